"""The feed-forward layers: two products with an activation between them, or a gated pair."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from minitf.model.ops import linear
from minitf.params import Param
from minitf.settings import setting


@dataclasses.dataclass(frozen=True)
class MlpConfig:
    kind: str = setting("gelu", "activation, and whether a gate multiplies it", one_of=lambda: MLP)
    hidden: int | None = setting(None, "width inside; None: 4 x model.dim", at_least=1)
    bias: bool = setting(False, "whether its products add a bias")


Aux = dict[str, jax.Array]  # float32 [B]: auxiliary sums over each row, for the loss


class MlpKind(NamedTuple):
    """A kind of MLP: its declarations, its function, and the settings that only it reads."""

    meaning: str
    params: Callable  # (cfg, dim) -> declarations
    apply: Callable[[Any, jax.Array, MlpConfig], tuple[jax.Array, Aux]]  # (params, x, cfg)
    reads: tuple[str, ...] = ()
    aux: tuple[str, ...] = ()  # names of its auxiliary sums


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


def up_down(params: Any, x: jax.Array, cfg: MlpConfig, *, activation: Callable) -> tuple[jax.Array, Aux]:
    return projected(params, "down", activation(projected(params, "up", x))), {}


def gated(params: Any, x: jax.Array, cfg: MlpConfig, *, activation: Callable) -> tuple[jax.Array, Aux]:
    """down(activation(gate x) * up x): GLU variants, arXiv:2002.05202."""
    gate, up = (once(projected(params, name, x)) for name in ("gate", "up"))
    return projected(params, "down", activation(gate) * up), {}


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
    "swiglu": MlpKind("SiLU with a gate (Llama)", gated_params, functools.partial(gated, activation=jax.nn.silu)),
    "geglu": MlpKind("GELU by tanh with a gate (Gemma)", gated_params, functools.partial(gated, activation=gelu_tanh)),
}
