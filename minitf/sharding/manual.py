"""Every transfer written out: gradients over all devices where code sees the arrays of one."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from minitf.params import Param, tree_map
from minitf.sharding.mesh import BATCH, batch_shards, devices_along
from minitf.sharding.rules import mesh_axes, partition
from minitf.sharding.seams import travels

Gradients = Callable[..., tuple[Any, Any]]  # (params, batch, ...) -> (sums, gradient by params) over rows


def manual(f: Gradients, specs: Any, dtype: str) -> Gradients:
    """f made to run on each device with its own rows and its own shards of params, and its results summed over all of them: the
    gradient is sharded as params are. Further arguments are the same everywhere.

    A gradient is summed here, once, over the axes that shard rows and not the parameter. Along those that shard it `gather` has
    summed it where the parameter was used, and then it is summed in what `travels`.
    """

    def on_all(params: Any, batch: Any, *rest: Any) -> tuple[Any, Any]:
        mesh = jax.sharding.get_abstract_mesh()
        assert mesh.size == batch_shards(mesh), mesh
        layout = tree_map(partition, specs)

        def summed(p: Param, g: jax.Array) -> jax.Array:
            taken = [a for axes in mesh_axes(p) for a in axes if a in BATCH]
            left = tuple(a for a in BATCH if a not in taken)
            if not taken:
                return jax.lax.psum(g, left)
            alone = devices_along(left, mesh) == 1
            return g if alone else jax.lax.psum(g.astype(travels(dtype)), left).astype(g.dtype)

        def on_one(params: Any, batch: Any, *rest: Any) -> tuple[Any, Any]:
            sums, grads = f(params, batch, *rest)
            return jax.lax.psum(sums, BATCH), tree_map(summed, specs, grads)

        in_specs = (layout, P(BATCH), *(P() for _ in rest))
        run = jax.shard_map(on_one, in_specs=in_specs, out_specs=(P(), layout), check_vma=False)
        return run(params, batch, *rest)

    return on_all


def over_devices(collectives: str, f: Gradients, specs: Any, dtype: str) -> Gradients:
    """f, whose gradients are over rows, over the rows of all devices: by a kind of `mesh.COLLECTIVES`. specs: of params; dtype: of
    products."""
    return manual(f, specs, dtype) if collectives == "manual" else f
