"""The work directory: one run at a time, in any place that can be named, an object store among them."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
import types

import pytest
from common import TINY, change, launch, series, text_config
from etils import epath
from etils.epath import backend, gpath
from tensorboardX import record_writer

from minitf.paths import write_whole
from minitf.runtime import lock as lock_lib
from minitf.runtime.checkpoint import Checkpoints
from minitf.runtime.log import JsonLines, json_lines
from minitf.runtime.watch import start_ticks
from minitf.workdir import differences, load_model, resolve


def held_by(workdir, **changes) -> None:
    """Writes a lock as another run would: of this machine and a process that lives (our parent) unless changed."""
    other = lock_lib.ourselves() | {
        "pid": os.getppid(),
        "started": start_ticks(os.getppid()),
        "time": time.time(),
        "job_id": "18",
    }
    (workdir / "lock.json").write_text(json.dumps(other | changes))


ELSEWHERE = dict(host="elsewhere", boot_id="another", processes="others")
LONG_AGO = -61.0


@pytest.fixture
def workdir(tmp_path):
    return epath.Path(tmp_path)


# ---- the lock


def test_lock_is_there_while_held_and_gone_after(workdir):
    with lock_lib.locked(workdir / "new"):
        lock = json.loads((workdir / "new/lock.json").read_text())
        assert (lock["pid"], lock["host"]) == (os.getpid(), lock_lib.ourselves()["host"])
        assert abs(lock["time"] - time.time()) < 60
    assert list((workdir / "new").iterdir()) == []


def test_a_living_run_on_this_machine_is_not_disturbed(workdir):
    held_by(workdir)
    before = (workdir / "lock.json").read_text()
    with (
        pytest.raises(ValueError, match=rf"another run writes there \(process {os.getppid()} on "),
        lock_lib.locked(workdir),
    ):
        pass
    assert (workdir / "lock.json").read_text() == before


def gone() -> int:
    """The id of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (lambda: dict(pid=gone()), "its process .* is gone"),
        (lambda: dict(started=1), "its process .* is gone"),  # the number belongs to a later process
        (lambda: dict(boot_id="before"), "this machine was started anew since"),
        (lambda: dict(ELSEWHERE, time=time.time() + LONG_AGO), "no sign of life for 6[0-9] s"),
        (lambda: dict(ELSEWHERE, job_id="17"), "it belongs to this job, 17"),
        (lambda: dict(processes="another container", time=time.time() + LONG_AGO), "no sign of life"),
    ],
)
def test_a_dead_run_is_taken_over_at_once_and_told(workdir, changes, why, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    held_by(workdir, **changes())
    with lock_lib.locked(workdir):
        assert json.loads((workdir / "lock.json").read_text())["pid"] == os.getpid()
    (line,) = capsys.readouterr().out.splitlines()
    assert re.search(f"taking over from a run that has not ended: {why}", line)


def test_a_torn_lock_is_none(workdir):
    (workdir / "lock.json").write_text('{"host": "x", "pi')
    with lock_lib.locked(workdir):
        pass


def test_a_run_elsewhere_that_shows_life_is_not_disturbed(workdir):
    held_by(workdir, **ELSEWHERE)
    other = lock_lib.Lock(workdir / "lock.json")
    other._us |= ELSEWHERE
    stop = threading.Event()

    def live():
        while not stop.wait(0.01):
            with other._alone():
                other._write()

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with (
            pytest.raises(ValueError, match=r"another run writes there \(process .* on elsewhere\)"),
            lock_lib.locked(workdir),
        ):
            pass
    finally:
        stop.set()
        thread.join()


def test_a_silent_run_elsewhere_is_taken_over_after_a_while_whatever_its_clock_says(workdir, monkeypatch, capsys):
    monkeypatch.setattr("minitf.runtime.lock.STALE", 0.2)
    held_by(workdir, **ELSEWHERE, time=time.time() + 1e6)
    with lock_lib.locked(workdir):
        pass
    waiting, taken = capsys.readouterr().out.splitlines()
    assert "waiting up to 0 s for a sign of life" in waiting
    assert "taking over from a run that has not ended: no sign of life" in taken


def test_a_lock_that_was_taken_over_is_noticed_and_left_alone(workdir, monkeypatch):
    monkeypatch.setattr("minitf.runtime.lock.RENEWED", 0.01)
    with lock_lib.locked(workdir) as lock:
        held_by(workdir, **ELSEWHERE)
        for _ in range(1000):
            if lock.lost:
                break
            threading.Event().wait(0.01)
        assert lock.lost == f"process {os.getppid()} on elsewhere"
    assert json.loads((workdir / "lock.json").read_text())["host"] == "elsewhere"


def test_lock_is_renewed(workdir, monkeypatch):
    monkeypatch.setattr("minitf.runtime.lock.RENEWED", 0.01)
    with lock_lib.locked(workdir) as lock:
        first = json.loads((workdir / "lock.json").read_text())["time"]
        for _ in range(1000):
            with contextlib.suppress(ValueError):  # read in the middle of a write
                if json.loads((workdir / "lock.json").read_text())["time"] > first:
                    break
            threading.Event().wait(0.01)
        else:
            pytest.fail("the lock was not renewed")
        assert lock.lost is None


HOLD = """
import sys
from etils import epath
from minitf.runtime import lock
with lock.locked(epath.Path(sys.argv[1])):
    print("in", flush=True)
    sys.stdin.read()
"""


def test_many_starts_at_once_leave_one_run(workdir):
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    starts = [subprocess.Popen([sys.executable, "-c", HOLD, workdir], **pipes) for _ in range(3)]
    try:
        # The losers end by themselves; the winner waits for its input to end.
        for _ in range(2):
            while not any(p.poll() is not None for p in starts):
                threading.Event().wait(0.05)
            (ended, *_) = [p for p in starts if p.poll() is not None]
            assert "another run writes there" in ended.stderr.read()
            starts.remove(ended)
        (winner,) = starts
        assert winner.communicate(input="")[0] == "in\n"
        assert winner.returncode == 0
    finally:
        for p in starts:
            p.kill()


# ---- any place


@pytest.mark.parametrize(
    "name",
    ["~/with space/é/", *(pytest.param(n, marks=pytest.mark.slow) for n in ("runs/a", "runs/../runs/a", "link/a"))],
)
def test_any_form_of_a_path_trains_and_resumes(corpus, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    cfg = text_config(corpus, checkpoint__last=True)
    launch(change(cfg, steps=2), name)
    _, lines = launch(change(cfg, steps=4), name)
    assert list(series(lines, "train/loss")) == [1, 2, 3, 4]
    assert len(list(tmp_path.rglob("config.json"))) == 1  # one directory, whatever the form


class ObjectStore(backend._OsPathBackend):
    """Stands in for s3://: a folder in which directories are only names, and files are neither appended to nor changed."""

    def __init__(self, root):
        self.root = root

    def local(self, path):
        return os.path.join(self.root, os.fspath(path).removeprefix("s3://"))

    def open(self, path, mode):
        assert mode in ("r", "rb", "w", "wb"), f"an object cannot be opened with mode {mode}"
        os.makedirs(os.path.dirname(self.local(path)), exist_ok=True)
        return super().open(self.local(path), mode)

    def exists(self, path):
        return super().exists(self.local(path))

    def isdir(self, path):
        return super().isdir(self.local(path))

    def listdir(self, path):
        return super().listdir(self.local(path))

    def makedirs(self, path, *, exist_ok, mode=None):
        pass

    def remove(self, path):
        super().remove(self.local(path))

    def rmtree(self, path):
        super().rmtree(self.local(path))

    def replace(self, path, dst):
        super().replace(self.local(path), self.local(dst))


@pytest.fixture
def object_store(tmp_path, monkeypatch):
    """A work directory s3://bucket/a run, and the folder that it is. Orbax, which talks to object stores itself, and the event
    files are given the folder."""
    folder = tmp_path / "bucket/a run"
    store = ObjectStore(str(tmp_path))
    monkeypatch.setitem(gpath._PREFIX_TO_BACKEND, "s3", store)
    init = Checkpoints.__init__
    monkeypatch.setattr(
        Checkpoints, "__init__", lambda self, path, *a, **k: init(self, epath.Path(store.local(path)), *a, **k)
    )
    tensorboard = types.SimpleNamespace(open=lambda path: open(store.local(path), "wb"))
    monkeypatch.setitem(record_writer.REGISTERED_FACTORIES, "s3", tensorboard)
    return "s3://bucket/a run", folder


@pytest.mark.slow
def test_an_object_store_holds_a_run_that_resumes(corpus, object_store):
    workdir, folder = object_store
    cfg = text_config(corpus, checkpoint__last=True)
    launch(change(cfg, steps=2), workdir)
    _, lines = launch(change(cfg, steps=4), workdir)
    assert list(series(lines, "train/loss")) == [1, 2, 3, 4]
    assert [e["event"] for e in json_lines(epath.Path(workdir) / "events.jsonl")].count("start") == 2
    assert load_model(workdir).step == 4
    names = {p.name.split(".")[0] for p in folder.iterdir()}
    assert names == {"checkpoints", "config", "metrics", "events", "tokenizer", "frame"}  # the lock is gone
    _, lines = launch(change(cfg, steps=1, checkpoint__last=False), workdir, overwrite=True)
    assert [line["step"] for line in lines] == [0, 1]


def test_an_object_store_has_one_run_at_a_time(object_store):
    workdir, folder = object_store
    folder.mkdir(parents=True)
    held_by(folder)
    with pytest.raises(ValueError, match="another run writes there"), lock_lib.locked(resolve(workdir)):
        pass


@pytest.mark.parametrize("name", ["s3://bucket/a run/é", "gs://bucket/x"])
def test_names_in_object_stores_stay_as_they_are(name):
    assert str(resolve(name)) == name
    assert str(resolve(name) / "config.json") == name + "/config.json"


def test_an_unknown_kind_of_store_is_refused():
    with pytest.raises(ValueError, match="--workdir ftp://x/y"):
        resolve("ftp://x/y")


def test_settings_name_what_may_change_and_what_not():
    old = TINY
    new = change(old, model__dim=32, log_every=7, model__remat="full", data__seed=3)
    fixed, free = differences(old, new)
    assert fixed == ["model.dim: 16 -> 32", "data.seed: None -> 3"]
    assert free == ["log_every: 1 -> 7", "model.remat: products -> full"]
    assert differences(old, old) == ([], [])


# ---- files


def test_whole_files_replace_whole_files(workdir):
    write_whole(workdir / "a", "one")
    write_whole(workdir / "a", "two")
    assert [p.name for p in workdir.iterdir()] == ["a"]
    assert (workdir / "a").read_text() == "two"


def test_json_lines_keep_what_is_whole_and_go_on(workdir):
    (workdir / "x").write_bytes(b'{"step": 1}\n{"step": 2}\n{"st')
    lines = JsonLines(workdir / "x", keep=lambda v: v["step"] != 2)
    lines.add({"step": 3})
    assert json_lines(workdir / "x") == [{"step": 1}, {"step": 3}]
    lines.close()
    assert (workdir / "x").read_text() == '{"step": 1}\n{"step": 3}\n'
