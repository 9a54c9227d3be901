"""Early stops of a run (signals, time limit), and the watchdog for hanging steps."""

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
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, NoReturn

import jax

import minitf
from minitf.runtime.processes import Vote
from minitf.settings import LONGEST, setting

# ---- stop requests

FAILED, MISTAKE, INTERRUPTED, NONFINITE = 1, 2, 3, 4  # exit statuses; MISTAKE: the user's
POLL = 0.25  # seconds between two checks for a stop request
BY_ITSELF = 3.0  # seconds that abandoned work may take to finish
ENDING = 5.0  # seconds that the interpreter may take to exit
LEFT_BEHIND = "left behind"


def leave(main: Callable[[], int]) -> NoReturn:
    """Exits with the status that main() returns, or as an exception that it raises would, but within seconds: does not wait for
    threads that still run, or for storage that no longer responds."""
    try:
        status = main()
    except SystemExit as e:
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
        status = e.code if isinstance(e.code, int) else 0 if e.code is None else FAILED
    except KeyboardInterrupt:
        traceback.print_exc()
        status = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
        status = FAILED
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if any(t.name == LEFT_BEHIND for t in threading.enumerate()):
        os._exit(status)  # the thread may be computing on devices, which a normal exit would destroy under it
    if not jax.distributed.is_initialized():  # several processes wait for one another, with a timeout of their own
        timer = threading.Timer(ENDING, os._exit, (status,))
        timer.daemon = True
        timer.start()
    sys.exit(status)


def at_most(seconds: float, f: Callable[[], Any]) -> None:
    """Runs f on a thread and abandons it after this many seconds, for cleanup that may block on unreachable storage. Exceptions of f
    are ignored."""

    def run() -> None:
        with contextlib.suppress(Exception):
            f()

    thread = threading.Thread(target=run, daemon=True, name="at most")
    with contextlib.suppress(RuntimeError):  # the interpreter is exiting and starts no more threads
        thread.start()
        thread.join(seconds)


def start_ticks(pid: int) -> int | None:
    """Start time of a process on this host, in clock ticks since boot; 0 if the system does not report it (not Linux);
    None if the process does not run."""
    if not os.path.exists("/proc/self/stat"):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return 0
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:  # fields after the command in parentheses: the state first
            fields = stat.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def process_age() -> float:
    """Seconds since Python started. Not since the process started: a shell that exec'd Python may have run long before."""
    return time.perf_counter() - minitf.STARTED


class Stopped(Exception):
    """All processes have agreed to stop the run here. status: exit status of the process."""

    def __init__(self, why: str, status: int):
        super().__init__(why)
        self.status = status


class StopRequest:
    """A request to stop the run, by a signal or a time limit in seconds (None: no limit)."""

    REASONS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "max_run_time")

    def __init__(self, max_run_time: float | None = None):
        self.signal: str | None = None
        self._end = math.inf if max_run_time is None else time.monotonic() - process_age() + max_run_time

    @property
    def reason(self) -> str | None:
        return self.signal or ("max_run_time" if time.monotonic() >= self._end else None)

    def ballot(self, failed: bool = False, *, heed: bool = True) -> list[int]:
        """This process's vote to stop all: [stop reason or 0, process index + 1 if it has failed]. heed=False: ignores stop requests.
        See `stopped`."""
        reason = self.reason if heed else None
        return [
            0 if reason is None else self.REASONS.index(reason) + 1,
            jax.process_index() + 1 if failed else 0,
        ]

    def stopped(self, asked: int, failing: int) -> Stopped | None:
        """The decision from the maximum over all ballots; None: continue."""
        if failing:
            return Stopped(f"an error in process {failing - 1}", FAILED)
        return Stopped(self.REASONS[asked - 1], INTERRUPTED) if asked else None

    def agreed(self, failed: bool = False, *, heed: bool = True) -> Stopped | None:
        """Casts this process's ballot and returns the decision of all (`stopped`). Every process must call it."""
        return self.stopped(*Vote(self.ballot(failed, heed=heed)).read())

    def check(self) -> None:
        """Raises Stopped in all processes if one is asked to stop. Every process must call it."""
        found = self.agreed()
        if found is not None:
            raise found

    def unless_asked(self, work: Callable[[], Any]) -> Any:
        """work(), on a thread that may be abandoned: if the process is asked to stop, waits BY_ITSELF seconds for the work, then
        raises Stopped and leaves the thread running (see `leave`). With several processes, which may wait for one another in work(),
        calls it directly, and they agree on stopping afterwards."""
        if jax.process_count() > 1:
            found = work()
            self.check()
            return found
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as e:
                future.set_exception(e)

        threading.Thread(target=run, daemon=True, name=LEFT_BEHIND).start()
        while not wait([future], timeout=POLL).done and self.reason is None:
            pass
        if not wait([future], timeout=BY_ITSELF).done:
            self.check()
        return future.result()


@contextlib.contextmanager
def stop_on_signals(max_run_time: float | None = None) -> Iterator[StopRequest]:
    """Yields a request that is set by SIGINT, SIGTERM, SIGHUP (a terminal that closes), SIGUSR1 (Slurm's `--signal`), or once this
    process has run for `max_run_time` seconds. A second signal has its previous effect. SIGHUP stays ignored if it was (nohup).
    Main thread only."""
    request = StopRequest(max_run_time)
    numbers = [getattr(signal, name) for name in StopRequest.REASONS if hasattr(signal, name)]
    before = {s: signal.getsignal(s) for s in numbers}
    if before.get(getattr(signal, "SIGHUP", None)) == signal.SIG_IGN:
        del before[signal.SIGHUP]

    def restore() -> None:
        for s, handler in before.items():
            signal.signal(s, handler)

    def handler(number: int, frame: Any) -> None:
        request.signal = signal.Signals(number).name
        restore()
        # Not print: the signal may have interrupted one.
        text = f"\n{request.signal}: the run saves and ends within two steps; a second one ends it at once\n"
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())

    try:
        for s in before:
            signal.signal(s, handler)
        yield request
    finally:
        restore()


# ---- the watchdog

REARM = 1.0  # seconds: rearming at every step would slow the shortest ones


@dataclasses.dataclass(frozen=True)
class WatchdogConfig:
    factor: float | None = setting(
        20.0,
        "a step may take this many times the median of the run's steps; None: no watchdog",
        **dict(above=0, at_most=LONGEST, may_change=True),
    )
    at_least: float = setting(60.0, "seconds that any step may take", above=0, at_most=LONGEST, may_change=True)
    exit: bool = setting(
        False, "then end the process, so that a scheduler restarts it; else report only", may_change=True
    )


class Watchdog:
    """Prints the stacks of all threads when a step takes too long: a hang in a collective or in a file system raises nothing.

    The limit depends on the run's step times, so there is none before the third step. faulthandler prints the stacks, as it works
    even if no Python code can run; with watchdog.exit it then ends the process with status 1.
    """

    def __init__(self, cfg: WatchdogConfig):
        self._cfg = cfg
        self._times: deque[float] = deque(maxlen=100)
        self._last: float | None = None
        self._armed = -math.inf
        self._timer: threading.Timer | None = None

    def limit(self) -> float | None:
        """Seconds that the current step may take; None: no limit."""
        if self._cfg.factor is None or len(self._times) < 2:
            return None
        return min(max(self._cfg.factor * statistics.median(self._times), self._cfg.at_least), LONGEST)

    def beat(self, step: int) -> None:
        """Records that a step has ended and the next one, `step`, begins."""
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
        # A little later, so that the line above is printed first.
        faulthandler.dump_traceback_later(limit + REARM + 0.2, exit=self._cfg.exit, file=sys.__stderr__)

    def pause(self) -> None:
        """Watches nothing until the next beat, and counts the time for no step: for evaluation, saving, and the end."""
        self._last, self._armed = None, -math.inf
        self._disarm()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            faulthandler.cancel_dump_traceback_later()
            self._timer = None
