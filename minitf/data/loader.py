"""Prefetches batches on a thread. A reader that ends early, loses a worker process, stalls or returns a batch out of order raises an
error that says so."""

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

AHEAD = 2  # batches prefetched to the devices
FIRST_FACTOR = 5  # multiple of the timeout for the first batch of each worker process, which imports JAX first
SILENT = 5.0  # seconds without a batch after which a worker that exited with status 0 is taken to be the cause
READER_CLOSING = 2.0  # seconds allowed for each step of closing the reader


class LoaderError(Exception):
    """The reader ended early, lost a worker process, stalled, or returned something other than the next batch."""


def numbered(number: int, batch: Any) -> tuple[int, Any]:
    return number, batch


def end_with_parent(index: int, count: int) -> None:
    """Initialiser of Grain's worker processes: the worker exits when its parent process has ended for any reason."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end with parent").start()


def children() -> set[Any]:
    """Grain's running worker processes."""
    return {p for p in multiprocessing.active_children() if p.name.startswith("grain-process-prefetch")}


def ended(process: Any) -> str:
    code = process.exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return f"worker process {process.pid} {how}"


def shapes(batch: Any) -> Any:
    return {name: (value.dtype, value.shape) for name, value in batch.items()}


class Loader:
    """Iterates over the batches of a MapDataset in order, prefetching them on a thread.

    put:     transforms each batch (e.g. places it on devices); called on the loader's thread.
    workers: processes that read rows, with `prefetch` batches each; 0: `threads` threads of this process.
    timeout: seconds without a batch after which the reader counts as stalled; None: never. Time while this process is suspended
             does not count.
    until:   polled while waiting for a batch; True ends the iteration.

    `next` raises LoaderError, or the exception that reading a row raised.
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
            if not flags.FLAGS.is_parsed():  # Grain's processes read absl flags
                flags.FLAGS.mark_as_parsed()
            # A killed worker leaks shared memory. Python's resource tracker frees it at exit; this silences its warning.
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
        self._known: set[Any] = set()  # worker processes of other loaders
        self._own: set[Any] = set()
        self._read = self._taken = 0  # batches read from Grain; batches returned to the caller
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
        """The next batch; None if `until` returned True."""
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
                waited += POLL  # counts polls: the clock also runs while this process is suspended
                if limit is not None and waited >= limit:
                    hangs = "a worker process or the storage hangs" if self._workers else "the storage hangs"
                    raise LoaderError(f"no batch for {limit:g} s (data.timeout): {hangs}") from None
                continue
            if what == "error":
                self._check_workers()  # a dead worker is the better explanation of Grain's error
                raise value
            if what == "end":
                raise LoaderError(f"the loader ended after {self._taken} of {self._length} batches")
            return value

    def _find_workers(self) -> None:
        if self._workers and self._taken <= self._workers:  # later, every worker has returned a batch and is known
            self._own |= children() - self._known

    def _check_workers(self, waited: float = 0.0) -> None:
        """Raises LoaderError if a worker process ended early."""
        self._find_workers()
        for process in self._own:
            # Status 0 is normal for a worker that has read its share (all that is left is prefetched) or whose error is on its
            # way here. In all other cases Grain does not notice that a worker exited with status 0.
            left = self._length - self._read > self._workers * (self._prefetch + 2)
            if process.exitcode or (process.exitcode == 0 and left and waited >= SILENT):
                raise LoaderError(f"{ended(process)}: the rows that it was to read are missing")

    def _work(self) -> None:
        """Body of the loader's thread: reads batches, checks them and puts them into the queue."""
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
                if self._workers:  # their arrays are views of shared memory that they reuse
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
        """Ends the reader and its worker processes within seconds. `failed`: kills the workers first."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._thread is None:
            return
        self._find_workers()
        if failed:  # else Grain, on the thread, would wait for a suspended worker
            self._kill()
            self._thread.join(READER_CLOSING)
        at_most(READER_CLOSING, lambda: self._reader.close())
        self._thread.join(READER_CLOSING)
        self._kill()

    def _kill(self) -> None:
        for process in self._own:
            process.kill()
            process.join(1.0)
