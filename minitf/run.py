"""The work directory of a run: who writes in it, what it holds, whether a run may go on in it, and its model."""

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from etils import epath

from minitf import config as config_lib
from minitf import params as P
from minitf.checkpoint import Checkpoints, DamagedError, check_fit
from minitf.config import Config
from minitf.data import frame as frames
from minitf.data import tokenizer
from minitf.data.datasets import BEFORE, Framing
from minitf.data.frame import Frame
from minitf.distributed import say, start_ticks
from minitf.metrics import is_local, json_lines, write_whole
from minitf.model.transformer import model_params
from minitf.paths import given
from minitf.settings import fields, flat
from minitf.sharding import MeshConfig, make_mesh, shardings

LOCK = "lock.json"
# And TensorBoard's event files; plugins holds its profiles.
OURS = (
    *("config.json", "metrics.jsonl", "events.jsonl", "checkpoints", "plugins"),
    *(tokenizer.FILE, tokenizer.CONFIG, tokenizer.SPECIALS, frames.FILE),
)


def resolve(workdir: str, setting: str = "--workdir") -> epath.Path:
    """The absolute path of a work directory given in any form: relative, with a tilde, through a link, an object store's."""
    try:
        return epath.Path(workdir) if "://" in workdir else epath.Path(given(workdir, setting).resolve())
    except (RuntimeError, KeyError) as e:  # no such user, a loop of links, an unknown scheme
        raise ValueError(f"{setting} {workdir}: {e}") from None


# ---- one run at a time

RENEWED = 10.0  # seconds between two signs of life in the lock
STALE = 60.0  # seconds without one after which a run on another machine counts as dead
JOB_IDS = ("MINITF_JOB_ID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")  # a scheduler's requeue keeps its job's id


def ourselves() -> dict[str, Any]:
    """What tells this process from all others."""

    def read(f: Callable[[str], str], path: str) -> str | None:
        try:
            return f(path).strip()
        except OSError:  # not Linux
            return None

    return {
        "host": socket.gethostname(),
        "boot_id": read(lambda p: Path(p).read_text(), "/proc/sys/kernel/random/boot_id"),
        "processes": read(os.readlink, "/proc/self/ns/pid"),  # process ids mean something within one container only
        "pid": os.getpid(),
        "started": start_ticks(os.getpid()),
        "job_id": next((os.environ[n] for n in JOB_IDS if os.environ.get(n)), None),
    }


def is_dead(lock: dict[str, Any], us: dict[str, Any], silence: float) -> str | None:
    """Why the run that holds the lock counts as dead; None: it does not. `silence`: seconds since its last sign of life."""
    if lock["host"] == us["host"] and lock["processes"] == us["processes"]:
        if lock["boot_id"] != us["boot_id"]:
            return "this machine was started anew since"
        # A later process may have its number.
        alive = lock["pid"] != us["pid"] and start_ticks(lock["pid"]) == lock["started"]
        return None if alive else f"its process {lock['pid']} is gone"
    if lock["job_id"] is not None and lock["job_id"] == us["job_id"]:
        return f"it belongs to this job, {us['job_id']}"
    return f"no sign of life for {silence:.0f} s" if silence >= STALE else None


class Lock:
    """The sign in a work directory that a run writes there, renewed every RENEWED seconds."""

    def __init__(self, path: epath.Path):
        self._path, self._us = path, ourselves()
        self.end = threading.Event()
        self.lost: str | None = None  # who took it over

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Reading and writing the lock as one act, where the file system knows how."""
        if not is_local(self._path):
            yield
            return
        import fcntl

        while True:
            with open(self._path, "a") as f:
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(f, fcntl.LOCK_EX)
                # The one who had it before us may have taken the file away.
                if self._path.exists() and os.path.samestat(os.fstat(f.fileno()), os.stat(self._path)):
                    yield
                    return

    def _read(self) -> dict[str, Any] | None:
        text = self._path.read_text() if self._path.exists() else ""
        try:
            return json.loads(text)
        except ValueError:  # none, or torn
            return None

    def _write(self) -> None:
        text = json.dumps(self._us | {"time": time.time()})
        if not is_local(self._path):
            self._path.write_text(text)
            return
        # In place and of one size: it needs no room, so that a full disk does not make a living run look dead.
        with open(self._path, "r+b") as f:
            f.write(text.encode().ljust(600))

    def try_once(self, seen: dict[str, Any] | None, since: float) -> tuple[dict[str, Any] | None, str | None]:
        """(the lock of a run that holds it or None where it is ours now, why an older one counted as dead). `seen`, `since`:
        the lock as it was, and for how long we have known it so, as other machines' clocks may differ."""
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
        """Raises ValueError where another run holds it. A run elsewhere that has been silent is waited for until it shows
        life or counts as dead."""
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
        """Until the end: a sign of life now and then. Notices where another run has taken over."""
        while not self.end.wait(RENEWED):
            with contextlib.suppress(OSError), self._alone():  # a file system out of reach: try again
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
    """Makes the directory and holds its lock. Raises ValueError where another run has it or the directory cannot be made."""
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
        thread.join(5.0)  # else it could write the lock again behind its release
        if not thread.is_alive():
            with contextlib.suppress(OSError):  # the directory is gone, and its lock with it
                lock.release()


# ---- what it holds


def written_by_us(workdir: epath.Path) -> list[epath.Path]:
    names = sorted(p.name for p in workdir.iterdir()) if workdir.exists() else []
    return [workdir / name for name in names if name in OURS or name.startswith("events.out.tfevents.")]


def clear(workdir: epath.Path) -> None:
    """Takes away an older run's files, and nothing else."""
    for path in written_by_us(workdir):
        if os.path.islink(path):
            os.unlink(path)  # the link alone: what it points to is not ours
        elif path.is_dir():
            path.rmtree()
        else:
            path.unlink()


def stored_config(workdir: epath.Path) -> tuple[Config, list[str]] | None:
    """The config of the run in a directory and the settings that are newer than it; None where there is none."""
    path = workdir / "config.json"
    if not path.exists():
        return None
    try:
        return config_lib.from_stored(json.loads(path.read_text()))
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None


def differences(old: Config, new: Config) -> tuple[list[str], list[str]]:
    """(what must not change and did, what may change and did), as lines `name: old -> new`."""
    before, after = flat(old), flat(new)
    lines: dict[bool, list[str]] = {False: [], True: []}
    for f in fields(Config):
        if before[f.name] != after[f.name]:
            lines[f.setting.may_change].append(f"{f.name}: {before[f.name]} -> {after[f.name]}")
    return lines[False], lines[True]


def has_checkpoint(workdir: epath.Path) -> bool:
    """Whether there is a committed checkpoint, to be read or not."""
    directory = workdir / "checkpoints"
    return directory.exists() and any(p.name.isdigit() for p in directory.iterdir())


def begin(workdir: epath.Path, cfg: Config, overwrite: bool = False) -> tuple[bool, list[str]]:
    """(whether a run was here already, its settings that change now as lines `name: old -> new`). Writes the resolved config of a
    new run; one that goes on takes it over when its checkpoint has been accepted. Raises ValueError where the directory holds
    another run, with the old and new values."""
    for parent in workdir.parents:
        if parent.name == "checkpoints" and (parent.parent / "config.json").exists():
            raise ValueError(f"--workdir {workdir}: lies inside the checkpoints of the run {parent.parent}")
    if overwrite:
        clear(workdir)
    stored = stored_config(workdir)
    found = written_by_us(workdir)
    if stored is None and found:
        raise ValueError(
            f"--workdir {workdir}: holds {', '.join(p.name for p in found)} but no config.json, so no run that could go on; "
            "give another directory, or --overwrite to start anew in this one"
        )
    changed: list[str] = []
    if stored is not None:
        fixed, changed = differences(stored[0], cfg)
        if fixed:
            raise ValueError(
                f"--workdir {workdir}: holds a run with other settings\n  "
                + "\n  ".join(fixed)
                + "\ngive another directory, or --overwrite to start anew in this one; --config.init_from starts a new run "
                "from another's parameters"
            )
        ended = [e["reason"] for e in json_lines(workdir / "events.jsonl") if e["event"] == "stop"]
        if ended and ended[-1] == "done" and not has_checkpoint(workdir):
            raise ValueError(
                f"--workdir {workdir}: holds a run that has finished and kept no checkpoint (checkpoint.last); give another "
                "directory, or --overwrite to start anew in this one"
            )
        if stored[1]:
            changed.append(f"new since: {', '.join(stored[1])}")
    if stored is None:
        store_config(workdir, cfg)
    return stored is not None, changed


def store_config(workdir: epath.Path, cfg: Config) -> None:
    write_whole(workdir / "config.json", config_lib.to_json(cfg))


@functools.cache
def commit() -> str | None:
    """The git commit of the code, with a + where files differ from it; None outside a repository."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def use_compilation_cache(setting: str | None, workdir: epath.Path) -> None:
    """Keeps compiled programs from one start to the next, so that a restart is quick. JAX's own variable goes first."""
    if setting == "none" or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    directory = workdir.parent / ".compilation_cache" if setting is None else resolve(setting, "compilation_cache")
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # a start has many small programs


# ---- its model


class Model(NamedTuple):
    cfg: Config
    params: Any
    step: int
    frame: Frame | None = None  # of its texts; None: not stored, see `frame_of`


@contextlib.contextmanager
def checkpoints_of(workdir: epath.Path) -> Iterator[Checkpoints]:
    """The checkpoints of a run, to read. Raises ValueError where there is none, or none that can be read."""
    directory = workdir / "checkpoints"
    if not directory.exists():
        raise ValueError(f"{workdir}: holds no checkpoints")
    try:
        with Checkpoints(directory, read_only=True) as checkpoints:
            if not checkpoints.steps():
                raise ValueError(f"{workdir}: holds no complete checkpoint")
            yield checkpoints
    except DamagedError as e:
        raise ValueError(str(e)) from None


def check_params(workdir: epath.Path, specs: Any) -> None:
    """Raises ValueError where the parameters of a run's newest checkpoint do not fit, with every array that does not."""
    with checkpoints_of(workdir) as checkpoints:
        step, about = checkpoints.newest_about()
        check_fit(f"{workdir}, step {step}", about["arrays"], {"params": P.abstract(specs)})


def load_params(workdir: epath.Path, target: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
    """(parameters like the target, the checkpoint's `about`) of the newest checkpoint that can be read, or of the given step.
    Raises ValueError where there is none, and with every array that does not fit."""
    with checkpoints_of(workdir) as checkpoints:
        if step is not None and step not in checkpoints.steps():
            raise ValueError(f"{workdir}: no checkpoint of step {step}; there are those of {checkpoints.steps()}")
        restored = checkpoints.restore_newest({"params": target}, steps=None if step is None else [step])
    for warning in restored.warnings():
        say(warning)
    return restored.tree["params"], restored.about


def load_model(workdir: str | os.PathLike, step: int | None = None, mesh: jax.sharding.Mesh | None = None) -> Model:
    """The config and the parameters of a run's newest checkpoint, or of the given step, on a mesh (default: one device).
    Raises ValueError where there is none that can be read."""
    directory = resolve(os.fspath(workdir), "workdir")
    stored = stored_config(directory)
    if stored is None:
        raise ValueError(f"{directory}: no config.json, so no run")
    cfg, _ = stored
    specs = model_params(cfg.model)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1]) if mesh is None else mesh
    params, about = load_params(directory, P.abstract(specs, shardings(specs, mesh)), step)
    return Model(cfg, params, about["step"], stored_frame(directory))


def tokenizer_of(workdir: epath.Path) -> tokenizer.Tokenizer:
    """The tokenizer of a run. Raises ValueError where it has none."""
    path = workdir / tokenizer.FILE
    if not path.exists():
        raise ValueError(
            f"{workdir}: has no {tokenizer.FILE}: its data were token ids, and text cannot be read with it"
        )
    return tokenizer.load_tokenizer(path)


def stored_frame(workdir: epath.Path) -> Frame | None:
    """The frame of a run's texts; None: a run from before it was stored."""
    path = workdir / frames.FILE
    if not path.exists():
        return None
    try:
        return frames.from_tree(json.loads(path.read_text()), str(path))
    except json.JSONDecodeError as e:
        raise ValueError(f"{path}: {e}") from None


def store_frame(workdir: epath.Path, frame: Frame) -> None:
    write_whole(workdir / frames.FILE, json.dumps(frames.to_tree(frame), indent=2) + "\n")


def framing_of(workdir: epath.Path) -> Framing:
    """How the texts of a run that goes on begin and end: as they did. A new one's are the tokenizer's."""
    stored = stored_frame(workdir)
    if stored is not None:
        return lambda tokenizer: stored
    return frames.of_before if (workdir / "config.json").exists() else frames.of_tokenizer


def frame_of(model: Model, tokenizer: tokenizer.Tokenizer | None) -> Frame:
    """The frame of a model's texts. One line on stderr says where it is not stored, but taken as it was before frames were."""
    if model.frame is not None:
        return model.frame
    frame = frames.of_before(tokenizer, model.cfg.data.eos_id)
    print(f"note: the run {BEFORE}", file=sys.stderr)
    return frame
