"""Starts this process as one of several, and votes among them."""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from minitf.runtime import cluster, hooks
from minitf.settings import LONGEST, setting

# ---- one of several processes


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    start_timeout: float = setting(
        300.0,
        "seconds to wait at the start until all processes have joined",
        at_least=1,
        at_most=LONGEST,
        may_change=True,
    )
    heartbeat_timeout: float = setting(
        30.0,
        "seconds without a heartbeat after which a process counts as dead, which ends all",
        **dict(at_least=1, at_most=LONGEST, may_change=True),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds flags for clusters that are not detected."""
    group = parser.add_argument_group("several processes, where the cluster is not one that is detected")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens (or $MINITF_COORDINATOR)")
    group.add_argument("--num_processes", type=int, metavar="N", help="how many there are (or $MINITF_NUM_PROCESSES)")
    group.add_argument("--process_id", type=int, metavar="I", help="which one this is (or $MINITF_PROCESS_ID)")


def start(cfg: DistributedConfig, args: argparse.Namespace) -> None:
    """Calls `jax.distributed.initialize` if flags, MINITF_* variables or a cluster ask for several processes, and prints what was
    chosen and why. Call it before any device is used. Does nothing if the caller has initialised `jax.distributed`. Raises ValueError
    for contradictory settings, and if the processes cannot connect."""
    if jax.distributed.is_initialized():
        return
    flags = {name: getattr(args, name) for name in cluster.EXPLICIT}
    why, arguments = cluster.detect(os.environ, cluster.this_machine(os.environ), **flags)
    if why is not None:
        print(why if arguments else f"one process: {why}", flush=True)
    if arguments is None:
        return
    hooks.own_signals()
    with hooks.service_waits(cfg.start_timeout):
        try:
            jax.distributed.initialize(
                **arguments,
                # A little longer than the service waits: its error names the missing processes.
                initialization_timeout=round(cfg.start_timeout) + 15,
                heartbeat_timeout_seconds=round(cfg.heartbeat_timeout),
                shutdown_timeout_seconds=round(cfg.heartbeat_timeout),
            )
        except Exception as e:  # an address that does not exist, a cluster that does not answer
            raise ValueError(
                f"{why}: could not start: {type(e).__name__}: {e}\nMINITF_NUM_PROCESSES=1 would start this process alone"
            ) from None


def is_first() -> bool:
    """Whether this process writes files and prints for all."""
    return jax.process_index() == 0


def say(text: str) -> None:
    """Prints a line in process 0 only."""
    if is_first():
        print(text, flush=True)


TRANSFER_FAILED = re.compile(r"Gloo|NCCL|UNAVAILABLE|Connection (reset|closed)")


def end_alone(error: Exception, status: int, cfg: DistributedConfig) -> NoReturn:
    """Ends this process, one of several, after an error that the others do not see; the coordination service then ends them. A
    normal exit would first wait for the others, which wait for this one."""
    if TRANSFER_FAILED.search("".join(traceback.format_exception(error))):
        # Another process died. The first process to exit would be blamed for it.
        print("waiting for the coordination service to name the process that died", file=sys.stderr, flush=True)
        time.sleep(cfg.heartbeat_timeout + 5)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextlib.contextmanager
def guarded(cfg: DistributedConfig) -> Iterator[None]:
    """An unexpected error prints its traceback and ends this process, and thereby all. In a single process it propagates."""
    try:
        yield
    except Exception as e:
        if jax.process_count() == 1:
            raise
        print(f"error on process {jax.process_index()} of {jax.process_count()}:", file=sys.stderr)
        traceback.print_exc()
        end_alone(e, 1, cfg)


@functools.cache
def _highest() -> tuple[NamedSharding, Callable[[jax.Array], jax.Array]]:
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    return NamedSharding(mesh, P("devices")), jax.jit(
        lambda x: jnp.max(x, axis=0), out_shardings=NamedSharding(mesh, P())
    )


class Vote:
    """Elementwise maximum of some integers over all processes. Every process must construct it at the same point."""

    def __init__(self, values: Sequence[int]):
        self._result: Any = np.array(values)
        if jax.process_count() > 1:
            sharding, highest = _highest()
            own = self._result[None]
            self._result = highest(
                jax.make_array_from_callback((jax.device_count(), len(values)), sharding, lambda index: own)
            )

    def read(self) -> list[int]:
        """The result. Blocks until all processes have cast their values."""
        return np.asarray(self._result).tolist()


def first_failing(failed: bool) -> int | None:
    """Index of the first process that has failed; None if none has. Blocks until all processes call it."""
    n = jax.process_count()
    (found,) = Vote([n - jax.process_index() if failed else 0]).read()
    return n - found if found else None


@contextlib.contextmanager
def together(fail: Callable[[str], NoReturn]) -> Iterator[None]:
    """A user's mistake (ValueError) in one process ends all; the first process with it reports it by `fail`. Every process must
    enter this block."""
    error = None
    try:
        yield
    except ValueError as e:
        error = e
    failing = first_failing(error is not None)
    if failing == jax.process_index():
        fail(str(error) if jax.process_count() == 1 else f"on process {failing}: {error}")
    if failing is not None:
        sys.exit(2)


def same_everywhere(what: str, value: str) -> None:
    """Raises ValueError naming the processes whose value differs from process 0's."""
    digest = np.frombuffer(hashlib.sha256(value.encode()).digest()[:4], np.int32)
    digests = multihost_utils.process_allgather(digest).reshape(jax.process_count())
    others = [str(i) for i, d in enumerate(digests) if d != digests[0]]
    if others:
        raise ValueError(f"{what} of process {', '.join(others)} differ from those of process 0")
