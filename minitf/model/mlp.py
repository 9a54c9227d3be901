"""The feed-forward layers: two products with an activation between them, or a gated pair."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from minitf.model.grouped import GROUPED_CHOICES
from minitf.model.ops import linear
from minitf.model.routers import ROUTERS
from minitf.params import Param
from minitf.settings import setting


@dataclasses.dataclass(frozen=True)
class MlpConfig:
    kind: str = setting("gelu", "activation, and whether a gate multiplies it", one_of=lambda: MLP)
    hidden: int | None = setting(None, "width inside; None: 4 x model.dim", at_least=1)
    bias: bool = setting(False, "whether its products add a bias")
    # A mixture of experts, each an MLP of this kind: experts.py.
    router: str = setting("none", "which experts process a token", one_of=lambda: ROUTERS)
    experts: int = setting(8, "experts of a layer", at_least=1)
    experts_per_token: int = setting(2, "experts that process a token", at_least=1)
    normalise_weights: bool = setting(True, "divide the weights of a token's experts by their sum")
    router_scale: float = setting(1.0, "factor of the weights of a token's experts", above=0)
    groups: int = setting(1, "groups of experts", at_least=1)
    groups_per_token: int = setting(1, "groups that a token's experts are of", at_least=1)
    shared: int = setting(0, "experts that process every token besides, computed as one MLP", at_least=0)
    dense_first: int = setting(0, "first layers, which have one MLP in place of a mixture", at_least=0)
    every: int = setting(1, "of so many layers the last has a mixture, the others one MLP", at_least=1)
    dense_hidden: int | None = setting(None, "width of the MLP of layers without a mixture; None: hidden", at_least=1)
    grouped: str = setting(
        "auto", "how experts' products are computed", one_of=lambda: GROUPED_CHOICES, may_change=True
    )


class MlpKind(NamedTuple):
    """A kind of MLP: its declarations, its function, and the settings that only it reads."""

    meaning: str
    params: Callable  # (cfg, dim) -> declarations
    apply: Callable[[Any, jax.Array, MlpConfig], jax.Array]  # (params, x, cfg)
    reads: tuple[str, ...] = ()
    gate: Callable | None = None  # a gated kind's activation; experts are of gated kinds


def width(cfg: MlpConfig, dim: int) -> int:
    return cfg.hidden or 4 * dim


def up_down_params(cfg: MlpConfig, dim: int) -> dict[str, Param]:
    F = width(cfg, dim)
    specs = dict(
        up=Param((dim, F), ("embed", "mlp"), "matrix", inputs=1),
        down=Param((F, dim), ("mlp", "embed"), "matrix", inputs=1),
    )
    if cfg.bias:
        specs["up_bias"] = Param((F,), ("mlp",), "bias")
        specs["down_bias"] = Param((dim,), ("norm",), "bias")
    return specs


def gated_params(cfg: MlpConfig, dim: int) -> dict[str, Param]:
    F = width(cfg, dim)
    specs = dict(gate=Param((dim, F), ("embed", "mlp"), "matrix", inputs=1), **up_down_params(cfg, dim))
    if cfg.bias:
        specs["gate_bias"] = Param((F,), ("mlp",), "bias")
    return specs


def projected(params: Any, name: str, x: jax.Array) -> jax.Array:
    return checkpoint_name(linear(x, params[name], params.get(f"{name}_bias")), name)


@jax.custom_vjp
def once(x: jax.Array) -> jax.Array:
    """x, whose gradient is computed once, before it is used. XLA's TPU compiler would recompute it in every product that reads it,
    for every tile: in Llama's MLP that costs more than the products."""
    return x


once.defvjp(lambda x: (x, None), lambda _, g: (jax.lax.optimization_barrier(g),))


def up_down(params: Any, x: jax.Array, cfg: MlpConfig, *, activation: Callable) -> jax.Array:
    return projected(params, "down", activation(projected(params, "up", x)))


def gated(params: Any, x: jax.Array, cfg: MlpConfig, *, activation: Callable) -> jax.Array:
    """down(activation(gate x) * up x): GLU variants, arXiv:2002.05202."""
    gate, up = (once(projected(params, name, x)) for name in ("gate", "up"))
    return projected(params, "down", activation(gate) * up)


def gated_kind(meaning: str, activation: Callable) -> MlpKind:
    return MlpKind(meaning, gated_params, functools.partial(gated, activation=activation), gate=activation)


def relu_squared(x: jax.Array) -> jax.Array:
    """max(x, 0)^2: Primer, arXiv:2109.08668."""
    return jax.nn.relu(x) ** 2


def gelu_erf(x: jax.Array) -> jax.Array:
    """x times the standard normal CDF: GELU, arXiv:1606.08415. `jax.nn.gelu` uses erfc, which keeps more digits where the result is
    near 0 and takes three times as long on a CPU."""
    return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))


gelu_tanh = functools.partial(jax.nn.gelu, approximate=True)

MLP = {
    "gelu": MlpKind("GELU by tanh (GPT-2)", up_down_params, functools.partial(up_down, activation=gelu_tanh)),
    "gelu_erf": MlpKind("GELU by erf", up_down_params, functools.partial(up_down, activation=gelu_erf)),
    "relu_squared": MlpKind("max(x, 0)^2", up_down_params, functools.partial(up_down, activation=relu_squared)),
    "swiglu": gated_kind("SiLU with a gate (Llama)", jax.nn.silu),
    "geglu": gated_kind("GELU by tanh with a gate (Gemma)", gelu_tanh),
}
