"""Checkpoints with Orbax: written asynchronously, committed atomically, restored on any mesh, and verified when read.

A checkpoint is the train state and one JSON object, `about`: step, position in the data, config, versions, mesh, and for each
array its shape, dtype and checksum. Orbax alone silently restores corrupt bytes and casts other dtypes.
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

ABOUT_FORMAT = 1  # version of `about`
SAVER_CLOSING = 5.0  # seconds that Orbax may take to close once everything is written


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
    """A run has checkpoints, but none can be read."""


class Restored(NamedTuple):
    tree: Any  # same structure as the target
    about: dict[str, Any]
    damaged: dict[int, str]  # newer steps that could not be read: step -> why

    def warnings(self) -> list[str]:
        """One line per damaged checkpoint."""
        step = self.about["step"]
        return [
            f"warning: the checkpoint of step {damaged} is damaged ({why}); going on from step {step}"
            for damaged, why in self.damaged.items()
        ]


# ---- metadata of arrays


def array_facts(tree: Any) -> dict[str, dict[str, Any]]:
    """Name -> shape and dtype of every array."""
    return {name: {"shape": list(a.shape), "dtype": str(a.dtype)} for name, a in named(tree)}


def check_fit(where: str, saved: dict[str, dict[str, Any]], target: Any) -> None:
    """Raises ValueError listing every array that is missing in the checkpoint, unexpected, or of another shape or dtype."""
    wanted = array_facts(target)
    parts = {name.split("/")[0] for name in wanted}  # the target may be a subtree of the state
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
    """An exception in one line: for an OS error the OS's message, else the root cause of the chain."""
    while e.__cause__ is not None:
        e = e.__cause__
    text = str(e).strip()
    number = re.search(r"os_error_code='(\d+)'", text)  # in TensorStore's messages, after file names
    if number or (isinstance(e, OSError) and e.errno is not None):
        return os.strerror(int(number[1]) if number else e.errno)
    return f"{type(e).__name__}: {text.splitlines()[0][:300]}" if text else type(e).__name__


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """Turns a failure in one process into an error in all, so that none restores an older checkpoint than the others."""
    error = None
    try:
        yield
    except Exception as e:
        error = e
    failing = first_failing(error is not None)
    if error is not None:
        if not is_first():  # process 0's reason is reported by the caller
            print(f"process {jax.process_index()}: {reason(error)}", file=sys.stderr)
        raise error
    if failing is not None:
        raise RuntimeError(f"process {failing} could not read it")


# ---- a directory of checkpoints


class Checkpoints:
    """The checkpoints of one run, in DIRECTORY/STEP. As a context manager it waits on exit for the pending write."""

    def __init__(self, directory: epath.Path, cfg: CheckpointConfig = CheckpointConfig(), *, read_only: bool = False):
        hooks.quieten("absl")  # Orbax logs about thirty lines per save
        if not read_only:
            hooks.quieten("asyncio")  # it repeats each failed write; we report the first
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
        self._saving: int | None = None  # the step whose write is pending
        self._handlers = {
            # Weights hardly compress: a tenth fewer bytes would cost seven times the CPU time.
            "state": ocp.PyTreeCheckpointHandler(use_compression=False),
            "about": ocp.JsonCheckpointHandler(),
        }
        self._manager = ocp.CheckpointManager(
            directory,
            item_handlers=self._handlers,
            options=ocp.CheckpointManagerOptions(
                best_fn=loss_of,  # without it Orbax writes no metrics
                best_mode="min",
                preservation_policy=policy.AnyPreservationPolicy(keep),
                cleanup_tmp_directories=not read_only,
                read_only=read_only,
                create=not read_only,
            ),
        )

    def __enter__(self) -> "Checkpoints":
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(hooks.closed_loops_ignored())
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self.wait()
        except SaveError:
            if kind is None:
                raise  # otherwise the exception that is already propagating is the one to report
        finally:
            # No write is pending. If the directory has become unusable, Orbax may block for long without a purpose.
            at_most(SAVER_CLOSING, self._manager.close)  # its errors were already raised by wait()
            self._stack.close()

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, in order."""
        return sorted(self._manager.all_steps())

    def lowest_loss(self) -> float:
        """Lowest evaluation loss of the saved checkpoints; inf if none was evaluated."""
        known = (self._manager.metrics(step) for step in self.steps())
        return min((loss_of(metrics) for metrics in known if metrics is not None), default=math.inf)

    def save(self, step: int, tree: Any, about: dict[str, Any], loss: float | None = None) -> dict[str, Any]:
        """Copies the arrays, starts writing them asynchronously, and returns `about` with their metadata. loss: evaluation loss at
        this step, for keep_best; None: not evaluated. Raises SaveError if this save or the previous one failed."""
        self.wait()
        self._saving = step
        about = {"format": ABOUT_FORMAT, "step": step, **about, "arrays": array_facts(tree)}
        for name, value in checksums(tree).items():
            about["arrays"][name]["checksum"] = value
        try:
            saved = self._manager.save(
                step,
                args=ocp.args.Composite(state=ocp.args.PyTreeSave(tree), about=ocp.args.JsonSave(about)),
                # A NaN or infinite loss is never the best.
                metrics={"loss": loss} if loss is not None and math.isfinite(loss) else None,
                force=True,
            )
        except Exception as e:
            raise self._failed(e) from e
        if not saved:
            raise SaveError(f"checkpoint of step {step}: skipped by Orbax")
        return about

    def check(self) -> None:
        """Raises SaveError if the pending write has already failed."""
        try:
            self._manager.check_for_errors()
        except Exception as e:
            raise self._failed(e) from e

    def wait(self) -> None:
        """Blocks until the pending write is committed. Raises SaveError if it failed."""
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
        """The JSON object `about` of a checkpoint."""
        return self._read("about", step, ocp.args.JsonRestore())

    def _read(self, item: str, step: int, args: Any) -> Any:
        # Not with the manager: in it, a process that can read its part would wait for one that cannot.
        return self._handlers[item].restore(self.directory / str(step) / item, args=args)

    def restore(self, step: int, target: Any, about: dict[str, Any]) -> Any:
        """The arrays of the target (a tree of jax.ShapeDtypeStruct with shardings): the whole state, or a subtree such as
        {"params": ...}. Raises ValueError if a checksum differs, and Orbax's exceptions for unreadable files; if one process cannot
        read its part, raises in all processes."""
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
        """Yields (step, about) of the checkpoints (of `steps`, if given), newest first; adds unreadable ones to `damaged`."""
        for step in reversed(self.steps() if steps is None else steps):
            try:
                with all_or_none():
                    about = self.about(step)
                    about["arrays"]
            except Exception as e:  # a damaged file can make Orbax raise anything
                damaged[step] = reason(e)
                continue
            yield step, about

    def newest_about(self) -> tuple[int, dict[str, Any]]:
        """(step, about) of the newest checkpoint whose `about` can be read. Raises DamagedError if there is none."""
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
        """The newest checkpoint (of `steps`, if given) that can be read completely; None if there are no checkpoints. check(about)
        may refuse one by a ValueError before its arrays are read. Raises DamagedError if there are checkpoints and none can be read,
        ValueError listing every array that does not fit the target."""
        damaged: dict[int, str] = {}
        for step, about in self.abouts(damaged, steps):
            check(about)
            check_fit(str(self.directory / str(step)), about["arrays"], target)
            try:
                return Restored(self.restore(step, target, about), about, damaged)
            except Exception as e:
                if "RESOURCE_EXHAUSTED" in str(e):
                    raise  # out of memory: the file is not damaged
                damaged[step] = reason(e)
        if damaged:
            raise self._all_damaged(damaged)
        return None

    def put_aside(self, steps: list[int]) -> None:
        """Renames damaged checkpoints to STEP.damaged, so that the resumed run can write these steps again."""
        for step in steps if is_first() else []:
            names = (f"{step}.damaged{f'-{n}' if n > 1 else ''}" for n in itertools.count(1))
            place = next(p for p in (self.directory / name for name in names) if not p.exists())
            (self.directory / str(step)).rename(place)
        Vote([0]).read()  # a barrier: all wait for the renaming
        self._manager.reload()


def loss_of(metrics: dict[str, float]) -> float:
    """Key that orders checkpoints: the loss; inf for the NaN that older checkpoints may contain."""
    return metrics["loss"] if math.isfinite(metrics["loss"]) else math.inf


@functools.cache
def versions() -> dict[str, str]:
    """Versions of the libraries that affect the numbers of a run."""
    return {
        name: importlib.metadata.version(name)
        for name in ("jax", "jaxlib", "optax", "orbax-checkpoint", "grain", "numpy")
    }
