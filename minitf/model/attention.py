"""Attention: its weights, its kinds, and `mix`, the only function that chooses a kernel."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from minitf.model.ops import dropout, linear, rms_norm, rotate, softcap
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


class Times(NamedTuple):
    """When the tokens of cached rows stand. Rows of different length end together: row b begins at time first_B[b]."""

    queries_S: jax.Array
    keys_T: jax.Array
    first_B: jax.Array


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


# ---- who may see whom, and with which kernel


class Mask(NamedTuple):
    """A query sees itself and earlier keys: the last `window` of them, of its own segment. `mix` alone turns this into a
    kernel's flags or a mask."""

    window: int | None = None
    segments_BS: jax.Array | None = None
    times: Times | None = None  # of cached keys; None: queries and keys are the same tokens, one after the other

    def allowed(self, S: int, T: int) -> jax.Array:
        """bool [1 or B, 1, S, T]; a query is always allowed to see itself, so no row is empty."""
        queries, keys = (jnp.arange(S), jnp.arange(T)) if self.times is None else self.times[:2]
        back = queries[:, None] - keys[None, :]
        seen = (back >= 0) if self.window is None else (back >= 0) & (back < self.window)
        if self.times is not None:
            begun = self.times.keys_T[None, :] >= self.times.first_B[:, None]
            return (seen[None] & begun[:, None, :])[:, None]
        if self.segments_BS is None:
            return seen[None, None]
        same = self.segments_BS[:, :, None] == self.segments_BS[:, None, :]
        return (seen[None] & same)[:, None]


def reference_mix(q, k, v, mask: Mask, cap: float | None, keys_B, rate: float) -> jax.Array:
    """Explicit scores [B, G, H/G, S, T] with a float32 softmax: honours every option."""
    B, S, H, K = q.shape
    G = k.shape[2]
    q = q.reshape(B, S, G, H // G, K)  # consecutive query heads share a key/value head
    scores = jnp.einsum("bsgrk,btgk->bgrst", q, k, preferred_element_type=jnp.float32)
    scores = softcap(scores * K**-0.5, cap)
    scores = jnp.where(mask.allowed(S, k.shape[1])[:, :, None], scores, -jnp.inf)
    probs = jax.nn.softmax(scores, axis=-1)
    if keys_B is not None and rate:
        probs = dropout(keys_B, probs, rate)
    return jnp.einsum("bgrst,btgk->bsgrk", probs.astype(v.dtype), v).reshape(B, S, H, K)


def jax_mix(implementation: str, q, k, v, mask: Mask) -> jax.Array:
    if mask.times is not None:
        return jax.nn.dot_product_attention(
            q, k, v, mask=mask.allowed(q.shape[1], k.shape[1]), implementation=implementation
        )
    window = None if mask.window is None else (mask.window - 1, 0)
    allowed = None if mask.segments_BS is None else mask.allowed(q.shape[1], k.shape[1])
    return jax.nn.dot_product_attention(
        q, k, v, mask=allowed, is_causal=True, local_window_size=window, implementation=implementation
    )


def xla_mix(q, k, v, mask, cap, keys_B, rate):
    """`jax.nn.dot_product_attention` compiled by XLA; scores in float32."""
    return jax_mix("xla", q, k, v, mask)


def cudnn_mix(q, k, v, mask, cap, keys_B, rate):
    """cuDNN's fused attention through `jax.nn.dot_product_attention`: NVIDIA GPUs, 16-bit types."""
    return jax_mix("cudnn", q, k, v, mask)


def splash_mix(q, k, v, mask: Mask, cap, keys_B, rate):
    """The Pallas splash kernel of JAX: TPU; scores never leave the chip."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    S, H, K = q.shape[1:]
    one = masks.CausalMask((S, S)) if mask.window is None else masks.LocalMask((S, S), (mask.window - 1, 0), 0)
    splash = kernel.make_splash_mha(
        masks.MultiHeadMask([one] * H), head_shards=1, q_seq_shards=1, attn_logits_soft_cap=cap
    )
    repeats = H // k.shape[2]
    heads_first = lambda x, n=1: jnp.repeat(x, n, axis=2).swapaxes(1, 2)
    args = heads_first(q * K**-0.5), heads_first(k, repeats), heads_first(v, repeats)
    if mask.segments_BS is None:
        y = jax.vmap(splash)(*args)
    else:
        y = jax.vmap(lambda q, k, v, s: splash(q, k, v, segment_ids=kernel.SegmentIds(s, s)))(*args, mask.segments_BS)
    return y.swapaxes(1, 2).astype(v.dtype)


class Kernel(NamedTuple):
    """An implementation of `mix`, where it runs and what it cannot do."""

    apply: Callable
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")
    softcap: bool = True
    dropout: bool = False
    float32: bool = True
    segments: bool = True
    sharded: bool = True


IMPLEMENTATIONS = {
    "reference": Kernel(reference_mix, dropout=True),
    "xla": Kernel(xla_mix, softcap=False),
    "cudnn": Kernel(cudnn_mix, ("gpu",), softcap=False, float32=False, segments=False),
    "splash": Kernel(splash_mix, ("tpu",), sharded=False),
}
AUTO = ("cudnn", "xla", "reference")  # in order of preference; splash is chosen by name only


def refusal(
    name: str, platform: str, *, dtype: str, softcap: bool, dropout: bool, segments: bool, devices: int
) -> str | None:
    """Why an implementation cannot run here, or None."""
    kernel = IMPLEMENTATIONS[name]
    if platform not in kernel.platforms:
        return f"it runs on {' and '.join(kernel.platforms)}, this is {platform}"
    if softcap and not kernel.softcap:
        return "it has no soft-cap (model.attention.softcap)"
    if dropout and not kernel.dropout:
        return "it has no dropout of attention weights (model.attention.dropout=0 leaves the other dropouts on)"
    if dtype == "float32" and not kernel.float32:
        return "it takes 16-bit types (model.dtype=bfloat16)"
    if segments and not kernel.segments:
        return "it does not separate documents (data.isolate_documents)"
    if devices > 1 and not kernel.sharded:
        return f"it does not run on a mesh of {devices} devices yet"
    return None


def choose(implementation: str, platform: str, **needs: Any) -> str:
    """The implementation that will run. Raises ValueError where one was named that cannot; only "auto" may choose."""
    if implementation != "auto":
        why = refusal(implementation, platform, **needs)
        if why:
            can = [n for n in IMPLEMENTATIONS if not refusal(n, platform, **needs)]
            raise ValueError(
                f"model.attention.implementation={implementation}: {why}; these can: {', '.join(['auto', *can])}"
            )
        return implementation
    return next(n for n in AUTO if not refusal(n, platform, **needs))


def mix(q_BSHK, k_BTGK, v_BTGK, mask: Mask, cfg: AttentionConfig, keys_B=None, rate: float = 0.0) -> jax.Array:
    """The weighted mean of the values that each query may see, [B, S, H, K] in v's dtype; softmax in float32."""
    if cfg.scale is not None:
        q_BSHK *= cfg.scale * q_BSHK.shape[-1] ** 0.5  # the kernels' own scale is head_dim ** -0.5
    mesh = jax.sharding.get_abstract_mesh()
    name = choose(
        cfg.implementation,
        jax.default_backend(),
        dtype=str(q_BSHK.dtype),
        softcap=cfg.softcap is not None,
        dropout=keys_B is not None and rate > 0,
        segments=mask.segments_BS is not None or mask.times is not None,
        devices=1 if mesh.empty else mesh.size,
    )
    return IMPLEMENTATIONS[name].apply(q_BSHK, k_BTGK, v_BTGK, mask, cfg.softcap, keys_B, rate)


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
    y_BSHK = checkpoint_name(mix(q_BSHK, k_BSGK, v_BSGK, mask, cfg, ctx.dropout_keys_B, rate), "context")
    return linear(y_BSHK, params["o"], params.get("o_bias"), inputs=2), stacks


ATTENTION = {
    "full": Layer(qkvo_params, lambda cfg: None),
    "sliding": Layer(qkvo_params, lambda cfg: cfg.window, reads=("window",)),
}
