"""The next-token loss as sums over tokens, in chunks of the sequence so that whole logits need never exist.

The gradient is formed in the forward pass, chunk by chunk, while a chunk's logits are there: nothing of them is kept or computed
again, and the head's gradient is summed over devices once.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from minitf.model.ops import matmul
from minitf.model.transformer import ModelConfig, head_logits, head_weight
from minitf.sharding import by_shard


@dataclasses.dataclass(frozen=True)
class LossConfig:
    z_loss: float | None = None  # weight of the mean squared log-partition (PaLM, arXiv:2204.02311); None: not formed
    # Positions whose logits exist at once; None: all. In 16-bit types a head's gradient is rounded after each: few are better.
    chunk: int | None = 256


class Parts(NamedTuple):
    """Of a chunk of rows."""

    x: jax.Array  # [B, C, D]
    targets: jax.Array  # [B, C]
    weights: jax.Array  # float32 [B, C]


Sums = dict[
    str, jax.Array
]  # weighted, over a row's positions, float32 [B]: `loss` (nats), `z_loss` (squared log-partition)


class Scores(NamedTuple):
    """What a token's loss and its gradient are made of."""

    logits: jax.Array  # float32 [B, C, V]
    log_partition: jax.Array  # [B, C]
    is_target: jax.Array  # bool [B, C, V]


def scores(w: jax.Array, parts: Parts, cfg: ModelConfig) -> Scores:
    logits = head_logits(w, parts.x, cfg)
    # Comparing with every class partitions over a sharded vocabulary, where a gather would collect the logits.
    is_target = jnp.arange(logits.shape[-1]) == parts.targets[..., None]
    return Scores(logits, jax.nn.logsumexp(logits, axis=-1), is_target)


def sums_of(s: Scores, weights: jax.Array) -> Sums:
    losses = s.log_partition - jnp.sum(jnp.where(s.is_target, s.logits, 0), axis=-1)
    return {"loss": jnp.sum(losses * weights, axis=-1), "z_loss": jnp.sum(s.log_partition**2 * weights, axis=-1)}


def token_sums(w: jax.Array, parts: Parts, cfg: ModelConfig) -> Sums:
    return sums_of(scores(w, parts, cfg), parts.weights)


def with_gradient(w: jax.Array, parts: Parts, z: float, cfg: ModelConfig) -> tuple[Sums, jax.Array, jax.Array]:
    """(sums, gradient by x [B, C, D], gradient by w as each shard of the batch has it, [shards, *w.shape]), of the sum of
    loss + z * z_loss over all rows."""
    s = scores(w, parts, cfg)
    # d loss / d logits = softmax - one-hot; d log_partition^2 / d logits = 2 log_partition softmax.
    softmax = jnp.exp(s.logits - s.log_partition[..., None])
    d = softmax * (1 + 2 * z * s.log_partition[..., None]) if z else softmax
    d = (d - s.is_target) * parts.weights[..., None]
    if cfg.logit_softcap is not None:
        d *= 1 - (s.logits / cfg.logit_softcap) ** 2
    d = d.astype(parts.x.dtype)
    dx = matmul(d, w, transposed=not cfg.tie_embeddings)

    def by_w(x: jax.Array, d: jax.Array) -> jax.Array:
        a, b = (d, x) if cfg.tie_embeddings else (x, d)
        rows = lambda t: t.reshape(-1, t.shape[-1])
        dw = jax.lax.dot_general(rows(a), rows(b), (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        # The sum over chunks too: whole, and in float32, it would be a model's largest buffer.
        return dw.astype(w.dtype)

    return sums_of(s, parts.weights), dx, by_shard(by_w, parts.x, d)


def in_chunks(f: Callable, carry: Any, parts: Parts, chunk: int | None) -> tuple[Any, Any]:
    """Scans f: (carry, parts of a chunk) -> (carry, y) along the sequence; y is [B, C, ...] and comes back as [B, S, ...]."""
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


def objective(sums: Sums, z: float) -> jax.Array:
    return jnp.sum(sums["loss"]) + z * jnp.sum(sums["z_loss"])


def no_sums(B: int) -> Sums:
    return {"loss": jnp.zeros(B), "z_loss": jnp.zeros(B)}


add = functools.partial(jax.tree.map, jnp.add)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def head_loss(w: jax.Array, parts: Parts, z: float, cfg: ModelConfig, chunk: int | None) -> tuple[jax.Array, Sums]:
    """(sum over all rows of loss + z * z_loss, sums); only the first has a gradient, by w and x."""
    zero = no_sums(len(parts.x))
    sums, _ = in_chunks(lambda total, p: (add(total, token_sums(w, p, cfg)), None), zero, parts, chunk)
    return objective(sums, z), sums


def head_loss_fwd(w: jax.Array, parts: Parts, z: float, cfg: ModelConfig, chunk: int | None) -> tuple[Any, Any]:
    def one(carry: Any, p: Parts) -> tuple[Any, jax.Array]:
        sums, dx, dw = with_gradient(w, p, z, cfg)
        return (sums, dw) if carry is None else add(carry, (sums, dw)), dx

    whole = chunk is None or chunk >= parts.x.shape[1]
    zero = (
        None
        if whole
        else jax.tree.map(
            lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(lambda: with_gradient(w, parts, z, cfg))[::2]
        )
    )
    (sums, dw), dx = in_chunks(one, zero, parts, chunk)
    return (objective(sums, z), sums), (jnp.sum(dw, axis=0), dx)


def head_loss_bwd(z: float, cfg: ModelConfig, chunk: int | None, kept: Any, cotangents: Any) -> tuple[jax.Array, Parts]:
    dw, dx = kept
    scale = cotangents[0]
    return scale.astype(dw.dtype) * dw, Parts(scale.astype(dx.dtype) * dx, None, None)


head_loss.defvjp(head_loss_fwd, head_loss_bwd)


def loss_sums(
    params: Any,
    x_BSD: jax.Array,
    targets_BS: jax.Array,
    weights_BS: jax.Array,
    cfg: ModelConfig,
    chunk: int | None,
    z: float = 0.0,
) -> tuple[jax.Array, Sums]:
    """(sum over all rows of loss + z * z_loss, to be differentiated; sums over each row's positions, without a gradient), of at
    most `chunk` positions of the sequence at a time."""
    return head_loss(head_weight(params, cfg), Parts(x_BSD, targets_BS, weights_BS), z, cfg, chunk)


def mean(total: jax.Array, weight: jax.Array) -> jax.Array:
    """total / weight, and 0 where nothing counts."""
    return jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1), 0)
