"""Checkpoints through Orbax: written behind the step, committed atomically, restored on any mesh, and never trusted unread.

A checkpoint is the train state and one JSON object, `about`: step, position in the data, config, versions, mesh, and for each
array its shape, dtype and checksum. Orbax alone restores flipped bytes and casts other number types without a word.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import itertools
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath

from minitf.params import named
from minitf.runtime import hooks
from minitf.runtime.digests import checksums
from minitf.runtime.processes import Vote, first_failing, is_first
from minitf.runtime.watch import at_most
from minitf.settings import setting

ABOUT_FORMAT = 1  # of `about`
SAVER_CLOSING = 5.0  # seconds that Orbax may take to end when all is written


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every: int | None = setting(
        None, "optimizer steps between saves; None: see every_minutes", at_least=1, may_change=True
    )
    every_minutes: float | None = setting(
        10.0, "minutes since the last save, whatever its reason; None: see every", above=0, may_change=True
    )
    last: bool = setting(
        True, "save after the last step, and before a signal or max_run_time ends the run", may_change=True
    )
    keep: int | None = setting(3, "newest checkpoints that are kept; None: all", at_least=1, may_change=True)
    keep_every: int | None = setting(
        None, "checkpoints whose step is a multiple of it are kept for ever; None: none", at_least=1, may_change=True
    )
    keep_best: int | None = setting(
        None,
        "checkpoints with the lowest evaluation losses that are kept (each new best is saved); None: none",
        **dict(at_least=1, may_change=True),
    )


class SaveError(Exception):
    """A checkpoint could not be written."""


class DamagedError(Exception):
    """No checkpoint of a run that has some can be read."""


class Restored(NamedTuple):
    tree: Any  # like the target
    about: dict[str, Any]
    damaged: dict[int, str]  # newer steps that could not be read: step -> why

    def warnings(self) -> list[str]:
        """A line for each damaged checkpoint."""
        step = self.about["step"]
        return [
            f"warning: the checkpoint of step {damaged} is damaged ({why}); going on from step {step}"
            for damaged, why in self.damaged.items()
        ]


# ---- what a checkpoint says of its arrays


def array_facts(tree: Any) -> dict[str, dict[str, Any]]:
    """Shape and dtype of every array, by name."""
    return {name: {"shape": list(a.shape), "dtype": str(a.dtype)} for name, a in named(tree)}


def check_fit(where: str, saved: dict[str, dict[str, Any]], target: Any) -> None:
    """Raises ValueError with every array that is missing from the checkpoint, too many in it, of another shape or dtype."""
    wanted = array_facts(target)
    parts = {name.split("/")[0] for name in wanted}  # a target may be a part of the state
    saved = {name: a for name, a in saved.items() if name.split("/")[0] in parts}
    lines = [f"  missing from the checkpoint: {name} {wanted[name]['shape']}" for name in wanted if name not in saved]
    lines += [f"  not in this model: {name} {saved[name]['shape']}" for name in saved if name not in wanted]
    for name in wanted:
        for what in ("shape", "dtype"):
            if name in saved and saved[name][what] != wanted[name][what]:
                lines.append(f"  {what} of {name}: saved {saved[name][what]}, wanted {wanted[name][what]}")
    if lines:
        raise ValueError(f"{where}: does not fit\n" + "\n".join(lines))


def reason(e: BaseException) -> str:
    """An exception in one line: the system's own words where it comes from the system, else the root of its chain."""
    while e.__cause__ is not None:
        e = e.__cause__
    text = str(e).strip()
    number = re.search(r"os_error_code='(\d+)'", text)  # TensorStore's, after names of files
    if number or (isinstance(e, OSError) and e.errno is not None):
        return os.strerror(int(number[1]) if number else e.errno)
    return f"{type(e).__name__}: {text.splitlines()[0][:300]}" if text else type(e).__name__


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """What fails in one process is an error in all: else some would read an older checkpoint than the others."""
    error = None
    try:
        yield
    except Exception as e:
        error = e
    failing = first_failing(error is not None)
    if error is not None:
        if not is_first():  # whose reason is told as the run's
            print(f"process {jax.process_index()}: {reason(error)}", file=sys.stderr)
        raise error
    if failing is not None:
        raise RuntimeError(f"process {failing} could not read it")


# ---- a directory of checkpoints


class Checkpoints:
    """The checkpoints of one run, in DIRECTORY/STEP. As a context it waits, on leaving, for the write under way."""

    def __init__(self, directory: epath.Path, cfg: CheckpointConfig = CheckpointConfig(), *, read_only: bool = False):
        hooks.quieten("absl")  # Orbax tells some thirty lines a save
        if not read_only:
            hooks.quieten("asyncio")  # and each failed write again; we tell the first
        policy = ocp.checkpoint_managers.preservation_policy
        keep = [policy.LatestN(cfg.keep)]
        if cfg.keep_every is not None:
            keep.append(policy.EveryNSteps(cfg.keep_every))
        if cfg.keep_best is not None:
            keep.append(
                policy.BestN(
                    get_metric_fn=loss_of, reverse=True, n=cfg.keep_best, keep_checkpoints_without_metrics=False
                )
            )
        self.directory = directory
        self._saving: int | None = None  # the step whose write is under way
        self._handlers = {
            # Weights do not compress: a tenth of the bytes would cost seven times the processor time.
            "state": ocp.PyTreeCheckpointHandler(use_compression=False),
            "about": ocp.JsonCheckpointHandler(),
        }
        self._manager = ocp.CheckpointManager(
            directory,
            item_handlers=self._handlers,
            options=ocp.CheckpointManagerOptions(
                best_fn=loss_of,  # so that metrics are written at all
                best_mode="min",
                preservation_policy=policy.AnyPreservationPolicy(keep),
                cleanup_tmp_directories=not read_only,
                read_only=read_only,
                create=not read_only,
            ),
        )

    def __enter__(self) -> "Checkpoints":
        self._ignoring = hooks.closed_loops_ignored()
        self._ignoring.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self.wait()
        except SaveError:
            if kind is None:
                raise  # else the error under way is the one to tell
        finally:
            # Nothing is written any more. Where the directory has become unusable, Orbax may wait long for nothing.
            at_most(SAVER_CLOSING, self._manager.close)  # what it raises was told by wait()
            self._ignoring.__exit__(None, None, None)

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, in order."""
        return sorted(self._manager.all_steps())

    def lowest_loss(self) -> float:
        """Of the checkpoints that were saved with an evaluation; infinite where there are none."""
        known = (self._manager.metrics(step) for step in self.steps())
        return min((loss_of(metrics) for metrics in known if metrics is not None), default=math.inf)

    def save(self, step: int, tree: Any, about: dict[str, Any], loss: float | None = None) -> dict[str, Any]:
        """Copies the arrays and returns `about` with what it says of them; they are written behind the next steps. `loss`: of
        an evaluation at this step, for keep_best. Raises SaveError where this save, or the one before it, failed."""
        self.wait()
        self._saving = step
        about = {"format": ABOUT_FORMAT, "step": step, **about, "arrays": array_facts(tree)}
        for name, value in checksums(tree).items():
            about["arrays"][name]["checksum"] = value
        try:
            saved = self._manager.save(
                step,
                args=ocp.args.Composite(state=ocp.args.PyTreeSave(tree), about=ocp.args.JsonSave(about)),
                # What is no number is never the best.
                metrics={"loss": loss} if loss is not None and math.isfinite(loss) else None,
                force=True,
            )
        except Exception as e:
            raise self._failed(e) from e
        if not saved:
            raise SaveError(f"checkpoint of step {step}: skipped by Orbax")
        return about

    def check(self) -> None:
        """Raises SaveError if the write under way has failed already."""
        try:
            self._manager.check_for_errors()
        except Exception as e:
            raise self._failed(e) from e

    def wait(self) -> None:
        """Until the write under way is committed. Raises SaveError where it was not."""
        if self._saving is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as e:
            raise self._failed(e) from e
        if self._saving not in self._manager.all_steps(read=True):
            raise self._failed(RuntimeError("it was not committed"))
        self._saving = None

    def _failed(self, e: Exception) -> SaveError:
        step, self._saving = self._saving, None
        good = sorted(s for s in self._manager.all_steps(read=True) if s != step)
        left = f"the newest complete checkpoint is of step {good[-1]}" if good else "there is no complete checkpoint"
        return SaveError(f"the checkpoint of step {step} could not be written: {reason(e)}; {left}")

    def about(self, step: int) -> dict[str, Any]:
        """The JSON object of a checkpoint."""
        return self._read("about", step, ocp.args.JsonRestore())

    def _read(self, item: str, step: int, args: Any) -> Any:
        # Not through the manager: there a process that can read its part waits for one that cannot.
        return self._handlers[item].restore(self.directory / str(step) / item, args=args)

    def restore(self, step: int, target: Any, about: dict[str, Any]) -> Any:
        """The arrays that the target (jax.ShapeDtypeStruct with shardings) names: the whole state, or a part of it such as
        {"params": ...}. Raises ValueError where a checksum differs, and what Orbax raises for files that it cannot read; where
        one process cannot read its part, then in all processes."""
        args = ocp.args.PyTreeRestore(
            item=target, restore_args=ocp.checkpoint_utils.construct_restore_args(target), partial_restore=True
        )
        with all_or_none():
            tree = self._read("state", step, args)
        for name, value in checksums(tree).items():
            if about["arrays"][name]["checksum"] != value:
                raise ValueError(f"{name}: the checksum is {value}, not {about['arrays'][name]['checksum']}")
        return tree

    def abouts(self, damaged: dict[int, str], steps: list[int] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
        """(step, about) of the checkpoints (of `steps`, if given), newest first; those that cannot be read go to `damaged`."""
        for step in reversed(self.steps() if steps is None else steps):
            try:
                with all_or_none():
                    about = self.about(step)
                    about["arrays"]
            except Exception as e:  # whatever a damaged file makes Orbax raise
                damaged[step] = reason(e)
                continue
            yield step, about

    def newest_about(self) -> tuple[int, dict[str, Any]]:
        """Of the newest checkpoint whose JSON object can be read. Raises DamagedError where there is none."""
        damaged: dict[int, str] = {}
        for found in self.abouts(damaged):
            return found
        raise self._all_damaged(damaged)

    def _all_damaged(self, damaged: dict[int, str]) -> DamagedError:
        told = "\n".join(f"  step {step}: {why}" for step, why in damaged.items())
        return DamagedError(f"{self.directory}: no checkpoint can be read\n{told}")

    def restore_newest(
        self, target: Any, check: Callable[[dict[str, Any]], None] = lambda about: None, steps: list[int] | None = None
    ) -> Restored | None:
        """The newest checkpoint (of `steps`, if given) that can be read whole; None where there is none at all. `check(about)`
        may refuse one by ValueError before its arrays are read. Raises DamagedError where there are some and none can be read,
        ValueError with every array that does not fit the target."""
        damaged: dict[int, str] = {}
        for step, about in self.abouts(damaged, steps):
            check(about)
            check_fit(str(self.directory / str(step)), about["arrays"], target)
            try:
                return Restored(self.restore(step, target, about), about, damaged)
            except Exception as e:
                if "RESOURCE_EXHAUSTED" in str(e):
                    raise  # the memory is too small, not the file bad
                damaged[step] = reason(e)
        if damaged:
            raise self._all_damaged(damaged)
        return None

    def put_aside(self, steps: list[int]) -> None:
        """Renames damaged checkpoints to STEP.damaged, out of the way of the run that will write these steps again."""
        for step in steps if is_first() else []:
            names = (f"{step}.damaged{f'-{n}' if n > 1 else ''}" for n in itertools.count(1))
            place = next(p for p in (self.directory / name for name in names) if not p.exists())
            (self.directory / str(step)).rename(place)
        Vote([0]).read()  # waits for it
        self._manager.reload()


def loss_of(metrics: dict[str, float]) -> float:
    """What orders checkpoints. Older ones may hold NaN, which has no place in an order."""
    return metrics["loss"] if math.isfinite(metrics["loss"]) else math.inf


@functools.cache
def versions() -> dict[str, str]:
    """Of the libraries that decide what a checkpoint's numbers become."""
    return {
        name: importlib.metadata.version(name)
        for name in ("jax", "jaxlib", "optax", "orbax-checkpoint", "grain", "numpy")
    }
