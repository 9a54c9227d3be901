"""Decoding token by token from cached keys and values gives what the forward pass over the whole text gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import TINY, change, make_mesh, random_params, slow

from minitf.model.attention import ATTENTION, slot_times
from minitf.model.mlp import MlpConfig
from minitf.model.transformer import POSITIONS, hidden, logits, model, new_cache

LENGTHS = (3, 9, 1, 9)  # of prompts, one a row
MORE = 7  # tokens decoded behind them


def configured(**changes):
    cfg = change(
        TINY, model__max_seq_len=32, model__num_layers=3, model__attention__window=5, model__tie_embeddings=True
    )
    return change(cfg, **changes).model


def texts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 64, n + MORE) for n in LENGTHS]


def decoded(params, cfg, mesh, length):
    """float32 [rows, 1 + MORE, V]: the logits after each prompt and after each token behind it, from a cache."""
    S = max(LENGTHS)
    first = jnp.array([S - n for n in LENGTHS], jnp.int32)
    prompts = np.zeros((len(LENGTHS), S), np.int32)
    for row, ids, n in zip(prompts, texts(), LENGTHS, strict=True):
        row[S - n :] = ids[:n]

    def step(params, tokens, cache):
        found = hidden(params, tokens, cfg, cache=cache)
        return logits(params, found.x_BSD[:, -1:], cfg)[:, 0], found.cache

    with jax.set_mesh(mesh):
        step = jax.jit(step)
        out, cache = step(params, prompts, new_cache(cfg, first, length))
        found = [out]
        for t in range(MORE):
            token = np.array([[ids[n + t]] for ids, n in zip(texts(), LENGTHS, strict=True)])
            out, cache = step(params, token, cache)
            found.append(out)
    assert int(cache.now) == S + MORE
    return np.stack([np.asarray(f) for f in found], axis=1)


def whole(params, cfg):
    """The same from one forward pass for each row alone."""
    rows = []
    for ids, n in zip(texts(), LENGTHS, strict=True):
        rows.append(np.asarray(jax.jit(lambda i: model(params, i, cfg))(ids[None]))[0, n - 1 :])
    return np.stack(rows)


# Every kind with one way of positions, and every way of positions with one kind; the other pairs in the slow suite.
KINDS = [*ATTENTION, "pattern"]
PAIRS = [(kind, positions) for kind in KINDS for positions in POSITIONS]


@pytest.mark.parametrize(
    ("kind", "positions"), slow(PAIRS, but=[p for p in PAIRS if p[0] == "pattern" or p[1] == "rope"])
)
def test_decoding_equals_the_whole_forward(kind, positions):
    kinds = dict(model__pattern=("sliding", "full")) if kind == "pattern" else dict(model__attention__kind=kind)
    cfg = configured(**kinds, model__positions=positions, model__attention__qk_norm=True)
    params = random_params(cfg)
    expected = whole(params, cfg)
    # A cache with room, and one that is just full.
    for length in (30, max(LENGTHS) + MORE) if positions == "rope" else (30,):
        np.testing.assert_allclose(
            decoded(params, cfg, make_mesh("1"), length), expected, atol=1e-5 * np.abs(expected).max()
        )


EXPERTS = MlpConfig(kind="swiglu", hidden=8, router="sigmoid", experts=8, shared=1, dense_first=1)


@pytest.mark.parametrize(
    "changes",
    [dict(model__attention__softcap=3.0), dict(model__attention__bias="qkvo"), dict(model__mlp=EXPERTS)],
)
def test_decoding_equals_the_whole_forward_with_other_settings(changes):
    cfg = configured(**changes)
    params = random_params(cfg)
    expected = whole(params, cfg)
    np.testing.assert_allclose(decoded(params, cfg, make_mesh("1"), 20), expected, atol=1e-5 * np.abs(expected).max())


def test_decoding_with_tensor_parallelism_equals_the_whole_forward():
    cfg = configured(model__pattern=("sliding", "full"))
    params = random_params(cfg)
    expected = whole(params, cfg)
    found = decoded(params, cfg, make_mesh("2x2x2"), 20)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def test_bfloat16_decoding_is_close_to_the_whole_forward():
    cfg = configured(model__dtype="bfloat16", model__pattern=("sliding", "full"))
    params = random_params(cfg, scale=0.1)
    expected = whole(params, cfg)
    np.testing.assert_allclose(decoded(params, cfg, make_mesh("1"), 20), expected, atol=5e-2)


def test_a_window_keeps_no_more_than_it_sees():
    cfg = configured(model__pattern=("sliding", "full"))
    cache = new_cache(cfg, jnp.zeros(2, jnp.int32), 20)
    assert [stacks[0].shape for stacks in cache.stacks] == [(2, 2, 5, 2, 4), (1, 2, 20, 2, 4)]


@pytest.mark.parametrize("T", [1, 4, 5])
def test_slots_hold_the_last_tokens(T):
    for now in range(12):
        times = slot_times(jnp.int32(now), T).tolist()
        assert sorted(times) == list(range(now - T + 1, now + 1))
        assert all(time % T == slot for slot, time in enumerate(times))
