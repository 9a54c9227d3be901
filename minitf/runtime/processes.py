"""Starting as one of several processes, and agreeing with the others."""

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
    """Flags that say what a cluster that is not detected does not say."""
    group = parser.add_argument_group("several processes, where the cluster is not one that is detected")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens (or $MINITF_COORDINATOR)")
    group.add_argument("--num_processes", type=int, metavar="N", help="how many there are (or $MINITF_NUM_PROCESSES)")
    group.add_argument("--process_id", type=int, metavar="I", help="which one this is (or $MINITF_PROCESS_ID)")


def start(cfg: DistributedConfig, args: argparse.Namespace) -> None:
    """Makes this process one of several where flags, MINITF_* variables or a cluster say so, and prints what was chosen and why.
    Before any use of a device. Does nothing where the caller has called `jax.distributed.initialize` itself. Raises ValueError
    where the surroundings do not fit together."""
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
                # A little longer than the service waits, whose answer names those that did not come.
                initialization_timeout=round(cfg.start_timeout) + 15,
                heartbeat_timeout_seconds=round(cfg.heartbeat_timeout),
                shutdown_timeout_seconds=round(cfg.heartbeat_timeout),
            )
        except Exception as e:  # an address that does not exist, a cluster that does not answer
            raise ValueError(
                f"{why}: could not start: {type(e).__name__}: {e}\nMINITF_NUM_PROCESSES=1 would start this process alone"
            ) from None


def is_first() -> bool:
    """Whether this process is the one that writes and speaks for all."""
    return jax.process_index() == 0


def say(text: str) -> None:
    """A line of the run, once."""
    if is_first():
        print(text, flush=True)


TRANSFER_FAILED = re.compile(r"Gloo|NCCL|UNAVAILABLE|Connection (reset|closed)")


def end_alone(error: Exception, status: int, cfg: DistributedConfig) -> NoReturn:
    """Ends this process, one of several, for an error that the others do not know of; the coordination service then ends them. A
    normal exit would first wait for the others, which wait for this one."""
    if TRANSFER_FAILED.search("".join(traceback.format_exception(error))):
        # It was another process that died. Who ends first would be named for it.
        print("waiting for the coordination service to name the process that died", file=sys.stderr, flush=True)
        time.sleep(cfg.heartbeat_timeout + 5)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextlib.contextmanager
def guarded(cfg: DistributedConfig) -> Iterator[None]:
    """An error that nothing expects ends this process, one of several, with its traceback, and so all. Alone, it is raised."""
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
    """The largest of each of some integers over all processes. Every process must cast it at the same place."""

    def __init__(self, values: Sequence[int]):
        self._result: Any = np.array(values)
        if jax.process_count() > 1:
            sharding, highest = _highest()
            own = self._result[None]
            self._result = highest(
                jax.make_array_from_callback((jax.device_count(), len(values)), sharding, lambda index: own)
            )

    def read(self) -> list[int]:
        """Waits for all processes, if they have not all cast it."""
        return np.asarray(self._result).tolist()


def first_failing(failed: bool) -> int | None:
    """The first process that has failed, by its number; None: none has. Waits for all."""
    n = jax.process_count()
    (found,) = Vote([n - jax.process_index() if failed else 0]).read()
    return n - found if found else None


@contextlib.contextmanager
def together(fail: Callable[[str], NoReturn]) -> Iterator[None]:
    """A mistake that a user can mend (ValueError) ends all processes where it ends one; the first of those that met it says so
    by `fail`. Every process must come here."""
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
    """Raises ValueError where processes have another value than process 0, naming them."""
    digest = np.frombuffer(hashlib.sha256(value.encode()).digest()[:4], np.int32)
    digests = multihost_utils.process_allgather(digest).reshape(jax.process_count())
    others = [str(i) for i, d in enumerate(digests) if d != digests[0]]
    if others:
        raise ValueError(f"{what} of process {', '.join(others)} differ from those of process 0")
