"""A mixture of experts in place of an MLP: no token is ever dropped, so that nothing depends on how tokens are grouped."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from minitf.model.grouped import GROUPED
from minitf.model.mlp import MLP, MlpConfig, gated_params, width
from minitf.model.routers import ROUTERS, Routing, is_index, taken
from minitf.params import Param, tree_map
from minitf.sharding.exchange import by_expert

# float32 [B, ...]: sums over the tokens of each row, for loss, router's bias and metrics.
Aux = dict[str, jax.Array]


class Tokens(NamedTuple):
    """What balance is measured over: tokens count by their weights in the loss."""

    weights_BS: jax.Array
    segments_BS: jax.Array | None = None  # a sequence's tokens have one number; None: a row is a sequence


def mlp_params(cfg: MlpConfig, dim: int) -> dict[str, Any]:
    """Declarations of a layer's MLP, or of its mixture."""
    if cfg.router == "none":
        return MLP[cfg.kind].params(cfg, dim)
    E, stack = cfg.experts, dict(stack=(("experts", cfg.experts),), chosen=cfg.experts_per_token)
    specs: dict[str, Any] = dict(router=Param((dim, E), ("embed", "router"), "router", inputs=1))
    specs["experts"] = tree_map(lambda p: dataclasses.replace(p, **stack), gated_params(cfg, dim))
    if ROUTERS[cfg.router].biased:
        specs["router_bias"] = Param((E,), ("router",), "state")
    if cfg.shared:
        specs["shared"] = gated_params(dataclasses.replace(cfg, hidden=cfg.shared * width(cfg, dim)), dim)
    return specs


class SortedPairs(NamedTuple):
    """R pairs of a token and an expert, sorted by expert. Those of other devices' experts come last and are masked: products leave
    them undefined, and 0 times NaN is NaN."""

    pairs_R: jax.Array  # slot times T plus token
    places_nkt: jax.Array  # row of each pair, in n parts of t tokens
    own_nkt1: jax.Array  # bool: whether it is among these rows


@jax.custom_vjp
def to_rows(x_TD: jax.Array, by: SortedPairs) -> jax.Array:
    """[R, D]: the token of each row. Gradients here and below are reads: scatters are slow on TPUs to compile and to run."""
    return x_TD[by.pairs_R % len(x_TD)]


@jax.custom_vjp
def to_tokens(y_RD: jax.Array, by: SortedPairs) -> jax.Array:
    """[T, D]: the sum over each token's rows, in float32; one part after the other, to form little at a time."""
    part = lambda at: jnp.sum(jnp.where(at[1], y_RD[at[0]], 0), axis=0, dtype=jnp.float32).astype(y_RD.dtype)
    return jax.lax.map(part, by[1:]).reshape(-1, y_RD.shape[1])


to_rows.defvjp(lambda x, by: (to_rows(x, by), by), lambda by, g: (to_tokens(g, by), None))
to_tokens.defvjp(lambda y, by: (to_tokens(y, by), by), lambda by, g: (to_rows(g, by), None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def over_chunks(f: Callable, n: jax.Array, fixed: Any, x: Any) -> jax.Array:
    """The sum of f(i, fixed, x) over i < n. The backward pass computes f anew."""
    y = jnp.zeros_like(jax.eval_shape(f, 0, fixed, x))
    return jax.lax.fori_loop(0, n, lambda i, y: y + f(i, fixed, x), y)


def over_chunks_bwd(f, kept, g):
    n, fixed, x = kept
    one = lambda i, sums: jax.tree.map(jnp.add, sums, jax.vjp(functools.partial(f, i, fixed), x)[1](g)[0])
    return None, None, jax.lax.fori_loop(0, n, one, jax.tree.map(jnp.zeros_like, x))


over_chunks.defvjp(lambda f, *args: (over_chunks(f, *args), args), over_chunks_bwd)


def own_experts(first, weights, x_BSD, index_BSk, factors_BSk, *, cfg: MlpConfig) -> jax.Array:
    """The weighted sum over those of each token's experts whose weights these are, numbers `first` and following: [B, S, D] in x's
    dtype, summed in float32. A part of the experts computes in chunks of 1.25 times its rows at equal use, as many as it has."""
    E, k, D = len(weights["gate"]), index_BSk.shape[-1], x_BSD.shape[-1]
    product = GROUPED["blocks" if cfg.grouped == "auto" else cfg.grouped].apply
    number_kT = index_BSk.reshape(-1, k).T - first
    group_N = jnp.where((number_kT >= 0) & (number_kT < E), number_kT, E).reshape(-1)
    order_N = jnp.argsort(group_N, stable=True)
    ends_E = jnp.cumsum(jnp.sum(group_N[:, None] == jnp.arange(E), axis=0, dtype=jnp.int32))
    N, parts = len(order_N), cfg.experts // E
    R = N if parts == 1 else min(N, -(-5 * N // (4 * parts * 512)) * 512)
    places_nkt = jnp.moveaxis(jnp.argsort(order_N).reshape(k, math.gcd(parts, N // k), -1), 0, 1)

    def chunk(i: int | jax.Array, fixed: Any, x: Any) -> jax.Array:
        (order_N, places_nkt, ends_E), (weights, x_TD, factors_Tk) = fixed, x
        places, ends_E = places_nkt - i * R, jnp.clip(ends_E - i * R, 0, R)
        own = (places >= 0) & (places < ends_E[-1])
        by = SortedPairs(jax.lax.dynamic_slice_in_dim(order_N, i * R, R), places, own[..., None])
        named = lambda name, x: checkpoint_name(product(x, weights[name], jnp.diff(ends_E, prepend=0)), name)
        x_RD = to_rows(x_TD, by)
        factors_R1 = taken(to_rows(factors_Tk, by), (by.pairs_R // len(x_TD))[:, None])
        h_RF = MLP[cfg.kind].gate(named("gate", x_RD)) * named("up", x_RD) * factors_R1  # else down's output is kept
        return to_tokens(named("down", h_RF.astype(x_RD.dtype)), by)

    fixed = jnp.pad(order_N, (0, -N % R)), places_nkt, ends_E
    x = weights, x_BSD.reshape(-1, D), factors_BSk.reshape(-1, k)
    return (chunk(0, fixed, x) if R == N else over_chunks(chunk, -(-ends_E[-1] // R), fixed, x)).reshape(x_BSD.shape)


def of_sequence(x_BSE: jax.Array, segments_BS: jax.Array | None) -> jax.Array:
    """[B, S or 1, E]: for each token the sum over its sequence, which is consecutive."""
    if segments_BS is None:
        return jnp.sum(x_BSE, axis=1, keepdims=True)
    differs, at = segments_BS[:, 1:] != segments_BS[:, :-1], jnp.arange(segments_BS.shape[1])
    edge = lambda side: jnp.pad(differs, ((0, 0), side), constant_values=True)
    first = jax.lax.cummax(jnp.where(edge((1, 0)), at, 0), axis=1)
    last = jax.lax.cummin(jnp.where(edge((0, 1)), at, len(at)), axis=1, reverse=True)
    until, read = jnp.cumsum(x_BSE, axis=1), lambda a, index: jnp.take_along_axis(a, index[..., None], axis=1)
    return read(until, last) - read(until - x_BSE, first)


def balance_sums(logits_BSE: jax.Array, routing: Routing, tokens: Tokens) -> Aux:
    """Sums over the tokens of each row, [B], of their weight times

    balance:  sum_e f_e p_e, p the token's probabilities, f_e = E / (k n) times the number of those of its sequence's n tokens that use
              expert e; 1 if all are used equally (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)
    router_z: logsumexp(logits)^2 (ST-MoE, arXiv:2202.08906)
    entropy:  the entropy of p, in nats

    and uses, int32 [B, E]: number of tokens that use each expert. Tokens of weight 0 count nowhere.
    """
    E, k, weights_BS, p = logits_BSE.shape[-1], routing.experts.shape[-1], tokens.weights_BS, routing.probabilities
    counts = (weights_BS > 0).astype(jnp.int32)[..., None]
    uses = jnp.sum(is_index(logits_BSE[..., None, :], routing.experts), axis=-2, dtype=jnp.int32) * counts
    total = lambda x: of_sequence(x, tokens.segments_BS)
    each = {
        "balance": jnp.sum(total(uses) * (E / k) / jnp.maximum(total(counts), 1) * p, axis=-1),
        "router_z": jax.nn.logsumexp(logits_BSE, axis=-1) ** 2,
        "entropy": jnp.sum(jax.scipy.special.entr(jax.lax.stop_gradient(p)), axis=-1),
    }
    return {name: jnp.sum(x * weights_BS, axis=1) for name, x in each.items()} | {"uses": jnp.sum(uses, axis=1)}


def mlp(params: Any, x_BSD: jax.Array, cfg: MlpConfig, tokens: Tokens | None) -> tuple[jax.Array, Aux]:
    """(the MLP of x, or the sum of the shared experts and, weighted, of each token's, [B, S, D] in x's dtype; `balance_sums`, {}
    without a mixture or tokens). Scores and sum are float32."""
    if cfg.router == "none":
        return MLP[cfg.kind].apply(params, x_BSD, cfg), {}
    logits = jnp.einsum("bsd,de->bse", x_BSD.astype(jnp.float32), params["router"], precision="highest")
    routing = ROUTERS[cfg.router].apply(logits, params.get("router_bias"), cfg)
    f, specs = functools.partial(own_experts, cfg=cfg), mlp_params(cfg, x_BSD.shape[-1])["experts"]
    y = by_expert(f, params["experts"], specs, x_BSD, *routing[:2])
    if cfg.shared:
        y += MLP[cfg.kind].apply(params["shared"], x_BSD, cfg)
    return y, {} if tokens is None else balance_sums(logits, routing, tokens)


def balanced(bias_E: jax.Array, uses_E: jax.Array, rate: float) -> jax.Array:
    """A router's bias after a step in which so many tokens used each expert: raised by `rate` for those used less than the mean,
    lowered for those used more (arXiv:2408.15664, algorithm 1)."""
    mean = jnp.mean(uses_E, axis=-1, keepdims=True, dtype=jnp.float32)
    return bias_E + rate * jnp.sign(mean - uses_E)
