"""A reader of batches that ends, dies, stalls or hands over something else: an error that names it, soon, and nothing left behind."""

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import grain
import numpy as np
import psutil
import pytest
from common import ROOT

from minitf.data import loader
from minitf.data.loader import Loader, LoaderError
from minitf.data.store import DataError


def made(batches, *, workers=0, timeout=None, until=lambda: False):
    return Loader(batches, lambda b: b, threads=1, prefetch=1, workers=workers, timeout=timeout, until=until)


def numbers(f=lambda i: i, n=1000):
    """Batches that hold f of their number."""
    return grain.MapDataset.range(n).map(lambda i: {"inputs": np.full(4, f(i))})


def ids(found):
    return [int(b["inputs"][0]) for b in found]


def held(release):
    """Reads three batches, and no other before the event."""

    def f(i):
        if i >= 3:
            release.wait(20)
        return i

    return f


@pytest.fixture(autouse=True)
def nothing_stays(request):
    """No process of a loader is left; and no thread, but where Grain's wait for a process that is gone."""
    before = set(threading.enumerate())
    yield
    for _ in range(100):
        threads = [t.name for t in threading.enumerate() if t.name.startswith("loader") and t not in before]
        if not (threads and "how" not in request.fixturenames) and not loader.children():
            return
        time.sleep(0.1)
    pytest.fail(f"left: {threads} {loader.children()}")


def test_batches_come_in_order_and_end():
    assert ids(made(numbers(n=7))) == list(range(7))


def test_what_reading_raises_is_raised_at_its_batch():
    def f(i):
        if i == 5:
            raise OSError("no such record")
        return i

    found = made(numbers(f))
    assert ids(itertools.islice(found, 5)) == list(range(5))
    with pytest.raises(OSError, match="no such record"):
        next(found)
    assert list(found) == []


def test_a_reader_that_stalls_is_an_error():
    release = threading.Event()
    found = made(numbers(held(release)), timeout=0.5)
    assert ids(itertools.islice(found, 3)) == [0, 1, 2]
    with pytest.raises(LoaderError, match=r"^no batch for 0\.5 s \(data\.timeout\): the storage hangs"):
        next(found)
    release.set()


def test_waiting_ends_where_it_is_asked_to():
    release, asked = threading.Event(), []
    found = made(numbers(held(release)), until=lambda: bool(asked))
    asked.append(True)  # what is there is given nevertheless
    assert ids(itertools.islice(found, 3)) == [0, 1, 2]
    assert list(found) == []
    found.close()
    release.set()


def test_a_reader_that_ends_early_is_an_error():
    found = made(numbers())
    found._source = ((i, {"inputs": np.full(4, i)}) for i in range(5))
    assert ids(itertools.islice(found, 5)) == list(range(5))
    with pytest.raises(LoaderError, match=r"^the loader ended after 5 of 1000 batches"):
        next(found)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ((6, {"inputs": np.full(4, 6)}), "^the loader gave batch 6, not 5"),
        ((5, {"inputs": np.full(3, 5)}), r"^the loader gave a batch of .*\(3,\).* behind ones of .*\(4,\)"),
        ((5, {"targets": np.full(4, 5)}), "^the loader gave a batch of .*targets"),
    ],
)
def test_another_batch_than_the_next_is_an_error(wrong, message):
    found = made(numbers())
    found._source = itertools.chain(((i, {"inputs": np.full(4, i)}) for i in range(5)), [wrong])
    assert ids(itertools.islice(found, 5)) == list(range(5))
    with pytest.raises(LoaderError, match=message):
        next(found)


# ---- processes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("kill", r"^worker process \d+ was killed by SIGKILL"),
        ("end", r"^worker process \d+ ended with status 0"),  # which Grain waits for for ever
        ("stop", r"^no batch for 8 s \(data\.timeout\): a worker process or the storage hangs"),
    ],
)
def test_a_worker_that_is_lost_is_an_error(how, message):
    def f(i):
        if i >= 60 and i % 2 and multiprocessing.parent_process() is not None:
            number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}.get(how)
            os._exit(0) if number is None else os.kill(os.getpid(), number)
        return i

    found = made(numbers(f), workers=2, timeout=8)
    assert ids(itertools.islice(found, 19)) == list(range(19))
    with pytest.raises(LoaderError, match=message):
        list(found)


@pytest.mark.slow
def test_what_a_worker_raises_is_raised():
    def f(i):
        if i == 61:
            raise DataError("x.bin: has become shorter")
        return i

    with pytest.raises(DataError, match=r"^x\.bin: has become shorter"):
        list(made(numbers(f), workers=2, timeout=8))


TRAINER = """
import itertools, sys, time
import grain, numpy as np
from minitf.data.loader import Loader
if __name__ == "__main__":
    batches = grain.MapDataset.range(10**6).map(lambda i: {"inputs": np.full(4, i)})
    found = Loader(batches, lambda b: b, threads=1, prefetch=1, workers=2, timeout=None, until=lambda: False)
    list(itertools.islice(found, 8))
    print("reads", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_workers_end_with_a_trainer_that_is_killed(tmp_path):
    (tmp_path / "trainer.py").write_text(TRAINER)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, tmp_path / "trainer.py"], env=env, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout.readline() == b"reads\n"
        children = psutil.Process(trainer.pid).children(recursive=True)
        assert len([c for c in children if "spawn_main" in " ".join(c.cmdline())]) == 2
        trainer.kill()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
