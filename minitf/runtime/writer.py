"""Writes a run's metrics to TensorBoard, JSON lines and the terminal."""

import datetime
import logging
import math
import sys
import time
from typing import Any, TextIO

import numpy as np
from etils import epath

from minitf.runtime import hooks
from minitf.runtime.log import JsonLines
from minitf.runtime.terminal import human


def duration(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


class TensorBoard:
    """A TensorBoard event file. Events are written on the caller's thread, so that after `flush` they are on disk and errors reach
    the caller; tensorboardX's own SummaryWriter keeps some in a queue, and hangs once its thread has died."""

    FLUSH = 10.0  # seconds between flushes: a killed process loses no more

    def __init__(self, directory: epath.Path, purge_step: int):
        """purge_step: readers hide events of this and later steps in older event files."""
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._summary, self._event = summary, Event
        # Readers sort files by name, which by itself has only the second: add nanoseconds.
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
        """Writes a monospaced text."""
        self._write(step, summary=self._summary.text(tag, "\n".join("    " + line for line in text.splitlines())))

    def flush(self) -> None:
        self._file.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        self._file.close()


class MetricWriter:
    """Writes scalars of a step to TensorBoard's event files, to metrics.jsonl and to the terminal: a live progress bar on a
    terminal, plain lines otherwise. Only process 0 has one.

    start: the step from which a run resumes; earlier output for later steps is removed. None: a new run; all is removed.
    validation: tokens in the validation splits, if evaluations use only a part of them; None: they use all.
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

        hooks.quieten("tensorboardX", logging.ERROR)  # a NaN is logged by us, not once for each tag
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
        # JSON has neither NaN nor infinity: null instead.
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
        """Advances the progress bar to `step` finished steps."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def say(self, text: str) -> None:
        """Prints a line, above the progress bar if there is one."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def text(self, step: int, tag: str, text: str) -> None:
        """Writes a monospaced text to TensorBoard."""
        self._tensorboard.text(step, tag, text)

    def flush(self) -> None:
        """Flushes everything written to disk."""
        self._jsonl.flush()
        self._tensorboard.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._jsonl.close()
        self._tensorboard.close()


class NoWriter:
    """A MetricWriter that does nothing, for processes other than 0."""

    def write(self, *_: Any) -> None:
        pass

    progress = say = text = flush = close = write
