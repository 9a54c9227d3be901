"""Numbers of a run: written once, to TensorBoard, JSON lines and the terminal; and the machine's peak rate."""

import datetime
import json
import logging
import math
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np

# Dense bfloat16 FLOP/s of one JAX device, by `device_kind`. Sources: cloud.google.com/tpu/docs (system architecture, per chip;
# v2, v3 and 7x list two devices a chip) and NVIDIA's data sheets (without sparsity).
PEAK_FLOPS = {
    "TPU v2": 22.5e12,
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 1153.5e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
}


def measured_flops(dtype: str = "float32", n: int = 2048, repeats: int = 3) -> float:
    """FLOP/s of the best of some n x n products on the default device."""
    x = jnp.ones((n, n), dtype)
    f = jax.jit(lambda a: a @ a).lower(x).compile()
    f(x).block_until_ready()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        f(x).block_until_ready()
        times.append(time.perf_counter() - start)
    return 2 * n**3 / min(times)


def peak_flops(devices: list, dtype: str) -> float:
    """FLOP/s of all devices together: from the table, else measured. Simulated CPU devices share one machine."""
    kind = devices[0].device_kind
    if kind in PEAK_FLOPS:
        return PEAK_FLOPS[kind] * len(devices)
    return measured_flops(dtype) * (1 if devices[0].platform == "cpu" else len(devices))


def group_of(name: str) -> str:
    """The group whose norms are logged together: `blocks/0/attention/q` -> `attention`, `head` -> `head`."""
    parts = name.split("/")
    return parts[2] if parts[0] == "blocks" else parts[0]


def human(n: float) -> str:
    """1234567 -> 1.23M."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(n) < 1000:
            return f"{n:.3g}{unit}"
        n /= 1000
    return f"{n:.3g}P"


def duration(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


class MetricWriter:
    """Writes scalars of a step to TensorBoard's event files, to metrics.jsonl and to the terminal: a live bar where the
    output is one, plain lines elsewhere. Only process 0 makes one."""

    def __init__(self, workdir: Path, steps: int, *, stream: TextIO | None = None):
        import tensorboardX
        from tqdm import tqdm

        logging.getLogger("tensorboardX").setLevel(logging.ERROR)  # a NaN is logged by us, not once for each tag
        self._steps = steps
        # Events reach the disk every few seconds: a killed process loses no more.
        self._tensorboard = tensorboardX.SummaryWriter(str(workdir), flush_secs=10)
        self._jsonl = open(workdir / "metrics.jsonl", "a", encoding="utf-8")
        self._stream = stream or sys.stdout
        self._bar = (
            tqdm(total=steps, unit="step", dynamic_ncols=True, file=self._stream) if self._stream.isatty() else None
        )

    def write(self, step: int, values: dict[str, Any]) -> None:
        values = {tag: np.asarray(v).item() for tag, v in values.items()}
        for tag, value in values.items():
            self._tensorboard.add_scalar(tag, value, step)
        # JSON has no NaN and no infinity: null.
        finite = {tag: value if math.isfinite(value) else None for tag, value in values.items()}
        self._jsonl.write(json.dumps({"step": step, **finite}) + "\n")
        self._jsonl.flush()
        self._show(step, values)

    def _show(self, step: int, values: dict[str, Any]) -> None:
        at = f"step {step}/{self._steps}"
        if "train/loss" in values:
            loss, rate = values["train/loss"], human(values["perf/tokens_per_s"])
            if self._bar is not None:
                self._bar.set_postfix_str(f"loss {loss:.4f}, {rate} tokens/s", refresh=False)
            else:
                left = duration((self._steps - step) * values["perf/step_time_s"])
                self.say(
                    f"{at}  loss {loss:.4f}  learning rate {values['train/learning_rate']:.3g}  gradient norm "
                    f"{values['train/grad_norm']:.3g}  {rate} tokens/s  MFU {values['perf/mfu']:.1%}  {left} left"
                )
        if "eval/loss" in values:
            bits = f"  bits per byte {values['eval/bits_per_byte']:.4f}" if "eval/bits_per_byte" in values else ""
            self.say(
                f"{at}  evaluation loss {values['eval/loss']:.4f}  perplexity {values['eval/perplexity']:.4g}{bits}"
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

    def text(self, tag: str, text: str) -> None:
        """A monospaced text in TensorBoard."""
        self._tensorboard.add_text(tag, "\n".join("    " + line for line in text.splitlines()), 0)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._jsonl.close()
        self._tensorboard.close()
