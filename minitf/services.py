"""The services and the progress of a training run, and how it starts or resumes."""

import dataclasses
import functools
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
from etils import epath

from minitf.config import to_json
from minitf.data.loader import LoaderError
from minitf.data.mixture import Phase
from minitf.data.store import DataError
from minitf.data.tokenizer_files import save_tokenizer
from minitf.job import Job, Program, check_same_run, compiled_step, evaluates_a_part, schedule_change
from minitf.params import count_params
from minitf.runtime.checkpoint import Checkpoints
from minitf.runtime.devices import PeakRate
from minitf.runtime.log import Events, StartUp, StepClock
from minitf.runtime.processes import is_first, say
from minitf.runtime.watch import StopRequest, Watchdog
from minitf.runtime.writer import MetricWriter, NoWriter
from minitf.sampling import Sampler
from minitf.sharding.devices import surroundings
from minitf.training.state import TrainState
from minitf.training.step import Batch
from minitf.workdir import load_params, resolve, store_config, store_frame


class NonFinite(Exception):
    """A loss, gradient or parameter is not finite, and the run must stop."""


class Refused(Exception):
    """The run in the work directory cannot resume as this job."""


class BatchError(Exception):
    """A batch could not be read."""


def batch_error(what: str, cause: Exception) -> BatchError:
    kind = "" if isinstance(cause, DataError | LoaderError) else f"{type(cause).__name__}: "
    error = BatchError(f"{what}: {kind}{cause}")
    error.__cause__ = cause
    return error


# ---- services and progress


@dataclasses.dataclass(frozen=True)
class Services:
    """The parts of a run that stay the same while it trains."""

    job: Job
    functions: Program
    first: int  # the last step before this process: 0, or the step of the checkpoint that it resumes from
    mixed: list[Phase]  # see job.phases
    stop: StopRequest
    events: Events
    checkpoints: Checkpoints
    writer: MetricWriter | NoWriter
    flops: float  # per step
    rate: PeakRate
    start_up: StartUp
    clock: StepClock
    watchdog: Watchdog
    writes: Sampler | None  # None: the run writes no samples


@dataclasses.dataclass
class Progress:
    """The parts of a run that change from step to step."""

    state: TrainState
    tokens_seen: int
    best: float  # lowest evaluation loss so far
    saved_at: float = dataclasses.field(default_factory=time.monotonic)
    pending: tuple[int, dict[str, Any]] | None = None  # (step, metrics) of the dispatched step, not yet read
    latest: dict[str, Any] = dataclasses.field(default_factory=dict)  # metrics of the last step that was read
    hashes: list[str] = dataclasses.field(default_factory=list)  # checksums of the batches since the last lap
    counts: list[int] = dataclasses.field(default_factory=list)  # numbers of tokens of these batches
    compile_time: float | None = None  # seconds; None: already logged


class ReadAhead:
    """Prefetches the batches of the next two steps, so that all processes know of a failed read before the step that needs it."""

    def __init__(self, batches: Iterator[Batch], steps: int):
        self.failure: BatchError | None = None
        self.ready: deque[Batch] = deque()
        self._batches, self._steps = batches, steps

    def read(self, step: int) -> None:
        """Appends the batch of this step to `ready`; nothing if the run is asked to stop before the batch is read."""
        if self.failure is not None or step > self._steps:
            return
        try:
            self.ready.extend(itertools.islice(self._batches, 1))
        except Exception as e:
            self.failure = batch_error(f"the batch of step {step}", e)


def read_together(batches: Iterator[Batch], stop: StopRequest, what: str) -> Iterator[Batch]:
    """The batches, read by all processes in lockstep. If one process cannot read a batch, raises BatchError in it and Stopped in the
    others; if one is asked to stop, raises Stopped in all."""
    while True:
        found, error = None, None
        try:
            found = next(batches, None)
        except Exception as e:
            error = e
        stopped = stop.agreed(error is not None)
        if error is not None:
            raise batch_error(what, error)
        if stopped is not None:
            raise stopped
        if found is None:
            return
        yield found


def unless_stopped(job: Job, stop: StopRequest, work: Callable[[], Any]) -> Any:
    """work() inside `surroundings`; raises Stopped if the run is asked to stop meanwhile."""

    def entered() -> Any:  # the contexts are entered here because this may run on another thread
        with surroundings(job.mesh, job.cfg.model.dtype):
            return work()

    return stop.unless_asked(entered)


# ---- start and resumption


def starting_state(
    job: Job, functions: Program, checkpoints: Checkpoints, say: Callable[[str], None]
) -> tuple[TrainState, dict[str, Any] | None]:
    """(the state to start from, `about` of its checkpoint or None for a new run). Renames damaged checkpoints."""
    cfg = job.cfg
    restored = checkpoints.restore_newest(functions.state, functools.partial(check_same_run, job))
    if restored is not None:
        for warning in restored.warnings():
            say(warning)
        if restored.damaged:
            checkpoints.put_aside(list(restored.damaged))
            say(f"the damaged checkpoints are now {checkpoints.directory}/STEP.damaged")
        return restored.tree, restored.about
    if cfg.init_from is None:
        return functions.init(jax.random.key(cfg.seed)), None
    source = resolve(cfg.init_from, "init_from")
    params, saved = load_params(source, functions.state.params)
    say(f"parameters from {source}, step {saved['step']}")
    return functions.start(params), None


def restored_or_new(
    job: Job, functions: Program, checkpoints: Checkpoints, events: Events, stop: StopRequest, start_up: StartUp
) -> tuple[TrainState, dict[str, Any] | None]:
    """`starting_state`, timed. Raises Refused if the run in the work directory cannot resume as this job."""
    kind = "restore" if checkpoints.steps() else "init"
    begin = lambda: jax.block_until_ready(starting_state(job, functions, checkpoints, say))
    with events.timed(kind) as event:
        try:
            state, restored = unless_stopped(job, stop, begin)
        except ValueError as e:
            raise Refused(str(e)) from e
        event["step"] = 0 if restored is None else restored["step"]
    start_up.phases[kind] = event["seconds"]
    return state, restored


def open_writer(
    job: Job, workdir: epath.Path, restored: dict[str, Any] | None, skipped: int
) -> MetricWriter | NoWriter:
    """Returns the writer after writing config and parameter counts or the resumption; process 0 also writes the run's files."""
    first = 0 if restored is None else restored["step"]
    writer: MetricWriter | NoWriter = NoWriter()
    if is_first():
        if job.tokenizer is not None:
            save_tokenizer(job.tokenizer, workdir)
        store_config(workdir, job.cfg)
        store_frame(workdir, job.frame)
        validation = sum(len(c.val) for c in job.corpora) if evaluates_a_part(job) else None
        writer = MetricWriter(workdir, job.steps, start=None if restored is None else first, validation=validation)
    writer.text(0 if restored is None else first + 1, "config", to_json(job.cfg))
    if restored is None:
        writer.write(0, {f"params/{name}": n for name, n in count_params(job.specs).items()})
        return writer
    writer.say(f"resuming after step {first} of {job.steps}")
    changed = schedule_change(job, restored, first - skipped)
    if changed is not None:
        writer.say(changed)
    return writer


def first_progress(run: Services, state: TrainState, restored: dict[str, Any] | None) -> Progress:
    cfg, seen = run.job.cfg, 0 if restored is None else restored.get("tokens_seen")
    if seen is None:  # an old checkpoint, without a count
        seen = run.first * cfg.batch_size * cfg.seq_len
        run.writer.say(f"the checkpoint has no count of tokens: train/tokens_seen goes on from all {seen:,} positions")
    return Progress(state, seen, math.inf if cfg.checkpoint.keep_best is None else run.checkpoints.lowest_loss())


def compiled(run: Services, progress: Progress, ahead: ReadAhead) -> Callable[..., Any]:
    """The step, compiled ahead of time for the batches read here; a batch of another shape would raise an error."""
    ahead.read(run.first + 1)
    # A run that is asked to stop now still takes one step if its batch is ready.
    stopped = run.stop.agreed(ahead.failure is not None, heed=not ahead.ready)
    if ahead.failure is not None or stopped is not None:
        raise ahead.failure or stopped
    ahead.read(run.first + 2)
    devices = list(run.job.mesh.local_devices)
    with run.events.timed("compile") as event:
        compile_it = lambda: compiled_step(run.functions, progress.state, ahead.ready[0], devices)
        step_fn = unless_stopped(run.job, run.stop, compile_it)
    progress.compile_time = run.start_up.phases["compile"] = event["seconds"]
    run.writer.say(f"compiled in {progress.compile_time:.1f} s")
    return step_fn
