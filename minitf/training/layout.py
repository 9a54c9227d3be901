"""Shapes and shardings of the train state."""

import functools
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from minitf.params import Param, abstract_params, is_param
from minitf.sharding.mesh import replicated
from minitf.sharding.rules import partition, shardings
from minitf.training.state import TrainState, first_state


def abstract_state(specs: Any, tx: optax.GradientTransformation) -> TrainState:
    """Shapes and dtypes of the state, without allocating it."""
    # Not through init_state: the shapes are declared, and tracing the random initialisation takes longer than all else here.
    return jax.eval_shape(functools.partial(first_state, tx=tx), abstract_params(specs))


def like_param(p: Param, shape: tuple[int, ...]) -> P:
    """PartitionSpec of an optimizer's array that belongs to a parameter: the parameter's own if the shapes are equal; that of the
    remaining dimensions if some are missing (factored moments); else replicated."""
    full = partition(p)
    axes, left = [], list(zip(p.full_shape, full, strict=True))
    for size in shape:
        while left and left[0][0] != size:
            left.pop(0)
        if not left:
            return P()
        axes.append(left.pop(0)[1])
    return P(*axes)


def state_shardings(specs: Any, tx: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """A NamedSharding for each array of the state. An optimizer's array belongs to the parameter whose path is a suffix of its own."""
    by_path = dict(jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_param))

    def one(path: tuple, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        for i in range(len(path)):
            if path[i:] in by_path:
                return NamedSharding(mesh, like_param(by_path[path[i:]], leaf.shape))
        return replicated(mesh)

    opt_state = jax.tree_util.tree_map_with_path(one, abstract_state(specs, tx).opt_state)
    return TrainState(replicated(mesh), replicated(mesh), shardings(specs, mesh), opt_state)
