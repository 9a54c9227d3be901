"""Descriptions of devices that are not attached, for their compilers."""

import contextlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

# Set before the TPU compiler is loaded: otherwise it would query Google Cloud's metadata for a TPU of this host, could not be loaded
# by two processes at the same time, and would write log files.
ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_LOG_DIR": "disabled"}


class Generation(NamedTuple):
    """A TPU generation."""

    dims: int  # dimensions of its torus
    example: str
    options: dict[str, Any]  # for get_topology_desc


TPUS = {
    # Two cores are one device, as with JAX on a real one.
    "v4": Generation(3, "v4:4x4x4", {"chip_config_name": "megacore"}),
    "v5e": Generation(2, "v5e:16x16", {}),
    "v5p": Generation(3, "v5p:8x8x8", {}),
    "v6e": Generation(2, "v6e:16x16", {}),
    "tpu7x": Generation(3, "tpu7x:4x4x4", {}),  # two devices per chip
}


class Gpu(NamedTuple):
    name: str  # as reported by the driver, a key of devices.DEVICES
    memory: int  # bytes
    bandwidth: int  # of the memory, bytes per second


# NVIDIA's Hopper (CUDA C++ programming guide, technical specifications of compute capability 9.0; data sheets of H100 SXM and
# H200), as an xla.gpu.GpuTargetConfigProto.
HOPPER = """
gpu_device_info {{
  cuda_compute_capability {{ major: 9 minor: 0 }}
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_core_limit: 2048
  threads_per_block_limit: 1024
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  l2_cache_size: 52428800
  memory_bandwidth: {gpu.bandwidth}
  device_memory_size: {gpu.memory}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 }}
device_description_str: "{gpu.name}"
"""
GPUS = {
    "h100": Gpu("NVIDIA H100 80GB HBM3", 80 * 10**9, 3350 * 10**9),
    "h200": Gpu("NVIDIA H200", 141 * 10**9, 4800 * 10**9),
}
KNOWN = (
    f"{', '.join(g.example for g in TPUS.values())}; 2xv5e:16x16 for two slices; h100:1x2x8, h200:1x1x8: GPUs in slices x hosts x "
    "GPUs of a host"
)


def find_devices(name: str) -> list:
    """The devices of a topology. Raises ValueError if the name is unknown or the compiler is not installed."""
    form = re.fullmatch(r"(?:(\d+)x)?([a-z]\w*):(\d+(?:x\d+)*)", name)
    if form is None or form[2] not in {**TPUS, **GPUS}:
        raise ValueError(f"--topology {name}: no such topology; known: {KNOWN}")
    kind, shape = form[2], form[3]
    sizes = [int(n) for n in shape.split("x")]
    dims = TPUS[kind].dims if kind in TPUS else 3
    if len(sizes) != dims or 0 in sizes:
        raise ValueError(f"--topology {name}: {kind} has {dims} dimensions, each at least 1; known: {KNOWN}")
    slices = int(form[1] or 1)
    if slices < 1 or (kind in GPUS and form[1]):
        raise ValueError(f"--topology {name}: slices are counted from 1, and of TPUs only; known: {KNOWN}")
    return tpus(name, kind, shape, slices) if kind in TPUS else gpus(name, kind, shape)


def tpus(name: str, kind: str, shape: str, slices: int) -> list:
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"--topology {name}: needs libtpu, the TPU's compiler: pip install '.[plan]' (Python 3.12 and newer, Linux)"
        )
    options = TPUS[kind].options | ({"num_slices": slices} if slices > 1 else {})
    return described_devices(name, lambda get: get(platform="tpu", topology_name=f"{kind}:{shape}", **options))


def gpus(name: str, kind: str, shape: str) -> list:
    if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
        version = jax.__version__
        raise ValueError(
            f"--topology {name}: needs the GPU's compiler: pip install --no-deps jax-cuda13-plugin=={version} "
            f"jax-cuda13-pjrt=={version}"
        )
    target = HOPPER.format(gpu=GPUS[kind])
    return described_devices(name, lambda get: get(kind, platform="cuda", target_config=target, topology=shape))


def described_devices(name: str, ask: Callable[[Callable], Any]) -> list:
    from jax.experimental import topologies

    try:
        with quiet():
            return list(ask(topologies.get_topology_desc).devices)
    except jax.errors.JaxRuntimeError as e:
        raise ValueError(f"--topology {name}: {first_line(e)}; known: {KNOWN}") from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discards stderr inside the block: libtpu warns there that there is no TPU."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def first_line(e: Exception) -> str:
    """First line of an XLA error, without its status code."""
    return re.sub(r"^[A-Z_]+: ", "", str(e)).strip().splitlines()[0]
