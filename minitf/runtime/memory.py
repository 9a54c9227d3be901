"""Configures the C library's allocator to reuse a step's buffers rather than request them from the system at every step."""

import ctypes
import importlib.metadata
import importlib.util
import platform

import jax

# mallopt(3) of glibc. With one arena and no separate mappings, the next step reuses freed memory, whichever thread allocates.
# M_TRIM_THRESHOLD: most free bytes at the top of the heap that are not returned to the system; here the maximum.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
SETTINGS = {M_ARENA_MAX: 1, M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1}


def on_cpu() -> bool:
    """Whether JAX will compute on CPU, determined without starting JAX: the allocator must be configured before its threads."""
    chosen = jax.config.jax_platforms
    if chosen:
        return chosen == "cpu"
    return not importlib.metadata.entry_points(group="jax_plugins") and importlib.util.find_spec("libtpu") is None


def keep_freed() -> bool:
    """Makes this process keep the memory that it frees; call it before JAX starts. Returns False, with nothing changed, without glibc
    or if JAX does not compute on CPU.

    By default, every CPU step requests its temporary buffer from the system, which clears it page by page. glibc reuses buffers of up
    to 32 MB by itself. Of larger ones the process may come to hold several, if small arrays are allocated between them.
    """
    if platform.libc_ver()[0] != "glibc" or not on_cpu():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(name, value) == 1 for name, value in SETTINGS.items())
