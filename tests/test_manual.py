"""Collectives by hand give what XLA's give: losses and gradients of one device, on any mesh of data and fsdp."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import TINY, assert_close, change, fit, launch, make_mesh, random_batch, random_params, series, text_config

from minitf import startup
from minitf.model.transformer import model_params
from minitf.params import named
from minitf.sharding.devices import longest_line, surroundings
from minitf.sharding.mesh import MeshConfig, batch_sharding, mesh_sizes
from minitf.sharding.rules import shardings
from minitf.training import step

MODELS = {
    # More rows in the table than tokens on a device, so that activations are exchanged.
    "dropout": dict(model__dropout=0.2),
    "tied": dict(
        model__tie_embeddings=True,
        model__positions="learned",
        model__norm="layer_norm",
        model__mlp__kind="gelu",
        model__mlp__bias=True,
        model__embedding_scale=2.0,
        model__dropout=0.1,
    ),
    "pattern": dict(
        model__num_layers=3,
        model__pattern=("sliding", "full"),
        model__attention__window=5,
        model__attention__bias="qkvo",
        model__attention__qk_norm=True,
        model__remat="full",
        model__dropout=0.1,
    ),
    "accumulation": dict(
        batch_size=16,
        accumulation=2,
        loss__z_loss=1e-2,
        loss__chunk=5,
        model__logit_softcap=5.0,
        model__remat="qkv_context",
        model__dropout=0.1,
    ),
}


def config(name, **changes):
    return change(TINY, **MODELS[name], **changes)


def batch_of(cfg):
    """Some positions do not count, and documents share rows."""
    rng = np.random.default_rng(1)
    shape = cfg.batch_size, cfg.seq_len
    batch = random_batch(cfg, weights=rng.integers(0, 2, shape))
    segments = np.sort(rng.integers(1, 3, shape), axis=1).astype(np.int32)
    first = np.argmax(segments[:, :, None] == segments[:, None, :], axis=2)
    return batch | {"segments": jnp.asarray(segments), "positions": jnp.arange(cfg.seq_len, dtype=jnp.int32) - first}


def arguments(cfg, mesh):
    layout = shardings(model_params(cfg.model), mesh)
    batch = jax.device_put(batch_of(cfg), batch_sharding(mesh))
    return jax.device_put(random_params(cfg.model), layout), batch, jnp.int32(3)


def results(cfg, mesh):
    """(losses, gradients)"""
    with surroundings(mesh, cfg.model.dtype):
        found = jax.jit(functools.partial(step.gradients, cfg=cfg))(*arguments(cfg, mesh))
    return jax.tree.map(lambda a: np.asarray(a, np.float64), found)


@functools.cache
def on_one_device(name):
    return results(config(name), make_mesh("1"))


def by_hand(cfg, mesh, inner):
    cfg = change(cfg, mesh__collectives="manual", mesh__fsdp_inner=inner)
    return cfg, make_mesh(mesh, cfg.mesh)


def assert_same(found, expected, tolerance):
    """Losses, and each array of the gradient relative to its largest element."""
    ((losses, _), grads), ((expected_losses, _), expected_grads) = found, expected
    for name, loss in expected_losses.items():
        assert losses[name] == pytest.approx(loss, rel=tolerance)
    largest = jax.tree.map(lambda e: np.abs(e).max(), expected_grads)
    assert min(jax.tree.leaves(largest)) > 1e-3  # else the difference of two roundings would count
    unit = lambda grads: jax.tree.map(lambda g, scale: g / scale, grads, largest)
    assert_close(unit(grads), unit(expected_grads), tolerance)


@pytest.mark.parametrize(
    ("name", "mesh", "inner"),
    [
        ("dropout", "8x1x1", None),
        pytest.param("dropout", "1x8x1", None, marks=pytest.mark.slow),
        ("dropout", "1x8x1", 4),
        pytest.param("tied", "2x4x1", 2, marks=pytest.mark.slow),
        pytest.param("pattern", "2x4x1", None, marks=pytest.mark.slow),
        pytest.param("accumulation", "2x4x1", 2, marks=pytest.mark.slow),
    ],
)
def test_losses_and_gradients_are_those_of_one_device(name, mesh, inner):
    cfg, mesh = by_hand(config(name), mesh, inner)
    assert_same(results(cfg, mesh), on_one_device(name), 1e-5)


@pytest.mark.slow
def test_bfloat16_is_as_near_as_its_rounding():
    cfg = config("accumulation", model__dtype="bfloat16")
    assert_same(results(*by_hand(cfg, "2x4x1", 2)), results(cfg, make_mesh("2x4x1")), 3e-2)


@pytest.mark.parametrize(
    "mesh",
    [MeshConfig(data=2, fsdp=4, fsdp_inner=2), pytest.param(MeshConfig(data=8, fsdp=1), marks=pytest.mark.slow)],
    ids=["2x4x1", "8x1x1"],
)
def test_training_is_the_same(mesh):
    """Norms, clipping, updates and the count of skipped steps come after, from sharded gradients."""
    cfg = change(TINY, optimizer__clip_norm=0.5, optimizer__weight_decay=0.1, model__dropout=0.1, mesh=mesh)
    batches, params = [random_batch(cfg, seed) for seed in range(3)], random_params(cfg.model)
    name = f"{mesh.data}x{mesh.fsdp}x1"
    auto, expected = fit(change(cfg, mesh__fsdp_inner=None), batches, params=params, mesh=name)
    found, updated = fit(change(cfg, mesh__collectives="manual"), batches, params=params, mesh=name)
    for a, b in zip(found, auto, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6)
    assert_close(updated, expected, 1e-5)


@pytest.mark.slow
def test_a_run_evaluates_samples_and_goes_on_with_either(corpus, tmp_path):
    cfg = text_config(
        corpus,
        mesh__fsdp=-1,
        eval_every=2,
        sample_every=2,
        sample__prompts=("a",),
        sample__max_new_tokens=2,
        checkpoint__last=True,
    )
    hand = change(cfg, mesh__collectives="manual", mesh__fsdp_inner=4)
    _, whole = launch(change(cfg, steps=4), tmp_path / "auto", devices=8)
    launch(change(hand, steps=2), tmp_path / "w", devices=8)
    status, lines = launch(change(cfg, steps=4), tmp_path / "w", devices=8)
    assert status == 0
    for tag in ("train/loss", "train/grad_norm", "eval/loss"):
        assert series(lines, tag) == pytest.approx(series(whole, tag), rel=1e-5)


# ---- what is sent, and when


def collectives(cfg, mesh):
    """name -> shapes that are sent, of the gradients' program; `loop` for those inside loops."""
    with surroundings(mesh, cfg.model.dtype):
        jaxpr = jax.make_jaxpr(functools.partial(step.gradients, cfg=cfg))(*arguments(cfg, mesh))
    found = {"sums": [], "sums in loops": [], "gathers": [], "scatters": [], "exchanges": []}
    kinds = dict(all_gather="gathers", reduce_scatter="scatters", psum_scatter="scatters", all_to_all="exchanges")

    def walk(jaxpr, loop):
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            kind = ("sums in loops" if loop else "sums") if name.startswith("psum") and name not in kinds else None
            if (kind := kinds.get(name, kind)) is not None:
                found[kind] += [v.aval for v in eqn.invars]
            for value in eqn.params.values():
                for inner in value if isinstance(value, (tuple, list)) else [value]:
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        walk(inner, loop or name in ("scan", "while"))

    walk(jaxpr.jaxpr, False)
    return found


def test_replicas_are_summed_once_in_a_step():
    cfg, mesh = by_hand(config("accumulation"), "2x4x1", None)
    sent = collectives(cfg, mesh)
    assert not sent["sums in loops"]
    arrays = len(jax.tree.leaves(random_params(cfg.model)))
    assert len(sent["sums"]) == arrays + 2  # and two losses


@pytest.mark.parametrize(("inner", "dtype"), [(None, "bfloat16"), (2, "bfloat16"), (2, "float16")])
def test_weights_travel_in_the_compute_dtype_as_matrices(inner, dtype):
    cfg = config("dropout", model__dtype=dtype, model__remat="full")
    sent = collectives(*by_hand(cfg, "1x8x1", inner))
    weights = [a for a in sent["gathers"] if a.dtype == dtype]
    steps = 1 if inner is None else 2
    # Seven matrices of a layer in the forward and in the backward pass, and the head; of the embedding, columns along the inner axis.
    assert len(weights) == steps * (2 * 7 + 1) + steps - 1
    assert len(sent["scatters"]) == steps * (7 + 1) + steps - 1
    assert {a.dtype for a in sent["scatters"]} == {jnp.dtype(jnp.bfloat16)}  # float16 does not hold sums over tokens
    assert {a.ndim for a in weights} == {2}


@pytest.mark.parametrize(("vocab_size", "exchanged"), [(64, True), (12, False)])
def test_activations_travel_where_they_are_less_than_the_table(vocab_size, exchanged):
    cfg = config("dropout", model__vocab_size=vocab_size, model__dim=32, model__mlp__hidden=48)
    sent = collectives(*by_hand(cfg, "1x8x1", None))
    assert len(sent["exchanges"]) == (2 if exchanged else 0)
    tables = [a for a in sent["gathers"] if a.shape == (4, vocab_size)]
    assert len(tables) == (1 if exchanged else 2)  # the head, and the embedding


# ---- the factors of fsdp


def grid(*sizes):
    return [tuple(map(int, c)) for c in np.ndindex(*sizes)]


@pytest.mark.parametrize(
    ("coords", "n"),
    [
        (grid(16, 16, 1), 16),
        (grid(4, 4, 4), 4),
        (grid(8, 8, 8), 8),
        (grid(8, 4, 1), 4),
        (grid(2, 2, 1), 2),
        (grid(16, 1, 1), 16),
        (grid(1, 1, 1), 1),
        ([(0, 0, 0), (1, 1, 0), (0, 1, 0), (1, 0, 0)], 1),  # no line in this order
        ([c for c in grid(4, 4, 4) for _ in range(2)], 8),  # two cores on a chip
    ],
)
def test_factors_follow_from_the_torus(coords, n):
    assert longest_line(coords) == n


def test_factors_change_no_place_of_a_shard():
    plain, factored = make_mesh("2x4x1"), make_mesh("2x4x1", MeshConfig(collectives="manual", fsdp_inner=2))
    assert dict(factored.shape) == {"data": 2, "fsdp": 2, "fsdp_inner": 2, "expert": 1, "tensor": 1}
    assert mesh_sizes(factored) == mesh_sizes(plain) == {"data": 2, "fsdp": 4, "expert": 1, "tensor": 1}
    specs = model_params(TINY.model)
    same = lambda a, b, shape: a.devices_indices_map(shape) == b.devices_indices_map(shape)
    assert same(batch_sharding(plain), batch_sharding(factored), (8, 16))
    pairs = zip(*(jax.tree.leaves(shardings(specs, mesh)) for mesh in (plain, factored)), strict=True)
    for (name, p), (a, b) in zip(named(specs), pairs, strict=True):
        assert same(a, b, p.full_shape), name
    assert startup.parameter_table(specs, factored) == startup.parameter_table(specs, plain)
    text = startup.describe_mesh(MeshConfig(), factored)
    assert text == "data=2, fsdp=4, expert=1, tensor=1; fsdp as 2 x 2"


def test_a_factor_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"mesh\.fsdp_inner=3: does not divide mesh.fsdp, here 8"):
        make_mesh("1x8x1", MeshConfig(collectives="manual", fsdp_inner=3))
