"""Checksums of arrays as text, on the host."""

import hashlib
from typing import Any

import jax

from minitf.params import named
from minitf.training.checksum import checksum


def hexadecimal(sums: Any) -> str:
    """A checksum (uint32 [2], on the host) as 16 hexadecimal digits."""
    high, low = (int(s) for s in sums)
    return f"{high:08x}{low:08x}"


_checksums = jax.jit(lambda tree: jax.tree.map(checksum, tree))


def checksums(tree: Any) -> dict[str, str]:
    """Name -> checksum of every array. Blocks until the arrays are computed."""
    return {name: hexadecimal(sums) for name, sums in named(jax.device_get(_checksums(tree)))}


def combined(arrays: dict[str, dict[str, Any]], prefix: str = "") -> str:
    """One checksum, derived from those of all arrays whose names begin with the prefix."""
    text = " ".join(f"{name} {a['checksum']}" for name, a in sorted(arrays.items()) if name.startswith(prefix))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
