"""Attention: weights, kinds, and the key/value cache."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from minitf.model.kernels import CHOICES, LANES, Mask, Scores, Times, mix
from minitf.model.ops import check_rate, linear, rms_norm, rotate
from minitf.params import Param
from minitf.settings import setting

BLOCK_MEANING = "most {} at a time in splash (the next smaller size that divides a row); None: what fits a TPU's memory"
RATE = dict(at_least=0, below=1, check=check_rate, may_change=True)  # of a setting that is a dropout rate
QK_NORM = {"head": "each head", "heads": "all heads together (OLMoE)"}
BIAS = {"none": "none of them", "qkv": "queries, keys and values", "qkvo": "these and the output"}


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    kind: str = setting("full", "what each layer's queries see, where model.pattern is None", one_of=lambda: ATTENTION)
    num_heads: int = setting(4, "query heads", at_least=1)
    num_kv_heads: int | None = setting(None, "key/value heads, shared by query heads; None: num_heads", at_least=1)
    head_dim: int | None = setting(None, "size of a head; None: model.dim / num_heads", at_least=1)
    window: int = setting(256, "positions that a query of a sliding layer sees, its own included", at_least=1)
    rope_base: float = setting(10_000.0, "base of RoPE's wavelengths", above=0)
    # Long wavelengths are stretched, see ops.stretched.
    rope_factor: float = setting(8.0, "factor by which rope_llama3 stretches long wavelengths", above=0)
    rope_low_freq_factor: float = setting(
        1.0, "turns within rope_original_len below which a wavelength is stretched by rope_factor", above=0
    )
    rope_high_freq_factor: float = setting(4.0, "turns within rope_original_len above which none is", above=0)
    rope_original_len: int = setting(8192, "context length before stretching", at_least=1)
    scale: float | None = setting(
        None, "factor of scores, before soft-cap and softmax; None: head_dim ** -0.5", above=0
    )
    bias: str = setting("none", "projections with a bias", one_of=lambda: BIAS)
    qk_norm: bool = setting(False, "RMSNorm of queries and of keys, before RoPE")
    qk_norm_over: str = setting("head", "what qk_norm's mean square is over", one_of=lambda: QK_NORM)
    qk_norm_eps: float = setting(1e-6, "added to the mean square in qk_norm", above=0)
    softcap: float | None = setting(None, "scores become softcap * tanh(scores / softcap); None: unchanged", above=0)
    dropout: float | None = setting(None, "dropout rate of attention weights; None: model.dropout", **RATE)
    implementation: str = setting("auto", "the kernel that computes attention", one_of=lambda: CHOICES, may_change=True)
    block_q: int | None = setting(
        None, BLOCK_MEANING.format("queries"), at_least=LANES, multiple_of=LANES, may_change=True
    )
    block_kv: int | None = setting(
        None, BLOCK_MEANING.format("keys"), at_least=LANES, multiple_of=LANES, may_change=True
    )


class AttentionKind(NamedTuple):
    """A kind of attention: its declarations, its window, and the settings that only it reads."""

    meaning: str
    params: Callable  # (cfg, dim) -> declarations
    # positions that a query sees, its own included; None: all before it
    window: Callable[[AttentionConfig], int | None]
    reads: tuple[str, ...] = ()


def sizes(cfg: AttentionConfig, dim: int) -> tuple[int, int, int]:
    """(H, G, K): query heads, key/value heads, head size."""
    return cfg.num_heads, cfg.num_kv_heads or cfg.num_heads, cfg.head_dim or dim // cfg.num_heads


def qkvo_params(cfg: AttentionConfig, dim: int) -> dict[str, Param]:
    H, G, K = sizes(cfg, dim)
    specs = dict(
        q=Param((dim, H, K), ("embed", "heads", "head_dim"), "matrix", inputs=1),
        k=Param((dim, G, K), ("embed", "kv_heads", "head_dim"), "matrix", inputs=1),
        v=Param((dim, G, K), ("embed", "kv_heads", "head_dim"), "matrix", inputs=1),
        o=Param((H, K, dim), ("heads", "head_dim", "embed"), "matrix", inputs=2),
    )
    if cfg.bias in ("qkv", "qkvo"):
        specs["q_bias"] = Param((H, K), ("heads", "head_dim"), "bias")
        specs["k_bias"] = Param((G, K), ("kv_heads", "head_dim"), "bias")
        specs["v_bias"] = Param((G, K), ("kv_heads", "head_dim"), "bias")
    if cfg.bias == "qkvo":
        specs["o_bias"] = Param((dim,), ("norm",), "bias")
    if cfg.qk_norm:
        first = 1 if cfg.qk_norm_over == "heads" else 2  # of a projection's dimensions: embed, heads, head_dim
        specs |= {f"{n}_norm": Param(specs[n].shape[first:], specs[n].axes[first:], "scale") for n in "qk"}
    return specs


class LayerCache(NamedTuple):
    """Keys and values of one layer, in a stack of all layers at its position in the pattern. The token at time t is in slot t % T,
    so that T slots hold a window of T tokens."""

    k_LBTGK: jax.Array
    v_LBTGK: jax.Array
    layer: jax.Array  # int32 [], index in the stack
    now: jax.Array  # int32 [], time of the first query
    first_B: jax.Array  # int32 [B], time of each row's first token


class Context(NamedTuple):
    """Inputs of a block besides its parameters and x."""

    rope: tuple[jax.Array, jax.Array] | None = None  # ops.rope_table of the positions; None: no RoPE
    segments_BS: jax.Array | None = None  # tokens see only tokens of an equal number; None: one document per row
    dropout_keys_B: jax.Array | None = None  # one key per row, for this layer; None: no dropout
    dropout_rate: float = 0.0
    cache: LayerCache | None = None  # None: keys and values come from x alone


# ---- the key/value cache


def remembered(cache: LayerCache, k_BSGK: jax.Array, v_BSGK: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The cache stacks with the keys and values of these tokens written: one token at time `now`, or the first tokens of all rows."""
    T, S = cache.k_LBTGK.shape[2], k_BSGK.shape[1]
    slot = cache.now % T if S == 1 else 0

    def write(stack: jax.Array, new: jax.Array) -> jax.Array:
        if S > T:  # only the last T are stored, each in its slot
            new = jnp.roll(new[:, S - T :], S % T, axis=1)
        return jax.lax.dynamic_update_slice(stack, new[None].astype(stack.dtype), (cache.layer, 0, slot, 0, 0))

    return write(cache.k_LBTGK, k_BSGK), write(cache.v_LBTGK, v_BSGK)


def slot_times(now: jax.Array, T: int) -> jax.Array:
    """int32 [T]: time of the token in each slot after the token at time `now` was written; negative: the slot is empty."""
    return now - (now - jnp.arange(T)) % T


# ---- the kinds


Stacks = tuple[jax.Array, jax.Array] | tuple[()]  # cached keys and values; () without a cache


def attention(
    params: Any, x_BSD: jax.Array, cfg: AttentionConfig, ctx: Context, kind: AttentionKind
) -> tuple[jax.Array, Stacks]:
    """Causal multi-head attention with shared key/value heads, [B, S, D] -> [B, S, D]; and the updated cache stacks."""
    q_BSHK, k_BSGK, v_BSGK = (linear(x_BSD, params[n], params.get(f"{n}_bias")) for n in "qkv")
    if cfg.qk_norm:
        q_BSHK = rms_norm(params["q_norm"], q_BSHK, cfg.qk_norm_eps)
        k_BSGK = rms_norm(params["k_norm"], k_BSGK, cfg.qk_norm_eps)
    if ctx.rope is not None:
        q_BSHK, k_BSGK = rotate(q_BSHK, ctx.rope), rotate(k_BSGK, ctx.rope)
    q_BSHK, k_BSGK, v_BSGK = map(checkpoint_name, (q_BSHK, k_BSGK, v_BSGK), "qkv")
    mask, stacks, cache = Mask(kind.window(cfg), ctx.segments_BS), (), ctx.cache
    if cache is not None:
        stacks = remembered(cache, k_BSGK, v_BSGK)
        if x_BSD.shape[1] == 1:  # several tokens are the rows' first: they see only one another
            k_BSGK, v_BSGK = (jax.lax.dynamic_index_in_dim(s, cache.layer, keepdims=False) for s in stacks)
            times = Times(cache.now[None], slot_times(cache.now, k_BSGK.shape[1]), cache.first_B)
            mask = Mask(mask.window, times=times)
    rate = ctx.dropout_rate if cfg.dropout is None else cfg.dropout
    how = Scores(cfg.scale, cfg.softcap, cfg.block_q, cfg.block_kv)
    y_BSHK = mix(q_BSHK, k_BSGK, v_BSGK, mask, how, cfg.implementation, ctx.dropout_keys_B, rate)
    return checkpoint_name(linear(y_BSHK, params["o"], params.get("o_bias"), inputs=2), "o"), stacks


ATTENTION = {
    "full": AttentionKind("all positions before", qkvo_params, lambda cfg: None),
    "sliding": AttentionKind("the last `window` positions", qkvo_params, lambda cfg: cfg.window, reads=("window",)),
}
