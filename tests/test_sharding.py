import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import TINY, assert_close, change, fit, make_mesh, random_batch, random_params, sizes_of_axes
from jax.sharding import PartitionSpec as P

from minitf import startup
from minitf.model.transformer import model_params
from minitf.params import Param
from minitf.sharding.devices import make_mesh as mesh_of
from minitf.sharding.devices import mesh_shape, surroundings
from minitf.sharding.mesh import AXES, MeshAxis, MeshConfig, batch_sharding, mesh_sizes
from minitf.sharding.rules import RULES, mesh_axes, shardings
from minitf.sharding.seams import gather, pin
from minitf.training import step as step_lib

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("cfg", "shape"),
    [
        (MeshConfig(), (1, 8, 1)),
        (MeshConfig(data=-1, fsdp=1), (8, 1, 1)),
        (MeshConfig(tensor=2), (1, 4, 2)),
        (MeshConfig(data=2, fsdp=2, tensor=2), (2, 2, 2)),
        (MeshConfig(fsdp=2, expert=-1), (1, 2, 4, 1)),
        (MeshConfig(data=-1, fsdp=1, tensor=2), (4, 1, 2)),
    ],
)
def test_minus_one_fills_the_rest(cfg, shape):
    assert [sizes_of_axes(sizes) for sizes in mesh_shape(cfg, 8)] == [sizes_of_axes(shape), sizes_of_axes((1, 1, 1))]
    assert sizes_of_axes(shape) == mesh_sizes(mesh_of(cfg))


@pytest.mark.parametrize(
    ("cfg", "words"),
    [
        (MeshConfig(data=3, fsdp=1), ["mesh.data=3", "the product is 3", "8 devices"]),
        (MeshConfig(data=16, fsdp=1), ["mesh.data=16", "16", "8 devices"]),
        (MeshConfig(data=3), ["mesh.data=3", "8 devices", "not divisible by 3"]),
        (MeshConfig(data=-1, fsdp=-1), ["at most one"]),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(cfg, words):
    with pytest.raises(ValueError) as e:
        mesh_shape(cfg, 8)
    for word in words:
        assert word in str(e.value)


@pytest.mark.parametrize(
    ("cfg", "devices", "hosts", "inside", "across"),
    [
        (MeshConfig(), 8, 2, (1, 4, 1), (1, 2, 1)),
        (MeshConfig(data=-1, fsdp=1), 8, 2, (4, 1, 1), (2, 1, 1)),
        (MeshConfig(data=2), 8, 2, (1, 4, 1), (2, 1, 1)),  # copies across hosts, shards inside
        (MeshConfig(data=2), 16, 4, (1, 4, 1), (2, 2, 1)),
        (MeshConfig(data=3), 12, 2, (3, 2, 1), (1, 2, 1)),
        (MeshConfig(tensor=4), 8, 2, (1, 1, 4), (1, 2, 1)),  # inside a host, although it is not named
        (MeshConfig(tensor=8), 8, 2, (1, 1, 4), (1, 1, 2)),  # it does not fit into one
        (MeshConfig(dcn_data=-1), 8, 2, (1, 4, 1), (2, 1, 1)),
        (MeshConfig(dcn_data=-1), 8, 1, (1, 8, 1), (1, 1, 1)),  # the same settings on one host
        (MeshConfig(dcn_data=2, dcn_fsdp=-1, tensor=2), 32, 4, (1, 4, 2), (2, 2, 1)),
        (MeshConfig(dcn_tensor=2, tensor=2, fsdp=2), 8, 2, (1, 2, 2), (1, 1, 2)),
    ],
)
def test_axes_have_factors_inside_hosts_and_across(cfg, devices, hosts, inside, across):
    assert [sizes_of_axes(sizes) for sizes in mesh_shape(cfg, devices, hosts)] == [
        sizes_of_axes(inside),
        sizes_of_axes(across),
    ]
    assert np.prod(inside) * hosts == devices
    assert np.prod(across) == hosts


@pytest.mark.parametrize(
    ("cfg", "devices", "hosts", "words"),
    [
        (
            MeshConfig(dcn_data=2),
            8,
            4,
            "mesh.dcn_data=2, mesh.dcn_fsdp=1, mesh.dcn_expert=1, mesh.dcn_tensor=1: the product is 2, .* 4 hosts",
        ),
        (MeshConfig(dcn_data=-1, dcn_fsdp=-1), 8, 4, "at most one axis may be -1 .the hosts that the others leave"),
        (MeshConfig(dcn_data=-1, dcn_fsdp=3), 8, 4, "4 hosts are not divisible by 3"),
        (MeshConfig(dcn_data=-1, tensor=8), 8, 2, "mesh.tensor=8: 4 devices on a host are not divisible by 8"),
        (MeshConfig(), 9, 2, "9 devices on 2 hosts: each host must have as many"),
    ],
)
def test_a_mesh_that_does_not_fit_the_hosts_is_refused(cfg, devices, hosts, words):
    with pytest.raises(ValueError, match=words):
        mesh_shape(cfg, devices, hosts)


@dataclasses.dataclass(frozen=True)
class Device:
    """What the layout asks of a device of several hosts."""

    id: int
    slice_index: int
    process_index: int
    device_kind: str = "cpu"
    platform: str = "cpu"


def test_hosts_lie_outermost_in_each_axis(monkeypatch):
    # Numbered otherwise than by host, and two processes a host.
    devices = [Device(i, slice_index=i % 2, process_index=i // 2) for i in range(16)]
    monkeypatch.setattr("minitf.sharding.devices.Mesh", lambda grid, axes, axis_types: grid)
    grid = mesh_of(MeshConfig(data=2, tensor=2), devices)
    assert grid.shape == (2, 4, 1, 1, 2)
    for host in (0, 1):
        assert {d.slice_index for d in grid[host].flat} == {host}
    grid = mesh_of(MeshConfig(dcn_fsdp=2, data=2, tensor=2), devices)
    assert grid.shape == (2, 4, 1, 1, 2)
    for host in (0, 1):
        assert {d.slice_index for d in grid[:, 2 * host : 2 * host + 2].flat} == {host}


@pytest.mark.parametrize(
    ("mesh", "changes", "at", "setting"),
    [
        ("1x2x4", {}, "blocks/0/attention/k: axis 'kv_heads' has size 2", "model.attention.num_kv_heads=2"),
        ("fsdp8", dict(dim=20), "axis 'embed' has size 20", "model.dim=20"),
        ("2x2x2", dict(vocab_size=65), "embedding: axis 'vocab' has size 65", "model.vocab_size=65"),
    ],
)
def test_a_size_that_does_not_divide_names_parameter_axis_and_sizes(mesh, changes, at, setting):
    with pytest.raises(ValueError) as e:
        shardings(model_params(change(TINY.model, **changes)), make_mesh(mesh))
    axis, n = {"1x2x4": ("tensor", 4), "fsdp8": ("fsdp", 8), "2x2x2": ("tensor", 2)}[mesh]
    text = str(e.value)
    assert f"{at}, not divisible by mesh axis '{axis}' of size {n} ({setting} with mesh.{axis}={n}; " in text
    assert ("the next that divides is 66" in text) == ("vocab" in text)


def test_every_weight_is_spread_over_fsdp_and_tensor():
    mesh = make_mesh("2x2x2")
    for p in jax.tree.leaves(model_params(TINY.model), is_leaf=lambda x: isinstance(x, Param)):
        if p.kind in ("matrix", "embedding", "head"):
            assert {a for axes in mesh_axes(p) for a in axes} >= {"fsdp", "tensor"}, p
            assert shardings(p, mesh).num_devices == 8
    assert {a for axes in RULES.values() for a in axes} <= set(AXES)


def test_another_axis_is_a_line_in_each_table(monkeypatch):
    """One that shards the MLP's width, of two devices: the losses and gradients of one device."""

    @dataclasses.dataclass(frozen=True)
    class WithDummy(MeshConfig):
        dummy: int = 2
        dcn_dummy: int = 1

    batch, params = random_batch(TINY), random_params(TINY.model)
    step = functools.partial(step_lib.gradients, step=jnp.int32(0), cfg=TINY)
    expected = jax.jit(step)(params, batch)
    monkeypatch.setitem(AXES, "dummy", MeshAxis("dummy"))
    monkeypatch.setitem(RULES, "mlp", ("tensor", "dummy"))
    mesh = mesh_of(WithDummy(fsdp=2, tensor=2))
    assert mesh_sizes(mesh) == {"data": 1, "fsdp": 2, "expert": 1, "tensor": 2, "dummy": 2}
    specs = model_params(TINY.model)
    layout = shardings(specs, mesh)
    sharded, p = (tree["blocks"][0]["mlp"]["up"] for tree in (layout, specs))
    assert math.prod(p.full_shape) == 8 * math.prod(sharded.shard_shape(p.full_shape))
    with surroundings(mesh, TINY.model.dtype):
        placed = jax.device_put(batch, batch_sharding(mesh))
        found = jax.jit(step)(jax.device_put(params, layout), placed)
    assert_close(found, expected, 1e-5, relative_to_largest=True)


def test_seams_are_identities_without_a_mesh():
    x = jnp.ones((2, 3, 4))
    assert pin(x) is x
    spec = {"w": Param((4, 4), ("embed", "mlp"), "matrix", inputs=1), "s": Param((4,), ("norm",), "scale")}
    out = gather({"w": jnp.ones((4, 4)), "s": jnp.ones(4)}, spec, "bfloat16")
    assert (out["w"].dtype, out["s"].dtype) == (jnp.bfloat16, jnp.float32)


def test_gather_makes_weights_whole_along_fsdp_only():
    mesh = make_mesh("2x2x2")
    spec = Param((16, 32), ("embed", "mlp"), "matrix", inputs=1)
    w = jax.device_put(np.ones((16, 32), np.float32), shardings(spec, mesh))
    with jax.set_mesh(mesh):
        out = jax.jit(lambda w: gather(w, spec, "float32"))(w)
    assert w.sharding.spec == P(("fsdp", "fsdp_inner", "expert"), ("tensor",))
    assert out.sharding.shard_shape(out.shape) == (16, 16)


def test_table_adds_up_to_the_bytes_on_a_device():
    specs, mesh = model_params(TINY.model), make_mesh("2x2x2")
    text = startup.parameter_table(specs, mesh)
    params = jax.device_put(random_params(TINY.model), shardings(specs, mesh))
    local = sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(params))
    assert text.splitlines()[-1].split() == ["total", f"{local:,}"]
    assert "blocks/0/attention/q" in text
    assert "(-, fsdp, tensor, -)" in text


@pytest.mark.parametrize("mesh", ["2x2x2", "1x2x4"])
def test_attention_is_the_same_under_tensor_parallelism(mesh):
    cfg = change(TINY, model__attention__num_kv_heads=4, optimizer__kind="sgd", optimizer__learning_rate=0.1)
    batches, params = [random_batch(cfg)] * 2, random_params(cfg.model)
    one, params_1 = fit(cfg, batches, params=params)
    many, params_n = fit(cfg, batches, params=params, mesh=mesh)
    assert [m["train/loss"] for m in many] == pytest.approx([m["train/loss"] for m in one], abs=1e-5)
    assert_close(params_n, params_1, 1e-5)
