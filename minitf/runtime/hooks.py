"""What is set for the whole process: JAX's configuration, levels of foreign logs, hooks of Python and of JAX; each says why."""

import contextlib
import functools
import glob
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator

import jax

# ---- JAX, before its first device is asked for


def use_cpu() -> None:
    """For a command that computes nothing: an accelerator and its memory are left alone."""
    jax.config.update("jax_platforms", "cpu")


def leave_absent_tpu() -> None:
    """Where libtpu is installed (extra plan), and nothing that it could drive is there, JAX does not start it: it would print
    warnings. What JAX_PLATFORMS asks for is left as it is. Before the first device is asked for."""
    if jax.config.jax_platforms or importlib.util.find_spec("libtpu") is None:
        return
    accelerators = ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia*", "/dev/dxg", "/dev/kfd")
    if not any(glob.glob(pattern) for pattern in accelerators) and "TPU_NAME" not in os.environ:
        use_cpu()


def keep_compiled(directory: str) -> None:
    """Compiled programs are kept in a directory from one start to the next; small ones too, of which a start has many."""
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def keep_nothing_compiled() -> None:
    """For programs of devices that are elsewhere, which no cache could give back."""
    jax.config.update("jax_enable_compilation_cache", False)


def own_signals() -> None:
    """JAX's handler of SIGTERM would come before ours and knows of no other signal."""
    jax.config.update("jax_enable_preemption_service", False)


@contextlib.contextmanager
def service_waits(seconds: float) -> Iterator[None]:
    """The coordination service waits so long for all processes. JAX has no setting for it, and by itself no process would learn
    which of the others did not come."""
    from jax._src.lib import _jax

    make = getattr(_jax, "get_distributed_runtime_service", None)
    if make is None:  # a later JAX
        yield
        return
    _jax.get_distributed_runtime_service = functools.partial(make, cluster_register_timeout=round(seconds))
    try:
        yield
    finally:
        _jax.get_distributed_runtime_service = make


# ---- Python


def quieten(name: str, level: int = logging.CRITICAL) -> None:
    """Of a library's log nothing below this level is shown: what matters of it we tell ourselves."""
    logging.getLogger(name).setLevel(level)


@contextlib.contextmanager
def closed_loops_ignored() -> Iterator[None]:
    """When a write fails Orbax closes its event loop, of which its other writes then complain, each in a traceback."""
    hook = sys.unraisablehook
    closed = lambda u: isinstance(u.exc_value, RuntimeError) and str(u.exc_value) == "Event loop is closed"
    sys.unraisablehook = lambda u: None if closed(u) else hook(u)
    try:
        yield
    finally:
        sys.unraisablehook = hook
