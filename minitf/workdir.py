"""The work directory of a run: its files, whether a run may resume in it, and its model."""

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from etils import epath

from minitf import config as config_lib
from minitf.config import Config
from minitf.data import frame as frames
from minitf.data import tokenizer_files
from minitf.data.datasets import BEFORE, Framing
from minitf.data.frame import Frame
from minitf.data.tokenizer import Tokenizer
from minitf.model.transformer import model_params
from minitf.params import abstract_params
from minitf.paths import given, write_whole
from minitf.runtime import hooks
from minitf.runtime.checkpoint import Checkpoints, DamagedError, check_fit
from minitf.runtime.log import json_lines
from minitf.runtime.processes import say
from minitf.settings import fields, flat
from minitf.sharding.devices import make_mesh
from minitf.sharding.mesh import MeshConfig
from minitf.sharding.rules import shardings

# Besides TensorBoard's event files. plugins holds profiles for TensorBoard.
OURS = (
    *("config.json", "metrics.jsonl", "events.jsonl", "checkpoints", "plugins"),
    *(
        tokenizer_files.TOKENIZER_FILE,
        tokenizer_files.TOKENIZER_CONFIG,
        tokenizer_files.SPECIALS_FILE,
        frames.FRAME_FILE,
    ),
)


def resolve(workdir: str, setting: str = "--workdir") -> epath.Path:
    """Absolute path of a work directory, given as a relative path, with a tilde, through a link or in an object store."""
    try:
        return epath.Path(workdir) if "://" in workdir else epath.Path(given(workdir, setting).resolve())
    except (RuntimeError, KeyError) as e:  # no such user, a loop of links, an unknown scheme
        raise ValueError(f"{setting} {workdir}: {e}") from None


# ---- its files


def written_by_us(workdir: epath.Path) -> list[epath.Path]:
    names = sorted(p.name for p in workdir.iterdir()) if workdir.exists() else []
    return [workdir / name for name in names if name in OURS or name.startswith("events.out.tfevents.")]


def clear(workdir: epath.Path) -> None:
    """Deletes the files of an older run, and nothing else."""
    for path in written_by_us(workdir):
        if os.path.islink(path):
            os.unlink(path)  # the link only: its target is not ours
        elif path.is_dir():
            path.rmtree()
        else:
            path.unlink()


def stored_config(workdir: epath.Path) -> tuple[Config, list[str]] | None:
    """(config of the run in a directory, names of settings that are newer than it); None if there is no run."""
    path = workdir / "config.json"
    if not path.exists():
        return None
    try:
        return config_lib.from_stored(json.loads(path.read_text()))
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None


def differences(old: Config, new: Config) -> tuple[list[str], list[str]]:
    """(changed settings that must not change, changed settings that may), as lines `name: old -> new`."""
    before, after = flat(old), flat(new)
    lines: dict[bool, list[str]] = {False: [], True: []}
    for f in fields(Config):
        if before[f.name] != after[f.name]:
            lines[f.setting.may_change].append(f"{f.name}: {before[f.name]} -> {after[f.name]}")
    return lines[False], lines[True]


def has_checkpoint(workdir: epath.Path) -> bool:
    """Whether there is a committed checkpoint, readable or not."""
    directory = workdir / "checkpoints"
    return directory.exists() and any(p.name.isdigit() for p in directory.iterdir())


def begin(workdir: epath.Path, cfg: Config, overwrite: bool = False) -> tuple[bool, list[str]]:
    """(whether the directory holds this run already, its settings that change now, as lines `name: old -> new`). Writes the resolved
    config of a new run; a resumed run writes it once its checkpoint has been accepted. Raises ValueError if the directory holds
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
    """Git commit of the code, with a + if files differ from it; None outside a repository."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def use_compilation_cache(setting: str | None, workdir: epath.Path) -> None:
    """Turns on JAX's persistent compilation cache, for quick restarts. JAX_COMPILATION_CACHE_DIR takes precedence."""
    if setting == "none" or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    directory = workdir.parent / ".compilation_cache" if setting is None else resolve(setting, "compilation_cache")
    hooks.keep_compiled(str(directory))


# ---- its model


class Model(NamedTuple):
    cfg: Config
    params: Any
    step: int
    frame: Frame | None = None  # frame of its texts; None: not stored, see `frame_of`


@contextlib.contextmanager
def checkpoints_of(workdir: epath.Path) -> Iterator[Checkpoints]:
    """The checkpoints of a run, read-only. Raises ValueError if there is none, or none that can be read."""
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
    """Raises ValueError if the parameters of a run's newest checkpoint do not fit, listing every array that does not."""
    with checkpoints_of(workdir) as checkpoints:
        step, about = checkpoints.newest_about()
        check_fit(f"{workdir}, step {step}", about["arrays"], {"params": abstract_params(specs)})


def load_params(workdir: epath.Path, target: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
    """(parameters like the target, the checkpoint's `about`) from the newest checkpoint that can be read, or from the given step.
    Raises ValueError if there is none, and listing every array that does not fit."""
    with checkpoints_of(workdir) as checkpoints:
        if step is not None and step not in checkpoints.steps():
            raise ValueError(f"{workdir}: no checkpoint of step {step}; there are those of {checkpoints.steps()}")
        restored = checkpoints.restore_newest({"params": target}, steps=None if step is None else [step])
    for warning in restored.warnings():
        say(warning)
    return restored.tree["params"], restored.about


def load_model(workdir: str | os.PathLike, step: int | None = None, mesh: jax.sharding.Mesh | None = None) -> Model:
    """Config and parameters of a run's newest checkpoint, or of the given step, on a mesh (None: one device).
    Raises ValueError if there is none that can be read."""
    directory = resolve(os.fspath(workdir), "workdir")
    stored = stored_config(directory)
    if stored is None:
        raise ValueError(f"{directory}: no config.json, so no run")
    cfg, _ = stored
    specs = model_params(cfg.model)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1]) if mesh is None else mesh
    params, about = load_params(directory, abstract_params(specs, shardings(specs, mesh)), step)
    return Model(cfg, params, about["step"], stored_frame(directory))


def tokenizer_of(workdir: epath.Path) -> Tokenizer:
    """The tokenizer of a run. Raises ValueError if it has none."""
    path = workdir / tokenizer_files.TOKENIZER_FILE
    if not path.exists():
        raise ValueError(
            f"{workdir}: has no {tokenizer_files.TOKENIZER_FILE}: its data were token ids, and text cannot be read with it"
        )
    return tokenizer_files.load_tokenizer(path)


def stored_frame(workdir: epath.Path) -> Frame | None:
    """The frame of a run's texts; None: an older run, which did not store it."""
    path = workdir / frames.FRAME_FILE
    if not path.exists():
        return None
    try:
        return frames.from_tree(json.loads(path.read_text()), str(path))
    except json.JSONDecodeError as e:
        raise ValueError(f"{path}: {e}") from None


def store_frame(workdir: epath.Path, frame: Frame) -> None:
    write_whole(workdir / frames.FRAME_FILE, json.dumps(frames.to_tree(frame), indent=2) + "\n")


def framing_of(workdir: epath.Path) -> Framing:
    """Framing of a run's texts: for a resumed run the same as before, for a new run the tokenizer's."""
    stored = stored_frame(workdir)
    if stored is not None:
        return lambda tokenizer: stored
    return frames.of_before if (workdir / "config.json").exists() else frames.of_tokenizer


def frame_of(model: Model, tokenizer: Tokenizer | None) -> Frame:
    """The frame of a model's texts. If the run did not store it, returns the frame that older runs used, with a note on stderr."""
    if model.frame is not None:
        return model.frame
    frame = frames.of_before(tokenizer, model.cfg.data.eos_id)
    print(f"note: the run {BEFORE}", file=sys.stderr)
    return frame
