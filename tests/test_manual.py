"""Collectives by hand give what XLA's give: losses and gradients of one device, on any mesh of data and fsdp."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import TINY, assert_close, change, make_mesh, random_batch, random_params

from minitf import sharding, step
from minitf.model.transformer import model_params

MODELS = {
    # More rows in the table than tokens on a device, so that activations are exchanged.
    "dropout": dict(model__vocab_size=64, model__dropout=0.2),
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


def compiled(cfg, mesh):
    """(gradients' program on a mesh, its arguments)"""
    layout = sharding.shardings(model_params(cfg.model), mesh)
    with sharding.surroundings(mesh, cfg.model.dtype):
        params = jax.device_put(random_params(cfg.model), layout)
        batch = jax.device_put(batch_of(cfg), sharding.batch_sharding(mesh))
        f = jax.jit(functools.partial(step.gradients, cfg=cfg))
        arguments = params, batch, jnp.int32(3)
        return f.lower(*arguments).compile(), arguments


def results(cfg, mesh):
    f, arguments = compiled(cfg, mesh)
    with sharding.surroundings(mesh, cfg.model.dtype):
        return jax.tree.map(lambda a: np.asarray(a, np.float64), f(*arguments))


@functools.cache
def on_one_device(name):
    return results(config(name), make_mesh("1"))


def by_hand(cfg, mesh, inner):
    cfg = change(cfg, mesh__collectives="manual", mesh__fsdp_inner=inner)
    return cfg, make_mesh(mesh, cfg.mesh)


def assert_same(found, expected, tolerance):
    """Losses, and each array of the gradient relative to its largest element."""
    (losses, grads), (expected_losses, expected_grads) = found, expected
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
        ("dropout", "1x8x1", None),
        ("dropout", "1x8x1", 4),
        ("tied", "2x4x1", 2),
        ("pattern", "2x4x1", None),
        ("accumulation", "2x4x1", 2),
    ],
)
def test_losses_and_gradients_are_those_of_one_device(name, mesh, inner):
    cfg, mesh = by_hand(config(name), mesh, inner)
    assert_same(results(cfg, mesh), on_one_device(name), 1e-5)
