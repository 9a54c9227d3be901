"""Sums over tokens are as exact at 65,536 tokens as at 1,024: each array's gradient is the float32 sum of what pieces of the
batch give, in 16-bit types too."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import TINY, change, make_mesh, random_params

from minitf.model.transformer import model_params
from minitf.params import named, weights_of
from minitf.sharding.devices import surroundings
from minitf.sharding.mesh import batch_sharding
from minitf.sharding.rules import shardings
from minitf.training import step

LENGTH, PIECE, TOKENS = 256, 1024, 65_536
# Every kind of array that is summed over tokens: tables, matrices, biases, scales of norms and of heads, with every term of a loss.
EVERYTHING = change(
    TINY,
    seq_len=LENGTH,
    loss__z_loss=1e-3,
    loss__chunk=64,
    model__dim=16,
    model__num_layers=1,
    model__max_seq_len=LENGTH,
    model__positions="learned",
    model__norm="layer_norm",
    model__attention__num_heads=4,
    model__attention__num_kv_heads=2,
    model__attention__bias="qkvo",
    model__attention__qk_norm=True,
    model__mlp__kind="geglu",
    model__mlp__hidden=32,
    model__mlp__bias=True,
)
MODELS = {
    "own head": EVERYTHING,
    "tied": change(EVERYTHING, model__tie_embeddings=True, model__norm="rms_norm", model__mlp__kind="gelu"),
    # Experts, a shared one, a router and its losses of balance, behind a dense layer.
    "mixture": change(
        EVERYTHING,
        loss__balance=0.1,
        loss__router_z=1e-2,
        model__num_layers=2,
        model__mlp__bias=False,
        model__mlp__router="sigmoid",
        model__mlp__experts=8,
        model__mlp__hidden=16,
        model__mlp__shared=1,
        model__mlp__dense_first=1,
    ),
}
COMMON = {"text": 0.0, "one id": 0.9}  # share of places that hold one id, whatever else is there


def batch_of(text: str, tokens: int) -> dict[str, np.ndarray]:
    """Ids whose frequencies fall as 1 / rank, as words' do."""
    rng, V = np.random.default_rng(0), EVERYTHING.model.vocab_size
    frequencies = 1 / np.arange(1, V + 1)
    ids = rng.choice(V, tokens + 1, p=frequencies / frequencies.sum()).astype(np.int32)
    ids[rng.random(tokens + 1) < COMMON[text]] = 7
    rows = lambda a: a.reshape(-1, LENGTH)
    return {
        "inputs": rows(ids[:-1]),
        "targets": rows(ids[1:]),
        "weights": np.ones((tokens // LENGTH, LENGTH), np.float32),
    }


@functools.cache
def gradients(cfg, mesh):
    return mesh, jax.jit(functools.partial(step.gradients, step=jnp.int32(0), cfg=cfg))


def gradient(cfg, batch, mesh=None) -> dict[str, np.ndarray]:
    """Name -> the gradient of the mean over all tokens."""
    mesh = mesh or make_mesh("1")
    with surroundings(mesh, cfg.model.dtype):
        params = jax.device_put(random_params(cfg.model), shardings(model_params(cfg.model), mesh))
        batch = jax.device_put(batch, batch_sharding(mesh))
        _, grads = gradients(cfg, mesh)[1](params, batch)
    weights = weights_of(model_params(cfg.model), grads)  # a router's bias has none
    return {name: np.asarray(g, np.float64) for name, g in named(weights)}


@functools.cache
def of_pieces(model: str, dtype: str, text: str, tokens: int = TOKENS) -> dict[str, np.ndarray]:
    """The same from pieces of the batch, added up here."""
    cfg, batch, total = change(MODELS[model], model__dtype=dtype), batch_of(text, tokens), {}
    for i in range(0, tokens // LENGTH, PIECE // LENGTH):
        piece = {name: a[i : i + PIECE // LENGTH] for name, a in batch.items()}
        total = {name: total.get(name, 0) + g * PIECE / tokens for name, g in gradient(cfg, piece).items()}
    return total


def distances(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
    """Of each array, relative to its norm."""
    return {name: float(np.linalg.norm(found[name] - e) / np.linalg.norm(e)) for name, e in expected.items()}


def cases():
    """One in the fast suite. In the slow one every mesh where all tokens of a step are one sum whose terms have the same sign, and the
    other combinations on one mesh each, in turn."""
    on = [("auto", "1"), ("auto", "2x2x2"), ("auto", "1x8x1"), ("manual", "1x8x1"), ("manual", "2x4x1")]
    fast = "own head", "bfloat16", "one id", 16, "manual", "2x4x1"
    yield fast
    for i, case in enumerate(itertools.product(MODELS, ("bfloat16", "float16"), COMMON, (1, 16))):
        for ways in on if case[2:] == ("one id", 1) else [on[i % len(on)]]:
            if (*case, *ways) != fast:
                yield pytest.param(*case, *ways, marks=pytest.mark.slow)


@pytest.mark.parametrize(("model", "dtype", "text", "accumulation", "collectives", "mesh"), list(cases()))
def test_the_gradient_is_the_sum_of_that_of_pieces(model, dtype, text, accumulation, collectives, mesh):
    cfg = change(MODELS[model], model__dtype=dtype, accumulation=accumulation, mesh__collectives=collectives)
    expected = of_pieces(model, dtype, text)
    found = distances(gradient(cfg, batch_of(text, TOKENS), make_mesh(mesh, cfg.mesh)), expected)
    assert max(found.values()) < 1e-2, found
    if text == "one id":  # so that float16 would not hold the sums
        assert max(np.abs(e).max() for e in expected.values()) * TOKENS > np.finfo(np.float16).max


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_more_tokens_are_no_farther_from_float32(dtype):
    few, many = (
        of_pieces("own head", dtype, "text", 4096),
        gradient(change(EVERYTHING, model__dtype=dtype), batch_of("text", TOKENS)),
    )
    few = distances(few, of_pieces("own head", "float32", "text", 4096))
    many = distances(many, of_pieces("own head", "float32", "text"))
    rounding = 2.0**-9  # of a gradient in bfloat16
    assert not {name: (many[name], d) for name, d in few.items() if many[name] > d + rounding}
