"""Mesh axes, and the settings of their sizes."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from minitf.settings import setting
from minitf.tables import Kind


class MeshAxis(NamedTuple):
    setting: str  # field of MeshConfig that is its size, or a multiple of its size
    rows: bool = False  # whether it shards the rows of a batch


AXES = {  # of every mesh, outermost (least communication) first; an axis of size 1 changes no program
    "data": MeshAxis("data", rows=True),
    "fsdp": MeshAxis("fsdp", rows=True),
    "fsdp_inner": MeshAxis("fsdp", rows=True),  # see `inner_size`
    "expert": MeshAxis("expert", rows=True),
    "tensor": MeshAxis("tensor"),
}
BATCH = tuple(name for name, axis in AXES.items() if axis.rows)

COLLECTIVES = {
    "auto": Kind("the compiler, on any mesh"),
    "manual": Kind("minitf, in the order that sends least; tensor=1", reads=("fsdp_inner",)),  # see manual.py
}
SIZE = dict(at_least=1, also={-1: "the devices that the others leave"}, may_change=True)
DCN = dict(at_least=1, also={-1: "the hosts that the others leave"}, may_change=True)


@dataclasses.dataclass(frozen=True, kw_only=True)  # positions would shift with a new axis
class MeshConfig:
    data: int = setting(1, "replicas of the parameters", **SIZE)
    fsdp: int = setting(-1, "shards of the parameters' width and of the batch", **SIZE)
    expert: int = setting(1, "shards of a mixture's experts, of other weights' width and of the batch", **SIZE)
    tensor: int = setting(1, "shards of heads, MLP and vocabulary", **SIZE)
    # If any is not 1, their product is the number of hosts, the sizes above are per host, and an axis's size is the product of both.
    # Otherwise data spans as many hosts as it can, then fsdp. With several TPU slices, a host is a slice.
    dcn_data: int = setting(1, "factor of data across hosts (TPU slices)", **DCN)
    dcn_fsdp: int = setting(1, "factor of fsdp across hosts (TPU slices)", **DCN)
    dcn_expert: int = setting(1, "factor of expert across hosts (TPU slices)", **DCN)
    dcn_tensor: int = setting(1, "factor of tensor across hosts (TPU slices)", **DCN)
    collectives: str = setting("auto", "who decides what is sent", one_of=lambda: COLLECTIVES, may_change=True)
    # Weights are all-gathered along the inner factor first, gradients reduce-scattered along it last.
    fsdp_inner: int | None = setting(
        None, "inner of two factors of fsdp; 1: one; None: a line of a TPU's torus, else 1", at_least=1, may_change=True
    )


def mesh_settings() -> tuple[str, ...]:
    """Names of the mesh sizes in MeshConfig, in the order of AXES."""
    return tuple(dict.fromkeys(axis.setting for axis in AXES.values()))


AnyMesh = Mesh | AbstractMesh


def mesh_sizes(mesh: AnyMesh) -> dict[str, int]:
    """Name -> size of each of `mesh_settings`."""
    of = lambda setting: math.prod(mesh.shape[name] for name, axis in AXES.items() if axis.setting == setting)
    return {setting: of(setting) for setting in mesh_settings()}


def devices_along(axes: Sequence[str], mesh: AnyMesh) -> int:
    return math.prod(mesh.shape[a] for a in axes)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of a batch: rows over the axes in BATCH; processes along other axes hold the same rows."""
    return NamedSharding(mesh, P(BATCH))


def batch_shards(mesh: AnyMesh) -> int:
    return devices_along(BATCH, mesh)
