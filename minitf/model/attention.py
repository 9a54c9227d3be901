"""Attention: its weights, its kinds, its cache."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from minitf.model.kernels import Mask, Scores, Times, mix
from minitf.model.ops import linear, rms_norm, rotate
from minitf.params import Param


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    kind: str = "full"  # of every layer, unless model.pattern names one for each place: see ATTENTION
    num_heads: int = 4  # query heads
    num_kv_heads: int | None = None  # key/value heads, each shared by consecutive query heads; None: num_heads
    head_dim: int | None = None  # None: model.dim / num_heads
    window: int = 256  # positions that a sliding layer sees, its own included
    rope_base: float = 10_000.0  # of RoPE's wavelengths
    # Of rope_llama3, which stretches the longer wavelengths: see ops.stretched.
    rope_factor: float = 8.0  # by which they are stretched
    rope_low_freq_factor: float = 1.0  # turns within rope_original_len below which a wavelength is stretched in full
    rope_high_freq_factor: float = 4.0  # above which it is not
    rope_original_len: int = 8192  # positions of the training before
    scale: float | None = None  # of scores, before soft-cap and softmax; None: head_dim ** -0.5
    bias: str = "none"  # "none", "qkv" or "qkvo": which projections add a bias
    qk_norm: bool = False  # RMSNorm of queries and keys over the head, before RoPE
    qk_norm_eps: float = 1e-6  # added to its mean square
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    dropout: float | None = None  # of the attention weights; None: model.dropout
    implementation: str = "auto"  # "auto" or one of IMPLEMENTATIONS
    # Of splash: at most so many queries and keys at a time, multiples of 128; the next smaller ones that divide a row are taken.
    # None: 256 KiB of a head, but at most 1024, which fits every TPU's memory beside the scores.
    block_q: int | None = None
    block_kv: int | None = None


class Layer(NamedTuple):
    """A kind: its declarations, how far back it sees, and the settings that it alone reads."""

    params: Callable  # (cfg, dim) -> declarations
    window: Callable[
        [AttentionConfig], int | None
    ]  # positions that a query sees, its own included; None: all before it
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
        specs["q_norm"] = Param((K,), ("head_dim",), "scale")
        specs["k_norm"] = Param((K,), ("head_dim",), "scale")
    return specs


class LayerCache(NamedTuple):
    """The keys and values of one layer, inside the stack of all layers of its place in the pattern; the token of time t is in
    slot t % T, so that T slots hold what a window of T sees."""

    k_LBTGK: jax.Array
    v_LBTGK: jax.Array
    layer: jax.Array  # int32 []
    now: jax.Array  # int32 [], time of the first query
    first_B: jax.Array  # int32 [B]


class Context(NamedTuple):
    """What a block needs to know besides its parameters and x."""

    rope: tuple[jax.Array, jax.Array] | None = None  # ops.rope_table of the positions; None: no RoPE
    segments_BS: jax.Array | None = None  # only equal numbers see each other; None: one document a row
    dropout_keys_B: jax.Array | None = None  # one key a row, for this layer; None: no dropout
    dropout_rate: float = 0.0
    cache: LayerCache | None = None  # None: keys and values are those of x alone


# ---- keys and values of earlier tokens


def remembered(cache: LayerCache, k_BSGK: jax.Array, v_BSGK: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The stacks with these tokens' keys and values in their slots: one token at its time, or the first ones of all rows."""
    T, S = cache.k_LBTGK.shape[2], k_BSGK.shape[1]
    slot = cache.now % T if S == 1 else 0

    def write(stack: jax.Array, new: jax.Array) -> jax.Array:
        if S > T:  # only the last T stay, each in its slot
            new = jnp.roll(new[:, S - T :], S % T, axis=1)
        return jax.lax.dynamic_update_slice(stack, new[None].astype(stack.dtype), (cache.layer, 0, slot, 0, 0))

    return write(cache.k_LBTGK, k_BSGK), write(cache.v_LBTGK, v_BSGK)


def slot_times(now: jax.Array, T: int) -> jax.Array:
    """int32 [T]: the time of the token in each slot when that of time `now` was the last; negative: there is none yet."""
    return now - (now - jnp.arange(T)) % T


# ---- the kinds


Stacks = tuple[jax.Array, jax.Array] | tuple[()]  # of keys and values; () without a cache


def attention(
    params: Any, x_BSD: jax.Array, cfg: AttentionConfig, ctx: Context, kind: Layer
) -> tuple[jax.Array, Stacks]:
    """Causal multi-head attention with shared key/value heads, [B, S, D] -> [B, S, D]; and the cache's stacks with x's tokens."""
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
        if x_BSD.shape[1] == 1:  # several tokens are the first ones, and see only one another
            k_BSGK, v_BSGK = (jax.lax.dynamic_index_in_dim(s, cache.layer, keepdims=False) for s in stacks)
            times = Times(cache.now[None], slot_times(cache.now, k_BSGK.shape[1]), cache.first_B)
            mask = Mask(mask.window, times=times)
    rate = ctx.dropout_rate if cfg.dropout is None else cfg.dropout
    how = Scores(cfg.scale, cfg.softcap, cfg.block_q, cfg.block_kv)
    y_BSHK = mix(q_BSHK, k_BSGK, v_BSGK, mask, how, cfg.implementation, ctx.dropout_keys_B, rate)
    return checkpoint_name(linear(y_BSHK, params["o"], params.get("o_bias"), inputs=2), "o"), stacks


ATTENTION = {
    "full": Layer(qkvo_params, lambda cfg: None),
    "sliding": Layer(qkvo_params, lambda cfg: cfg.window, reads=("window",)),
}
