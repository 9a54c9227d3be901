"""The train state."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from minitf.params import init_params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    step: jax.Array  # int32 []: optimizer steps taken, skipped ones included
    skipped: jax.Array  # int32 []: steps whose update was not applied because it was not finite
    params: Any
    opt_state: Any


def first_state(params: Any, tx: optax.GradientTransformation) -> TrainState:
    return TrainState(jnp.int32(0), jnp.int32(0), params, tx.init(params))


def init_state(key: jax.Array, specs: Any, tx: optax.GradientTransformation) -> TrainState:
    return first_state(init_params(specs, key), tx)
