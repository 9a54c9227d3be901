"""Builds an optax transformation and its learning-rate schedule from a config and the parameters' declarations."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

from minitf.params import Param, tree_map
from minitf.settings import setting

MOMENT_DTYPES = {"float32": "4 bytes a parameter", "bfloat16": "2 bytes a parameter"}
AFTER_NONFINITE = {"stop": "the run ends, status 4", "skip": "the update is left out"}  # the update is never applied


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    kind: str = setting("adamw", "update rule", one_of=lambda: OPTIMIZERS)
    learning_rate: float = setting(3e-4, "rate at the schedule's peak", above=0, may_change=True)
    schedule: str = setting("cosine", "learning rate after warm-up", one_of=lambda: SCHEDULES, may_change=True)
    warmup_steps: int = setting(
        0, "updates of a linear ramp; the first has rate 0, the next after it the peak", at_least=0, may_change=True
    )
    decay_steps: int | None = setting(
        None, "last updates, whose rates fall below the peak; None: a fifth of all", at_least=1, may_change=True
    )
    end_learning_rate: float = setting(
        0.0, "rate that an update after the last would have; at most learning_rate", at_least=0, may_change=True
    )
    b1: float = setting(0.9, "decay of the first moment", at_least=0, below=1, may_change=True)
    b2: float = setting(0.95, "decay of the second moment", at_least=0, below=1, may_change=True)
    eps: float = setting(1e-8, "added to the root of the second moment", above=0, may_change=True)
    momentum: float | None = setting(None, "decay of SGD's momentum; None: none", at_least=0, below=1, may_change=True)
    muon_momentum: float = setting(0.95, "decay of Muon's momentum", at_least=0, below=1, may_change=True)
    weight_decay: float = setting(0.1, "times learning rate: share of a weight per update", at_least=0, may_change=True)
    decay_embeddings: bool = setting(False, "also decay token and position embeddings", may_change=True)
    clip_norm: float | None = setting(
        1.0, "global norm to which the accumulated gradient is clipped; None: not clipped", above=0, may_change=True
    )
    moment_dtype: str = setting("float32", "dtype of the first moment", one_of=lambda: MOMENT_DTYPES)
    nonfinite: str = setting(
        "stop",
        "what follows a loss, gradient or update that is not finite",
        one_of=lambda: AFTER_NONFINITE,
        may_change=True,
    )


# ---- schedules: f(cfg, steps after warm-up) -> learning rate of update i = 0, 1, ... steps - 1 after warm-up


def constant(cfg: OptimizerConfig, steps: int) -> optax.Schedule:
    return optax.constant_schedule(cfg.learning_rate)


def linear_decay(cfg: OptimizerConfig, steps: int) -> optax.Schedule:
    """A line from the peak to the end rate: update i is i / steps of the way, so an update after the last would have the end rate."""
    return optax.linear_schedule(cfg.learning_rate, cfg.end_learning_rate, steps)


def cosine_decay(cfg: OptimizerConfig, steps: int) -> optax.Schedule:
    """Half a cosine between the same end points as `linear_decay` (arXiv:1608.03983)."""
    return optax.cosine_decay_schedule(cfg.learning_rate, steps, alpha=cfg.end_learning_rate / cfg.learning_rate)


def warmup_stable_decay(cfg: OptimizerConfig, steps: int) -> optax.Schedule:
    """The peak, then a line over the last decay_steps = d updates (MiniCPM, arXiv:2404.06395): the update before them has the peak,
    they are 1 / (d + 1), ... d / (d + 1) of the way to the end rate, which an update after the last would have."""
    total = steps + cfg.warmup_steps
    decay = min(max(1, total // 5 if cfg.decay_steps is None else cfg.decay_steps), steps)
    last = steps - decay - 1  # last update at the peak
    line = linear_decay(cfg, decay + 1)
    return lambda count: line(jnp.maximum(count - last, 0))


class Schedule(NamedTuple):
    meaning: str
    make: Callable[[OptimizerConfig, int], optax.Schedule]
    reads: tuple[str, ...] = ()


SCHEDULES = {
    "constant": Schedule("the peak", constant),
    "linear": Schedule("a line to end_learning_rate", linear_decay, reads=("end_learning_rate",)),
    "cosine": Schedule("half a cosine to end_learning_rate", cosine_decay, reads=("end_learning_rate",)),
    "warmup_stable_decay": Schedule(
        "the peak, then a line over decay_steps", warmup_stable_decay, reads=("end_learning_rate", "decay_steps")
    ),
}


def make_schedule(cfg: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate of the update at optimizer step 0, 1, ...; the schedule that trains is also the one that is logged."""
    after = steps - cfg.warmup_steps
    # If the warm-up is as long as the run, the schedule is the ramp alone.
    main = SCHEDULES[cfg.schedule].make(cfg, after) if after > 0 else constant(cfg, 0)
    if cfg.warmup_steps == 0:
        return main
    return optax.join_schedules(
        [optax.linear_schedule(0.0, cfg.learning_rate, cfg.warmup_steps), main], [cfg.warmup_steps]
    )


# ---- optimizers


def decays(p: Param, cfg: OptimizerConfig) -> bool:
    return p.kind in ("matrix", "head", "router") or (p.kind == "embedding" and cfg.decay_embeddings)


def decay_mask(specs: Any, cfg: OptimizerConfig) -> Any:
    """Which parameters decay: by kind, never by the number of dimensions, as a stacked norm scale has two."""
    return tree_map(lambda p: decays(p, cfg), specs)


def per_layer(make: Callable[[], optax.GradientTransformation], specs: Any) -> optax.GradientTransformation:
    """Applies to each layer of a stack separately a rule that reads whole arrays (their norm, their two largest dimensions)."""

    def mapped(depth: int) -> optax.GradientTransformation:
        tx = make()
        init, update = tx.init, tx.update
        for _ in range(depth):
            init, update = jax.vmap(init), jax.vmap(update)
        return optax.GradientTransformation(init, update)

    labels = tree_map(lambda p: str(p.stack), specs)
    depths = {str(p.stack): len(p.stack) for p in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, Param))}
    return optax.partition({label: mapped(depth) for label, depth in depths.items()}, labels)


def sgd(cfg: OptimizerConfig, specs: Any, schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(
        optax.add_decayed_weights(cfg.weight_decay, decay_mask(specs, cfg)), optax.sgd(schedule, momentum=cfg.momentum)
    )


def adamw(cfg: OptimizerConfig, specs: Any, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Decoupled weight decay, arXiv:1711.05101; the decay is multiplied by the learning rate."""
    return optax.adamw(
        schedule,
        cfg.b1,
        cfg.b2,
        cfg.eps,
        mu_dtype=cfg.moment_dtype,
        weight_decay=cfg.weight_decay,
        mask=decay_mask(specs, cfg),
    )


def lion(cfg: OptimizerConfig, specs: Any, schedule: optax.Schedule) -> optax.GradientTransformation:
    """arXiv:2302.06675."""
    return optax.lion(
        schedule, cfg.b1, cfg.b2, mu_dtype=cfg.moment_dtype, weight_decay=cfg.weight_decay, mask=decay_mask(specs, cfg)
    )


def adafactor(cfg: OptimizerConfig, specs: Any, schedule: optax.Schedule) -> optax.GradientTransformation:
    """arXiv:1804.04235. The learning rate is relative: the size of an update is that fraction of its array's root mean square."""
    return optax.chain(
        per_layer(lambda: optax.adafactor(schedule), specs),
        # Adafactor's updates are already scaled by the learning rate and negated.
        optax.add_decayed_weights(lambda count: -cfg.weight_decay * schedule(count), decay_mask(specs, cfg)),
    )


def muon_with_adamw(cfg: OptimizerConfig, specs: Any, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Muon for matrices, AdamW for tables, head, routers, scales and biases. Updates of matrices are scaled to AdamW's size
    (0.2 x sqrt of the larger dimension, arXiv:2502.16982), so that both share one learning rate and one weight decay."""

    def dimensions(p: Param) -> MuonDimensionNumbers:
        split = len(p.stack) + p.inputs
        return MuonDimensionNumbers(tuple(range(len(p.stack), split)), tuple(range(split, len(p.full_shape))))

    labels = tree_map(lambda p: "muon" if p.kind == "matrix" else "adamw", specs)
    matrices = tree_map(lambda p: dimensions(p) if p.kind == "matrix" else optax.MaskedNode(), specs)
    others = tree_map(lambda p: optax.MaskedNode() if p.kind == "matrix" else decays(p, cfg), specs)
    return optax.partition(
        {
            "muon": muon(
                schedule,
                beta=cfg.muon_momentum,
                weight_decay=cfg.weight_decay,
                mu_dtype=cfg.moment_dtype,
                muon_weight_dimension_numbers=matrices,
                consistent_rms=0.2,
            ),
            "adamw": optax.adamw(
                schedule, cfg.b1, cfg.b2, cfg.eps, mu_dtype=cfg.moment_dtype, weight_decay=cfg.weight_decay, mask=others
            ),
        },
        labels,
    )


class Optimizer(NamedTuple):
    meaning: str
    make: Callable[[OptimizerConfig, Any, optax.Schedule], optax.GradientTransformation]
    reads: tuple[str, ...] = ()


OPTIMIZERS = {
    "sgd": Optimizer("SGD, with or without momentum", sgd, reads=("momentum",)),
    "adamw": Optimizer("AdamW (arXiv:1711.05101)", adamw, reads=("b1", "b2", "eps", "moment_dtype")),
    "lion": Optimizer("Lion (arXiv:2302.06675)", lion, reads=("b1", "b2", "moment_dtype")),
    "adafactor": Optimizer("Adafactor (arXiv:1804.04235); the rate is relative to a weight's size", adafactor),
    "muon": Optimizer(
        "Muon for matrices, AdamW for the rest",
        muon_with_adamw,
        reads=("b1", "b2", "eps", "moment_dtype", "muon_momentum"),
    ),
}


def make_optimizer(cfg: OptimizerConfig, specs: Any, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Clipping by global norm, then the optimizer; its input is the accumulated gradient. Entries of kind "state" have no part in
    either."""
    weights = tree_map(lambda p: optax.MaskedNode() if p.kind == "state" else p, specs)
    tx = OPTIMIZERS[cfg.kind].make(cfg, weights, schedule)
    tx = tx if cfg.clip_norm is None else optax.chain(optax.clip_by_global_norm(cfg.clip_norm), tx)
    mask = tree_map(lambda p: p.kind != "state", specs)
    return tx if all(jax.tree.leaves(mask)) else optax.masked(tx, mask)
