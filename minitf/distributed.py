"""The process and its surroundings: for now, how a signal ends a run."""

import contextlib
import signal
from collections.abc import Iterator
from typing import Any


class StopRequest:
    """Names the signal that has asked the run to end after the step at hand; None: go on."""

    def __init__(self):
        self.signal: str | None = None


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """SIGINT and SIGTERM set the request; a second one acts as it would have without us. Main thread only."""
    request = StopRequest()
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {s: signal.getsignal(s) for s in signals}

    def handler(number: int, frame: Any) -> None:
        request.signal = signal.Signals(number).name
        for s in signals:
            signal.signal(s, before[s])

    try:
        for s in signals:
            signal.signal(s, handler)
        yield request
    finally:
        for s in signals:
            signal.signal(s, before[s])
