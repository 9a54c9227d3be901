"""Output whose failures never end a run; and tables as text."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any


class Lasting:
    """A text stream whose writes do not fail. Characters that it cannot encode are written as escapes, and once its reader is gone,
    output is discarded."""

    def __init__(self, stream: Any):
        self._stream = stream
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError:  # a closed pipe, a terminal that is gone, a full disk behind a redirection
            self._drop()
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._drop()

    def _drop(self) -> None:
        """Redirects the stream's file to /dev/null, with its buffered text, which the interpreter flushes once more at exit."""
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Makes standard output and error `Lasting` inside the block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and Lasting(stream) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream:
                stream.flush()
        sys.stdout, sys.stderr = before


def columns(lines: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Rows of cells as aligned text: the first `left` columns flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def cell(i: int, text: str) -> str:
        return text.ljust(widths[i]) if i < left else text.rjust(widths[i])

    return ["  ".join(cell(i, text) for i, text in enumerate(line)).rstrip() for line in lines]


def human(n: float) -> str:
    """1234567 -> 1.23M."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(n) < 1000:
            return f"{n:.3g}{unit}"
        n /= 1000
    return f"{n:.3g}P"
