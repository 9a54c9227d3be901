"""The training loop: `decide` says what is due after each step, the services do it."""

import contextlib
import math
import os
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from minitf.config import Config, seconds
from minitf.job import Job, about, evaluation_batches, phases, program, sampler, training_batches
from minitf.model.flops import flops_per_token
from minitf.runtime import digests
from minitf.runtime.checkpoint import CheckpointConfig, Checkpoints, SaveError
from minitf.runtime.devices import PeakRate
from minitf.runtime.lock import Lock
from minitf.runtime.log import Events, StartUp, StepClock
from minitf.runtime.processes import Vote, is_first, say
from minitf.runtime.profile import Profile
from minitf.runtime.watch import Stopped, Watchdog, process_age, stop_on_signals
from minitf.services import (
    BatchError,
    NonFinite,
    Progress,
    ReadAhead,
    Services,
    compiled,
    first_progress,
    open_writer,
    read_together,
    restored_or_new,
    unless_stopped,
)
from minitf.sharding.devices import surroundings
from minitf.text import sample
from minitf.training.evaluation import evaluate, router_metrics
from minitf.workdir import commit

# ---- decisions: pure functions of the step, the settings and the processes' vote


class Due(NamedTuple):
    """Actions due after a step, the same in every process."""

    evaluate: bool
    sample: bool
    save: bool  # regardless of the evaluation loss
    profile: bool  # a trace begins or ends
    end: bool  # after the last step, or because the run was asked to stop


def evaluation_due(cfg: Config, step: int, steps: int) -> bool:
    return cfg.eval_every is not None and step > 0 and (step % cfg.eval_every == 0 or step == steps)


def decide(cfg: Config, step: int, steps: int, *, stopped: bool, late: bool, traced: bool) -> Due:
    """Actions due after a step. stopped: the run was asked to stop; late: a save is due by the clock; traced: a trace begins or ends
    after this step."""
    last, every = step == steps, cfg.checkpoint.every
    sampled = cfg.sample_every is not None and (step % cfg.sample_every == 0 or last)
    return Due(
        # A process that was asked to stop may have only seconds left: it saves, and the resumed run evaluates.
        evaluate=evaluation_due(cfg, step, steps) and not stopped,
        sample=sampled and not stopped,
        save=late or (every is not None and step % every == 0),
        profile=traced,
        end=last or stopped,
    )


def is_saved(cfg: CheckpointConfig, due: Due, *, improved: bool, ended: bool) -> bool:
    """Whether to save the state. improved: its evaluation loss is the lowest so far; ended: the run ends here, for whatever
    reason."""
    return due.save or (improved and cfg.keep_best is not None) or (ended and cfg.last)


# ---- between steps


def evaluate_now(run: Services, progress: Progress, step: int) -> float:
    """Evaluates, writes the metrics and returns the loss."""
    asked, what = lambda: run.stop.reason is not None, f"evaluation of step {step}"
    corpora = run.job.corpora
    data = {c.name: read_together(evaluation_batches(run.job, c, asked), run.stop, what) for c in corpora}
    with run.events.timed("evaluation", step=step):
        work = lambda: evaluate(run.functions.evaluate, progress.state.params, data)
        scores = unless_stopped(run.job, run.stop, work)
    run.writer.write(step, scores)
    return scores["eval/loss"]


def sample_now(run: Services, progress: Progress, step: int) -> None:
    """Writes completions of the fixed prompts, with the same random numbers at every step."""
    job, cfg, params = run.job, run.job.cfg, progress.state.params
    with run.events.timed("sample", step=step):
        work = lambda: sample(run.writes, params, job.tokenizer, job.frame, cfg.sample, cfg.seed, run.stop.check)
        text = unless_stopped(job, run.stop, work)
    run.writer.text(step, "samples", text)
    run.writer.say(f"step {step}/{job.steps}  samples\n{text}")


def save(run: Services, progress: Progress, step: int, loss: float | None = None) -> None:
    """Saves a checkpoint; raises NonFinite if a parameter is not finite. loss: evaluation loss of this state; None: not evaluated."""
    norms = {name: v for name, v in progress.latest.items() if name.startswith("norm/parameter/")}
    if not all(math.isfinite(v) for v in norms.values()):
        raise NonFinite(f"step {step}: parameter norms {norms}; this state was not saved")
    # Logs first: a run that resumes from this checkpoint finds all earlier lines on disk.
    run.writer.flush()
    run.events.flush()
    with run.events.timed("save", step=step) as event:
        facts = about(run.job, step, run.mixed, progress.tokens_seen, loss)
        described = run.checkpoints.save(step, progress.state, facts, loss)
        event["parameters"] = digests.combined(described["arrays"], "params/")
        event["bytes"] = sum(a.nbytes for a in jax.tree.leaves(progress.state))
    progress.saved_at = time.monotonic()


def lap(run: Services, progress: Progress, step: int) -> dict[str, float]:
    """Records the steps since the last lap as an event; {} if there are none."""
    if not progress.hashes:
        return {}
    took = run.clock.lap(step)
    run.events.add("steps", **took, batches=progress.hashes)
    took["tokens"] = sum(progress.counts)
    progress.hashes, progress.counts = [], []
    return took


def check_finite(run: Services, step: int, metrics: dict[str, Any]) -> None:
    """If a step was not finite, reports its skipped update or raises NonFinite, by optimizer.nonfinite."""
    if metrics.pop("finite"):
        return
    loss, norm = float(metrics["train/loss"]), float(metrics["train/grad_norm"])
    where = f"step {step}: loss {loss}, gradient norm {norm}"
    if math.isfinite(loss) and math.isfinite(norm):
        where += ", but the update or a parameter that it makes is not finite in float32"
    if run.job.cfg.optimizer.nonfinite == "stop":
        raise NonFinite(f"{where}; this update was not applied. optimizer.nonfinite=skip would go on without it")
    run.writer.say(f"{where}: skipped")


def finish(run: Services, progress: Progress) -> None:
    """Reads the metrics of the pending step, which blocks until it is computed, and logs them if due."""
    (step, metrics), progress.pending = progress.pending, None
    job, progress.latest = run.job, metrics
    progress.hashes.append(digests.hexadecimal(np.asarray(metrics.pop("batch"))))
    progress.counts.append(int(metrics.pop("tokens")))
    progress.tokens_seen += progress.counts[-1]
    check_finite(run, step, metrics)
    run.writer.progress(step)
    if step == run.first + 1:
        run.start_up.phases["step"] = run.clock.running()
        ended = run.start_up.ended()
        run.events.add("first_step", step=step, **ended)
        run.writer.say(run.start_up.described(ended))
    if step % job.cfg.log_every == 0 or step == job.steps:
        log_metrics(run, progress, step)
        run.checkpoints.check()


def log_metrics(run: Services, progress: Progress, step: int) -> None:
    """Writes the metrics of a step, and the throughput since the last lap."""
    cfg, took = run.job.cfg, lap(run, progress, step)
    positions = cfg.batch_size * cfg.seq_len  # per step
    step_time = took["seconds"] / (took["last"] - took["first"] + 1)
    values = jax.device_get(progress.latest)
    values |= router_metrics(values.pop("routed")) | {
        "train/tokens_seen": progress.tokens_seen,
        "perf/step_time_s": step_time,
        "perf/tokens_per_s": took["tokens"] / took["seconds"],
        "perf/mfu": run.rate.utilisation(run.flops / step_time, run.writer.say),
        "perf/data_wait_frac": took["data_wait"] / took["seconds"],
    }
    if progress.tokens_seen != step * positions:  # padding and masked targets are also computed
        values["train/positions_seen"] = step * positions
        values["perf/positions_per_s"] = positions / step_time
    if progress.compile_time is not None:
        values["perf/compile_time_s"], progress.compile_time = progress.compile_time, None
    run.writer.write(step, values)


def pause(
    run: Services, progress: Progress, step: int, due: Due, stopped: Stopped | None, ahead: ReadAhead
) -> tuple[Stopped | None, bool]:
    """Evaluates, samples and saves as due. Returns (why the run stops here or None, whether the state was saved)."""
    loss = None
    try:
        if due.evaluate:
            loss = evaluate_now(run, progress, step)
        if due.sample:
            sample_now(run, progress, step)
    except Stopped as e:
        stopped = e
    except BatchError as e:  # the data files have changed since the start
        ahead.failure = e
    improved = loss is not None and loss < progress.best
    if improved:
        progress.best = loss
    ended = due.end or stopped is not None or ahead.failure is not None
    saving = is_saved(run.job.cfg.checkpoint, due, improved=improved, ended=ended)
    if saving:
        save(run, progress, step, loss)
    return stopped, saving


def ended_by(run: Services, step: int, stopped: Stopped, saved: bool) -> int:
    """Waits for the last save, reports why the run stopped, and returns its exit status."""
    run.checkpoints.wait()
    kept = "the same command goes on" if saved else "not saved (checkpoint.last=False)"
    run.writer.say(f"stopped by {stopped} after step {step} of {run.job.steps}; {kept}")
    run.events.add("stop", step=step, reason=str(stopped))
    return stopped.status


@contextlib.contextmanager
def failure_recorded(events: Events) -> Iterator[None]:
    """Records an error as the run's last event, and raises it."""
    try:
        yield
    except BaseException as e:
        with contextlib.suppress(OSError):  # the disk may be full: raise the first error, not this one
            events.add("stop", reason=f"{type(e).__name__}: {e}")
        raise


# ---- the loop


def train(job: Job, workdir: str | os.PathLike, lock: Lock | None = None, start_up: StartUp | None = None) -> int:
    """Trains from the newest checkpoint in the work directory, or from the start, to the last step, and returns the exit
    status. Writes metrics, events and checkpoints to the work directory. start_up: times of the phases so far; None: unknown. Raises
    Stopped if the run is asked to stop before its first step."""
    cfg, workdir, start_up = job.cfg, epath.Path(workdir), start_up or StartUp()
    functions = program(job)
    with start_up.phase("peak rate"):
        rate = PeakRate(list(job.mesh.devices.flat), cfg.model.dtype)
    limit = None if cfg.max_run_time is None else seconds("max_run_time", cfg.max_run_time)

    with contextlib.ExitStack() as stack:
        stack.enter_context(surroundings(job.mesh, cfg.model.dtype))
        stop = stack.enter_context(stop_on_signals(limit))
        events = stack.enter_context(contextlib.closing(Events(workdir / "events.jsonl" if is_first() else None)))
        events.add("start", pid=os.getpid(), process_age=process_age(), steps=job.steps, commit=commit())
        stack.push(lambda kind, error, trace: events.add("stop", reason=str(error)) if kind is Stopped else None)
        checkpoints = stack.enter_context(Checkpoints(workdir / "checkpoints", cfg.checkpoint))
        state, restored = restored_or_new(job, functions, checkpoints, events, stop, start_up)
        first = 0 if restored is None else restored["step"]

        # An evaluation was due at the step where the run was stopped, but was skipped.
        owed = restored is not None and restored["evaluation"] is None and evaluation_due(cfg, first, job.steps)
        if restored is not None and first >= job.steps and not owed:
            say(f"step {first} of {job.steps} is already done; to go on, give more steps: --config.steps=N")
            events.add("stop", step=first, reason="already done")
            return 0
        writer = open_writer(job, workdir, restored, int(state.skipped))
        stack.callback(writer.close)
        run = Services(
            job=job,
            functions=functions,
            first=first,
            mixed=phases(job, restored),
            stop=stop,
            events=events,
            checkpoints=checkpoints,
            writer=writer,
            flops=flops_per_token(cfg.model, job.specs, cfg.seq_len) * cfg.batch_size * cfg.seq_len,
            rate=rate,
            start_up=start_up,
            clock=StepClock(first),
            watchdog=Watchdog(cfg.watchdog),
            writes=None if cfg.sample_every is None else sampler(job),
        )
        progress = first_progress(run, state, restored)
        del state  # its buffers are donated to the first step
        if owed:
            evaluate_now(run, progress, first)
            if first >= job.steps:
                events.add("stop", step=first, reason="already done")
                return 0
        if job.steps == 0:
            if cfg.checkpoint.last:
                save(run, progress, 0)
            writer.say("0 steps: nothing to train")
            events.add("stop", step=0, reason="done")
            return 0

        batches = training_batches(job, first, run.mixed, lambda: stop.reason is not None)
        ahead = ReadAhead(stack.enter_context(contextlib.closing(batches)), job.steps)
        step_fn = compiled(run, progress, ahead)
        profile = stack.enter_context(Profile(workdir, cfg.profile, first, writer.say))
        profile.begin(first)
        stack.callback(run.watchdog.pause)
        stack.enter_context(failure_recorded(events))
        run.clock.start(first)
        for step in range(first + 1, job.steps + 1):
            # Decisions of all processes together, cast before the step so that the devices do not wait for the result. Only the
            # first process reads the clock.
            minutes = cfg.checkpoint.every_minutes
            late = is_first() and minutes is not None and time.monotonic() - progress.saved_at >= 60 * minutes
            vote = Vote([*stop.ballot(ahead.failure is not None), late])
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                progress.state, metrics = step_fn(progress.state, ahead.ready.popleft())
                if progress.pending is not None:
                    finish(run, progress)  # the previous step: reading this one now would stall the device
                progress.pending = (step, metrics)
                run.watchdog.beat(step + 1)
                with run.clock.waiting():
                    ahead.read(step + 2)
            if lock is not None and lock.lost:  # before anything is saved
                raise SaveError(f"another run has taken over {workdir} ({lock.lost}); step {step} is not saved")
            *ballots, late = vote.read()
            stopped = None if step == job.steps else stop.stopped(*ballots)
            traced = profile.begins_or_ends(step)
            due = decide(cfg, step, job.steps, stopped=stopped is not None, late=bool(late), traced=traced)
            if not any(due):
                continue

            finish(run, progress)  # first, so that the metrics of a step are checked before its state is saved
            lap(run, progress, step)  # the time from here on counts for no step
            run.watchdog.pause()
            profile.end(step)
            stopped, saved = pause(run, progress, step, due, stopped, ahead)
            profile.begin(step)
            run.clock.start(step)
            if ahead.failure is not None:
                raise ahead.failure
            if stopped is not None:
                return ended_by(run, step, stopped, saved)
        checkpoints.wait()
        events.add("stop", step=job.steps, reason="done")
        if job.tokenizer is not None and cfg.checkpoint.last:
            chat = " --chat" if job.frame.template is not None else ""
            writer.say(f"done; talk to it with: python -m minitf.generate --workdir {workdir}{chat}")
        return 0
