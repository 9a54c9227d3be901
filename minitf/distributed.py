"""The process and its surroundings: what ends a run early, and what watches that it goes on."""

import contextlib
import dataclasses
import faulthandler
import math
import os
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

# ---- asked to end


def start_ticks(pid: int) -> int | None:
    """When a process of this machine began, in clock ticks since boot; 0 where the system does not tell (it is not Linux);
    None: it does not run."""
    if not os.path.exists("/proc/self/stat"):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return 0
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:  # after the command in parentheses: the state, and so on
            fields = stat.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def process_age() -> float:
    """Seconds since this process began, its interpreter's start-up included; 0 where the system does not tell."""
    ticks = start_ticks(os.getpid())
    if not ticks:
        return 0.0
    with open("/proc/uptime", "rb") as uptime:
        return float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


class StopRequest:
    """Why the run is to end after the step at hand; None: go on."""

    def __init__(self, max_run_time: float | None = None):
        self.signal: str | None = None
        self._end = math.inf if max_run_time is None else time.monotonic() - process_age() + max_run_time

    @property
    def reason(self) -> str | None:
        return self.signal or ("max_run_time" if time.monotonic() >= self._end else None)


@contextlib.contextmanager
def stop_on_signals(max_run_time: float | None = None) -> Iterator[StopRequest]:
    """SIGINT, SIGTERM and SIGUSR1 (Slurm's `--signal`) set the request, and so do `max_run_time` seconds of this process; a
    second signal acts as it would have without us. Main thread only."""
    request = StopRequest(max_run_time)
    names = ("SIGINT", "SIGTERM", "SIGUSR1")
    before = {s: signal.getsignal(s) for s in (getattr(signal, n) for n in names if hasattr(signal, n))}

    def restore() -> None:
        for s, handler in before.items():
            signal.signal(s, handler)

    def handler(number: int, frame: Any) -> None:
        request.signal = signal.Signals(number).name
        restore()
        # Not print: the signal may have come in the middle of one.
        text = f"\n{request.signal}: the run ends after the step at hand; a second one ends it at once\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())

    try:
        for s in before:
            signal.signal(s, handler)
        yield request
    finally:
        restore()


# ---- watched

REARM = 1.0  # seconds: arming at every step would slow the shortest ones


@dataclasses.dataclass(frozen=True)
class WatchdogConfig:
    factor: float | None = 20.0  # a step may take so many times the median of the run's own steps; None: no watchdog
    at_least: float = 60.0  # seconds that any step may take
    exit: bool = False  # end the process then, so that a scheduler starts it again; else only tell


class Watchdog:
    """Prints the stacks of all threads when a step takes too long: a hang in a collective or in a file system raises nothing.

    The limit comes from the steps themselves, so none holds before the third. The stacks are faulthandler's, which needs
    no Python to run; where the process is to end, it does so with status 1.
    """

    def __init__(self, cfg: WatchdogConfig):
        self._cfg = cfg
        self._times: deque[float] = deque(maxlen=100)
        self._last: float | None = None
        self._armed = -math.inf
        self._timer: threading.Timer | None = None

    def limit(self) -> float | None:
        """Seconds that the step at hand may take."""
        if self._cfg.factor is None or len(self._times) < 2:
            return None
        return max(self._cfg.factor * statistics.median(self._times), self._cfg.at_least)

    def beat(self, step: int) -> None:
        """A step has ended and the next, `step`, begins."""
        now = time.monotonic()
        if self._last is not None:
            self._times.append(now - self._last)
        self._last = now
        limit = self.limit()
        if limit is None or now - self._armed < REARM:
            return
        self._disarm()
        self._armed = now
        text = f"watchdog: step {step} or the next takes more than {limit:.0f} s, the median is "
        text += f"{statistics.median(self._times):.2g} s"
        text += "; the process ends (watchdog.exit). All threads:" if self._cfg.exit else ". All threads:"
        self._timer = threading.Timer(limit + REARM, print, (text,), {"file": sys.stderr})
        self._timer.daemon = True
        self._timer.start()
        # A little later, so that the line above comes first.
        faulthandler.dump_traceback_later(limit + REARM + 0.2, exit=self._cfg.exit, file=sys.__stderr__)

    def pause(self) -> None:
        """Until the next beat nothing is watched, and the time counts for no step: evaluation, saving, the end."""
        self._last, self._armed = None, -math.inf
        self._disarm()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            faulthandler.cancel_dump_traceback_later()
            self._timer = None
