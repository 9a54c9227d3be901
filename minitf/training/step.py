"""The train step (gradients, update, metrics): a pure function of state and batch."""

import functools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from minitf.model.experts import Aux, balanced
from minitf.model.loss import LossConfig, loss_sums, mean
from minitf.model.transformer import ModelConfig, hidden, model_params
from minitf.params import group_of, named, weights_of
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


def dropout_keys(cfg: StepConfig, step: jax.Array, rows: jax.Array) -> jax.Array | None:
    """One key for each row of the global batch, a function of seed, step and row alone; None: no dropout."""
    if not (cfg.model.dropout or cfg.model.attention.dropout):
        return None
    key = jax.random.fold_in(jax.random.key(cfg.seed), zlib.crc32(b"dropout"))
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, step), rows)


def row_sums(
    params: Any, batch: Batch, cfg: StepConfig, **how: Any
) -> tuple[jax.Array, dict[str, jax.Array], tuple[Aux, ...]]:
    """(the objective of the next-token losses, summed over the batch; weighted sums of these losses over each row, [B], without a
    gradient; `Hidden.aux`). how: keywords of `hidden`."""
    positions, segments = batch.get("positions"), batch.get("segments")
    found = hidden(params, batch["inputs"], cfg.model, positions=positions, segments=segments, **how)
    return *loss_sums(params, found.x_BSD, batch["targets"], batch["weights"], cfg.model, cfg.loss), found.aux


ROUTER_LOSSES = {"balance": "balance_loss", "router_z": "router_z_loss"}  # setting of LossConfig and sum -> metric


def router_sums(aux: tuple[Aux, ...]) -> tuple[dict[str, jax.Array], list[Aux]]:
    """(sums of a mixture's losses, each the mean over its layers; for each place sums of its layers [layers, ...] over the rows)"""
    layers = [jax.tree.map(lambda a: jnp.sum(a, axis=1), place) for place in aux]
    losses = {n: [place.pop(n) for place in layers if n in place] for n in ROUTER_LOSSES}
    return {n: jnp.mean(jnp.concatenate(found)) for n, found in losses.items() if found}, layers


def accumulated(f: Callable[[Batch], Any], batch: Batch, parts: int) -> Any:
    """Sum of f over `parts` microbatches, computed in sequence. Microbatch i takes rows i, i + parts, ..., so that each
    device works on its own rows."""
    if parts == 1:
        return f(batch)
    micro = jax.tree.map(lambda a: a.reshape(a.shape[0] // parts, parts, *a.shape[1:]).swapaxes(0, 1), batch)
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(f, jax.tree.map(lambda a: a[0], micro)))
    total, _ = jax.lax.scan(lambda total, b: (jax.tree.map(jnp.add, total, f(b)), None), zero, micro)
    return total


class StepSums(NamedTuple):
    losses: dict[str, jax.Array]
    routed: list[Aux]  # for each place `balance_sums` of its layers that are no losses; {} without a mixture


def gradients(params: Any, batch: Batch, step: jax.Array, cfg: StepConfig) -> tuple[StepSums, Any]:
    """(mean losses, gradient) of the batch: sums over its tokens divided by the sum of its weights, so that neither accumulation
    nor padding nor the mesh changes them. The division comes last: gradients of activations, divided by the number of tokens, would
    underflow in 16 bits."""

    def loss_fn(params: Any, micro: Batch, step: jax.Array) -> tuple[jax.Array, StepSums]:
        keys = dropout_keys(cfg, step, micro["rows"])
        total, sums, aux = row_sums(params, micro, cfg, dropout_keys=keys, weights=micro["weights"])
        losses = {name: jnp.sum(rows) for name, rows in sums.items()}
        if cfg.loss.z_loss is None:
            del losses["z_loss"]
        of_routers, routed = router_sums(aux)
        for name, value in of_routers.items():
            total += (getattr(cfg.loss, name) or 0.0) * value
            losses[ROUTER_LOSSES[name]] = value
        return total, StepSums(losses, routed)

    def total(params: Any, batch: Batch, step: jax.Array) -> tuple[StepSums, Any]:
        def part(micro: Batch) -> tuple[StepSums, Any]:
            (_, sums), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, micro, step)
            return sums, grads

        return accumulated(part, batch, cfg.accumulation)

    rows = jnp.arange(batch["inputs"].shape[0])
    over_all = over_devices(cfg.mesh.collectives, total, model_params(cfg.model), cfg.model.dtype)
    weight = jnp.sum(batch["weights"])
    of_token = lambda s: mean(s, weight) if jnp.issubdtype(s.dtype, jnp.floating) else s  # numbers of tokens stay
    return jax.tree.map(of_token, over_all(params, {**batch, "rows": rows}, step))


def group_norms(kind: str, tree: Any) -> dict[str, jax.Array]:
    """Norms by group of parameters, as `norm/KIND/GROUP`."""
    squares: dict[str, Any] = {}
    for name, leaf in named(tree):
        group = group_of(name)
        squares[group] = squares.get(group, 0.0) + jnp.sum(jnp.square(leaf.astype(jnp.float32)))
    return {f"norm/{kind}/{group}": jnp.sqrt(s) for group, s in squares.items()}


def with_balanced_routers(params: Any, routed: list[Aux], rate: float) -> Any:
    """The parameters, with the routers' biases, where there are any, moved once towards equal use of the experts."""

    def one(block: Any, sums: Aux) -> Any:
        bias = {n: balanced(b, sums["uses"], rate) for n, b in block["mlp"].items() if n == "router_bias"}
        return block | {"mlp": block["mlp"] | bias}

    return params | {"blocks": tuple(map(one, params["blocks"], routed))}


def train_step(
    state: TrainState, batch: Batch, *, cfg: StepConfig, tx: optax.GradientTransformation, schedule: optax.Schedule
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimizer step: accumulated gradient, its norm, clipping, update. An update that is not finite, or would make a parameter
    so, is not applied and leaves the optimizer's state unchanged."""
    specs = model_params(cfg.model)
    (losses, routed), grads = gradients(state.params, batch, state.step, cfg)
    norm = optax.tree.norm(weights_of(specs, grads))
    finite = jnp.isfinite(losses["loss"]) & jnp.isfinite(norm)

    def apply(carry: Any) -> Any:
        _, params, opt_state, _, _ = carry
        updates, new_state = tx.update(grads, opt_state, params)
        updates = jax.lax.optimization_barrier(updates)  # computed once, for norms and addition
        new_params, norms = optax.apply_updates(params, updates), group_norms("update", weights_of(specs, updates))
        would_be = group_norms("parameter", weights_of(specs, new_params))
        new_params = with_balanced_routers(new_params, routed, cfg.loss.bias_rate)
        ok = jnp.all(jnp.isfinite(jnp.stack([*norms.values(), *would_be.values()])))
        kept = lambda new, old: jax.tree.map(lambda n, o: jnp.where(ok, n, o), new, old)
        norms = {name: jnp.where(ok, value, 0.0) for name, value in norms.items()}
        return jnp.bool_(False), kept(new_params, params), kept(new_state, opt_state), norms, ok

    # A loop of at most one iteration, not a `cond`: a loop updates its carry in place, a branch copies it. The update is computed
    # inside: before the loop, XLA's CPU compiler lets collectives of several devices deadlock.
    weights = weights_of(specs, state.params)
    none = jax.tree.map(jnp.zeros_like, jax.eval_shape(functools.partial(group_norms, "update"), weights))
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
        **group_norms("gradient", weights_of(specs, grads)),
        **update_norms,
        **group_norms("parameter", weights_of(specs, params)),
        "routed": [
            sums | {n: b for n, b in block["mlp"].items() if n == "router_bias"}
            for sums, block in zip(routed, params["blocks"], strict=True)
        ],
        "finite": finite,
        "batch": checksum(batch["inputs"]),
        "tokens": jnp.sum(batch["weights"] > 0, dtype=jnp.int32),  # targets with a weight: neither padding nor masked
    }
    return TrainState(state.step + 1, skipped, params, opt_state), metrics
