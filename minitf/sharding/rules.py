"""The one table from logical axes to mesh axes, and the shardings that follow from it for each declaration."""

from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from minitf.params import Param, named, tree_map
from minitf.sharding.mesh import AXES, AnyMesh, devices_along, mesh_sizes

# Logical axis of a Param -> the mesh axes that shard it, except those that already shard an earlier dimension of the same array.
RULES: dict[str, tuple[str, ...]] = {
    "layers": (),
    "vocab": ("tensor",),
    "positions": (),
    "experts": ("expert",),
    "embed": ("fsdp", "fsdp_inner", "expert"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    "router": (),
    "norm": (),
}
GATHERED = ("embed",)  # logical axes that are all-gathered before a product uses the array
SIZED_BY = {  # logical axis -> the setting that sizes it
    "vocab": "model.vocab_size",
    "embed": "model.dim",
    "heads": "model.attention.num_heads",
    "kv_heads": "model.attention.num_kv_heads",
    "mlp": "model.mlp.hidden",
    "experts": "model.mlp.experts",
}


def mesh_axes(p: Param) -> list[tuple[str, ...]]:
    """Mesh axes that shard each dimension of an array."""
    found: list[tuple[str, ...]] = []
    for axis in p.full_axes:
        taken = [a for axes in found for a in axes]
        found.append(tuple(a for a in RULES[axis] if a not in taken))
    return found


def partition(p: Param, *, gathered: bool = False) -> P:
    """PartitionSpec of a declaration; `gathered`: after `seams.gather`, as used in a product."""
    entries = zip(p.full_axes, mesh_axes(p), strict=True)
    return P(*(None if not axes or (gathered and axis in GATHERED) else axes for axis, axes in entries))


def check_divisible(specs: Any, mesh: Mesh) -> None:
    """Raises ValueError if the mesh does not divide a dimension, naming the parameter, its axis, the mesh axis and both sizes."""
    for name, p in named(specs):
        for axis, size, axes in zip(p.full_axes, p.full_shape, mesh_axes(p), strict=True):
            n = devices_along(axes, mesh)
            if size % n:
                settings = ", ".join(f"mesh.{s}={mesh_sizes(mesh)[s]}" for s in settings_of(axes, mesh))
                along = " x ".join(map(repr, settings_of(axes, mesh)))
                fix = f"{SIZED_BY[axis]}={size} with {settings}; the next that divides is {-(-size // n) * n}"
                raise ValueError(
                    f"{name}: axis {axis!r} has size {size}, not divisible by mesh axis {along} of size {n} ({fix})"
                )


def settings_of(axes: Sequence[str], mesh: AnyMesh) -> list[str]:
    """Settings of the given mesh axes, without axes of size 1."""
    return list(dict.fromkeys(AXES[a].setting for a in axes if mesh.shape[a] > 1))


def shardings(specs: Any, mesh: Mesh) -> Any:
    """A NamedSharding for every declaration. Raises ValueError for a dimension that the mesh does not divide."""
    check_divisible(specs, mesh)
    return tree_map(lambda p: NamedSharding(mesh, partition(p)), specs)
