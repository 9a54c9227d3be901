"""Experts on several devices: each device computes its own experts' part of the rows of all devices along the expert axis."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from minitf.params import tree_map
from minitf.sharding.mesh import BATCH, devices_along
from minitf.sharding.rules import RULES, partition
from minitf.sharding.seams import is_manual, per_device, row_shards

EXPERTS, WIDTH = RULES["experts"], RULES["mlp"]


def by_expert(f: Callable[..., jax.Array], weights: Any, specs: Any, *rows: jax.Array) -> jax.Array:
    """The sum over all experts of f(number of the first of a device's experts, their weights, *rows [B, ...]), [B, ...] in f's dtype.
    weights: gathered by `seams.gather`, as declared by specs. Rows are all-gathered along the expert axis, sums reduce-scattered."""
    spread = rows[0].shape[0] % row_shards() == 0

    def local(weights: Any, *rows: jax.Array) -> jax.Array:
        mesh = jax.sharding.get_abstract_mesh()
        n, across = (devices_along(axes, mesh) if is_manual(mesh) else 1 for axes in (EXPERTS, WIDTH))
        first = jax.lax.axis_index(EXPERTS) * len(jax.tree.leaves(weights)[0]) if n > 1 else 0
        if n > 1 and spread:
            rows = [jax.lax.all_gather(r, EXPERTS, tiled=True) for r in rows]
        y = f(first, weights, *rows)
        if n > 1:  # without `spread` every device along the axis has all rows
            y = jax.lax.psum_scatter(y, EXPERTS, tiled=True) if spread else jax.lax.psum(y, EXPERTS)
        return jax.lax.psum(y, WIDTH) if across > 1 else y

    of_rows, layout = P(BATCH) if spread else P(), tree_map(lambda p: partition(p, gathered=True), specs)
    return per_device(local, (layout, *(of_rows for _ in rows)), of_rows)(weights, *rows)
