"""A mixture of experts in place of an MLP: no token is ever dropped, so that nothing depends on how tokens are grouped."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from minitf.model.grouped import GROUPED
from minitf.model.mlp import MLP, MlpConfig, gated_params, width
from minitf.model.routers import ROUTERS, Routing, is_index
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


class Sorting(NamedTuple):
    """Order by expert of N = T k rows, one for each token and expert of it. Rows of other devices' experts come last and are masked:
    grouped products leave them undefined, and 0 times NaN is NaN."""

    order_N: jax.Array  # token number times k plus place among the token's experts
    places_Tk: jax.Array  # its inverse
    own_Tk1: jax.Array  # bool


@jax.custom_vjp
def to_rows(x_TD: jax.Array, by: Sorting) -> jax.Array:
    """[N, D]: the token of each row. Gradients here and below are reads: scatters are slow on TPUs to compile and to run."""
    return x_TD[by.order_N // by.own_Tk1.shape[1]]


def to_rows_bwd(by, g):
    return jnp.sum(jnp.where(by.own_Tk1, g[by.places_Tk], 0), axis=1, dtype=jnp.float32).astype(g.dtype), None


to_rows.defvjp(lambda x, by: (to_rows(x, by), by), to_rows_bwd)


@jax.custom_vjp
def from_rows(y_ND: jax.Array, by: Sorting) -> jax.Array:
    """[T, k, D]: the rows of each token."""
    return jnp.where(by.own_Tk1, y_ND[by.places_Tk], 0)


def from_rows_bwd(by, g):
    return jnp.where(by.own_Tk1, g, 0).reshape(-1, g.shape[-1])[by.order_N], None


from_rows.defvjp(lambda y, by: (from_rows(y, by), by), from_rows_bwd)


def own_experts(first, weights, x_BSD, index_BSk, factors_BSk, *, product: Callable, activation: Callable) -> jax.Array:
    """The weighted sum over those of each token's experts that these weights are of, numbers `first` and following: [B, S, D] in x's
    dtype, summed in float32."""
    E, shape = len(weights["gate"]), (-1, index_BSk.shape[-1])
    number_Tk = index_BSk.reshape(shape) - first
    own_Tk = (number_Tk >= 0) & (number_Tk < E)
    group_N = jnp.where(own_Tk, number_Tk, E).reshape(-1)
    order = jnp.argsort(group_N, stable=True)
    by = Sorting(order, jnp.argsort(order).reshape(shape), own_Tk[..., None])
    sizes_E = jnp.sum(group_N[:, None] == jnp.arange(E), axis=0, dtype=jnp.int32)

    def projected(name: str, x: jax.Array) -> jax.Array:
        return checkpoint_name(product(x, weights[name], sizes_E), name)

    x = to_rows(x_BSD.reshape(-1, x_BSD.shape[-1]), by)
    y_TkD = from_rows(projected("down", activation(projected("gate", x)) * projected("up", x)), by)
    y = jnp.sum(y_TkD.astype(jnp.float32) * factors_BSk.reshape(*shape, 1), axis=1)
    return y.astype(x_BSD.dtype).reshape(x_BSD.shape)


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
    index, factors = (checkpoint_name(a, "router") for a in routing[:2])
    kind, product = MLP[cfg.kind], GROUPED["blocks" if cfg.grouped == "auto" else cfg.grouped].apply
    f = functools.partial(own_experts, product=product, activation=kind.gate)
    y = by_expert(f, params["experts"], mlp_params(cfg, x_BSD.shape[-1])["experts"], x_BSD, index, factors)
    if cfg.shared:
        y += kind.apply(params["shared"], x_BSD, cfg)
    return y, {} if tokens is None else balance_sums(logits, routing._replace(experts=index), tokens)


def balanced(bias_E: jax.Array, uses_E: jax.Array, rate: float) -> jax.Array:
    """A router's bias after a step in which so many tokens used each expert: raised by `rate` for those used less than the mean,
    lowered for those used more (arXiv:2408.15664, algorithm 1)."""
    mean = jnp.mean(uses_E, axis=-1, keepdims=True, dtype=jnp.float32)
    return bias_E + rate * jnp.sign(mean - uses_E)
