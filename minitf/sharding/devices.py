"""Builds a mesh from devices and their number of hosts, and the context in which programs are traced for it."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from minitf.sharding.mesh import AXES, MeshConfig, mesh_settings


def filled_sizes(prefix: str, cfg: MeshConfig, total: int, of: str) -> list[int]:
    """Sizes of the settings prefix + `mesh_settings`, with -1 replaced so that their product is `total`. `of`: what `total` counts,
    for messages. Raises ValueError if the product cannot be `total`."""
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
    """Sizes of `mesh_settings` (inside a host, across hosts). Raises ValueError if they do not fit the devices and hosts."""
    if devices % hosts:
        raise ValueError(f"{devices} devices on {hosts} hosts: each host must have as many")
    if any(getattr(cfg, f"dcn_{a}") != 1 for a in mesh_settings()):
        across = filled_sizes("dcn_", cfg, hosts, "hosts")
        inside = filled_sizes("", cfg, devices // hosts, "devices" if hosts == 1 else "devices on a host")
        return tuple(inside), tuple(across)
    # Outer axes communicate least, so they span hosts first, and tensor only the hosts that they cannot.
    inside, across, left = filled_sizes("", cfg, devices, "devices"), [], hosts
    for i, size in enumerate(inside):
        across.append(math.gcd(size, left))
        inside[i] //= across[i]
        left //= across[i]
    return tuple(inside), tuple(across)


def host_count(devices: Sequence[Any]) -> int:
    """Number of groups of devices with fast links: machines, or TPU slices. JAX calls both slices, and sets no slice_index if there
    is only one."""
    return len({getattr(d, "slice_index", 0) for d in devices})


def longest_line(coords: Sequence[tuple[int, ...]]) -> int:
    """Largest k for which each consecutive group of k devices of an axis lies on one line of the torus; all if all do.

    [(0, 0), (0, 1), (1, 0), (1, 1)] -> 2. A collective along a line uses its ring. For one over a whole torus, XLA's TPU compiler
    turns reduce-scatters, in three dimensions also all-gathers, into all-reduces, which send twice as much.
    """

    def straight(some: Sequence[tuple[int, ...]]) -> bool:
        return sum(len(set(along)) > 1 for along in zip(*some, strict=True)) <= 1

    n = len(coords)
    lengths = [k for k in range(1, n + 1) if n % k == 0 and all(straight(coords[i : i + k]) for i in range(0, n, k))]
    return lengths[-1]


def inner_size(cfg: MeshConfig, devices: Sequence[Any]) -> int:
    """Size of the mesh axis fsdp_inner, for the devices along fsdp; 1: the axis fsdp has all of them. Raises ValueError if
    mesh.fsdp_inner does not divide their number."""
    n, inner = len(devices), cfg.fsdp_inner
    if inner is None:
        known = cfg.collectives == "manual" and devices[0].platform == "tpu"
        inner = longest_line([d.coords for d in devices]) if known else 1
    if n % inner:
        raise ValueError(f"mesh.fsdp_inner={inner}: does not divide mesh.fsdp, here {n}")
    return 1 if inner == n else inner


def make_mesh(cfg: MeshConfig, devices: list | None = None) -> Mesh:
    """The mesh over all devices (or those given): tensor is the innermost axis, and hosts are outermost within each axis. Enter it
    with `jax.set_mesh`. Raises ValueError if the sizes do not fit the devices."""
    devices = jax.devices() if devices is None else devices
    n, settings = host_count(devices), mesh_settings()
    inside, across = mesh_shape(cfg, len(devices), n)
    if n == 1:
        try:
            types = (AxisType.Auto,) * len(settings)
            grid = jax.make_mesh(inside, settings, axis_types=types, devices=devices).devices
        except NotImplementedError:  # a mesh axis matches no whole axis of the TPU's torus: split a physical axis
            grid = mesh_utils.create_device_mesh(inside, devices, allow_split_physical_axes=True)
    else:
        grid = mesh_utils.create_hybrid_device_mesh(inside, across, devices, allow_split_physical_axes=True)
    sizes = dict(zip(settings, grid.shape, strict=True))
    inner = inner_size(cfg, np.moveaxis(grid, settings.index("fsdp"), 0).reshape(sizes["fsdp"], -1)[:, 0].tolist())
    factors = {"fsdp": sizes["fsdp"] // inner, "fsdp_inner": inner}
    grid = grid.reshape([factors.get(name, sizes[axis.setting]) for name, axis in AXES.items()])
    return Mesh(grid, tuple(AXES), axis_types=(AxisType.Auto,) * len(AXES))


def platform_of(mesh: Mesh) -> str:
    """Platform of the mesh's devices, attached or only described: "cpu", "gpu" or "tpu"."""
    name = mesh.devices.flat[0].platform
    return "gpu" if name == "cuda" else name  # devices that are only described say cuda


def compute_capability(device: Any) -> float | None:
    """Compute capability of an NVIDIA GPU; None for any other device."""
    found = getattr(device, "compute_capability", None)
    return None if found is None else float(found)


# ---- where programs are traced


def precision(dtype: str) -> str:
    """Matmul precision for model.dtype. By default TPUs and GPUs would use fewer bits than float32 has."""
    return "highest" if dtype == "float32" else "default"


@contextlib.contextmanager
def surroundings(mesh: Mesh, dtype: str) -> Iterator[None]:
    """Context in which programs are traced: the mesh and the matmul precision."""
    with jax.set_mesh(mesh), jax.default_matmul_precision(precision(dtype)):
        yield
