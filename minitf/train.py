"""Trains a model: python -m minitf.train --config configs/tiny.py [--workdir DIR] [--config.NAME=VALUE ...]"""

import sys
import threading

if __name__ == "__main__":  # what is imported below takes half a minute where nothing of it is cached
    starting = threading.Timer(0.8, lambda: print("starting: importing JAX", file=sys.stderr, flush=True))
    starting.daemon = True
    if sys.stderr is not None and sys.stderr.isatty():  # someone waits
        starting.start()

import argparse
import contextlib
import errno
import functools
import itertools
import math
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from minitf import command_line
from minitf import config as config_lib
from minitf import workdir as workdir_lib
from minitf.data import frame as frames
from minitf.data.loader import LoaderError
from minitf.data.store import DataError
from minitf.data.tokenizer_files import save_tokenizer
from minitf.job import (
    LOWER,
    Job,
    Program,
    TooLarge,
    about,
    check_same_run,
    compiled_step,
    evaluates_a_part,
    evaluation_batches,
    phases,
    prepare,
    program,
    sampler,
    schedule_change,
    training_batches,
)
from minitf.model.flops import flops_per_token
from minitf.params import count_params
from minitf.runtime import digests, memory, processes, watch
from minitf.runtime import lock as lock_lib
from minitf.runtime.checkpoint import Checkpoints, DamagedError, SaveError
from minitf.runtime.devices import listed_flops, measured_apart, peak_flops
from minitf.runtime.log import Events, StartUp, StepClock
from minitf.runtime.processes import Vote
from minitf.runtime.profile import Profile
from minitf.runtime.terminal import lasting_output
from minitf.runtime.watch import (
    FAILED,
    MISTAKE,
    NONFINITE,
    Stopped,
    StopRequest,
    Watchdog,
    process_age,
    stop_on_signals,
)
from minitf.runtime.writer import MetricWriter, NoWriter, human
from minitf.sharding.mesh import surroundings
from minitf.startup import describe
from minitf.text import sample
from minitf.training.evaluation import evaluate
from minitf.training.state import TrainState
from minitf.training.step import Batch
from minitf.workdir import (
    check_params,
    commit,
    framing_of,
    has_checkpoint,
    load_params,
    resolve,
    store_config,
    store_frame,
    use_compilation_cache,
)


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


# ---- the loop


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


def train(
    job: Job, workdir: str | os.PathLike, lock: lock_lib.Lock | None = None, start_up: StartUp | None = None
) -> int:
    """Trains from the newest checkpoint of the work directory, or from the start, to the last step, and returns the exit
    status. Metrics, events and checkpoints go to the work directory. `start_up`: what was done before; None: not known. Raises
    Stopped where it is asked to end before its first step."""
    cfg, workdir, start_up = job.cfg, epath.Path(workdir), start_up or StartUp()
    positions_a_step = cfg.batch_size * cfg.seq_len
    flops = flops_per_token(cfg.model, job.specs, cfg.seq_len)
    functions = program(job)
    with start_up.phase("peak rate"):
        devices = list(job.mesh.devices.flat)
        peak, is_listed = peak_flops(devices, cfg.model.dtype), listed_flops(devices, cfg.model.dtype) is not None
    first_process = processes.is_first()  # the one that writes files, checkpoints aside
    limit = None if cfg.max_run_time is None else config_lib.seconds("max_run_time", cfg.max_run_time)

    with contextlib.ExitStack() as stack:
        stack.enter_context(surroundings(job.mesh, job.cfg.model.dtype))
        stop = stack.enter_context(stop_on_signals(limit))
        events = stack.enter_context(contextlib.closing(Events(workdir / "events.jsonl" if first_process else None)))
        events.add("start", pid=os.getpid(), process_age=process_age(), steps=job.steps, commit=commit())
        stack.push(lambda kind, error, trace: events.add("stop", reason=str(error)) if kind is Stopped else None)
        checkpoints = stack.enter_context(Checkpoints(workdir / "checkpoints", cfg.checkpoint))

        def inside(work: Callable[[], Any]) -> Any:
            """work(), unless the run is asked to end meanwhile."""

            def entered() -> Any:  # perhaps on another thread
                with surroundings(job.mesh, job.cfg.model.dtype):
                    return work()

            return stop.unless_asked(entered)

        def begin() -> tuple[TrainState, dict[str, Any] | None]:
            return jax.block_until_ready(starting_state(job, functions, checkpoints, processes.say))

        beginning = "restore" if checkpoints.steps() else "init"
        with events.timed(beginning) as event:
            try:
                state, restored = inside(begin)
            except ValueError as e:
                raise Refused(str(e)) from e
            event["step"] = first = 0 if restored is None else restored["step"]
        start_up.phases[beginning] = event["seconds"]

        def evaluation_due(step: int) -> bool:
            return cfg.eval_every is not None and step > 0 and (step % cfg.eval_every == 0 or step == job.steps)

        # Where there was no time for it when the run was stopped.
        owed = restored is not None and evaluation_due(first) and restored["evaluation"] is None
        if restored is not None and first >= job.steps and not owed:
            processes.say(f"step {first} of {job.steps} is already done; to go on, give more steps: --config.steps=N")
            events.add("stop", step=first, reason="already done")
            return 0
        if first_process and job.tokenizer is not None:
            save_tokenizer(job.tokenizer, workdir)
        if first_process:
            store_config(workdir, cfg)
            store_frame(workdir, job.frame)
        start = None if restored is None else first
        validation = sum(len(c.val) for c in job.corpora) if evaluates_a_part(job) else None
        writer = MetricWriter(workdir, job.steps, start=start, validation=validation) if first_process else NoWriter()
        stack.callback(writer.close)
        writer.text(0 if restored is None else first + 1, "config", config_lib.to_json(cfg))
        if restored is None:
            writer.write(0, {f"params/{name}": n for name, n in count_params(job.specs).items()})
        else:
            writer.say(f"resuming after step {first} of {job.steps}")
            changed = schedule_change(job, restored, first - int(state.skipped))
            if changed is not None:
                writer.say(changed)

        mixed = phases(job, restored)
        tokens_seen = 0 if restored is None else restored.get("tokens_seen")
        if tokens_seen is None:  # a checkpoint from before they were counted
            tokens_seen = first * positions_a_step
            writer.say(
                f"the checkpoint has no count of tokens: train/tokens_seen goes on from all {tokens_seen:,} positions"
            )
        best = math.inf if cfg.checkpoint.keep_best is None else checkpoints.lowest_loss()
        saved_at = time.monotonic()

        asked = lambda: stop.reason is not None

        def evaluate_now(step: int) -> float:
            what = f"evaluation of step {step}"
            data = {c.name: read_together(evaluation_batches(job, c, asked), stop, what) for c in job.corpora}
            with events.timed("evaluation", step=step):
                scores = inside(lambda: evaluate(functions.evaluate, state.params, data))
            writer.write(step, scores)
            return scores["eval/loss"]

        writes = None if cfg.sample_every is None else sampler(job)

        def sample_now(step: int) -> None:
            """Writes what the model makes of the fixed prompts: the same draws at every step."""
            with events.timed("sample", step=step):
                text = inside(
                    lambda: sample(writes, state.params, job.tokenizer, job.frame, cfg.sample, cfg.seed, stop.check)
                )
            writer.text(step, "samples", text)
            writer.say(f"step {step}/{job.steps}  samples\n{text}")

        if owed:
            evaluate_now(first)
            if first >= job.steps:
                events.add("stop", step=first, reason="already done")
                return 0

        def save(step: int, loss: float | None = None) -> None:
            """A checkpoint of a state that is finite; what was logged up to it reaches the disk first."""
            nonlocal saved_at
            norms = {name: v for name, v in latest.items() if name.startswith("norm/parameter/")}
            if not all(math.isfinite(v) for v in norms.values()):
                raise NonFinite(f"step {step}: parameter norms {norms}; this state was not saved")
            writer.flush()
            events.flush()
            with events.timed("save", step=step) as event:
                described = checkpoints.save(step, state, about(job, step, mixed, tokens_seen, loss), loss)
                event["parameters"] = digests.combined(described["arrays"], "params/")
                event["bytes"] = sum(a.nbytes for a in jax.tree.leaves(state))
            saved_at = time.monotonic()

        latest: dict[str, Any] = {}
        if job.steps == 0:
            if cfg.checkpoint.last:
                save(0)
            writer.say("0 steps: nothing to train")
            events.add("stop", step=0, reason="done")
            return 0

        batches = stack.enter_context(contextlib.closing(training_batches(job, first, mixed, asked)))
        ahead: deque[Batch] = deque()  # of the next two steps: so that all processes know of a failure before its step
        failure: Exception | None = None

        def read_ahead(step: int) -> None:
            """The batch of this step, behind those that are there; none where the run is asked to end before it comes."""
            nonlocal failure
            if failure is not None or step > job.steps:
                return
            try:
                ahead.extend(itertools.islice(batches, 1))
            except Exception as e:
                failure = batch_error(f"the batch of step {step}", e)

        read_ahead(first + 1)
        # A start that is asked to end makes a step nevertheless, where nothing keeps it from that.
        stopped = stop.agreed(failure is not None, heed=not ahead)
        if failure is not None or stopped is not None:
            raise failure or stopped
        read_ahead(first + 2)
        with events.timed("compile") as event:
            # Once: a batch of another shape would be an error.
            step_fn = inside(lambda: compiled_step(functions, state, ahead[0], list(job.mesh.local_devices)))
        compile_time: float | None = event["seconds"]
        start_up.phases["compile"] = compile_time
        writer.say(f"compiled in {compile_time:.1f} s")

        profile = stack.enter_context(Profile(workdir, cfg.profile, first, writer.say))
        profile.begin(first)
        clock, watchdog = StepClock(first), Watchdog(cfg.watchdog)
        stack.callback(watchdog.pause)
        hashes: list[str] = []  # of the batches since the last lap
        counts: list[int] = []  # of their tokens

        def lap(step: int) -> dict[str, float]:
            """Records the steps since the last lap; {} where there are none."""
            if not hashes:
                return {}
            took = clock.lap(step)
            events.add("steps", **took, batches=hashes[:])
            took["tokens"] = sum(counts)
            hashes.clear()
            counts.clear()
            return took

        def finish(step: int, metrics: dict[str, jax.Array]) -> None:
            """Reads a step's metrics, which waits for it, and logs them where due."""
            nonlocal latest, compile_time, tokens_seen, peak
            latest = metrics
            hashes.append(digests.hexadecimal(np.asarray(metrics.pop("batch"))))
            counts.append(int(metrics.pop("tokens")))
            tokens_seen += counts[-1]
            if not metrics.pop("finite"):
                loss, norm = float(metrics["train/loss"]), float(metrics["train/grad_norm"])
                where = f"step {step}: loss {loss}, gradient norm {norm}"
                if math.isfinite(loss) and math.isfinite(norm):
                    where += ", but the update or a parameter that it makes is not finite in float32"
                if cfg.optimizer.nonfinite == "stop":
                    raise NonFinite(
                        f"{where}; this update was not applied. optimizer.nonfinite=skip would go on without it"
                    )
                writer.say(f"{where}: skipped")
            writer.progress(step)
            if step == first + 1:
                start_up.phases["step"] = clock.running()
                ended = start_up.ended()
                events.add("first_step", step=step, **ended)
                writer.say(start_up.described(ended))
            if step % cfg.log_every and step != job.steps:
                return
            took = lap(step)
            step_time = took["seconds"] / (took["last"] - took["first"] + 1)
            if flops * positions_a_step / step_time > peak and not is_listed:
                again = measured_apart(devices, cfg.model.dtype)
                if again > peak:
                    writer.say(f"peak rate: {human(peak)}FLOP/s was exceeded, measured again: {human(again)}FLOP/s")
                peak = max(peak, again)
            values = jax.device_get(metrics) | {
                "train/tokens_seen": tokens_seen,
                "perf/step_time_s": step_time,
                "perf/tokens_per_s": took["tokens"] / took["seconds"],
                "perf/mfu": flops * positions_a_step / step_time / peak,
                "perf/data_wait_frac": took["data_wait"] / took["seconds"],
            }
            if tokens_seen != step * positions_a_step:  # padding and masked targets are computed, too
                values["train/positions_seen"] = step * positions_a_step
                values["perf/positions_per_s"] = positions_a_step / step_time
            if compile_time is not None:
                values["perf/compile_time_s"], compile_time = compile_time, None
            writer.write(step, values)
            checkpoints.check()

        try:
            pending = None
            for step in range(first + 1, job.steps + 1):
                # What the processes decide together, asked before the step so that the devices need not wait for the answer.
                minutes = cfg.checkpoint.every_minutes
                # One clock for all: that of the first process.
                late = first_process and minutes is not None and time.monotonic() - saved_at >= 60 * minutes
                vote = Vote([*stop.ballot(failure is not None), late])
                with jax.profiler.StepTraceAnnotation("train", step_num=step):
                    state, metrics = step_fn(state, ahead.popleft())
                    if pending is not None:
                        finish(*pending)  # the step before: reading this one now would stall the device
                    pending = (step, metrics)
                    watchdog.beat(step + 1)
                    with clock.waiting():
                        read_ahead(step + 2)
                if lock is not None and lock.lost:
                    raise SaveError(f"another run has taken over {workdir} ({lock.lost}); step {step} is not saved")
                *ballots, due = vote.read()
                end = step == job.steps
                stopped = None if end else stop.stopped(*ballots)
                # A process that is told to stop may have seconds left: it saves, and the next one evaluates.
                evaluating = evaluation_due(step) and stopped is None
                sampling = writes is not None and stopped is None and (step % cfg.sample_every == 0 or end)
                every = cfg.checkpoint.every
                saving = (every is not None and step % every == 0) or due
                profiling = profile.begins_or_ends(step)
                if not (evaluating or sampling or saving or profiling or end or stopped):
                    continue

                finish(*pending)
                pending = None
                lap(step)
                watchdog.pause()
                profile.end(step)
                loss = None
                try:
                    if evaluating:
                        loss = evaluate_now(step)
                    if sampling:
                        sample_now(step)
                except Stopped as e:
                    stopped = e
                except BatchError as e:  # the files are others than at the start
                    failure = e
                if loss is not None and loss < best:
                    best = loss
                    saving = saving or cfg.checkpoint.keep_best is not None
                saving = saving or ((end or stopped or failure) and cfg.checkpoint.last)
                if saving:
                    save(step, loss)
                profile.begin(step)
                clock.start(step)
                if failure is not None:
                    raise failure
                if stopped is not None:
                    checkpoints.wait()
                    kept = "the same command goes on" if saving else "not saved (checkpoint.last=False)"
                    writer.say(f"stopped by {stopped} after step {step} of {job.steps}; {kept}")
                    events.add("stop", step=step, reason=str(stopped))
                    return stopped.status
            checkpoints.wait()
            events.add("stop", step=job.steps, reason="done")
            if job.tokenizer is not None and cfg.checkpoint.last:
                chat = " --chat" if job.frame.template is not None else ""
                writer.say(f"done; talk to it with: python -m minitf.generate --workdir {workdir}{chat}")
            return 0
        except BaseException as e:
            with contextlib.suppress(OSError):  # the disk may be full: the first error is the one to tell
                events.add("stop", reason=f"{type(e).__name__}: {e}")
            raise


def default_workdir(config: str) -> str:
    """Of a run whose command does not name one."""
    return f"runs/{Path(config.partition(':')[0]).stem}"


@lasting_output()
def main(argv: list[str] | None = None) -> int:
    start_up = StartUp(process_age())
    parser = argparse.ArgumentParser(
        prog="python -m minitf.train",
        description="Trains a decoder-only language model.",
        epilog="--config.NAME=VALUE changes a setting, as in --config.model.num_layers=8; --print_config shows them all. "
        "The same command goes on with a run that was stopped or killed. Exit status: 0 done, 1 failure, 2 a mistake in settings "
        "or data, 3 stopped by a signal or max_run_time after saving, 4 loss not finite.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="a Python file with get_config()")
    parser.add_argument(
        "--workdir", metavar="DIR", help="where the run is kept (default: runs/NAME of the config file)"
    )
    parser.add_argument(
        "--print_config", action="store_true", help="print the settings after overrides as JSON, and stop"
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="start anew in a work directory that holds a run (default: go on with it)",
    )
    processes.add_arguments(parser)
    try:
        args, cfg = command_line.parse_args(sys.argv[1:] if argv is None else argv, parser)
        if args.print_config:
            print(config_lib.to_json(cfg), end="")
            return 0
        processes.leave_absent_tpu()
        workdir = resolve(default_workdir(args.config) if args.workdir is None else args.workdir)
        use_compilation_cache(cfg.compilation_cache, workdir)
        if cfg.keep_memory:
            memory.keep_freed()
        with start_up.phase("processes"):
            processes.start(cfg.distributed, args)
    except ValueError as e:
        command_line.fail(str(e))
    with processes.guarded(cfg.distributed), contextlib.ExitStack() as stack:
        with start_up.phase("devices"):
            jax.devices()
        with processes.together(command_line.fail), start_up.phase("data"):
            framing = frames.of_tokenizer if args.overwrite else framing_of(workdir)
            job = prepare(cfg, framing=framing)
        with processes.together(command_line.fail):
            processes.same_everywhere("settings or data", config_lib.to_json(job.cfg) + job.sha256)
        processes.say(describe(job))
        lock = None
        with processes.together(command_line.fail):
            if cfg.init_from is not None:
                check_params(resolve(cfg.init_from, "init_from"), job.specs)
            if processes.is_first():
                lock = stack.enter_context(lock_lib.locked(workdir))
                found, changed = workdir_lib.begin(workdir, job.cfg, args.overwrite)
                print(f"work directory {workdir}; watch it with: tensorboard --logdir {workdir}")
                for line in changed:
                    print(f"changed: {line}")
                if found and not has_checkpoint(workdir):
                    print("the run there has no checkpoint yet: it starts anew")
                sys.stdout.flush()
        return guarded_train(job, workdir, lock, start_up)


def guarded_train(job: Job, workdir: epath.Path, lock: lock_lib.Lock | None, start_up: StartUp) -> int:
    """`train`, with one message in place of a traceback for what may happen to a sound program."""
    try:
        return train(job, workdir, lock, start_up)
    except Stopped as e:
        processes.say(f"stopped by {e} before its first step; the same command goes on")
        return e.status
    except (Refused, TooLarge, NonFinite, DamagedError) as e:  # every process meets these, at the same step
        text = f"not finite at {e}" if isinstance(e, NonFinite) else str(e)
        status = {Refused: MISTAKE, TooLarge: MISTAKE, NonFinite: NONFINITE, DamagedError: FAILED}[type(e)]
        if processes.is_first():
            print(f"error: {text}", file=sys.stderr)
        return status
    except BatchError as e:  # the other processes have stopped, too
        mistake = isinstance(e.__cause__, DataError)
        if not mistake and not isinstance(e.__cause__, LoaderError):
            traceback.print_exception(e)
        print(f"error: {e.__cause__ if mistake else e}", file=sys.stderr)
        return MISTAKE if mistake else FAILED
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e) or jax.process_count() > 1:  # of several, the others wait: see `guarded`
            raise
        print(f"error: out of memory: {str(e).splitlines()[0]}; {LOWER}", file=sys.stderr)
        return FAILED
    except (DataError, SaveError, OSError) as e:
        if isinstance(e, OSError) and e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        text = f"{workdir}: {e.strerror}" if isinstance(e, OSError) else str(e)
        status = MISTAKE if isinstance(e, DataError) else FAILED
        if jax.process_count() > 1:  # the others wait for this one
            print(f"error on process {jax.process_index()}: {text}", file=sys.stderr)
            processes.end_alone(e, status, job.cfg.distributed)
        print(f"error: {text}", file=sys.stderr)
        return status


if __name__ == "__main__":
    starting.cancel()
    watch.leave(main)
