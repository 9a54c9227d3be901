"""One declaration per array; counts, initial values and abstract trees are derived from the declarations.

Parameters are nested dicts (and tuples) of arrays. Their declarations are a tree of the same structure with a `Param` at every leaf.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

Init = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]  # (key, shape, dtype) -> array

KINDS = ("matrix", "embedding", "head", "router", "scale", "bias", "state")
UNROUNDED = ("router", "scale", "bias", "state")  # kinds that are used in float32, whatever the compute dtype


@dataclasses.dataclass(frozen=True)
class Param:
    """Declaration of one array: everything but its value.

    shape:   shape of one layer, without the stack.
    axes:    logical name of each dimension of `shape`; `sharding.rules.RULES` maps them to mesh axes.
    kind:    one of KINDS; determines weight decay, Muon, FLOPs and the default initial scale; a "state" is set by the step.
    inputs:  number of leading dimensions of `shape` that are contracted with the activation.
    init:    (key, shape, dtype) -> array; None: the model's scheme decides by kind.
    dtype:   dtype of the master weight; the compute dtype is `ModelConfig.dtype`.
    stack:   leading dimensions (name, size), of layers and experts, excluded from fan-in, decay, Muon, factored moments and norms.
    chosen:  number of entries of the stack's last dimension that one token uses; None: all.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    kind: str
    inputs: int = 0
    init: Init | None = None
    dtype: str = "float32"
    stack: tuple[tuple[str, int], ...] = ()
    chosen: int | None = None

    def __post_init__(self):
        assert self.kind in KINDS, f"unknown kind {self.kind!r}; known: {', '.join(KINDS)}"
        assert len(self.shape) == len(self.axes), (
            f"{len(self.shape)} sizes {self.shape} but {len(self.axes)} axis names {self.axes}"
        )
        assert 0 <= self.inputs < max(len(self.shape), 1), f"{self.inputs} inputs of {len(self.shape)} dimensions"

    @property
    def full_shape(self) -> tuple[int, ...]:
        return tuple(n for _, n in self.stack) + self.shape

    @property
    def full_axes(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.stack) + self.axes

    @property
    def size(self) -> int:
        return math.prod(self.full_shape)

    @property
    def active(self) -> int:
        """Number of elements that one token uses."""
        return self.size if self.chosen is None else self.size // self.stack[-1][1] * self.chosen

    @property
    def multiplied(self) -> int:
        """Number of elements that multiply one token."""
        return self.active if self.kind in ("matrix", "head", "router") else 0

    @property
    def fan_in(self) -> int:
        return math.prod(self.shape[: self.inputs])

    @property
    def writes_residual(self) -> bool:
        """Whether this is a matrix whose output is added to the residual stream."""
        return self.kind == "matrix" and self.axes[self.inputs :] == ("embed",)


def is_param(x: Any) -> bool:
    return isinstance(x, Param)


def tree_map(f: Callable, specs: Any, *rest: Any) -> Any:
    """`jax.tree.map` over a tree of declarations and trees of the same structure."""
    return jax.tree.map(f, specs, *rest, is_leaf=is_param)


def path_name(path: tuple) -> str:
    """The key path of a leaf as it appears in checkpoints, logs and errors: `blocks/0/attention/q`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named(specs: Any) -> Iterator[tuple[str, Any]]:
    """Yields (name, leaf) for every leaf of a tree of declarations or arrays."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_param):
        yield path_name(path), leaf


def named_map(f: Callable, specs: Any, *rest: Any) -> Any:
    """Like `tree_map`, but f receives the leaf's name as its first argument."""
    return jax.tree_util.tree_map_with_path(lambda path, *xs: f(path_name(path), *xs), specs, *rest, is_leaf=is_param)


def stacked(specs: Any, layers: int) -> Any:
    """The declarations with a new leading stack dimension of `layers` layers."""
    return tree_map(lambda p: dataclasses.replace(p, stack=(("layers", layers), *p.stack)), specs)


def weights_of(specs: Any, tree: Any) -> Any:
    """The tree without the entries of kind "state"; None in their places."""
    return tree_map(lambda p, a: None if p.kind == "state" else a, specs, tree)


def group_of(name: str) -> str:
    """The group whose norms are logged together: `blocks/0/attention/q` -> `attention`, `head` -> `head`."""
    parts = name.split("/")
    return parts[2] if parts[0] == "blocks" else parts[0]


def count_params(specs: Any) -> dict[str, int]:
    """Parameter counts: `total`, `active` (those that one token uses), `embedding` (token and position tables, one of which may be a
    tied head), `non_embedding`."""
    weights = [p for _, p in named(weights_of(specs, specs))]
    total, active = sum(p.size for p in weights), sum(p.active for p in weights)
    embedding = sum(p.size for p in weights if p.kind == "embedding")
    return {"total": total, "active": active, "embedding": embedding, "non_embedding": total - embedding}


def abstract_params(specs: Any, shardings: Any = None) -> Any:
    """The parameters as `jax.ShapeDtypeStruct`s, with shardings if given."""
    if shardings is None:
        return tree_map(lambda p: jax.ShapeDtypeStruct(p.full_shape, p.dtype), specs)
    return tree_map(lambda p, s: jax.ShapeDtypeStruct(p.full_shape, p.dtype, sharding=s), specs, shardings)


# ---- initial values


def ones(key, shape, dtype):
    return jnp.ones(shape, dtype)


def zeros(key, shape, dtype):
    return jnp.zeros(shape, dtype)


@dataclasses.dataclass(frozen=True)
class Normal:
    """Normal distribution with mean 0 and standard deviation `std`."""

    std: float

    def __call__(self, key, shape, dtype):
        return self.std * jax.random.normal(key, shape, dtype)


def fixed(p: Param, num_layers: int) -> float:
    """0.02 everywhere: the tutorial's."""
    return 0.02


def gpt2(p: Param, num_layers: int) -> float:
    """0.02, divided by sqrt(2 x layers) where a matrix writes to the residual stream: Radford et al. 2019, section 2.3."""
    return 0.02 / math.sqrt(2 * num_layers) if p.writes_residual else 0.02


def fan_in(p: Param, num_layers: int) -> float:
    """1 / sqrt(inputs), which keeps the variance of activations.

    An embedding of width D counts as a (tied) head with D inputs.
    """
    return 1 / math.sqrt(p.shape[-1] if p.kind == "embedding" else p.fan_in)


SCHEMES = {"fixed": fixed, "gpt2": gpt2, "fan_in": fan_in}


def with_inits(specs: Any, scheme: str, num_layers: int) -> Any:
    """The declarations with every `init=None` filled in: ones for scales, zeros for biases, the scheme's normal for the rest."""

    def one(p: Param) -> Param:
        if p.init is not None:
            return p
        by_kind = {"scale": ones, "bias": zeros, "state": zeros}
        return dataclasses.replace(p, init=by_kind.get(p.kind) or Normal(SCHEMES[scheme](p, num_layers)))

    return tree_map(one, specs)


def init_params(specs: Any, key: jax.Array) -> Any:
    """Initial values. Each array has its own key, derived from its name and layer, so that neither other parameters nor the
    number of layers change it. Layers are initialised separately, so that a stack has the scale of one layer."""

    def one(name: str, p: Param) -> jax.Array:
        base = jax.random.fold_in(key, zlib.crc32(name.encode()))
        f = lambda k: p.init(k, p.shape, p.dtype)
        for _, n in reversed(p.stack):
            f = lambda k, f=f, n=n: jax.vmap(lambda i: f(jax.random.fold_in(k, i)))(jnp.arange(n))
        return f(base)

    return named_map(one, specs)
