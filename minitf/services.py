"""What a run stands on while it trains, how far it is, and how it begins."""

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
from minitf.sharding.mesh import surroundings
from minitf.training.state import TrainState
from minitf.training.step import Batch
from minitf.workdir import load_params, resolve, store_config, store_frame


class NonFinite(Exception):
    """A loss, gradient or parameter that is not finite where the config says to stop."""


class Refused(Exception):
    """The run of the work directory cannot go on as this job."""


class BatchError(Exception):
    """A batch could not be made."""


def batch_error(what: str, cause: Exception) -> BatchError:
    kind = "" if isinstance(cause, DataError | LoaderError) else f"{type(cause).__name__}: "
    error = BatchError(f"{what}: {kind}{cause}")
    error.__cause__ = cause
    return error


# ---- what a run stands on, and how far it is


@dataclasses.dataclass(frozen=True)
class Services:
    """What stays while a run trains."""

    job: Job
    functions: Program
    first: int  # the step after which this process goes on
    mixed: list[Phase]  # how rows of a mixture are counted
    stop: StopRequest
    events: Events
    checkpoints: Checkpoints
    writer: MetricWriter | NoWriter
    flops: float  # of a step
    rate: PeakRate
    start_up: StartUp
    clock: StepClock
    watchdog: Watchdog
    writes: Sampler | None  # of the samples; None: there are none


@dataclasses.dataclass
class Progress:
    """What changes from step to step."""

    state: TrainState
    tokens_seen: int
    best: float  # loss of an evaluation
    saved_at: float = dataclasses.field(default_factory=time.monotonic)
    pending: tuple[int, dict[str, Any]] | None = None  # the step under way and its metrics, which nobody has read
    latest: dict[str, Any] = dataclasses.field(default_factory=dict)  # metrics of the last step that was read
    hashes: list[str] = dataclasses.field(default_factory=list)  # of the batches since the last lap
    counts: list[int] = dataclasses.field(default_factory=list)  # of their tokens
    compile_time: float | None = None  # until it has been logged


class ReadAhead:
    """The batches of the next two steps, so that all processes know of a failure before its step."""

    def __init__(self, batches: Iterator[Batch], steps: int):
        self.failure: BatchError | None = None
        self.ready: deque[Batch] = deque()
        self._batches, self._steps = batches, steps

    def read(self, step: int) -> None:
        """The batch of this step, behind those that are there; none where the run is asked to end before it comes."""
        if self.failure is not None or step > self._steps:
            return
        try:
            self.ready.extend(itertools.islice(self._batches, 1))
        except Exception as e:
            self.failure = batch_error(f"the batch of step {step}", e)


def read_together(batches: Iterator[Batch], stop: StopRequest, what: str) -> Iterator[Batch]:
    """The batches, which all processes take in step. Raises BatchError where this process cannot read one, and Stopped in all
    others then, and in all where one is asked to end."""
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
    """work(), unless the run is asked to end meanwhile."""

    def entered() -> Any:  # perhaps on another thread
        with surroundings(job.mesh, job.cfg.model.dtype):
            return work()

    return stop.unless_asked(entered)


# ---- the beginning


def starting_state(
    job: Job, functions: Program, checkpoints: Checkpoints, say: Callable[[str], None]
) -> tuple[TrainState, dict[str, Any] | None]:
    """(the state to go on from, what its checkpoint says; None for a new run). Damaged checkpoints are put aside."""
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
    """`starting_state`, timed. Raises Refused where the run there cannot go on as this job."""
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
    """The writer, which has written what a run says of itself at its start; in the first process also the run's files."""
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
    if seen is None:  # a checkpoint from before they were counted
        seen = run.first * cfg.batch_size * cfg.seq_len
        run.writer.say(f"the checkpoint has no count of tokens: train/tokens_seen goes on from all {seen:,} positions")
    return Progress(state, seen, math.inf if cfg.checkpoint.keep_best is None else run.checkpoints.lowest_loss())


def compiled(run: Services, progress: Progress, ahead: ReadAhead) -> Callable[..., Any]:
    """The step, compiled once for the batches that are read here: one of another shape would be an error."""
    ahead.read(run.first + 1)
    # A start that is asked to end makes a step nevertheless, where nothing keeps it from that.
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
