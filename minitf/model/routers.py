"""Routers: which experts of a mixture process a token, and with which weights. Functions of scores, which are float32."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name


class Routing(NamedTuple):
    """What a router decides for tokens [...]."""

    experts: jax.Array  # int32 [..., k]: the chosen ones, best first, each once
    weights: jax.Array  # float32 [..., k]: factors of their outputs
    probabilities: jax.Array  # float32 [..., E]: shares of all experts, which sum to 1, for balance


def is_index(scores: jax.Array, index: jax.Array) -> jax.Array:
    """bool, shaped as scores [..., E]: whether an entry's place is the index [...]."""
    return jnp.arange(scores.shape[-1]) == index[..., None]


def best(scores: jax.Array, k: int) -> jax.Array:
    """int32 [..., k]: indices of the k largest of [..., E], largest first; of equal ones the first. (As by `jax.lax.top_k`, for which
    XLA's CPU compiler would all-gather sharded rows.) Named "router", so that every policy of remat saves it."""
    found = []
    for _ in range(k):
        found.append(jnp.argmax(scores, axis=-1))
        scores = jnp.where(is_index(scores, found[-1]), -jnp.inf, scores)
    return checkpoint_name(jnp.stack(found, axis=-1).astype(jnp.int32), "router")


def taken(values: jax.Array, index: jax.Array) -> jax.Array:
    """values [..., E] at index [..., k]; by comparison, as the gradient of an indexed read would be a scatter."""
    values = values[..., None, :]
    return jnp.sum(jnp.where(is_index(values, index), values, 0), axis=-1)


def weighed(chosen: jax.Array, cfg: Any) -> jax.Array:
    """The scores of the chosen experts as weights; 1e-20, as in DeepSeek-V3, lets them all be 0."""
    if cfg.normalise_weights:
        chosen = chosen / (jnp.sum(chosen, axis=-1, keepdims=True) + 1e-20)
    return chosen * cfg.router_scale


def softmax(logits: jax.Array, bias: None, cfg: Any) -> Routing:
    """The largest of the probabilities over all experts (Mixtral, arXiv:2401.04088; OLMoE, arXiv:2409.02060)."""
    p = jax.nn.softmax(logits, axis=-1)
    index = best(logits, cfg.experts_per_token)
    return Routing(index, weighed(taken(p, index), cfg), p)


def softmax_of_chosen(logits: jax.Array, bias: None, cfg: Any) -> Routing:
    """The probabilities over the chosen experts alone (gpt-oss, arXiv:2508.10925): those of `softmax`, normalised."""
    index = best(logits, cfg.experts_per_token)
    weights = jax.nn.softmax(taken(logits, index), axis=-1) * cfg.router_scale
    return Routing(index, weights, jax.nn.softmax(logits, axis=-1))


def sigmoid(logits: jax.Array, bias: jax.Array, cfg: Any) -> Routing:
    """DeepSeek-V3 (arXiv:2412.19437, section 2.1.2): the bias takes part in the choice alone; a token's experts are of the
    groups_per_token groups whose two best sum highest."""
    s = jax.nn.sigmoid(logits)
    choice = jax.lax.stop_gradient(s + bias)
    if cfg.groups > 1:
        grouped = choice.reshape(*choice.shape[:-1], cfg.groups, -1)
        score = jnp.sum(taken(grouped, best(grouped, min(2, grouped.shape[-1]))), axis=-1)
        allowed = jnp.any(is_index(score[..., None, :], best(score, cfg.groups_per_token)), axis=-2)
        choice = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(choice.shape)
    index = best(choice, cfg.experts_per_token)
    return Routing(index, weighed(taken(s, index), cfg), s / (jnp.sum(s, axis=-1, keepdims=True) + 1e-20))


class RouterKind(NamedTuple):
    meaning: str
    apply: Callable[[jax.Array, jax.Array | None, Any], Routing] | None = None  # (logits [..., E], bias [E], MlpConfig)
    reads: tuple[str, ...] = ()
    biased: bool = False  # whether it reads a bias, which is no weight


MIXTURE = ("experts", "experts_per_token", "router_scale", "shared", "grouped", "dense_first", "every", "dense_hidden")
GROUPS = ("groups", "groups_per_token")
ROUTERS = {
    "none": RouterKind("no mixture: every layer has one MLP"),
    "softmax": RouterKind("the most probable experts (Mixtral, Qwen3)", softmax, (*MIXTURE, "normalise_weights")),
    "softmax_of_chosen": RouterKind("probabilities over the chosen alone (gpt-oss)", softmax_of_chosen, MIXTURE),
    "sigmoid": RouterKind(
        "sigmoids, with groups of experts and a bias of the choice alone (DeepSeek-V3)",
        sigmoid,
        (*MIXTURE, "normalise_weights", *GROUPS),
        biased=True,
    ),
}
