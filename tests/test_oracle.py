"""Every single-choice departure from one recipe equals the plain model: logits, gradients, a three-step loss curve."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import MESHES, TINY, assert_close, change, make_mesh, random_batch, random_params

from minitf import sharding
from minitf import step as step_lib
from minitf.model import reference
from minitf.model.attention import ATTENTION
from minitf.model.mlp import MLP
from minitf.model.transformer import NORMS, POSITIONS, REMAT, model, model_params

LEARNING_RATE = 0.1
STEPS = 3
TOLERANCE = 1e-5

# Sizes that every mesh divides; a query width (8 x 4) that is not the model's (16).
BASE = change(
    TINY,
    model__attention__num_heads=8,
    model__attention__num_kv_heads=4,
    model__attention__head_dim=4,
    model__attention__window=5,
)
DEPARTURES = {
    "base": {},
    "sliding": dict(model__attention__kind="sliding"),
    "alternating": dict(model__pattern=("full", "sliding"), model__num_layers=3),  # one period, and a layer left over
    "multi_head": dict(model__attention__num_kv_heads=None),
    "attention_scale": dict(model__attention__scale=0.2),
    # A norm of small numbers magnifies their rounding, hence the epsilon.
    "post_norms": dict(model__post_norms=True, model__norm="rms_norm_offset", model__norm_eps=1e-2),
    "embedding_scale": dict(model__embedding_scale=4.0, model__tie_embeddings=True),
    "attention_softcap": dict(model__attention__softcap=2.0),
    "qk_norm": dict(model__attention__qk_norm=True, model__attention__qk_norm_eps=1e-2),
    "qkv_bias": dict(model__attention__bias="qkv"),
    "qkvo_bias": dict(model__attention__bias="qkvo"),
    "learned": dict(model__positions="learned"),
    # The two frequencies turn 5.7 and 0.06 times in 36 positions: one stays, one is stretched. 32 of 40 times is in between.
    "rope_llama3": dict(model__positions="rope_llama3", model__attention__rope_original_len=36),
    "rope_llama3_between": dict(
        model__positions="rope_llama3",
        model__attention__rope_original_len=200,
        model__attention__rope_factor=2.0,
        model__attention__rope_high_freq_factor=40.0,
    ),
    "none": dict(model__positions="none"),
    "layer_norm": dict(model__norm="layer_norm"),
    "layer_norm_no_bias": dict(model__norm="layer_norm_no_bias"),
    "gelu": dict(model__mlp__kind="gelu"),
    "gelu_erf": dict(model__mlp__kind="gelu_erf"),
    "relu_squared": dict(model__mlp__kind="relu_squared"),
    "geglu": dict(model__mlp__kind="geglu"),
    "mlp_bias": dict(model__mlp__bias=True),
    "tied": dict(model__tie_embeddings=True),
    "logit_softcap": dict(model__logit_softcap=3.0),
    "z_loss": dict(loss__z_loss=0.1),
}
WAYS = {  # to compute the same: other paths through the code, not other models
    "reference_kernel": dict(model__attention__implementation="reference"),
    "rope_base": dict(model__attention__rope_base=100.0),
    "documents": dict(data__isolate_documents=True),
    "accumulation": dict(accumulation=2),
    "unroll": dict(model__unroll=2),
    "chunked_loss": dict(loss__chunk=6),  # with a rest
}


def departure(name: str):
    return change(BASE, **(DEPARTURES | WAYS)[name])


def test_every_kind_in_every_table_is_a_departure():
    configs = [departure(name).model for name in DEPARTURES]
    assert {k for c in configs for k in (c.pattern or (c.attention.kind,))} == set(ATTENTION)
    assert {c.mlp.kind for c in configs} == set(MLP)
    assert {c.norm for c in configs} == set(NORMS)
    assert {c.positions for c in configs} == set(POSITIONS)


def batch_for(cfg) -> dict:
    """Random ids with some targets that do not count; with isolation, three documents a row and padding at its end."""
    weights = np.random.default_rng(1).integers(0, 4, (cfg.batch_size, cfg.seq_len)) > 0
    batch = random_batch(cfg, weights=weights)
    if cfg.data.isolate_documents:
        segments = np.repeat([1, 2, 3, 0], [5, 3, 6, 2])[None].repeat(cfg.batch_size, 0)
        positions = np.r_[np.arange(5), np.arange(3), np.arange(6), 0, 0][None].repeat(cfg.batch_size, 0)
        batch |= {"segments": jnp.asarray(segments), "positions": jnp.asarray(positions)}
    return batch


def curve(step, params, batch):
    """(losses of three steps of plain SGD, gradients of the first), compiled as one program."""

    def body(params, _):
        loss, grads = step(params, batch)
        return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads), (loss, grads)

    _, (losses, grads) = jax.lax.scan(body, params, None, length=STEPS)
    return losses, jax.tree.map(lambda g: g[0], grads)


@functools.cache
def expected(name: str):
    cfg = departure(name)
    batch, params = batch_for(cfg), random_params(cfg.model)
    plain = functools.partial(jax.value_and_grad(reference.loss_fn), cfg=cfg.model, z_loss=cfg.loss.z_loss)

    @jax.jit
    def run(params, batch):
        logits = reference.model(params, batch["inputs"], cfg.model, batch.get("positions"), batch.get("segments"))
        return logits, curve(plain, params, batch)

    return jax.tree.map(np.asarray, run(params, batch))


def actual(cfg, mesh_name: str):
    batch, params = batch_for(cfg), random_params(cfg.model)
    mesh = make_mesh(mesh_name)

    def step(params, batch):
        losses, grads = step_lib.gradients(params, batch, jnp.int32(0), cfg)
        return losses["loss"] + (cfg.loss.z_loss or 0) * losses.get("z_loss", 0), grads

    with jax.set_mesh(mesh):
        layout = sharding.shardings(model_params(cfg.model), mesh)
        placed = jax.device_put(params, layout), jax.device_put(batch, sharding.batch_sharding(mesh))

        @jax.jit
        def logits(params, batch):
            keywords = dict(positions=batch.get("positions"), segments=batch.get("segments"))
            return model(params, batch["inputs"], cfg.model, **keywords)

        return jax.tree.map(np.asarray, (logits(*placed), jax.jit(functools.partial(curve, step))(*placed)))


def check(name: str, remat: str, mesh: str) -> None:
    logits, (losses, grads) = actual(change(departure(name), model__remat=remat), mesh)
    logits_0, (losses_0, grads_0) = expected(name)
    assert np.abs(logits_0).max() > 0.1
    assert losses_0[-1] < losses_0[0]
    assert_close({"logits": logits}, {"logits": logits_0}, TOLERANCE, relative_to_largest=True)
    assert_close(grads, grads_0, TOLERANCE, relative_to_largest=True)
    assert_close({"losses": losses}, {"losses": losses_0}, TOLERANCE, relative_to_largest=True)


FAST = [("none", "1"), ("full", "2x2x2")]
SLOW = [("full", "1")] + [("none", mesh) for mesh in MESHES if mesh not in ("1", "2x2x2")]  # every other mesh once
# Every other policy on a mesh, with all that a policy names: a gated MLP and one without, two kinds of layers.
POLICIES = [(remat, "2x2x2") for remat in REMAT if remat not in ("none", "full")]


@pytest.mark.parametrize(("remat", "mesh"), FAST)
@pytest.mark.parametrize("name", DEPARTURES)
def test_equals_reference(name, remat, mesh):
    check(name, remat, mesh)


@pytest.mark.parametrize(("remat", "mesh"), FAST[-1:])
@pytest.mark.parametrize("name", ["documents", "accumulation", "chunked_loss"])
def test_other_ways_equal_the_reference(name, remat, mesh):
    check(name, remat, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "remat", "mesh"),
    [(n, *case) for n in DEPARTURES for case in SLOW]
    + [(n, *case) for n in WAYS for case in FAST + SLOW]
    + [(n, *case) for n in ("base", "geglu", "alternating", "documents") for case in POLICIES],
)
def test_equals_reference_on_every_mesh_and_policy(name, remat, mesh):
    check(name, remat, mesh)
