"""Numbers of a run: written once, to TensorBoard, JSON lines and the terminal."""

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
