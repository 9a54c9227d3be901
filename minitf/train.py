"""Trains a model: python -m minitf.train --config configs/tiny.py [--workdir DIR] [--config.NAME=VALUE ...]"""

import sys
import threading

if __name__ == "__main__":  # the imports below take half a minute if no file is cached
    starting = threading.Timer(0.8, lambda: print("starting: importing JAX", file=sys.stderr, flush=True))
    starting.daemon = True
    if sys.stderr is not None and sys.stderr.isatty():  # a person is waiting
        starting.start()

import argparse
import contextlib
import errno
import traceback
from pathlib import Path

import jax
from etils import epath

from minitf import command_line
from minitf import config as config_lib
from minitf import workdir as workdir_lib
from minitf.data import frame as frames
from minitf.data.loader import LoaderError
from minitf.data.store import DataError
from minitf.job import LOWER, Job, TooLarge, prepare
from minitf.loop import train
from minitf.runtime import hooks, memory, processes, watch
from minitf.runtime import lock as lock_lib
from minitf.runtime.checkpoint import DamagedError, SaveError
from minitf.runtime.log import StartUp
from minitf.runtime.terminal import lasting_output
from minitf.runtime.watch import FAILED, MISTAKE, NONFINITE, Stopped, process_age
from minitf.services import BatchError, NonFinite, Refused
from minitf.startup import describe
from minitf.workdir import check_params, framing_of, has_checkpoint, resolve, use_compilation_cache


def default_workdir(config: str) -> str:
    """Work directory of a run without --workdir: runs/NAME of its config file."""
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
        hooks.leave_absent_tpu()
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
    """`train`, with a one-line message instead of a traceback for expected failures. Returns the exit status."""
    try:
        return train(job, workdir, lock, start_up)
    except Stopped as e:
        processes.say(f"stopped by {e} before its first step; the same command goes on")
        return e.status
    except (Refused, TooLarge, NonFinite, DamagedError) as e:  # raised in every process, at the same step
        text = f"not finite at {e}" if isinstance(e, NonFinite) else str(e)
        status = {Refused: MISTAKE, TooLarge: MISTAKE, NonFinite: NONFINITE, DamagedError: FAILED}[type(e)]
        if processes.is_first():
            print(f"error: {text}", file=sys.stderr)
        return status
    except BatchError as e:  # the other processes have stopped with Stopped
        mistake = isinstance(e.__cause__, DataError)
        if not mistake and not isinstance(e.__cause__, LoaderError):
            traceback.print_exception(e)
        print(f"error: {e.__cause__ if mistake else e}", file=sys.stderr)
        return MISTAKE if mistake else FAILED
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e) or jax.process_count() > 1:  # the other processes wait: see `guarded`
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
