"""Manual collectives: gradients over all devices, computed under `shard_map` over every mesh axis."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from minitf.params import Param, tree_map
from minitf.sharding.mesh import BATCH, batch_shards, devices_along
from minitf.sharding.rules import mesh_axes, partition
from minitf.sharding.seams import travels

Gradients = Callable[..., tuple[Any, Any]]  # (params, batch, ...) -> (sums, gradient w.r.t. params), over rows


def manual(f: Gradients, specs: Any, dtype: str) -> Gradients:
    """f under `shard_map`: each device runs it on its own rows and its own shards of params, and the results are summed over
    devices. The gradient is sharded like params. Further arguments are replicated.

    Gradients are all-reduced here, once, over the axes that shard rows and not the parameter. Over axes that shard the parameter
    `gather` has already reduce-scattered them; their all-reduce over the remaining axes uses the dtype `travels`.
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
    """f over the rows of all devices: `manual(f)`, or f itself if the compiler partitions it. collectives: a key of COLLECTIVES;
    specs: declarations of params; dtype: the compute dtype."""
    if collectives == "auto":
        return f
    assert collectives == "manual", collectives
    return manual(f, specs, dtype)
