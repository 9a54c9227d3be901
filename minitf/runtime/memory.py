"""The C library's allocator, set so that a step's buffers are not fetched from the system anew each time."""

import ctypes
import importlib.metadata
import importlib.util
import platform

import jax

# mallopt(3) of glibc. With one arena and no mapping apart, freed memory is found again by the next step, whichever thread asks.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
SETTINGS = {
    M_ARENA_MAX: 1,
    M_MMAP_MAX: 0,
    M_TRIM_THRESHOLD: 2**31 - 1,
}  # the last: bytes at the end that are kept, the most


def on_cpu() -> bool:
    """Whether JAX will compute on the CPU, said without starting it: its threads must find the allocator set."""
    chosen = jax.config.jax_platforms
    if chosen:
        return chosen == "cpu"
    return not importlib.metadata.entry_points(group="jax_plugins") and importlib.util.find_spec("libtpu") is None


def keep_freed() -> bool:
    """Lets this process keep the memory that it frees; call it before JAX starts. False where there is no such allocator, or
    where JAX computes elsewhere: then nothing is changed.

    A CPU's step takes its temporary buffer from the system at each call, and the system clears it page by page. Buffers of up to
    32 MB glibc keeps by itself; of larger ones the process may come to hold several, where small arrays are put between them.
    """
    if platform.libc_ver()[0] != "glibc" or not on_cpu():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(name, value) == 1 for name, value in SETTINGS.items())
