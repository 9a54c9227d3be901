"""The next-token loss as sums over tokens, in chunks of the sequence so that logits of all positions never exist at once.

The gradient is computed in the forward pass, chunk by chunk, from the chunk's logits: no logits are saved, none are recomputed
unless `passes` is above 1, and the head's gradient is summed over devices once.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from minitf.model.ops import matmul, outer
from minitf.model.transformer import ModelConfig, head_logits, head_name, head_weight
from minitf.settings import setting
from minitf.sharding.seams import added, by_shard, travels


@dataclasses.dataclass(frozen=True)
class LossConfig:
    z_loss: float | None = setting(
        None,
        "weight of the mean squared log-partition (arXiv:2204.02311); None: not computed",
        above=0,
        may_change=True,
    )
    # Means over a mixture's layers. Their tokens' weights are known before the forward pass, so that neither mesh nor accumulation nor
    # padding changes them.
    balance: float | None = setting(
        None,
        "weight of a mixture's balance loss of each sequence (arXiv:2412.19437); None: 0",
        above=0,
        may_change=True,
    )
    router_z: float | None = setting(
        None, "weight of the routers' mean squared log-partition (arXiv:2202.08906); None: 0", above=0, may_change=True
    )
    bias_rate: float = setting(
        1e-3, "step of the bias that balances a sigmoid router (arXiv:2408.15664)", at_least=0, may_change=True
    )
    # Each chunk reads and writes the head's whole gradient in float32.
    chunk: int | None = setting(256, "positions whose logits exist at once; None: all", at_least=1, may_change=True)
    # Only one part at a time is in float32: the whole would be the largest array of a model with a large vocabulary.
    passes: int = setting(1, "parts of the head's gradient; each recomputes the logits", at_least=1, may_change=True)


class Parts(NamedTuple):
    """Activations, targets and weights of a chunk of positions."""

    x: jax.Array  # [B, C, D]
    targets: jax.Array  # [B, C]
    weights: jax.Array  # float32 [B, C]


# Weighted sums over each row's positions, float32 [B]: `loss` (nats), `z_loss` (squared log-partition).
Sums = dict[str, jax.Array]


class TokenScores(NamedTuple):
    """Intermediates of the per-token losses and their gradients."""

    logits: jax.Array  # float32 [B, C, V]
    log_partition: jax.Array  # [B, C]
    is_target: jax.Array  # bool [B, C, V]


def token_scores(w: jax.Array, parts: Parts, cfg: ModelConfig) -> TokenScores:
    logits = head_logits(w, parts.x, cfg)
    # A comparison with every class partitions over a sharded vocabulary; indexing would all-gather the logits.
    is_target = jnp.arange(logits.shape[-1]) == parts.targets[..., None]
    return TokenScores(logits, jax.nn.logsumexp(logits, axis=-1), is_target)


def sums_of(s: TokenScores, weights: jax.Array) -> Sums:
    losses = s.log_partition - jnp.sum(jnp.where(s.is_target, s.logits, 0), axis=-1)
    return {"loss": jnp.sum(losses * weights, axis=-1), "z_loss": jnp.sum(s.log_partition**2 * weights, axis=-1)}


def token_sums(w: jax.Array, parts: Parts, cfg: ModelConfig) -> Sums:
    return sums_of(token_scores(w, parts, cfg), parts.weights)


def with_gradient(
    w: jax.Array, parts: Parts, z: float, cfg: ModelConfig, columns: slice
) -> tuple[Sums, jax.Array, jax.Array]:
    """(sums, gradient w.r.t. x [B, C, D], gradient w.r.t. the part of w for these columns of x) of loss + z * z_loss summed over all
    rows. The last is float32 and not yet summed over row shards: [shards, D, V], or [shards, V, D] if tied."""
    s = token_scores(w, parts, cfg)
    # d loss / d logits = softmax - one-hot; d log_partition^2 / d logits = 2 log_partition softmax.
    softmax = jnp.exp(s.logits - s.log_partition[..., None])
    d = softmax * (1 + 2 * z * s.log_partition[..., None]) if z else softmax
    d = (d - s.is_target) * parts.weights[..., None]
    if cfg.logit_softcap is not None:
        d *= 1 - (s.logits / cfg.logit_softcap) ** 2
    d = d.astype(parts.x.dtype)
    dx, x = matmul(d, w, transposed=not cfg.tie_embeddings), parts.x[..., columns]
    return sums_of(s, parts.weights), dx, by_shard(outer, *((d, x) if cfg.tie_embeddings else (x, d)))


def in_chunks(f: Callable, carry: Any, parts: Parts, chunk: int | None) -> tuple[Any, Any]:
    """Scans f: (carry, parts of a chunk) -> (carry, y) along the sequence; y [B, C, ...] is returned as [B, S, ...]."""
    B, S, _ = parts.x.shape
    if chunk is None or chunk >= S:
        return f(carry, parts)
    whole, rest = divmod(S, chunk)

    def split(a: jax.Array) -> jax.Array:
        return a[:, : whole * chunk].reshape(B, whole, chunk, *a.shape[2:]).swapaxes(0, 1)

    carry, ys = jax.lax.scan(f, carry, jax.tree.map(split, parts))
    ys = jax.tree.map(lambda y: y.swapaxes(0, 1).reshape(B, whole * chunk, *y.shape[3:]), ys)
    if rest:
        carry, y = f(carry, jax.tree.map(lambda a: a[:, whole * chunk :], parts))
        ys = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), ys, y)
    return carry, ys


def objective(sums: Sums, loss: LossConfig) -> jax.Array:
    return jnp.sum(sums["loss"]) + (loss.z_loss or 0.0) * jnp.sum(sums["z_loss"])


def no_sums(B: int) -> Sums:
    return {"loss": jnp.zeros(B), "z_loss": jnp.zeros(B)}


add = functools.partial(jax.tree.map, jnp.add)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def head_loss(head: jax.Array, parts: Parts, cfg: ModelConfig, loss: LossConfig) -> tuple[jax.Array, Sums]:
    """(`objective` of the sums, sums); only the first has a gradient, w.r.t. the head's parameter and x."""
    w, zero = head_weight(head, cfg), no_sums(len(parts.x))
    sums, _ = in_chunks(lambda total, p: (add(total, token_sums(w, p, cfg)), None), zero, parts, loss.chunk)
    return objective(sums, loss), sums


def head_loss_fwd(head: jax.Array, parts: Parts, cfg: ModelConfig, loss: LossConfig) -> tuple[Any, Any]:
    w, by_parameter = jax.vjp(lambda head: head_weight(head, cfg), head)
    width = cfg.dim // loss.passes

    def one_pass(parts: Parts, first: int, nothing: jax.Array) -> tuple[Sums, jax.Array, jax.Array]:
        gradient = functools.partial(with_gradient, z=loss.z_loss or 0.0, cfg=cfg, columns=slice(first, first + width))

        def one(carry: Any, p: Parts) -> tuple[Any, jax.Array]:
            sums, dx, dw = gradient(w, p)
            return (sums, dw) if carry is None else add(carry, (sums, dw)), dx if first == 0 else None

        whole = loss.chunk is None or loss.chunk >= parts.x.shape[1]
        zero = lambda a: jnp.full(a.shape, nothing, a.dtype)
        carry = None if whole else jax.tree.map(zero, jax.eval_shape(gradient, w, parts)[::2])
        (sums, dw), dx = in_chunks(one, carry, parts, loss.chunk)
        return sums, dx, dw.astype(travels(parts.x.dtype))

    nothing = jnp.float32(0)
    sums, dx, *dw = one_pass(parts, 0, nothing)
    for first in range(width, cfg.dim, width):
        # In sequence, so that only one is in float32 at a time. XLA would allocate zeros that it knows at the start.
        parts, dw, nothing = jax.lax.optimization_barrier((parts, dw, nothing))
        dw += one_pass(parts, first, nothing)[2:]
    dw = added(jnp.concatenate(dw, axis=2 if cfg.tie_embeddings else 1))
    (d_head,) = by_parameter(dw.astype(w.dtype))
    # Sharded before the backward pass continues: unsharded, the head's gradient is the model's largest array.
    return (objective(sums, loss), sums), jax.lax.optimization_barrier((d_head, dx))


def head_loss_bwd(cfg: ModelConfig, loss: LossConfig, kept: Any, cotangents: Any) -> tuple[jax.Array, Parts]:
    d_head, dx = kept
    scale = cotangents[0]
    return scale * d_head, Parts(scale.astype(dx.dtype) * dx, None, None)


head_loss.defvjp(head_loss_fwd, head_loss_bwd)


def loss_sums(
    params: Any,
    x_BSD: jax.Array,
    targets_BS: jax.Array,
    weights_BS: jax.Array,
    cfg: ModelConfig,
    loss: LossConfig,
) -> tuple[jax.Array, Sums]:
    """(loss + weighted z_loss summed over all rows, to be differentiated; sums over each row's positions, without a gradient)"""
    return head_loss(params[head_name(cfg)], Parts(x_BSD, targets_BS, weights_BS), cfg, loss)


def mean(total: jax.Array, weight: jax.Array) -> jax.Array:
    """total / weight; 0 if the weight is 0, NaN if it is NaN."""
    return jnp.where(weight == 0, 0, total / jnp.where(weight == 0, 1, weight))
