"""Peak rates and memory of devices."""

import contextlib
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from minitf.runtime.terminal import human
from minitf.sharding.devices import precision


class Device(NamedTuple):
    """Specifications of one JAX device of a kind. None: unknown."""

    flops: float  # dense bfloat16 FLOP/s
    hbm: float | None = None  # bytes of memory available to a program
    clock: float | None = None  # cycles per second
    ici: float | None = None  # bytes per second, one way, over all links to other chips together


GiB = 2**30
# By `device_kind`. Sources:
# - FLOP/s (float16 is as fast), TPU: cloud.google.com/tpu/docs (system architecture, per chip; v2, v3 and 7x have two devices per
#   chip); NVIDIA: data sheets of A100, H100, H200, HGX B200 and GB200 NVL72 (half of the figures with sparsity).
# - memory, TPU: the limit that the compiler of libtpu 0.0.52 reports when a program is too large; NVIDIA: the same data sheets; the
#   driver and JAX's own reserve take part of it.
# - clock: FLOP/s divided by FLOPs per cycle, 2 x the multipliers of the matrix units: 8 x 128^2 (v4, v5p), 4 x 128^2 (v5e),
#   4 x 256^2 (v6e; 7x: a guess, of which large products reach 85 % by the compiler's estimates).
# - links: one way, jax-ml.github.io/scaling-book, "How to think about TPUs": 45e9 per link (v4, v5e), 90e9 (v5p, v6e), 4 links on a
#   2-D torus, 6 on a 3-D one; 7x: half of its chip's, from cloud.google.com/tpu/docs/tpu7x.
V5E = Device(197e12, 15.75 * GiB, 1.5e9, 180e9)
V5P = Device(459e12, 95.73 * GiB, 1.75e9, 540e9)
V6E = Device(918e12, 31.24 * GiB, 1.75e9, 360e9)
DEVICES = {
    "TPU v2": Device(22.5e12),
    "TPU v3": Device(61.5e12),
    "TPU v4": Device(275e12, 30.75 * GiB, 1.05e9, 270e9),
    "TPU v5 lite": V5E,
    "TPU v5e": V5E,
    "TPU v5": V5P,
    "TPU v5p": V5P,
    "TPU v6 lite": V6E,
    "TPU v6e": V6E,
    "TPU7x": Device(1153.5e12, 94.74 * GiB, 2.2e9, 300e9),
    "NVIDIA A100-SXM4-40GB": Device(312e12, 40e9),
    "NVIDIA A100-SXM4-80GB": Device(312e12, 80e9),
    "NVIDIA A100-PCIE-40GB": Device(312e12, 40e9),
    "NVIDIA A100 80GB PCIe": Device(312e12, 80e9),
    "NVIDIA H100 80GB HBM3": Device(989e12, 80e9),
    "NVIDIA H100 PCIe": Device(756e12, 80e9),
    "NVIDIA H100 NVL": Device(835e12, 94e9),
    "NVIDIA H200": Device(989e12, 141e9),
    "NVIDIA B200": Device(2250e12, 180e9),
    "NVIDIA GB200": Device(2500e12, 186e9),
}
PEAK_FLOPS = {kind: device.flops for kind, device in DEVICES.items()}


def measured_flops(dtype: str = "float32", repeats: int = 5) -> float:
    """FLOP/s of the fastest of `repeats` products of square matrices on the default device, large enough to keep it busy, with the
    matmul precision of the step."""
    n = 1024 if jax.default_backend() == "cpu" else 8192
    x = jnp.ones((n, n), dtype)
    f = jax.jit(functools.partial(jnp.matmul, precision=precision(dtype))).lower(x, x).compile()
    f(x, x).block_until_ready()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        f(x, x).block_until_ready()
        times.append(time.perf_counter() - start)
    return 2 * n**3 / min(times)


def listed_flops(devices: list, dtype: str) -> float | None:
    """FLOP/s of all devices together from the table; None if not listed. None for float32: its full-precision products (`precision`)
    are 6 to 30 times slower than the table, so that MFU would not show how busy a device is."""
    flops = PEAK_FLOPS.get(devices[0].device_kind)
    return None if flops is None or dtype == "float32" else flops * len(devices)


def peak_flops(devices: list, dtype: str) -> float:
    """FLOP/s of all devices together: from the table, else measured by every process at the same time. Call it outside a mesh context,
    in which every product would run on all devices."""
    listed = listed_flops(devices, dtype)
    if listed is not None:
        return listed
    # CPU devices share a machine; so may processes, whose measurements are simultaneous.
    return measured_flops(dtype) * (jax.process_count() if devices[0].platform == "cpu" else len(devices))


def measured_apart(devices: list, dtype: str) -> float:
    """`peak_flops` inside a mesh context: runs on its own thread, which does not inherit the context."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(peak_flops, devices, dtype).result()


class PeakRate:
    """Peak FLOP/s of all devices together, and a run's utilisation. A measured peak is measured again if a run exceeds it."""

    def __init__(self, devices: list, dtype: str):
        self._devices, self._dtype = devices, dtype
        self._flops, self._listed = peak_flops(devices, dtype), listed_flops(devices, dtype) is not None

    def utilisation(self, flops: float, say: Callable[[str], None]) -> float:
        """Utilisation (MFU) at this many FLOP/s."""
        if flops > self._flops and not self._listed:
            again = measured_apart(self._devices, self._dtype)
            if again > self._flops:
                say(f"peak rate: {human(self._flops)}FLOP/s was exceeded, measured again: {human(again)}FLOP/s")
            self._flops = max(self._flops, again)
        return flops / self._flops


def free_memory(device: Any) -> float | None:
    """Free bytes on a device; on CPU, free memory of the machine within its limits. None: unknown."""
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        return stats["bytes_limit"] - stats["bytes_in_use"] if {"bytes_limit", "bytes_in_use"} <= stats.keys() else None
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    except OSError:  # not Linux
        return None
    free = 1024.0 * sum(int(lines[name].split()[0]) for name in ("MemAvailable", "SwapFree"))
    with contextlib.suppress(OSError, ValueError):  # a container's limit; "max" means none
        here = Path("/sys/fs/cgroup")
        free = min(free, int((here / "memory.max").read_text()) - int((here / "memory.current").read_text()))
    return free
