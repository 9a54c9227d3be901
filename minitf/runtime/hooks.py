"""Process-wide settings, each with its reason: JAX's configuration, log levels of libraries, hooks of Python and JAX."""

import contextlib
import functools
import glob
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator

import jax

# ---- JAX; call these before its backends are initialised


def use_cpu() -> None:
    """Restricts JAX to the CPU, for commands that compute nothing: accelerators and their memory are left alone."""
    jax.config.update("jax_platforms", "cpu")


def leave_absent_tpu() -> None:
    """Restricts JAX to the CPU if libtpu is installed (extra plan) without any accelerator: starting libtpu would print warnings.
    Does nothing if JAX_PLATFORMS is set."""
    if jax.config.jax_platforms or importlib.util.find_spec("libtpu") is None:
        return
    accelerators = ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia*", "/dev/dxg", "/dev/kfd")
    if not any(glob.glob(pattern) for pattern in accelerators) and "TPU_NAME" not in os.environ:
        use_cpu()


def keep_compiled(directory: str) -> None:
    """Turns on the persistent compilation cache in a directory, also for small programs, of which a start compiles many."""
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def keep_nothing_compiled() -> None:
    """Turns off the compilation cache, for programs of devices that are only described: they cannot be loaded from a cache."""
    jax.config.update("jax_enable_compilation_cache", False)


def own_signals() -> None:
    """Turns off JAX's handler of SIGTERM, which would run before ours and handles no other signal."""
    jax.config.update("jax_enable_preemption_service", False)


@contextlib.contextmanager
def service_waits(seconds: float) -> Iterator[None]:
    """Makes the coordination service wait this long for all processes to register. JAX has no setting for it, and without it no
    process would learn which of the others are missing."""
    from jax._src.lib import _jax

    make = getattr(_jax, "get_distributed_runtime_service", None)
    if make is None:  # a newer JAX
        yield
        return
    _jax.get_distributed_runtime_service = functools.partial(make, cluster_register_timeout=round(seconds))
    try:
        yield
    finally:
        _jax.get_distributed_runtime_service = make


# ---- Python


def quieten(name: str, level: int = logging.CRITICAL) -> None:
    """Hides messages of a library's logger below this level; we report what matters ourselves."""
    logging.getLogger(name).setLevel(level)


@contextlib.contextmanager
def closed_loops_ignored() -> Iterator[None]:
    """Hides "Event loop is closed" tracebacks: after a failed write Orbax closes its loop, and all its other writes raise it."""
    hook = sys.unraisablehook
    closed = lambda u: isinstance(u.exc_value, RuntimeError) and str(u.exc_value) == "Event loop is closed"
    sys.unraisablehook = lambda u: None if closed(u) else hook(u)
    try:
        yield
    finally:
        sys.unraisablehook = hook
