"""The next-token loss as sums over tokens, in chunks of the sequence so that whole logits need never exist."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from minitf.model.transformer import ModelConfig, head_logits, head_weight


@dataclasses.dataclass(frozen=True)
class LossConfig:
    z_loss: float | None = None  # weight of the mean squared log-partition (PaLM, arXiv:2204.02311); None: not formed
    chunk: int | None = 1024  # positions whose logits exist at once; fewer save memory, and cost time; None: all


def token_sums(
    w: jax.Array, x: jax.Array, targets: jax.Array, weights: jax.Array, cfg: ModelConfig
) -> dict[str, jax.Array]:
    """Weighted sums over a row's positions, float32 [B]: `loss` (nats) and `z_loss` (squared log-partition)."""
    logits = head_logits(w, x, cfg)
    log_partition = jax.nn.logsumexp(logits, axis=-1)
    # Comparing with every class partitions over a sharded vocabulary, where a gather would collect the logits.
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    losses = log_partition - jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
    return {"loss": jnp.sum(losses * weights, axis=-1), "z_loss": jnp.sum(log_partition**2 * weights, axis=-1)}


def loss_sums(
    params: Any, x_BSD: jax.Array, targets_BS: jax.Array, weights_BS: jax.Array, cfg: ModelConfig, chunk: int | None
) -> dict[str, jax.Array]:
    """`token_sums` over a row's positions, at most `chunk` of the sequence at a time; the backward pass forms each chunk's
    logits again."""
    w = head_weight(params, cfg)
    B, S, _ = x_BSD.shape
    if chunk is None or chunk >= S:
        return token_sums(w, x_BSD, targets_BS, weights_BS, cfg)
    whole, rest = divmod(S, chunk)
    one = jax.checkpoint(lambda *xs: token_sums(w, *xs, cfg), prevent_cse=False)

    def chunks(a: jax.Array) -> jax.Array:
        return a[:, : whole * chunk].reshape(B, whole, chunk, *a.shape[2:]).swapaxes(0, 1)

    zero = {"loss": jnp.zeros(B), "z_loss": jnp.zeros(B)}
    parts = (x_BSD, targets_BS, weights_BS)
    sums, _ = jax.lax.scan(
        lambda total, xs: (jax.tree.map(jnp.add, total, one(*xs)), None), zero, tuple(map(chunks, parts))
    )
    if rest:
        sums = jax.tree.map(jnp.add, sums, one(*(a[:, whole * chunk :] for a in parts)))
    return sums


def mean(total: jax.Array, weight: jax.Array) -> jax.Array:
    """total / weight, and 0 where nothing counts."""
    return jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1), 0)
