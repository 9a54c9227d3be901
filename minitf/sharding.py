"""The mesh, the one table from logical to mesh axes, and the seams (`pin`, `gather`, `lookup`) that hold all that the model
knows of sharding.

The seams have two implementations. Where the compiler sees the whole program (`mesh.collectives=auto`), they say how arrays shall
lie, and it inserts what must be sent. Inside `manual`, where code sees the arrays of one device, they send by themselves.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from minitf import params as P_
from minitf.params import Param
from minitf.settings import setting


class MeshAxis(NamedTuple):
    setting: str  # the size in MeshConfig that it is, or that it is a factor of
    rows: bool = False  # whether it shards the rows of a batch


AXES = {  # of every mesh, outermost first: those that send least. An axis of size 1 changes no program.
    "data": MeshAxis("data", rows=True),
    "fsdp": MeshAxis("fsdp", rows=True),
    "fsdp_inner": MeshAxis("fsdp", rows=True),  # see `inner_size`
    "tensor": MeshAxis("tensor"),
}
BATCH = tuple(name for name, axis in AXES.items() if axis.rows)

# Logical axis of a Param -> the mesh axes that shard it, those that an earlier dimension of the same array has taken aside.
RULES: dict[str, tuple[str, ...]] = {
    "layers": (),
    "vocab": ("tensor",),
    "positions": (),
    "embed": ("fsdp", "fsdp_inner"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    "norm": (),
}
GATHERED = ("embed",)  # logical axes that are made whole where a product uses the array


SETTINGS = {  # logical axis -> the setting that sizes it
    "vocab": "model.vocab_size",
    "embed": "model.dim",
    "heads": "model.attention.num_heads",
    "kv_heads": "model.attention.num_kv_heads",
    "mlp": "model.mlp.hidden",
}


SIZE = dict(at_least=1, also={-1: "the devices that the others leave"}, may_change=True)
DCN = dict(at_least=1, also={-1: "the hosts that the others leave"}, may_change=True)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    data: int = setting(1, "replicas of the parameters", **SIZE)
    fsdp: int = setting(-1, "shards of the parameters' width and of the batch", **SIZE)
    tensor: int = setting(1, "shards of heads, MLP and vocabulary", **SIZE)
    # Where any is not 1, their product is the number of hosts, the sizes above count inside one, and an axis has the product of
    # both; else data takes the hosts first, then fsdp. A host is a TPU slice where there are several.
    dcn_data: int = setting(1, "factor of data across hosts (TPU slices)", **DCN)
    dcn_fsdp: int = setting(1, "factor of fsdp across hosts (TPU slices)", **DCN)
    dcn_tensor: int = setting(1, "factor of tensor across hosts (TPU slices)", **DCN)
    collectives: str = setting("auto", "who decides what is sent", one_of=lambda: COLLECTIVES, may_change=True)
    # Weights are gathered along the inner factor first, gradients scattered along it last.
    fsdp_inner: int | None = setting(
        None, "inner of two factors of fsdp; 1: one; None: a line of a TPU's torus, else 1", at_least=1, may_change=True
    )


def mesh_settings() -> tuple[str, ...]:
    """The sizes of a mesh by their names in MeshConfig, in the order of AXES."""
    return tuple(dict.fromkeys(axis.setting for axis in AXES.values()))


def filled(prefix: str, cfg: MeshConfig, total: int, of: str) -> list[int]:
    """The sizes of the settings prefix + `mesh_settings`, -1 replaced by what the others leave of the total. Raises ValueError where
    they do not fit; `of`: what there are so many of."""
    sizes = {prefix + a: getattr(cfg, prefix + a) for a in mesh_settings()}
    text = ", ".join(f"mesh.{a}={n}" for a, n in sizes.items())
    rest = [a for a, n in sizes.items() if n == -1]
    if len(rest) > 1:
        raise ValueError(f"{text}: at most one axis may be -1 (the {of} that the others leave)")
    fixed = math.prod(n for n in sizes.values() if n != -1)
    if rest:
        if total % fixed:
            raise ValueError(f"{text}: {total} {of} are not divisible by {fixed}, the product of the given axes")
        sizes[rest[0]] = total // fixed
    elif fixed != total:
        raise ValueError(
            f"{text}: the product is {fixed}, but there are {total} {of}; set one axis to -1 to fill the rest"
        )
    return list(sizes.values())


Shape = tuple[int, ...]


def mesh_shape(cfg: MeshConfig, devices: int, hosts: int = 1) -> tuple[Shape, Shape]:
    """Sizes of `mesh_settings` on so many devices (inside a host, across hosts). Raises ValueError where they do not fit."""
    if devices % hosts:
        raise ValueError(f"{devices} devices on {hosts} hosts: each host must have as many")
    if any(getattr(cfg, f"dcn_{a}") != 1 for a in mesh_settings()):
        across = filled("dcn_", cfg, hosts, "hosts")
        inside = filled("", cfg, devices // hosts, "devices" if hosts == 1 else "devices on a host")
        return tuple(inside), tuple(across)
    # The outer axes send least: they take the hosts first, and tensor only what none of them can.
    inside, across, left = filled("", cfg, devices, "devices"), [], hosts
    for i, size in enumerate(inside):
        across.append(math.gcd(size, left))
        inside[i] //= across[i]
        left //= across[i]
    return tuple(inside), tuple(across)


def hosts(devices: Sequence[Any]) -> int:
    """Groups of devices with fast links among them: machines, or slices of a TPU. JAX calls both slices, and does not number
    them where there is one."""
    return len({getattr(d, "slice_index", 0) for d in devices})


def line(coords: Sequence[tuple[int, ...]]) -> int:
    """How many at a time, of devices in the order of an axis, lie on one line of a torus; all where all do.

    [(0, 0), (0, 1), (1, 0), (1, 1)] -> 2. A collective along a line uses its ring; over a whole torus at once XLA's TPU compiler
    makes reduce-scatters, on three dimensions all-gathers too, into all-reduces, which send twice as much.
    """

    def straight(some: Sequence[tuple[int, ...]]) -> bool:
        return sum(len(set(along)) > 1 for along in zip(*some, strict=True)) <= 1

    n = len(coords)
    lengths = [k for k in range(1, n + 1) if n % k == 0 and all(straight(coords[i : i + k]) for i in range(0, n, k))]
    return lengths[-1]


def inner_size(cfg: MeshConfig, devices: Sequence[Any]) -> int:
    """The size of the axis fsdp_inner, of devices along fsdp; 1: all are along the axis fsdp. Raises ValueError for a size that does
    not divide them."""
    n, inner = len(devices), cfg.fsdp_inner
    if inner is None:
        known = cfg.collectives == "manual" and devices[0].platform == "tpu"
        inner = line([d.coords for d in devices]) if known else 1
    if n % inner:
        raise ValueError(f"mesh.fsdp_inner={inner}: does not divide mesh.fsdp, here {n}")
    return 1 if inner == n else inner


def make_mesh(cfg: MeshConfig, devices: list | None = None) -> Mesh:
    """The mesh over all devices (or those given), tensor innermost, hosts outermost in each axis. Enter it with `jax.set_mesh`.
    Raises ValueError where the sizes do not fit."""
    devices = jax.devices() if devices is None else devices
    n, settings = hosts(devices), mesh_settings()
    inside, across = mesh_shape(cfg, len(devices), n)
    if n == 1:
        try:
            types = (AxisType.Auto,) * len(settings)
            grid = jax.make_mesh(inside, settings, axis_types=types, devices=devices).devices
        except NotImplementedError:  # no axis of the TPU's torus is as long as one of ours: part of one, then
            grid = mesh_utils.create_device_mesh(inside, devices, allow_split_physical_axes=True)
    else:
        grid = mesh_utils.create_hybrid_device_mesh(inside, across, devices, allow_split_physical_axes=True)
    sizes = dict(zip(settings, grid.shape, strict=True))
    inner = inner_size(cfg, np.moveaxis(grid, settings.index("fsdp"), 0).reshape(sizes["fsdp"], -1)[:, 0].tolist())
    factors = {"fsdp": sizes["fsdp"] // inner, "fsdp_inner": inner}
    grid = grid.reshape([factors.get(name, sizes[axis.setting]) for name, axis in AXES.items()])
    return Mesh(grid, tuple(AXES), axis_types=(AxisType.Auto,) * len(AXES))


AnyMesh = Mesh | AbstractMesh


def sizes(mesh: AnyMesh) -> dict[str, int]:
    """The size of each of `mesh_settings`."""
    of = lambda setting: math.prod(mesh.shape[name] for name, axis in AXES.items() if axis.setting == setting)
    return {setting: of(setting) for setting in mesh_settings()}


def devices_along(axes: Sequence[str], mesh: AnyMesh) -> int:
    return math.prod(mesh.shape[a] for a in axes)


def mesh_axes(p: Param) -> list[tuple[str, ...]]:
    """The mesh axes that shard each dimension of an array."""
    found: list[tuple[str, ...]] = []
    for axis in p.full_axes:
        taken = [a for axes in found for a in axes]
        found.append(tuple(a for a in RULES[axis] if a not in taken))
    return found


def partition(p: Param, *, gathered: bool = False) -> P:
    """The declaration's PartitionSpec; `gathered`: as used in a product."""
    entries = zip(p.full_axes, mesh_axes(p), strict=True)
    return P(*(None if not axes or (gathered and axis in GATHERED) else axes for axis, axes in entries))


def check_divisible(specs: Any, mesh: Mesh) -> None:
    """Raises ValueError naming the parameter, its axis, the mesh axis and both sizes."""
    for name, p in P_.named(specs):
        for axis, size, axes in zip(p.full_axes, p.full_shape, mesh_axes(p), strict=True):
            n = devices_along(axes, mesh)
            if size % n:
                settings = ", ".join(f"mesh.{s}={sizes(mesh)[s]}" for s in settings_of(axes, mesh))
                named = " x ".join(map(repr, settings_of(axes, mesh)))
                fix = f"{SETTINGS[axis]}={size} with {settings}; the next that divides is {-(-size // n) * n}"
                raise ValueError(
                    f"{name}: axis {axis!r} has size {size}, not divisible by mesh axis {named} of size {n} ({fix})"
                )


def settings_of(axes: Sequence[str], mesh: AnyMesh) -> list[str]:
    """The settings of those of the mesh axes that have several devices."""
    return list(dict.fromkeys(AXES[a].setting for a in axes if mesh.shape[a] > 1))


def shardings(specs: Any, mesh: Mesh) -> Any:
    """A NamedSharding for every declaration. Raises ValueError for a size that the mesh does not divide."""
    check_divisible(specs, mesh)
    return P_.tree_map(lambda p: NamedSharding(mesh, partition(p)), specs)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over the axes that shard them; every process along another holds the same rows."""
    return NamedSharding(mesh, P(BATCH))


def precision(dtype: str) -> str:
    """Of products in model.dtype: all bits of float32 where it asks for them. TPUs and GPUs would use fewer."""
    return "highest" if dtype == "float32" else "default"


@contextlib.contextmanager
def surroundings(mesh: Mesh, dtype: str) -> Iterator[None]:
    """What programs run in: the mesh, and the precision of products."""
    with jax.set_mesh(mesh), jax.default_matmul_precision(precision(dtype)):
        yield


def batch_shards(mesh: AnyMesh) -> int:
    return devices_along(BATCH, mesh)


def platform(mesh: Mesh) -> str:
    """What the devices are, which may be elsewhere: "cpu", "gpu" or "tpu"."""
    name = mesh.devices.flat[0].platform
    return "gpu" if name == "cuda" else name  # cuda: where devices are only described


def capability(device: Any) -> float | None:
    """The compute capability of an NVIDIA GPU; None of any other device."""
    found = getattr(device, "compute_capability", None)
    return None if found is None else float(found)


# ---- the seams


def is_manual(mesh: AnyMesh) -> bool:
    """Whether code of this mesh context sees the arrays of one device: inside `manual` and `per_device`."""
    return not mesh.empty and mesh.are_all_axes_manual


def spread() -> AbstractMesh | None:
    """The mesh over which the compiler spreads what is traced here; None: arrays are those of one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 or is_manual(mesh) else mesh


def row_shards() -> int:
    """Into how many parts the rows of arrays [B, ...] are sharded here; inside `per_device` each device has its own alone."""
    mesh = spread()
    return 1 if mesh is None else batch_shards(mesh)


def per_device(f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """f on each device's part of the arrays, cut by these specs: for a kernel, which the compiler cannot partition. It is f
    itself on one device, and where all around it runs on each device's part already."""
    mesh = spread()
    if mesh is None:
        return f
    # check_vma: kernels do not say over which axes their results vary.
    return jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def constrain(x: jax.Array, spec: P) -> jax.Array:
    """`with_sharding_constraint`; without a mesh, on one device and inside `manual` the identity, so that no activation is kept
    twice."""
    mesh = spread()
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

    return P_.tree_map(one, specs, layer_params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rows_of(table: jax.Array, ids: jax.Array, dtype: str) -> jax.Array:
    """table[ids] in the compute dtype. The gradient of a row sums over all tokens that name it, in float32."""
    return table.astype(dtype)[ids]


def rows_of_fwd(table, ids, dtype):
    return rows_of(table, ids, dtype), (table, ids)


def rows_of_bwd(dtype, kept, g):
    table, ids = kept
    into = lambda g, ids: jnp.zeros(table.shape, jnp.float32).at[ids].add(g.astype(jnp.float32))
    return row_sum(into, g, ids).astype(table.dtype), None


rows_of.defvjp(rows_of_fwd, rows_of_bwd)


def lookup(table: jax.Array, spec: Param, ids: jax.Array, dtype: str) -> jax.Array:
    """The rows of a table [V, D] that ids [B, S] name, [B, S, D] in the compute dtype."""
    mesh = jax.sharding.get_abstract_mesh()
    # A row and its gradient travel once for each token, or once for each row of the table.
    along = tuple(a for a in mesh_axes(spec)[1] if is_manual(mesh) and mesh.shape[a] > 1)
    if along and ids.size < table.shape[0]:
        return exchanged(table, ids, dtype, along)
    return rows_of(gather(table, spec, dtype), ids, dtype)


# ---- collectives by hand


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
        layout = P_.tree_map(partition, specs)

        def summed(p: Param, g: jax.Array) -> jax.Array:
            taken = [a for axes in mesh_axes(p) for a in axes if a in BATCH]
            left = tuple(a for a in BATCH if a not in taken)
            if not taken:
                return jax.lax.psum(g, left)
            alone = devices_along(left, mesh) == 1
            return g if alone else jax.lax.psum(g.astype(travels(dtype)), left).astype(g.dtype)

        def on_one(params: Any, batch: Any, *rest: Any) -> tuple[Any, Any]:
            sums, grads = f(params, batch, *rest)
            return jax.lax.psum(sums, BATCH), P_.tree_map(summed, specs, grads)

        in_specs = (layout, P(BATCH), *(P() for _ in rest))
        run = jax.shard_map(on_one, in_specs=in_specs, out_specs=(P(), layout), check_vma=False)
        return run(params, batch, *rest)

    return on_all


class Collectives(NamedTuple):
    """How gradients over all devices are made of gradients over rows, and the settings that it alone reads."""

    meaning: str
    apply: Callable[[Gradients, Any, str], Gradients]  # arguments as of `manual`
    reads: tuple[str, ...] = ()


COLLECTIVES = {
    "auto": Collectives("the compiler, on any mesh", lambda f, specs, dtype: f),
    "manual": Collectives("minitf, in the order that sends least; tensor=1", manual, reads=("fsdp_inner",)),
}


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
    columns = rows_of(table, jax.lax.all_gather(ids, outer, tiled=True), dtype)
    return jax.lax.all_to_all(columns, outer, split_axis=0, concat_axis=2, tiled=True)
