"""The budget of collectives: what the compiled train step sends on each mesh is what the declarations imply, and nothing else."""

import dataclasses
import math
from collections import Counter

import jax
import pytest
from common import MESHES, TINY, change, make_mesh, sizes_of_axes, slow
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from minitf import job as job_lib
from minitf.model.experts import mlp, mlp_params
from minitf.model.mlp import MlpConfig
from minitf.params import Param, tree_map
from minitf.plan import hlo
from minitf.plan.program import abstract_batch, compile_step, job_of
from minitf.sharding.devices import surroundings
from minitf.sharding.mesh import BATCH, MeshConfig, batch_sharding, batch_shards
from minitf.sharding.rules import RULES, partition
from minitf.sharding.seams import constrain

# Weights are larger than what a row of the batch is reduced to, and each kind of array has a size of its own.
CFG = change(
    TINY,
    model__dim=32,
    model__vocab_size=192,
    model__attention__num_kv_heads=4,
    model__attention__head_dim=12,
    model__mlp__hidden=64,
)
SMALL = 512  # bytes: norms, losses, the checksum of a batch, the scales' gradients
SMALL_IN_ALL = 4096  # bytes


def on(mesh, **changes):
    data, fsdp, tensor = MESHES[mesh]
    cfg = change(CFG, mesh__data=data, mesh__fsdp=fsdp, mesh__tensor=tensor, **changes)
    return job_of(cfg, jax.devices()[: data * fsdp * tensor])


def declarations(specs):
    return [
        p for p in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, Param)) if p.kind not in ("scale", "bias")
    ]


def implied(job):
    """(kind, mesh axes, bytes) -> how many such arrays a step sends on a device."""
    cfg, sizes = job.cfg, job.mesh.shape
    wide = lambda axes: tuple(a for a in axes if sizes[a] > 1)
    batch, shards = wide(BATCH), batch_shards(job.mesh)
    activation = cfg.batch_size // shards * cfg.seq_len * cfg.model.dim * 4
    again = cfg.model.remat == "full"  # the backward pass forms products anew
    budget = Counter()
    for p in declarations(job.specs):
        layers = math.prod(n for _, n in p.stack)
        split = lambda axes: sizes["tensor"] > 1 and "tensor" in {m for a in axes for m in RULES[a]}
        whole = p.size // layers * 4 // (sizes["tensor"] if split(p.axes) else 1)
        if sizes["fsdp"] > 1:
            budget["all-gather", ("fsdp",), whole] += layers * (
                2 if p.stack else 1
            )  # a block's again for the backward pass
        if batch:
            budget["all-reduce", batch, whole] += layers  # its gradient; XLA's CPU compiler scatters none
        taken, given = (p.axes[:1], ()) if p.kind == "embedding" else (p.axes[: p.inputs], p.axes[p.inputs :])
        # Each device has a part of the sum over what is split among them; and of the gradient by the input.
        is_last = p.axes[0] == "mlp"  # a block's last product, whose result nothing needs again
        budget["all-reduce", ("tensor",), activation] += (
            layers * split(taken) * (2 if again and p.stack and not is_last else 1)
        )
        budget["all-reduce", ("tensor",), activation] += layers * split(given)
    return +budget


def sent(job):
    """(the same of the compiled step, arrays below SMALL left out; bytes of these)"""
    compiled, _ = compile_step(job)
    module = hlo.parse(compiled.as_text())
    run = hlo.runs(module)
    if job.cfg.model.mlp.router == "none":  # a mixture's loops over the rows of its experts send nothing
        assert len(run.unknown) <= 1  # the update, which runs at most once
    found, small = Counter(), 0
    for c in hlo.collectives(module, run, job.mesh.shape):
        for array in hlo.elements(c.instruction.shape):  # the compiler joins several into one
            n = hlo.nbytes(array)
            if n < SMALL:
                small += c.count * n
            else:
                found[c.kind, c.axes, n] += c.count
    return found, small


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        *slow([(mesh, {}) for mesh in MESHES], but=[("fsdp8", {}), ("2x2x2", {})]),
        ("2x2x2", dict(model__remat="full")),
        pytest.param("2x2x2", dict(loss__chunk=None, model__num_layers=3), marks=pytest.mark.slow),
    ],
)
def test_a_step_sends_what_the_declarations_imply(mesh, changes):
    job = on(mesh, **changes)
    found, small = sent(job)
    assert found == implied(job)
    assert small < SMALL_IN_ALL


def test_one_device_sends_nothing():
    assert sent(on("1")) == (Counter(), 0)


def test_a_gather_by_accident_is_seen(monkeypatch):
    job = on("2x2x2")
    monkeypatch.setattr("minitf.model.transformer.pin", lambda x: constrain(x, P()))
    found, _ = sent(job)
    assert found - implied(job)


def test_weights_travel_in_the_compute_dtype_where_the_device_has_it():
    """XLA's CPU compiler does 16-bit collectives in float32; what is asked of it is 16 bits, cast before they are gathered."""
    job = on("fsdp8", model__dtype="bfloat16")
    functions = job_lib.program(job)
    with surroundings(job.mesh, job.cfg.model.dtype):
        text = functions.step.lower(functions.state, abstract_batch(job)).as_text()
    dims = "x".join(map(str, dataclasses.replace(job.specs["blocks"][0]["mlp"]["gate"], stack=()).shape))
    constraints = [line for line in text.splitlines() if "sharding_constraint" in line and f"tensor<{dims}x" in line]
    assert constraints
    assert all(f"tensor<{dims}xbf16>" in line for line in constraints)


# ---- mixtures

MIXTURE = MlpConfig(kind="swiglu", hidden=64, router="softmax", experts=16, experts_per_token=2)
WHOLE = 16 * 16 * 64 * 4  # bytes of one kind of all experts' weights


@pytest.mark.parametrize("mesh", slow(["1x1x8x1", "1x2x2x2"], but=["1x2x2x2"]))
@pytest.mark.parametrize("router", slow(["softmax", "sigmoid"], but=["sigmoid"]))
def test_a_mixture_gathers_rows_and_scatters_sums_of_its_experts(router, mesh):
    """Rows, their experts and the weights of these; nothing more to choose experts than to use them."""
    cfg = dataclasses.replace(MIXTURE, router=router)
    mesh = make_mesh(mesh)
    specs = mlp_params(cfg, 16)
    weights = tree_map(
        lambda p: jax.ShapeDtypeStruct(
            p.full_shape, "float32", sharding=NamedSharding(mesh, partition(p, gathered=True))
        ),
        specs,
    )
    rows = jax.ShapeDtypeStruct((8, 4, 16), "float32", sharding=batch_sharding(mesh))
    with jax.set_mesh(mesh):
        compiled = jax.jit(lambda w, x: mlp(w, x, cfg, None)[0]).lower(weights, rows).compile()
    module = hlo.parse(compiled.as_text())
    found = Counter()
    for c in hlo.collectives(module, hlo.runs(module), mesh.shape):
        found[c.kind, c.axes] += c.count * len(hlo.elements(c.instruction.shape))
    expected = {("all-gather", ("expert",)): 3, ("reduce-scatter", ("expert",)): 1}
    assert found == expected | ({("all-reduce", ("tensor",)): 1} if mesh.shape["tensor"] > 1 else {})


@pytest.mark.parametrize("mesh", slow(["2x1x4x1", "1x2x2x2"]))
def test_no_step_sends_the_experts_of_other_devices(mesh):
    sizes = sizes_of_axes(tuple(map(int, mesh.split("x"))))
    job = job_of(change(TINY, model__mlp=MIXTURE, mesh=MeshConfig(**sizes)), jax.devices())
    found, _ = sent(job)
    assert ("all-gather", ("expert",)) in {(kind, axes) for kind, axes, _ in found}
    assert max(size for _, _, size in found) <= WHOLE // sizes["expert"] // sizes["tensor"]
