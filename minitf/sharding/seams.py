"""The seams (`pin`, `gather`, `lookup`): all that the model knows of sharding.

They have two implementations. Where the compiler sees the whole program (`mesh.collectives=auto`), they say how arrays shall
lie, and it inserts what must be sent. Inside `manual`, where code sees the arrays of one device, they send by themselves.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from minitf.params import Param, tree_map
from minitf.sharding.mesh import BATCH, AnyMesh, batch_shards
from minitf.sharding.rules import GATHERED, RULES, mesh_axes, partition


def is_manual(mesh: AnyMesh) -> bool:
    """Whether code of this mesh context sees the arrays of one device: inside `manual` and `per_device`."""
    return not mesh.empty and mesh.are_all_axes_manual


def spread_mesh() -> AbstractMesh | None:
    """The mesh over which the compiler spreads what is traced here; None: arrays are those of one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 or is_manual(mesh) else mesh


def row_shards() -> int:
    """Into how many parts the rows of arrays [B, ...] are sharded here; inside `per_device` each device has its own alone."""
    mesh = spread_mesh()
    return 1 if mesh is None else batch_shards(mesh)


def per_device(f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """f on each device's part of the arrays, cut by these specs: for a kernel, which the compiler cannot partition. It is f
    itself on one device, and where all around it runs on each device's part already."""
    mesh = spread_mesh()
    if mesh is None:
        return f
    # check_vma: kernels do not say over which axes their results vary.
    return jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def constrain(x: jax.Array, spec: P) -> jax.Array:
    """`with_sharding_constraint`; without a mesh, on one device and inside `manual` the identity, so that no activation is kept
    twice."""
    mesh = spread_mesh()
    return x if mesh is None else jax.lax.with_sharding_constraint(x, spec)


def pin(x: jax.Array) -> jax.Array:
    """Keeps activations [B, ...] sharded by rows: stands at block borders."""
    return constrain(x, P(BATCH, *(None,) * (x.ndim - 1)))


def by_shard(f: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """f of each shard's rows of arrays [B, ...], stacked [shards, ...] where they are: so that what is a sum over rows can be
    added up over the devices once, and not each time that more is added to it."""
    n = row_shards()
    if n == 1 or arrays[0].shape[0] % n:  # rows that cannot be spread evenly are left to the compiler
        return f(*arrays)[None]

    def pinned(x: jax.Array) -> jax.Array:
        # The other dimensions stay as they are: pinned, logits would be made whole along the vocabulary.
        return constrain(x, P(BATCH, *(P.UNCONSTRAINED,) * (x.ndim - 1)))

    split = (pinned(a.reshape(n, a.shape[0] // n, *a.shape[1:])) for a in arrays)
    return pinned(jax.vmap(f)(*split))


def held(dtype: Any) -> str:
    """What weights in the compute dtype are held in where they are used. A gradient has its array's dtype, and float16 does not hold
    sums over tokens: its numbers are held in float32. XLA removes the casts."""
    name = jnp.dtype(dtype).name
    return "float32" if name == "float16" else name


def travels(dtype: Any) -> str:
    """What sums over tokens, formed in float32 on each device, are added up in between devices: in as many bits as the compute
    dtype has."""
    mesh = jax.sharding.get_abstract_mesh()
    alone = mesh.empty or mesh.size == 1
    return held(dtype) if alone or jnp.dtype(dtype).name != "float16" else "bfloat16"


def row_sum(f: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """f, a sum over the rows of arrays [B, ...] in float32, of all rows, of which each device's part has been cast to what
    travels: in `held` of the first array's dtype."""
    dtype = arrays[0].dtype
    parts = by_shard(lambda *rows: f(*rows).astype(travels(dtype)), *arrays)
    return added(parts).astype(held(dtype))


def added(parts: jax.Array) -> jax.Array:
    """The sum of what `by_shard` gives, in its dtype; `jnp.sum` would send float32."""
    return parts[0] if len(parts) == 1 else jax.lax.reduce(parts, jnp.zeros((), parts.dtype), jax.lax.add, (0,))


def pin_cache(x_LBTGK: jax.Array) -> jax.Array:
    """Keeps cached keys or values sharded by rows and heads."""
    return constrain(x_LBTGK, P(None, BATCH, None, RULES["kv_heads"], None))


def sent(w: jax.Array, send: Callable[[jax.Array], jax.Array], dtype: str) -> jax.Array:
    """send(w) in the compute dtype, as it is `held`, where `send` moves numbers between devices; the gradient comes back in what
    `travels`."""

    @jax.custom_vjp
    def there(w: jax.Array) -> jax.Array:
        return send(w.astype(dtype)).astype(held(dtype))  # Cast first: half the bytes travel.

    def back(_: None, g: jax.Array) -> tuple[jax.Array]:
        transposed = jax.linear_transpose(send, jax.ShapeDtypeStruct(shape, travels(dtype)))
        return (transposed(g.astype(travels(dtype)))[0].astype(master),)

    shape, master = w.shape, w.dtype
    there.defvjp(lambda w: (there(w), None), back)
    return there(w)


def gather(layer_params: Any, specs: Any, dtype: str) -> Any:
    """One layer's weights ready for products: matrices and tables in the compute dtype, as it is `held`, and whole along fsdp;
    scales and biases stay float32. First line of the scan body, so that only one layer is whole at a time."""
    mesh = jax.sharding.get_abstract_mesh()

    def one(p: Param, w: jax.Array) -> jax.Array:
        if p.kind in ("scale", "bias"):
            return w
        if is_manual(mesh):
            return sent(w, lambda w: gathered(w, p, mesh), dtype)
        return sent(w, lambda w: constrain(w, partition(p, gathered=True)), dtype)

    return tree_map(one, specs, layer_params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def table_rows(table: jax.Array, ids: jax.Array, dtype: str) -> jax.Array:
    """table[ids] in the compute dtype. The gradient of a row sums over all tokens that name it, in float32."""
    return table.astype(dtype)[ids]


def table_rows_fwd(table, ids, dtype):
    return table_rows(table, ids, dtype), (table, ids)


def table_rows_bwd(dtype, kept, g):
    table, ids = kept
    into = lambda g, ids: jnp.zeros(table.shape, jnp.float32).at[ids].add(g.astype(jnp.float32))
    return row_sum(into, g, ids).astype(table.dtype), None


table_rows.defvjp(table_rows_fwd, table_rows_bwd)


def lookup(table: jax.Array, spec: Param, ids: jax.Array, dtype: str) -> jax.Array:
    """The rows of a table [V, D] that ids [B, S] name, [B, S, D] in the compute dtype."""
    mesh = jax.sharding.get_abstract_mesh()
    # A row and its gradient travel once for each token, or once for each row of the table.
    along = tuple(a for a in mesh_axes(spec)[1] if is_manual(mesh) and mesh.shape[a] > 1)
    if along and ids.size < table.shape[0]:
        return exchanged(table, ids, dtype, along)
    return table_rows(gather(table, spec, dtype), ids, dtype)


def gathered(w: jax.Array, p: Param, mesh: AnyMesh) -> jax.Array:
    """The array of a declaration, of which this is one device's part, whole along its GATHERED dimensions."""
    for dim, (axis, axes) in enumerate(zip(p.full_axes, mesh_axes(p), strict=True)):
        if axis in GATHERED:
            w = whole(w, dim, tuple(a for a in axes if mesh.shape[a] > 1))
    return w


def whole(w: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    """w whole along a dimension that is sharded over these mesh axes, axis by axis. Its transpose scatters the gradient's sum,
    likewise.

    Sent as matrices, devices along a dimension of their own: XLA's TPU compiler makes all-reduces of what is scattered along a last
    dimension, of small gathers with more dimensions, and of matrices whose width it cannot halve often enough.
    """
    w = jnp.moveaxis(w, dim, 0)
    rows = w.reshape(len(w), -1)
    for axis in reversed(axes):
        rows = jax.lax.all_gather(rows, axis).reshape(-1, rows.shape[1])
    return jnp.moveaxis(rows.reshape(-1, *w.shape[1:]), 0, dim)


def exchanged(table: jax.Array, ids: jax.Array, dtype: str, axes: tuple[str, ...]) -> jax.Array:
    """The rows [B, S, D] that ids [B, S] name in a table whose columns are sharded over these mesh axes: along the outermost, each
    device looks up the ids of all in its columns, and sends to each what it asked for.

    Along the others columns are gathered: with fewer in a row and more rows, lookups would take longer than sending the columns.
    """
    outer, *others = axes
    table = sent(table, lambda t: whole(t, 1, tuple(others)), dtype)
    columns = table_rows(table, jax.lax.all_gather(ids, outer, tiled=True), dtype)
    return jax.lax.all_to_all(columns, outer, split_axis=0, concat_axis=2, tiled=True)
