"""The mesh, the one table from logical to mesh axes, and the two seams (`pin`, `gather`) that hold all that the model
knows of sharding."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from minitf import params as P_
from minitf.params import Param

AXES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")  # the batch is sharded over both; weights over fsdp and tensor

RULES: dict[str, str | None] = {  # logical axis of a Param -> mesh axis
    "layers": None,
    "vocab": "tensor",
    "positions": None,
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "norm": None,
}


SETTINGS = {  # logical axis -> the setting that sizes it
    "vocab": "model.vocab_size",
    "embed": "model.dim",
    "heads": "model.attention.num_heads",
    "kv_heads": "model.attention.num_kv_heads",
    "mlp": "model.mlp.hidden",
}


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    data: int = 1  # replicas of the parameters; -1: the devices that the others leave
    fsdp: int = -1  # shards of the parameters along their width, of the batch too
    tensor: int = 1  # shards of heads, MLP and vocabulary
    # Factors of the same axes that lie across hosts (of several TPU slices: across slices). Where any is given, their product is
    # the number of hosts, the sizes above count inside one, and an axis has the product of both; else data takes the hosts
    # first, then fsdp. -1: the hosts that the others leave.
    dcn_data: int = 1
    dcn_fsdp: int = 1
    dcn_tensor: int = 1


def filled(prefix: str, cfg: MeshConfig, total: int, of: str) -> list[int]:
    """The sizes of the settings prefix + AXES, -1 replaced by what the others leave of the total. Raises ValueError where they do
    not fit; `of`: what there are so many of."""
    sizes = {prefix + a: getattr(cfg, prefix + a) for a in AXES}
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
    """Sizes of AXES on so many devices (inside a host, across hosts). Raises ValueError where they do not fit."""
    if devices % hosts:
        raise ValueError(f"{devices} devices on {hosts} hosts: each host must have as many")
    if any(getattr(cfg, f"dcn_{a}") != 1 for a in AXES):
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


def make_mesh(cfg: MeshConfig, devices: list | None = None) -> Mesh:
    """The mesh over all devices (or those given), tensor innermost, hosts outermost in each axis. Enter it with `jax.set_mesh`.
    Raises ValueError where the sizes do not fit."""
    devices = jax.devices() if devices is None else devices
    n = hosts(devices)
    inside, across = mesh_shape(cfg, len(devices), n)
    types = (AxisType.Auto,) * len(AXES)
    if n == 1:
        try:
            return jax.make_mesh(inside, AXES, axis_types=types, devices=devices)
        except NotImplementedError:  # no axis of the TPU's torus is as long as one of ours: part of one, then
            grid = mesh_utils.create_device_mesh(inside, devices, allow_split_physical_axes=True)
    else:
        grid = mesh_utils.create_hybrid_device_mesh(inside, across, devices, allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=types)


def describe_mesh(cfg: MeshConfig, mesh: Mesh) -> str:
    """The sizes of the axes, and which part of them lies across hosts."""
    devices = list(mesh.devices.flat)
    text = ", ".join(f"{a}={n}" for a, n in mesh.shape.items())
    if (n := hosts(devices)) > 1:
        _, across = mesh_shape(cfg, len(devices), n)
        kind = "slices" if devices[0].platform == "tpu" else "hosts"
        text += f"; across {n} {kind}: " + ", ".join(f"{a}={f}" for a, f in zip(AXES, across, strict=True) if f > 1)
    return text


def partition(p: Param, *, gathered: bool = False) -> P:
    """The declaration's PartitionSpec; `gathered`: as used in a product, that is without fsdp."""
    entries = [RULES[a] for a in p.full_axes]
    return P(*(None if gathered and m == "fsdp" else m for m in entries))


def check_divisible(specs: Any, mesh: Mesh) -> None:
    """Raises ValueError naming the parameter, its axis, the mesh axis and both sizes."""
    for name, p in P_.named(specs):
        for axis, size in zip(p.full_axes, p.full_shape, strict=True):
            mesh_axis = RULES[axis]
            n = 1 if mesh_axis is None else mesh.shape[mesh_axis]
            if size % n:
                fix = f"{SETTINGS[axis]}={size} with mesh.{mesh_axis}={n}; the next that divides is {-(-size // n) * n}"
                raise ValueError(
                    f"{name}: axis {axis!r} has size {size}, not divisible by mesh axis {mesh_axis!r} of size {n} ({fix})"
                )


def shardings(specs: Any, mesh: Mesh) -> Any:
    """A NamedSharding for every declaration. Raises ValueError for a size that the mesh does not divide."""
    check_divisible(specs, mesh)
    return P_.tree_map(lambda p: NamedSharding(mesh, partition(p)), specs)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over data and fsdp; every process of a tensor axis holds the same rows."""
    return NamedSharding(mesh, P(BATCH))


def precision(dtype: str) -> str:
    """Of products in model.dtype: all bits of float32 where it asks for them. TPUs and GPUs would use fewer."""
    return "highest" if dtype == "float32" else "default"


@contextlib.contextmanager
def surroundings(mesh: Mesh, dtype: str) -> Iterator[None]:
    """What programs run in: the mesh, and the precision of products."""
    with jax.set_mesh(mesh), jax.default_matmul_precision(precision(dtype)):
        yield


def batch_shards(mesh: Mesh) -> int:
    return math.prod(mesh.shape[a] for a in BATCH)


def row_shards() -> int:
    """Into how many parts the rows of arrays [B, ...] are sharded here; inside `per_device` each device has its own alone."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty or mesh.are_all_axes_manual else batch_shards(mesh)


def platform(mesh: Mesh) -> str:
    """What the devices are, which may be elsewhere: "cpu", "gpu" or "tpu"."""
    name = mesh.devices.flat[0].platform
    return "gpu" if name == "cuda" else name  # cuda: where devices are only described


def capability(device: Any) -> float | None:
    """The compute capability of an NVIDIA GPU; None of any other device."""
    found = getattr(device, "compute_capability", None)
    return None if found is None else float(found)


def per_device(f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """f on each device's part of the arrays, cut by these specs: for a kernel, which the compiler cannot partition. It is f
    itself on one device, and where all around it runs on each device's part already."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or mesh.are_all_axes_manual:
        return f
    # check_vma: kernels do not say over which axes their results vary.
    return jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def constrain(x: jax.Array, spec: P) -> jax.Array:
    """`with_sharding_constraint`; without a mesh or on one device the identity, so that no activation is kept twice."""
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty or mesh.size == 1 else jax.lax.with_sharding_constraint(x, spec)


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


def pin_cache(x_LBTGK: jax.Array) -> jax.Array:
    """Keeps cached keys or values sharded by rows and heads."""
    return constrain(x_LBTGK, P(None, BATCH, None, RULES["kv_heads"], None))


def gather(layer_params: Any, specs: Any, dtype: str) -> Any:
    """One layer's weights ready for products: matrices and tables in the compute dtype and whole along fsdp; scales and
    biases stay float32. First line of the scan body, so that only one layer is whole at a time."""

    def one(p: Param, w: jax.Array) -> jax.Array:
        if p.kind in ("scale", "bias"):
            return w
        # Cast first: half the bytes travel.
        return constrain(w.astype(dtype), partition(dataclasses.replace(p, stack=()), gathered=True))

    return P_.tree_map(one, specs, layer_params)


def table(specs: Any, mesh: Mesh) -> str:
    """The start-up table: parameter, shape, dtype, partition, bytes per device."""
    rows = [("parameter", "shape", "dtype", "partition", "bytes/device")]
    total = 0
    for name, p in P_.named(specs):
        local = NamedSharding(mesh, partition(p)).shard_shape(p.full_shape)
        n = math.prod(local) * jnp.dtype(p.dtype).itemsize
        total += n
        spec = ", ".join("-" if m is None or mesh.shape[m] == 1 else m for m in partition(p))
        rows.append((name, "x".join(map(str, p.full_shape)), p.dtype, f"({spec})", f"{n:,}"))
    rows.append(("total", "", "", "", f"{total:,}"))
    widths = [max(len(r[i]) for r in rows) for i in range(5)]
    lines = [
        "  ".join(c.rjust(w) if i == 4 else c.ljust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True)))
        for r in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
