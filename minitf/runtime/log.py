"""JSON lines that survive a kill, the events of a run, and clocks."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

from minitf.paths import is_local, write_whole


def json_lines(path: epath.Path) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines; [] without a file. Skips a line that a kill has truncated."""
    lines = []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return lines


class JsonLines:
    """Appends objects to a file as JSON lines, each written at once; existing lines stay if `keep` is true for them. Object stores
    cannot append: there `flush`, which the run calls at each save, rewrites the file."""

    def __init__(self, path: epath.Path | None, keep: Callable[[dict[str, Any]], bool] = lambda value: True):
        """path: None: writes nothing."""
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


class Events(JsonLines):
    """The events of a run, in events.jsonl: objects with `time` (seconds since 1970), `event`, and further fields."""

    def add(self, event: str, **fields: Any) -> None:
        super().add({"time": time.time(), "event": event, **fields})

    @contextlib.contextmanager
    def timed(self, event: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """Records the beginning of the block, and its end with `seconds` and the fields that the block adds to the yielded dict;
        after a kill in between only the beginning is recorded."""
        self.add(event, state="begin", **fields)
        start, more = time.perf_counter(), {}
        yield more
        more["seconds"] = time.perf_counter() - start
        self.add(event, state="end", **fields, **more)


class StartUp:
    """Times the phases from the start of a process to the end of its first step."""

    def __init__(self, age: float = 0.0):
        """age: seconds since the process started, all counted as imports."""
        self._began = time.perf_counter() - age
        self.phases = {"imports": age} if age else {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the block as a phase."""
        start = time.perf_counter()
        yield
        self.phases[name] = time.perf_counter() - start

    def ended(self) -> dict[str, Any]:
        """Seconds since the start, and of each phase; the remainder is `other`."""
        seconds = time.perf_counter() - self._began
        return {"seconds": seconds, "phases": self.phases | {"other": seconds - sum(self.phases.values())}}

    @staticmethod
    def described(ended: dict[str, Any]) -> str:
        """A result of `ended` in one line, without phases below 0.05 s."""
        parts = ", ".join(f"{name} {s:.1f}" for name, s in ended["phases"].items() if s >= 0.05)
        return f"first step after {ended['seconds']:.1f} s: {parts}"


class StepClock:
    """Times the steps since the last lap; evaluation and saving happen between laps and are not counted."""

    def __init__(self, step: int):
        self.start(step)

    def start(self, step: int) -> None:
        self._step, self._since, self._waited = step, time.perf_counter(), 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Times the block as waiting for data."""
        began = time.perf_counter()
        yield
        self._waited += time.perf_counter() - began

    def running(self) -> float:
        """Seconds since the last lap."""
        return time.perf_counter() - self._since

    def lap(self, step: int) -> dict[str, float]:
        """Ends the lap: its steps first..last, their seconds, and seconds of these spent waiting for data."""
        took = {
            "first": self._step + 1,
            "last": step,
            "seconds": self.running(),
            "data_wait": self._waited,
        }
        self.start(step)
        return took
