"""Grouped products: every way to compute them, and what it may rely on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import assert_close, slow

from minitf.model.experts import own_experts
from minitf.model.grouped import GROUPED, megablox_product
from minitf.model.mlp import MlpConfig

N, D, F = 70, 24, 16
PRODUCTS = {name: kind.apply for name, kind in GROUPED.items()} | {
    "megablox": functools.partial(megablox_product, interpret=True)
}
SIZES = {  # rows of each group; the rest of the N rows are beyond all groups
    "uneven": (30, 1, 20, 9),
    "some empty": (0, 40, 0, 15),
    "one group has all": (0, N, 0, 0),
    "no row at all": (0, 0, 0, 0),
    "all rows": (20, 20, 20, 10),
}
kinds = pytest.mark.parametrize("kind", slow(PRODUCTS, but=("blocks", "megablox")))


def operands(sizes, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    x, w, g = (rng.standard_normal(shape) for shape in ((N, D), (len(sizes), D, F), (N, F)))
    return *(jnp.asarray(a, dtype) for a in (x, w, g)), jnp.asarray(sizes, jnp.int32)


def results(kind, x, w, g, sizes):
    """(product, gradient of x, gradient of w), without the undefined rows."""
    y, vjp = jax.vjp(lambda x, w: PRODUCTS[kind](x, w, sizes), x, w)
    dx, dw = vjp(g)
    own = int(sizes.sum())
    return y[:own], dx[:own], dw


def plain(x, w, g, sizes):
    """The same by numpy, in float64."""
    x, w, g = (np.asarray(a, np.float64) for a in (x, w, g))
    y, dx, dw, begin = np.zeros_like(g), np.zeros_like(x), np.zeros_like(w), 0
    for e, n in enumerate(sizes.tolist()):
        rows = slice(begin, begin + n)
        y[rows], dx[rows], dw[e] = x[rows] @ w[e], g[rows] @ w[e].T, x[rows].T @ g[rows]
        begin += n
    return y[:begin], dx[:begin], dw


@kinds
@pytest.mark.parametrize("sizes", SIZES)
def test_a_product_and_its_gradients_are_those_of_each_group(kind, sizes):
    given = operands(SIZES[sizes])
    found = results(kind, *given)
    assert_close(found, plain(*given), 1e-5)
    empty = np.asarray(SIZES[sizes]) == 0
    assert np.all(np.asarray(found[2])[empty] == 0)


@pytest.mark.parametrize("kind", ["blocks", "megablox"])
@pytest.mark.parametrize("beyond", [np.nan, np.inf, 1e30])
def test_rows_beyond_all_groups_change_nothing(kind, beyond):
    """Whatever other kinds of products leave there."""
    x, w, g, sizes = operands(SIZES["uneven"])
    own = jnp.arange(N)[:, None] < sizes.sum()
    before = results(kind, x, w, g, sizes)
    after = results(kind, jnp.where(own, x, beyond), w, jnp.where(own, g, beyond), sizes)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", slow(["blocks", "megablox", "ragged"], but=["blocks"]))
def test_sixteen_bits_are_summed_in_float32(kind):
    """1 + 2^-9 + ... (256 times) is 1.5; summed in bfloat16 it stays 1."""
    n = 257
    terms = jnp.full((n,), 2.0**-9).at[0].set(1).astype(jnp.bfloat16)
    ones = lambda *shape: jnp.ones(shape, jnp.bfloat16)
    product, sizes = PRODUCTS[kind], lambda rows: jnp.asarray([rows, 0], jnp.int32)
    y = product(jnp.broadcast_to(terms, (8, n)), ones(2, n, 8), sizes(8))
    _, vjp = jax.vjp(lambda w: product(ones(n, 8), w, sizes(n)), ones(2, 8, 8))
    (dw,) = vjp(jnp.broadcast_to(terms[:, None], (n, 8)))
    assert (y.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert np.all(np.asarray(y, np.float32) == 1.5)
    assert np.all(np.asarray(dw[0], np.float32) == 1.5)


@pytest.mark.parametrize(("D", "F"), [(128, 128), (96, 200), pytest.param(1100, 136, marks=pytest.mark.slow)])
def test_tiles_of_the_kernel_may_be_cut(D, F):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((150, D), (3, D, F)))
    given = x, w, jnp.ones((150, F)), jnp.asarray([70, 0, 60], jnp.int32)
    assert_close(results("megablox", *given), plain(*given), 1e-4)


# ---- in a mixture


@pytest.mark.parametrize("chosen", ["the same two", "any"])
def test_experts_of_a_device_in_as_many_chunks_as_they_have_rows(chosen):
    """Two of 16 experts, whose 1,200 rows are three chunks of 512; gradients too."""
    T, D, F, k = 600, 8, 4, 2
    cfg = MlpConfig(kind="swiglu", router="softmax", experts=16, experts_per_token=k)
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    weights = dict(gate=array(2, D, F), up=array(2, D, F), down=array(2, F, D))
    index = jnp.tile(jnp.asarray([5, 4]), (T, 1)) if chosen == "the same two" else jnp.asarray(rng.permuted(
        np.tile(np.arange(16), (T, 1)), axis=1)[:, :k])  # fmt: skip
    x, factors = array(1, T, D), jax.nn.sigmoid(array(1, T, k))

    def dense(weights, x, factors):
        h = jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, weights["gate"]))
        h *= jnp.einsum("bsd,edf->bsef", x, weights["up"])
        use = jnp.sum((index[None, ..., None] == 4 + jnp.arange(2)) * factors[..., None], axis=2)
        return jnp.einsum("bsef,efd,bse->bsd", h, weights["down"], use)

    mixed = lambda weights, x, factors: own_experts(4, weights, x, index[None], factors, cfg=cfg)
    probe = array(1, T, D)
    found, expected = (
        jax.jit(jax.value_and_grad(lambda *a, f=f: jnp.sum(f(*a) * probe), argnums=(0, 1, 2)))(weights, x, factors)
        for f in (mixed, dense)
    )
    assert_close(found, expected, 1e-5, relative_to_largest=True)
