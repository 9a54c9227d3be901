"""The seams (`pin`, `gather`, `lookup`): the only functions through which the model deals with sharding.

Each has two implementations. With `mesh.collectives=auto` it constrains shardings, and the compiler inserts collectives. Inside
`manual`, where arrays are one device's shards, it calls the collectives itself.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from minitf.params import UNROUNDED, Param, tree_map
from minitf.sharding.mesh import BATCH, AnyMesh, batch_shards
from minitf.sharding.rules import GATHERED, RULES, mesh_axes, partition


def is_manual(mesh: AnyMesh) -> bool:
    """Whether arrays in this mesh context are one device's shards: inside `manual` and `per_device`."""
    return not mesh.empty and mesh.are_all_axes_manual


def spread_mesh() -> AbstractMesh | None:
    """Mesh over which the compiler partitions what is traced here; None: no mesh, one device, or a manual region."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 or is_manual(mesh) else mesh


def row_shards() -> int:
    """Number of row shards of arrays [B, ...] in this mesh context; 1 in a manual region, where a device sees only its own rows."""
    mesh = spread_mesh()
    return 1 if mesh is None else batch_shards(mesh)


def per_device(f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """f under `shard_map` with these specs, for kernels that the compiler cannot partition. Returns f unchanged on one device or
    inside a manual region."""
    mesh = spread_mesh()
    if mesh is None:
        return f
    # check_vma: kernels do not declare over which mesh axes their results vary.
    return jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def constrain(x: jax.Array, spec: P) -> jax.Array:
    """`with_sharding_constraint`; the identity without a mesh, on one device and inside a manual region, so that no activation is
    saved twice."""
    mesh = spread_mesh()
    return x if mesh is None else jax.lax.with_sharding_constraint(x, spec)


def pin(x: jax.Array) -> jax.Array:
    """Keeps activations [B, ...] sharded by rows; called at block boundaries."""
    return constrain(x, P(BATCH, *(None,) * (x.ndim - 1)))


def by_shard(f: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """f of each shard's rows of arrays [B, ...], stacked as [shards, ...] without communication: a sum over rows can then be
    accumulated per device and all-reduced once."""
    n = row_shards()
    if n == 1 or arrays[0].shape[0] % n:  # rows that do not divide evenly are left to the compiler
        return f(*arrays)[None]

    def pinned(x: jax.Array) -> jax.Array:
        # Other dimensions keep their sharding: with P(BATCH) alone logits would be all-gathered along the vocabulary.
        return constrain(x, P(BATCH, *(P.UNCONSTRAINED,) * (x.ndim - 1)))

    split = (pinned(a.reshape(n, a.shape[0] // n, *a.shape[1:])) for a in arrays)
    return pinned(jax.vmap(f)(*split))


def held(dtype: Any) -> str:
    """Dtype that stores weights of this compute dtype where products use them. A gradient has its array's dtype, and float16 cannot
    represent sums over tokens, so float16 weights are stored as float32. XLA removes the casts."""
    name = jnp.dtype(dtype).name
    return "float32" if name == "float16" else name


def travels(dtype: Any) -> str:
    """Dtype in which sums over tokens, computed in float32 on each device, are all-reduced: it has as many bits as the compute
    dtype."""
    mesh = jax.sharding.get_abstract_mesh()
    alone = mesh.empty or mesh.size == 1
    return held(dtype) if alone or jnp.dtype(dtype).name != "float16" else "bfloat16"


def row_sum(f: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """f, a float32 sum over the rows of arrays [B, ...], over all rows: each device's sum is cast to `travels` of the first array's
    dtype, all-reduced, and returned in `held` of it."""
    dtype = arrays[0].dtype
    parts = by_shard(lambda *rows: f(*rows).astype(travels(dtype)), *arrays)
    return added(parts).astype(held(dtype))


def added(parts: jax.Array) -> jax.Array:
    """Sum over the shards of `by_shard`'s result, in its dtype; `jnp.sum` would all-reduce in float32."""
    return parts[0] if len(parts) == 1 else jax.lax.reduce(parts, jnp.zeros((), parts.dtype), jax.lax.add, (0,))


def pin_cache(x_LBTGK: jax.Array) -> jax.Array:
    """Keeps cached keys or values sharded by rows and heads."""
    return constrain(x_LBTGK, P(None, BATCH, None, RULES["kv_heads"], None))


def sent(w: jax.Array, send: Callable[[jax.Array], jax.Array], dtype: str) -> jax.Array:
    """send(w) of w in the compute dtype, stored as `held`; `send` is a linear function that communicates. The gradient is
    communicated in the dtype `travels`."""

    @jax.custom_vjp
    def there(w: jax.Array) -> jax.Array:
        return send(w.astype(dtype)).astype(held(dtype))  # cast first, to send half the bytes

    def back(_: None, g: jax.Array) -> tuple[jax.Array]:
        transposed = jax.linear_transpose(send, jax.ShapeDtypeStruct(shape, travels(dtype)))
        return (transposed(g.astype(travels(dtype)))[0].astype(master),)

    shape, master = w.shape, w.dtype
    there.defvjp(lambda w: (there(w), None), back)
    return there(w)


def gather(layer_params: Any, specs: Any, dtype: str) -> Any:
    """One layer's weights ready for products: matrices and tables all-gathered along fsdp in the compute dtype, stored as `held`;
    routers all-gathered in float32; scales and biases as they are. First line of the scan body, so that only one layer is gathered
    at a time."""
    mesh = jax.sharding.get_abstract_mesh()

    def one(p: Param, w: jax.Array) -> jax.Array:
        if p.kind in UNROUNDED and not set(GATHERED) & set(p.axes):
            return w
        use = "float32" if p.kind in UNROUNDED else dtype
        if is_manual(mesh):
            return sent(w, lambda w: gathered(w, p, mesh), use)
        return sent(w, lambda w: constrain(w, partition(p, gathered=True)), use)

    return tree_map(one, specs, layer_params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def table_rows(table: jax.Array, ids: jax.Array, dtype: str) -> jax.Array:
    """table[ids] in the compute dtype. A row's gradient is summed in float32 over the tokens with its id."""
    return table.astype(dtype)[ids]


def table_rows_fwd(table, ids, dtype):
    return table_rows(table, ids, dtype), (table, ids)


def table_rows_bwd(dtype, kept, g):
    table, ids = kept
    into = lambda g, ids: jnp.zeros(table.shape, jnp.float32).at[ids].add(g.astype(jnp.float32))
    return row_sum(into, g, ids).astype(table.dtype), None


table_rows.defvjp(table_rows_fwd, table_rows_bwd)


def lookup(table: jax.Array, spec: Param, ids: jax.Array, dtype: str) -> jax.Array:
    """Rows of a table [V, D] for ids [B, S]: [B, S, D] in the compute dtype."""
    mesh = jax.sharding.get_abstract_mesh()
    # `exchanged` sends a row and a gradient per token, `gather` a row and a gradient per row of the table.
    along = tuple(a for a in mesh_axes(spec)[1] if is_manual(mesh) and mesh.shape[a] > 1)
    if along and ids.size < table.shape[0]:
        return exchanged(table, ids, dtype, along)
    return table_rows(gather(table, spec, dtype), ids, dtype)


def gathered(w: jax.Array, p: Param, mesh: AnyMesh) -> jax.Array:
    """w, one device's shard of the declared array, all-gathered along its GATHERED dimensions."""
    for dim, (axis, axes) in enumerate(zip(p.full_axes, mesh_axes(p), strict=True)):
        if axis in GATHERED:
            w = whole(w, dim, tuple(a for a in axes if mesh.shape[a] > 1))
    return w


def whole(w: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    """w all-gathered, one axis at a time, along a dimension that is sharded over these mesh axes. Its transpose reduce-scatters the
    gradient the same way.

    Sent as matrices, stacked along a new dimension of devices: XLA's TPU compiler substitutes all-reduces for scatters along a last
    dimension, for small gathers with more dimensions, and for matrices whose width it cannot halve often enough.
    """
    w = jnp.moveaxis(w, dim, 0)
    rows = w.reshape(len(w), -1)
    for axis in reversed(axes):
        rows = jax.lax.all_gather(rows, axis).reshape(-1, rows.shape[1])
    return jnp.moveaxis(rows.reshape(-1, *w.shape[1:]), 0, dim)


def exchanged(table: jax.Array, ids: jax.Array, dtype: str, axes: tuple[str, ...]) -> jax.Array:
    """Rows [B, S, D] for ids [B, S] of a table whose columns are sharded over these mesh axes. Along the outermost axis, each device
    looks up every device's ids in its own columns and returns the results by all-to-all.

    Columns are all-gathered along the other axes: looking up more ids in narrower rows would take longer than the gather.
    """
    outer, *others = axes
    table = sent(table, lambda t: whole(t, 1, tuple(others)), dtype)
    columns = table_rows(table, jax.lax.all_gather(ids, outer, tiled=True), dtype)
    return jax.lax.all_to_all(columns, outer, split_axis=0, concat_axis=2, tiled=True)
