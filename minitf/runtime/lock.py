"""A lock: one run at a time in a work directory."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from etils import epath

from minitf.paths import is_local
from minitf.runtime.watch import start_ticks

LOCK = "lock.json"


RENEWED = 10.0  # seconds between two renewals of the lock
STALE = 60.0  # seconds without a renewal after which a run on another machine counts as dead
JOB_IDS = ("MINITF_JOB_ID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")  # a job that a scheduler requeues keeps its id


def ourselves() -> dict[str, Any]:
    """Identity of this process, unique across hosts, boots and containers."""

    def read(f: Callable[[str], str], path: str) -> str | None:
        try:
            return f(path).strip()
        except OSError:  # not Linux
            return None

    return {
        "host": socket.gethostname(),
        "boot_id": read(lambda p: Path(p).read_text(), "/proc/sys/kernel/random/boot_id"),
        "processes": read(os.readlink, "/proc/self/ns/pid"),  # the PID namespace: process ids are unique only within it
        "pid": os.getpid(),
        "started": start_ticks(os.getpid()),
        "job_id": next((os.environ[n] for n in JOB_IDS if os.environ.get(n)), None),
    }


def is_dead(lock: dict[str, Any], us: dict[str, Any], silence: float) -> str | None:
    """Why the run that holds the lock counts as dead; None: it may be alive. silence: seconds since the lock was last renewed."""
    if lock["host"] == us["host"] and lock["processes"] == us["processes"]:
        if lock["boot_id"] != us["boot_id"]:
            return "this machine was started anew since"
        # A later process may have the same id.
        alive = lock["pid"] != us["pid"] and start_ticks(lock["pid"]) == lock["started"]
        return None if alive else f"its process {lock['pid']} is gone"
    if lock["job_id"] is not None and lock["job_id"] == us["job_id"]:
        return f"it belongs to this job, {us['job_id']}"
    return f"no sign of life for {silence:.0f} s" if silence >= STALE else None


class Lock:
    """Lock file of a work directory, held by the run that writes there and renewed every RENEWED seconds."""

    def __init__(self, path: epath.Path):
        self._path, self._us = path, ourselves()
        self.end = threading.Event()
        self.lost: str | None = None  # the process that took the lock over

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Makes a read and write of the lock atomic, if the file system supports locks."""
        if not is_local(self._path):
            yield
            return
        import fcntl

        while True:
            with open(self._path, "a") as f:
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(f, fcntl.LOCK_EX)
                # The previous holder may have deleted the file meanwhile.
                if self._path.exists() and os.path.samestat(os.fstat(f.fileno()), os.stat(self._path)):
                    yield
                    return

    def _read(self) -> dict[str, Any] | None:
        text = self._path.read_text() if self._path.exists() else ""
        try:
            return json.loads(text)
        except ValueError:  # no file, or partially written
            return None

    def _write(self) -> None:
        text = json.dumps(self._us | {"time": time.time()})
        if not is_local(self._path):
            self._path.write_text(text)
            return
        # In place and of constant size: it needs no space, so that a run on a full disk does not look dead.
        with open(self._path, "r+b") as f:
            f.write(text.encode().ljust(600))

    def try_once(self, seen: dict[str, Any] | None, since: float) -> tuple[dict[str, Any] | None, str | None]:
        """(the lock of the run that holds it, or None if it is ours now; why the previous run counted as dead). seen, since: the
        lock as first read, and when (monotonic seconds), as clocks of other machines may differ."""
        with self._alone():
            lock = self._read()
            why = None
            if lock is not None:
                watched = time.monotonic() - since if lock == seen else 0.0
                why = is_dead(lock, self._us, max(time.time() - lock["time"], watched))
                if why is None:
                    return lock, None
            self._write()
            return None, why

    def acquire(self, say: Callable[[str], None]) -> None:
        """Takes the lock. Raises ValueError if another run holds it. For a silent run on another machine, waits until it renews the
        lock or counts as dead."""
        seen, since = None, time.monotonic()
        while True:
            lock, why = self.try_once(seen, since)
            if lock is None:
                if why is not None:
                    say(f"taking over from a run that has not ended: {why}")
                return
            who = f"process {lock['pid']} on {lock['host']}"
            here = (lock["host"], lock["processes"]) == (self._us["host"], self._us["processes"])
            if here or (seen is not None and lock != seen):
                raise ValueError(
                    f"--workdir {self._path.parent}: another run writes there ({who}); stop it, or give another directory"
                )
            if seen is None:
                seen, since = lock, time.monotonic()
                say(f"a run on another machine may write there ({who}): waiting up to {STALE:.0f} s for a sign of life")
            time.sleep(0.5)

    def renew(self) -> None:
        """Renews the lock until `end` is set; sets `lost` and returns if another run has taken over."""
        while not self.end.wait(RENEWED):
            with contextlib.suppress(OSError), self._alone():  # the file system may be unreachable: try again
                lock = self._read()
                if lock is not None and any(lock[k] != v for k, v in self._us.items()):
                    self.lost = f"process {lock['pid']} on {lock['host']}"
                    return
                self._write()

    def release(self) -> None:
        if self.lost is None:
            with self._alone():
                self._path.unlink()


@contextlib.contextmanager
def locked(workdir: epath.Path, say: Callable[[str], None] = print) -> Iterator[Lock]:
    """Creates the directory and holds its lock. Raises ValueError if another run holds it or the directory cannot be created."""
    try:
        if workdir.exists() and not workdir.is_dir():
            raise ValueError(f"--workdir {workdir}: is a file")
        workdir.mkdir(parents=True, exist_ok=True)
        lock = Lock(workdir / LOCK)
        lock.acquire(say)
    except OSError as e:
        raise ValueError(f"--workdir {workdir}: {e.strerror or e}") from None
    thread = threading.Thread(target=lock.renew, name="lock", daemon=True)
    thread.start()
    try:
        yield lock
    finally:
        lock.end.set()
        thread.join(5.0)  # otherwise it could write the lock again after its release
        if not thread.is_alive():
            with contextlib.suppress(OSError):  # the directory is gone, and its lock with it
                lock.release()
