"""The train step (gradients, update, metrics) and the eval step: pure functions of state and batch."""

import functools
import zlib
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from minitf.model.loss import LossConfig, loss_sums, mean
from minitf.model.transformer import ModelConfig, hidden, model_params
from minitf.params import group_of, named
from minitf.sharding.manual import over_devices
from minitf.sharding.mesh import MeshConfig
from minitf.training.checksum import checksum
from minitf.training.state import TrainState

Batch = dict[str, jax.Array]


class StepConfig(Protocol):
    """The settings that a step reads; a run's config has them all."""

    model: ModelConfig
    loss: LossConfig
    mesh: MeshConfig  # only its collectives
    accumulation: int  # number of microbatches
    seed: int  # seed of dropout


# ---- training


def dropout_keys(cfg: StepConfig, step: jax.Array, rows: jax.Array) -> jax.Array | None:
    """One key for each row of the global batch, a function of seed, step and row alone; None: no dropout."""
    if not (cfg.model.dropout or cfg.model.attention.dropout):
        return None
    key = jax.random.fold_in(jax.random.key(cfg.seed), zlib.crc32(b"dropout"))
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, step), rows)


def row_sums(
    params: Any, batch: Batch, cfg: StepConfig, keys: jax.Array | None = None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(the objective, summed over the batch; weighted sums of the losses over each row, [B], without a gradient)"""
    positions, segments = batch.get("positions"), batch.get("segments")
    found = hidden(params, batch["inputs"], cfg.model, positions=positions, segments=segments, dropout_keys=keys)
    return loss_sums(params, found.x_BSD, batch["targets"], batch["weights"], cfg.model, cfg.loss)


def accumulated(f: Callable[[Batch], Any], batch: Batch, parts: int) -> Any:
    """Sum of f over `parts` microbatches, computed in sequence. Microbatch i takes rows i, i + parts, ..., so that each
    device works on its own rows."""
    if parts == 1:
        return f(batch)
    micro = jax.tree.map(lambda a: a.reshape(a.shape[0] // parts, parts, *a.shape[1:]).swapaxes(0, 1), batch)
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(f, jax.tree.map(lambda a: a[0], micro)))
    total, _ = jax.lax.scan(lambda total, b: (jax.tree.map(jnp.add, total, f(b)), None), zero, micro)
    return total


def gradients(params: Any, batch: Batch, step: jax.Array, cfg: StepConfig) -> tuple[dict[str, jax.Array], Any]:
    """(mean losses, gradient) of the batch: sums over its tokens divided by the sum of its weights, so that neither accumulation
    nor padding nor the mesh changes them. The division comes last: gradients of activations, divided by the number of tokens, would
    underflow in 16 bits."""

    def loss_fn(params: Any, micro: Batch, step: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        total, sums = row_sums(params, micro, cfg, dropout_keys(cfg, step, micro["rows"]))
        losses = {name: jnp.sum(rows) for name, rows in sums.items()}
        if cfg.loss.z_loss is None:
            del losses["z_loss"]
        return total, losses

    def total(params: Any, batch: Batch, step: jax.Array) -> tuple[dict[str, jax.Array], Any]:
        def part(micro: Batch) -> tuple[dict[str, jax.Array], Any]:
            (_, losses), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, micro, step)
            return losses, grads

        return accumulated(part, batch, cfg.accumulation)

    rows = jnp.arange(batch["inputs"].shape[0])
    over_all = over_devices(cfg.mesh.collectives, total, model_params(cfg.model), cfg.model.dtype)
    weight = jnp.sum(batch["weights"])
    return jax.tree.map(lambda s: mean(s, weight), over_all(params, {**batch, "rows": rows}, step))


def group_norms(kind: str, tree: Any) -> dict[str, jax.Array]:
    """Norms by group of parameters, as `norm/KIND/GROUP`."""
    squares: dict[str, Any] = {}
    for name, leaf in named(tree):
        group = group_of(name)
        squares[group] = squares.get(group, 0.0) + jnp.sum(jnp.square(leaf.astype(jnp.float32)))
    return {f"norm/{kind}/{group}": jnp.sqrt(s) for group, s in squares.items()}


def train_step(
    state: TrainState, batch: Batch, *, cfg: StepConfig, tx: optax.GradientTransformation, schedule: optax.Schedule
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimizer step: accumulated gradient, its norm, clipping, update. An update that is not finite, or would make a parameter
    so, is not applied and leaves the optimizer's state unchanged."""
    losses, grads = gradients(state.params, batch, state.step, cfg)
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(losses["loss"]) & jnp.isfinite(norm)

    def apply(carry: Any) -> Any:
        _, params, opt_state, _, _ = carry
        updates, new_state = tx.update(grads, opt_state, params)
        updates = jax.lax.optimization_barrier(updates)  # computed once, for norms and addition
        new_params, norms = optax.apply_updates(params, updates), group_norms("update", updates)
        would_be = group_norms("parameter", new_params)
        ok = jnp.all(jnp.isfinite(jnp.stack([*norms.values(), *would_be.values()])))
        kept = lambda new, old: jax.tree.map(lambda n, o: jnp.where(ok, n, o), new, old)
        norms = {name: jnp.where(ok, value, 0.0) for name, value in norms.items()}
        return jnp.bool_(False), kept(new_params, params), kept(new_state, opt_state), norms, ok

    # A loop of at most one iteration, not a `cond`: a loop updates its carry in place, a branch copies it. The update is computed
    # inside: before the loop, XLA's CPU compiler lets collectives of several devices deadlock.
    none = jax.tree.map(jnp.zeros_like, jax.eval_shape(functools.partial(group_norms, "update"), state.params))
    _, params, opt_state, update_norms, finite = jax.lax.while_loop(
        lambda carry: carry[0], apply, (finite, state.params, state.opt_state, none, jnp.bool_(False))
    )
    skipped = state.skipped + ~finite
    metrics = {f"train/{name}": value for name, value in losses.items()}
    metrics |= {
        # The optimizer counts the updates that were applied, and so does its schedule.
        "train/learning_rate": schedule(state.step - state.skipped),
        "train/grad_norm": norm,
        "train/skipped_steps": skipped,
        **group_norms("gradient", grads),
        **update_norms,
        **group_norms("parameter", params),
        "finite": finite,
        "batch": checksum(batch["inputs"]),
        "tokens": jnp.sum(batch["weights"] > 0, dtype=jnp.int32),  # targets with a weight: neither padding nor masked
    }
    return TrainState(state.step + 1, skipped, params, opt_state), metrics


# ---- evaluation


def eval_step(params: Any, batch: Batch, byte_lengths: jax.Array | None, *, cfg: StepConfig) -> dict[str, jax.Array]:
    """Sums over each row of a batch, [B]: nats, tokens, and, unless byte_lengths (bytes per token id) is None, bytes of text."""
    sums = {"nats": row_sums(params, batch, cfg)[1]["loss"], "tokens": jnp.sum(batch["weights"], axis=-1)}
    if byte_lengths is not None:
        sums["bytes"] = jnp.sum(byte_lengths[batch["targets"]] * batch["weights"], axis=-1)
    return sums
