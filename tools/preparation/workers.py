"""Runs tasks in several processes with a progress report; leaves no process behind, whatever happens."""

import collections
import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

Say = Callable[[int], None]  # reports the number of bytes of a task that are done


class Task(NamedTuple):
    arguments: tuple
    size: int  # bytes
    done: int = 0  # bytes done by an earlier run


class WorkerDied(Exception):
    """A worker process died or raised an unexpected exception: not a user error."""


def serve(pipe: Any, function: Callable[..., None], threads: int) -> None:
    """Calls function for the arguments of each task from the pipe; sends back bytes done, and at the end an exception or None."""
    # Exits with a killed parent: the next run resumes from this task's files.
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has ended
        while True:
            arguments = pipe.recv()
            try:
                function(*arguments, pipe.send)
                pipe.send(None)
            except ValueError as e:
                pipe.send(ValueError(str(e)))
            except Exception:
                pipe.send(WorkerDied(f"a worker process failed:\n{traceback.format_exc()}"))


def parallel(what: str, function: Callable[..., None], tasks: list[Task], workers: int) -> None:
    """Calls function(*arguments, say) for all tasks, in `workers` processes with the largest first; in this process and in order if
    one is enough. Raises their ValueError, or WorkerDied; leaves no process behind."""
    workers = min(workers, len(tasks))
    with contextlib.closing(Progress(what, tasks)) as progress:
        if workers > 1:
            in_processes(function, tasks, workers, progress)
        else:
            for i, task in enumerate(tasks):
                function(*task.arguments, functools.partial(progress, i))


def in_processes(
    function: Callable[..., None], tasks: list[Task], workers: int, progress: Callable[[int, int], None]
) -> None:
    context = multiprocessing.get_context("spawn")
    threads = max(1, cores() // workers)
    processes: dict[Any, Any] = {}  # pipe -> process
    busy: dict[Any, int] = {}  # pipe -> number of its task
    left = collections.deque(sorted(range(len(tasks)), key=lambda i: tasks[i].done - tasks[i].size))

    def give(pipe: Any) -> None:
        busy[pipe] = left.popleft()
        with contextlib.suppress(ConnectionError):  # the worker has died: the next `recv` raises
            pipe.send(tasks[busy[pipe]].arguments)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by workers: Ctrl-C interrupts this process alone
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            processes[ours] = context.Process(target=serve, args=(theirs, function, threads), daemon=True)
            processes[ours].start()
            theirs.close()
        signal.signal(signal.SIGINT, before)
        for pipe in processes:
            give(pipe)
        while busy:
            for pipe in multiprocessing.connection.wait(list(busy)):
                try:
                    answer = pipe.recv()
                except (EOFError, ConnectionError):
                    processes[pipe].join()
                    raise WorkerDied(f"a worker process died: {describe_exit(processes[pipe].exitcode)}") from None
                if isinstance(answer, Exception):
                    raise answer
                if answer is not None:
                    progress(busy[pipe], answer)
                elif left:
                    give(pipe)
                else:
                    del busy[pipe]
    finally:
        signal.signal(signal.SIGINT, before)
        for process in processes.values():
            process.kill()  # safe at any time: a run that resumes repeats what it did since its last record
            process.join()


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    name = signal.Signals(-code).name
    return name + (": the system may have run out of memory; fewer --workers take less" if name == "SIGKILL" else "")


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Progress:
    """Reports the bytes of all tasks that are done: a bar on a terminal, otherwise a line every EVERY seconds."""

    EVERY = 10.0  # seconds between lines

    def __init__(self, what: str, tasks: list[Task]):
        from tqdm import tqdm

        self.what, self.total, self.by_task = what, sum(t.size for t in tasks), [t.done for t in tasks]
        self.before = self.now = sum(self.by_task)
        self.start = self.told = time.monotonic()
        options = dict(desc=what, total=self.total, initial=self.now, unit="B", unit_scale=True, dynamic_ncols=True)
        self.bar = tqdm(**options) if sys.stderr.isatty() else None

    def __call__(self, task: int, done: int) -> None:
        self.now += done - self.by_task[task]
        self.by_task[task] = done
        if self.bar is not None:
            self.bar.update(self.now - self.bar.n)
        elif (now := time.monotonic()) - self.told >= self.EVERY:
            self.told = now
            speed = max(self.now - self.before, 1) / (now - self.start)
            left = time.strftime("%H:%M:%S", time.gmtime(max(self.total - self.now, 0) / speed))
            print(
                f"{self.what}: {self.now / 1e6:.0f} of {self.total / 1e6:.0f} MB, {speed / 1e6:.3g} MB/s, {left} left",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
