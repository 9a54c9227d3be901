"""Numbers of a run: written once, to TensorBoard, JSON lines and the terminal; the events of its life; and the machine's
peak rate."""

import contextlib
import datetime
import functools
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from minitf.sharding import precision


class Device(NamedTuple):
    """What one JAX device of a kind has. None: not known."""

    flops: float  # dense bfloat16 FLOP/s
    hbm: float | None = None  # bytes of memory that a program can have
    clock: float | None = None  # cycles a second
    ici: float | None = None  # bytes a second that it sends over all its links to other chips together


GiB = 2**30
# By `device_kind`. Sources:
# - FLOP/s (float16 is as fast), TPU: cloud.google.com/tpu/docs (system architecture, per chip; v2, v3 and 7x list two devices a
#   chip); NVIDIA: data sheets of A100, H100, H200, HGX B200 and GB200 NVL72 (half of what they say with sparsity).
# - memory, TPU: what the compiler of libtpu 0.0.52 names when a program is too large; NVIDIA: the same data sheets, of which the
#   driver and JAX's own reserve take some.
# - clock: FLOP/s by the FLOPs of a cycle, which are 2 x the multipliers of the matrix units: 8 x 128^2 (v4, v5p), 4 x 128^2 (v5e),
#   4 x 256^2 (v6e; 7x: a guess, of which large products reach 85 % by the compiler's estimates).
# - links: one way, jax-ml.github.io/scaling-book, "How to think about TPUs": 45e9 a link (v4, v5e), 90e9 (v5p, v6e), 4 links on a
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
    """FLOP/s of the best of some products of square matrices on the default device, large enough to keep it busy, in as many bits
    as those of the step."""
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
    """FLOP/s of all devices together by the table; None where it does not say. Products in float32 are full ones (`precision`): 6 to
    30 times slower than the table says, which would hide how busy a device is."""
    flops = PEAK_FLOPS.get(devices[0].device_kind)
    return None if flops is None or dtype == "float32" else flops * len(devices)


def peak_flops(devices: list, dtype: str) -> float:
    """FLOP/s of all devices together: from the table, else measured, by every process at the same time. Outside a mesh, which
    would do each product on all devices."""
    listed = listed_flops(devices, dtype)
    if listed is not None:
        return listed
    # CPU devices share a machine, and so may processes, which measure at the same time.
    return measured_flops(dtype) * (jax.process_count() if devices[0].platform == "cpu" else len(devices))


def measured_apart(devices: list, dtype: str) -> float:
    """`peak_flops` while a program is under way, in a thread of its own, to which the mesh around does not reach."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(peak_flops, devices, dtype).result()


def free_memory(device: Any) -> float | None:
    """Bytes that a program can still have on a device: of a CPU, what the machine and its limits leave; None: not known."""
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        return stats["bytes_limit"] - stats["bytes_in_use"] if {"bytes_limit", "bytes_in_use"} <= stats.keys() else None
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    except OSError:  # not Linux
        return None
    free = 1024.0 * sum(int(lines[name].split()[0]) for name in ("MemAvailable", "SwapFree"))
    with contextlib.suppress(OSError, ValueError):  # of a container; "max" is no limit
        here = Path("/sys/fs/cgroup")
        free = min(free, int((here / "memory.max").read_text()) - int((here / "memory.current").read_text()))
    return free


def human(n: float) -> str:
    """1234567 -> 1.23M."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(n) < 1000:
            return f"{n:.3g}{unit}"
        n /= 1000
    return f"{n:.3g}P"


def duration(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


def json_lines(path: epath.Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; none where there is no file. A line that a kill has torn is left out."""
    lines = []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def write_whole(path: epath.Path, text: str) -> None:
    """Replaces a file by one of this text: at no time is there a part of it."""
    new = path.parent / f"{path.name}.new"
    new.write_text(text, encoding="utf-8")
    new.replace(path)


class JsonLines:
    """Appends objects to a file as JSON lines, each on the disk at once; of the lines that it has, those stay for which
    `keep` is true. An object store has no appending: there the file is written anew at every `flush`, which the run calls at
    each save."""

    def __init__(self, path: epath.Path | None, keep: Callable[[dict[str, Any]], bool] = lambda value: True):
        """`path`: None writes nowhere."""
        if path is None:
            self._file, self._lines = open(os.devnull, "w"), ""
            return
        self._path = path
        self._lines = "".join(json.dumps(x) + "\n" for x in json_lines(path) if keep(x))
        self._file = None
        if is_local(path):
            write_whole(path, self._lines)
            self._file = open(path, "a", encoding="utf-8")
            self._lines = ""

    def add(self, value: dict[str, Any]) -> None:
        line = json.dumps(value) + "\n"
        if self._file is not None:
            self._file.write(line)
            self._file.flush()
        else:
            self._lines += line

    def flush(self) -> None:
        if self._file is None:
            self._path.write_text(self._lines)

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()


def is_local(path: epath.Path) -> bool:
    """Whether the path is a file's of this machine, not of an object store."""
    return "://" not in str(path)


class Events(JsonLines):
    """The life of a run in events.jsonl: objects with `time` (seconds since 1970), `event`, and what belongs to it."""

    def add(self, event: str, **fields: Any) -> None:
        super().add({"time": time.time(), "event": event, **fields})

    @contextlib.contextmanager
    def timed(self, event: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """Records the beginning, and the end with its `seconds` and what the block puts into the dict that it gets; a kill
        in between leaves the beginning alone."""
        self.add(event, state="begin", **fields)
        start, more = time.perf_counter(), {}
        yield more
        more["seconds"] = time.perf_counter() - start
        self.add(event, state="end", **fields, **more)


class StartUp:
    """What the time from the start of a process to the end of its first step goes to, phase by phase."""

    def __init__(self, age: float = 0.0):
        """`age`: seconds that the process has lived, all of them spent on imports."""
        self._began = time.perf_counter() - age
        self.phases = {"imports": age} if age else {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the block."""
        start = time.perf_counter()
        yield
        self.phases[name] = time.perf_counter() - start

    def ended(self) -> dict[str, Any]:
        """Seconds since the start, and of each phase; what belongs to none is `other`."""
        seconds = time.perf_counter() - self._began
        return {"seconds": seconds, "phases": self.phases | {"other": seconds - sum(self.phases.values())}}

    @staticmethod
    def described(ended: dict[str, Any]) -> str:
        """In one line, without what takes no time to speak of."""
        parts = ", ".join(f"{name} {s:.1f}" for name, s in ended["phases"].items() if s >= 0.05)
        return f"first step after {ended['seconds']:.1f} s: {parts}"


class StepClock:
    """Times the steps since the last lap; evaluation and saving lie between laps."""

    def __init__(self, step: int):
        self.start(step)

    def start(self, step: int) -> None:
        self._step, self._since, self._waited = step, time.perf_counter(), 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the block as waiting for data."""
        began = time.perf_counter()
        yield
        self._waited += time.perf_counter() - began

    def running(self) -> float:
        """Seconds since the last lap."""
        return time.perf_counter() - self._since

    def lap(self, step: int) -> dict[str, float]:
        """Steps first..last since the last lap, their seconds, and how many of these were spent waiting for data."""
        took = {
            "first": self._step + 1,
            "last": step,
            "seconds": self.running(),
            "data_wait": self._waited,
        }
        self.start(step)
        return took


class TensorBoard:
    """An event file of TensorBoard's. Events are written by the caller's thread, so that after `flush` they are on the disk and
    an error is the caller's; tensorboardX's own SummaryWriter keeps some in a queue, and hangs once its thread has died."""

    FLUSH = 10.0  # seconds: a killed process loses no more

    def __init__(self, directory: epath.Path, purge_step: int):
        """Readers hide what older event files hold of `purge_step` and later."""
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._summary, self._event = summary, Event
        # The name has the second; readers take files in the order of their names.
        self._file = EventsWriter(str(directory / "events"), f".{time.time_ns() % 10**9:09d}")
        self._flushed = time.monotonic()
        self._write(purge_step, session_log=SessionLog(status=SessionLog.START))

    def _write(self, step: int, **content: Any) -> None:
        self._file.write_event(self._event(wall_time=time.time(), step=step, **content))
        if time.monotonic() - self._flushed > self.FLUSH:
            self.flush()

    def scalars(self, step: int, values: dict[str, float]) -> None:
        parts = [self._summary.scalar(tag, value) for tag, value in values.items()]
        for part in parts[1:]:
            parts[0].MergeFrom(part)
        self._write(step, summary=parts[0])

    def text(self, step: int, tag: str, text: str) -> None:
        """A monospaced text."""
        self._write(step, summary=self._summary.text(tag, "\n".join("    " + line for line in text.splitlines())))

    def flush(self) -> None:
        self._file.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        self._file.close()


class MetricWriter:
    """Writes scalars of a step to TensorBoard's event files, to metrics.jsonl and to the terminal: a live bar where the
    output is one, plain lines elsewhere. Only process 0 makes one.

    `start`: the step after which a resumed run goes on; what was written for later steps, and lost, is taken away. None: all.
    `validation`: tokens of the validation splits where evaluations are of a part of them; None: they are of all.
    """

    def __init__(
        self,
        workdir: epath.Path,
        steps: int,
        *,
        start: int | None = None,
        validation: int | None = None,
        stream: TextIO | None = None,
    ):
        from tqdm import tqdm

        logging.getLogger("tensorboardX").setLevel(logging.ERROR)  # a NaN is logged by us, not once for each tag
        self._steps, self._validation = steps, validation
        first = 0 if start is None else start + 1
        self._tensorboard = TensorBoard(workdir, purge_step=first)
        self._jsonl = JsonLines(workdir / "metrics.jsonl", keep=lambda line: line["step"] < first)
        self._stream = stream or sys.stdout
        self._bar = None
        if self._stream.isatty():
            self._bar = tqdm(total=steps, initial=start or 0, unit="step", dynamic_ncols=True, file=self._stream)

    def write(self, step: int, values: dict[str, Any]) -> None:
        values = {tag: np.asarray(v).item() for tag, v in values.items()}
        self._tensorboard.scalars(step, values)
        # JSON has no NaN and no infinity: null.
        finite = {tag: value if math.isfinite(value) else None for tag, value in values.items()}
        self._jsonl.add({"step": step, **finite})
        self._show(step, values)

    def _show(self, step: int, values: dict[str, Any]) -> None:
        at = f"step {step}/{self._steps}"
        if "train/loss" in values:
            loss, rate = values["train/loss"], f"{human(values['perf/tokens_per_s'])} tokens/s"
            if "perf/positions_per_s" in values:
                rate += f" ({human(values['perf/positions_per_s'])} positions/s)"
            if self._bar is not None:
                self._bar.set_postfix_str(f"loss {loss:.4f}, {rate}", refresh=False)
            else:
                left = duration((self._steps - step) * values["perf/step_time_s"])
                self.say(
                    f"{at}  loss {loss:.4f}  learning rate {values['train/learning_rate']:.3g}  gradient norm "
                    f"{values['train/grad_norm']:.3g}  {rate}  MFU {values['perf/mfu']:.1%}  {left} left"
                )
        if "eval/loss" in values:
            bits = f"  bits per byte {values['eval/bits_per_byte']:.4f}" if "eval/bits_per_byte" in values else ""
            part = (
                ""
                if self._validation is None
                else f"  on {values['eval/tokens']:,} of {self._validation:,} validation tokens"
            )
            self.say(
                f"{at}  evaluation loss {values['eval/loss']:.4f}  perplexity {values['eval/perplexity']:.4g}{bits}{part}"
            )

    def progress(self, step: int) -> None:
        """Moves the bar to `step` finished steps."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def say(self, text: str) -> None:
        """A line of its own, above the bar where there is one."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def text(self, step: int, tag: str, text: str) -> None:
        """A monospaced text in TensorBoard."""
        self._tensorboard.text(step, tag, text)

    def flush(self) -> None:
        """Brings all that was written to the disk."""
        self._jsonl.flush()
        self._tensorboard.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._jsonl.close()
        self._tensorboard.close()


class NoWriter:
    """Stands for a MetricWriter in the processes that write nothing."""

    def write(self, *_: Any) -> None:
        pass

    progress = say = text = flush = close = write
