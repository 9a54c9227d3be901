"""Batches read ahead on a thread, by a reader that is not trusted to go on: what ends, dies, stalls or hands over another batch
than the next one is an error that says so."""

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable
from typing import Any

import grain
import numpy as np
from absl import flags

from minitf.runtime.watch import POLL, at_most

AHEAD = 2  # batches that are put on the devices before they are asked for
FIRST_FACTOR = 5  # worker processes may take so many times as long for the first batch: each imports JAX
SILENT = 5.0  # seconds without a batch after which a process that has ended with 0 is why
READER_CLOSING = 2.0  # seconds that each part of a reader may take to end


class LoaderError(Exception):
    """The reader of batches ended, lost a process, stalled, or handed over something else than the next batch."""


def numbered(number: int, batch: Any) -> tuple[int, Any]:
    return number, batch


def end_with_parent(index: int, count: int) -> None:
    """What a worker process of Grain's runs first: it ends when the process that started it has ended, however that was."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end with parent").start()


def children() -> set[Any]:
    """Worker processes of Grain's that run."""
    return {p for p in multiprocessing.active_children() if p.name.startswith("grain-process-prefetch")}


def ended(process: Any) -> str:
    code = process.exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return f"worker process {process.pid} {how}"


def shapes(batch: Any) -> Any:
    return {name: (value.dtype, value.shape) for name, value in batch.items()}


class Loader:
    """An iterator of the elements of a MapDataset of `length` batches, in order.

    put:     makes of a batch what is handed on; called on the loader's thread.
    workers: processes that read; 0: threads of this one.
    timeout: seconds without a batch after which the reader counts as stalled; None: never. Time in which this process itself
             is stopped does not count.
    until:   asked while a batch is waited for: True ends the iteration.

    `next` raises LoaderError, or what the reading of a row has raised.
    """

    def __init__(
        self,
        batches: grain.MapDataset,
        put: Callable[[Any], Any],
        *,
        threads: int,
        prefetch: int,
        workers: int,
        timeout: float | None,
        until: Callable[[], bool],
    ):
        source = batches.map_with_index(numbered)
        self._source = source.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=prefetch))
        if workers:
            if not flags.FLAGS.is_parsed():  # Grain's processes ask for them
                flags.FLAGS.mark_as_parsed()
            # One that is killed leaves blocks of memory, which Python's own tracker frees, and would tell of, at the end.
            quiet = "ignore:resource_tracker:UserWarning"
            if quiet not in os.environ.get("PYTHONWARNINGS", ""):
                os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), quiet]))
            options = grain.MultiprocessingOptions(workers, per_worker_buffer_size=prefetch)
            self._source = self._source.mp_prefetch(options, worker_init_fn=end_with_parent)
        self._length, self._put, self._timeout, self._until = len(batches), put, timeout, until
        self._workers, self._prefetch = workers, prefetch
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(AHEAD)
        self._closed = threading.Event()
        self._reader: Any = None  # Grain's iterator
        self._thread: threading.Thread | None = None
        self._known: set[Any] = set()  # processes of other loaders
        self._own: set[Any] = set()
        self._read = self._taken = 0  # batches, from Grain and by the caller
        self._shapes: Any = None

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Any:
        if self._closed.is_set() or self._taken == self._length:
            raise StopIteration
        if self._thread is None:
            self._known = children()
            self._thread = threading.Thread(target=self._work, daemon=True, name="loader")
            self._thread.start()
        try:
            found = self._wait()
        except BaseException:
            self.close(failed=True)
            raise
        if found is None:
            raise StopIteration
        self._find_workers()
        self._taken += 1
        return found

    def _wait(self) -> Any:
        """The next batch; None: `until` says so."""
        waited, limit = 0.0, self._timeout
        if limit is not None and self._taken < self._workers:
            limit *= FIRST_FACTOR
        while True:
            try:
                what, value = self._queue.get(timeout=POLL)
            except queue.Empty:
                if self._until():
                    return None
                self._check_workers(waited)
                waited += POLL  # polls and not the clock, which goes on while this process is stopped
                if limit is not None and waited >= limit:
                    hangs = "a worker process or the storage hangs" if self._workers else "the storage hangs"
                    raise LoaderError(f"no batch for {limit:g} s (data.timeout): {hangs}") from None
                continue
            if what == "error":
                self._check_workers()  # whose end may be why Grain raises
                raise value
            if what == "end":
                raise LoaderError(f"the loader ended after {self._taken} of {self._length} batches")
            return value

    def _find_workers(self) -> None:
        if self._workers and self._taken <= self._workers:  # later, each has given a batch and is known
            self._own |= children() - self._known

    def _check_workers(self, waited: float = 0.0) -> None:
        """Raises LoaderError where a process has ended before its time."""
        self._find_workers()
        for process in self._own:
            # With 0 ends, too, one that has read its share, when no more is left than is read ahead, and one whose error is on
            # its way to us. Of no other does Grain notice that it has ended with 0.
            left = self._length - self._read > self._workers * (self._prefetch + 2)
            if process.exitcode or (process.exitcode == 0 and left and waited >= SILENT):
                raise LoaderError(f"{ended(process)}: the rows that it was to read are missing")

    def _work(self) -> None:
        """On the thread."""
        try:
            self._reader = iter(self._source)
            for number, batch in self._reader:
                if number != self._read:
                    raise LoaderError(f"the loader gave batch {number}, not {self._read}, counted from its start")
                self._read += 1
                found = shapes(batch)
                if found != (self._shapes or found):
                    raise LoaderError(f"the loader gave a batch of {found} behind ones of {self._shapes}")
                self._shapes = found
                if self._workers:  # whose arrays lie in memory that is shared with them and used again
                    batch = {name: np.array(value) for name, value in batch.items()}
                self._hand_on("batch", self._put(batch))
                if self._closed.is_set():
                    return
            self._hand_on("end", None)
        except BaseException as e:
            self._hand_on("error", e)

    def _hand_on(self, what: str, value: Any) -> None:
        while not self._closed.is_set():
            try:
                return self._queue.put((what, value), timeout=POLL)
            except queue.Full:
                pass

    def close(self, *, failed: bool = False) -> None:
        """Ends the reader and its processes within some seconds."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._thread is None:
            return
        self._find_workers()
        if failed:  # so that Grain ends on the thread, too: it would wait for a process that is stopped
            self._kill()
            self._thread.join(READER_CLOSING)
        at_most(READER_CLOSING, lambda: self._reader.close())
        self._thread.join(READER_CLOSING)
        self._kill()

    def _kill(self) -> None:
        for process in self._own:
            process.kill()
            process.join(1.0)
