"""Attention: its weights, its kinds, and `mix`, the only function that chooses a kernel."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from minitf.model.ops import dropout, linear, rms_norm, rotate, softcap
from minitf.params import Param
from minitf.sharding import BATCH, RULES, capability, per_device, row_shards


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


def score_scale(cfg: AttentionConfig, head_dim: int) -> float:
    return head_dim**-0.5 if cfg.scale is None else cfg.scale


def scaled(q: jax.Array, cfg: AttentionConfig) -> jax.Array:
    """Queries [..., K] of a kernel without a scale of its own. Rounded once: in bfloat16 the scale itself would be rounded too, the
    same way for all."""
    return (q.astype(jnp.float32) * score_scale(cfg, q.shape[-1])).astype(q.dtype)


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
    first_query: int = 0  # places in the row of the first query and key at hand, which are a part of it
    first_key: int = 0

    def allowed(self, S: int, T: int) -> jax.Array:
        """bool [1 or B, 1, S, T]; a query is always allowed to see itself, so no row is empty."""
        queries, keys = self.first_query + jnp.arange(S), self.first_key + jnp.arange(T)
        if self.times is not None:
            queries, keys = self.times[:2]
        back = queries[:, None] - keys[None, :]
        seen = (back >= 0) if self.window is None else (back >= 0) & (back < self.window)
        if self.times is not None:
            begun = self.times.keys_T[None, :] >= self.times.first_B[:, None]
            return (seen[None] & begun[:, None, :])[:, None]
        if self.segments_BS is None:
            return seen[None, None]
        of_queries, of_keys = (
            self.segments_BS[:, first : first + n] for first, n in ((self.first_query, S), (self.first_key, T))
        )
        same = of_queries[:, :, None] == of_keys[:, None, :]
        return (seen[None] & same)[:, None]


def reference_mix(q, k, v, mask: Mask, cfg: AttentionConfig, keys_B, rate: float) -> jax.Array:
    """Explicit scores [B, G, H/G, S, T] with a float32 softmax: honours every option."""
    B, S, H, K = q.shape
    G = k.shape[2]
    q = q.reshape(B, S, G, H // G, K)  # consecutive query heads share a key/value head
    scores = jnp.einsum("bsgrk,btgk->bgrst", q, k, preferred_element_type=jnp.float32)
    scores = softcap(scores * score_scale(cfg, K), cfg.softcap)
    scores = jnp.where(mask.allowed(S, k.shape[1])[:, :, None], scores, -jnp.inf)
    probs = jax.nn.softmax(scores, axis=-1)
    if keys_B is not None and rate:
        probs = dropout(keys_B, probs, rate)
    return jnp.einsum("bgrst,btgk->bsgrk", probs.astype(v.dtype), v).reshape(B, S, H, K)


@jax.custom_vjp
def query_key(q_BGSK: jax.Array, k_BGTK: jax.Array) -> jax.Array:
    """float32 [B, G, S, T]: q . k. What differs from autodiff is the form of the gradient by k: q, the smaller operand, is the one
    that is transposed. XLA's CPU compiler would write the transposed gradient of the scores out, at a tenth of its usual speed."""
    return jax.lax.dot_general(q_BGSK, k_BGTK, (((3,), (3,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)


def query_key_fwd(q, k):
    return query_key(q, k), (q, k)


def query_key_bwd(kept, g):
    q, k = kept
    product = lambda a, b, dims: jax.lax.dot_general(a.astype(g.dtype), b.astype(g.dtype), (dims, ((0, 1), (0, 1))))
    dq, dk = product(g, k, ((3,), (2,))), product(q, g, ((2,), (2,))).swapaxes(2, 3)
    return dq.astype(q.dtype), dk.astype(k.dtype)


query_key.defvjp(query_key_fwd, query_key_bwd)


def blocked_mix(q, k, v, mask: Mask, cfg: AttentionConfig, keys_B, rate):
    """`reference` with a block of queries at a time against the keys that some of them see, so that near half of the square is
    never formed."""
    B, S, H, K = q.shape
    G = k.shape[2]
    q = scaled(q, cfg).reshape(B, S, G, H // G, K).transpose(0, 2, 3, 1, 4)
    # Cast back block by block, so that the gradients of the blocks are added up in float32.
    k, v = (x.swapaxes(1, 2).astype(jnp.float32) for x in (k, v))
    size = max(128, -(-S // 8))  # the blocks are unrolled, so there are no more than eight
    parts = []
    for first in range(0, S, size):
        last = min(first + size, S)
        begin = 0 if mask.window is None else max(0, first + 1 - mask.window)
        rows, keys = slice(first, last), slice(begin, last)
        n, T = last - first, last - begin
        k_block, v_block = (x[:, :, keys].astype(q.dtype) for x in (k, v))
        s = query_key(q[:, :, :, rows].reshape(B, G, -1, K), k_block).reshape(B, G, -1, n, T)
        seen = mask._replace(first_query=first, first_key=begin).allowed(n, T)[:, :, None]
        probs = jax.nn.softmax(jnp.where(seen, softcap(s, cfg.softcap), -jnp.inf), axis=-1)
        y = jnp.einsum("bgst,bgtk->bgsk", probs.astype(q.dtype).reshape(B, G, -1, T), v_block)
        parts.append(y.reshape(B, H, n, K))
    return jnp.concatenate(parts, axis=2).swapaxes(1, 2)


def jax_mix(implementation: str, q, k, v, mask: Mask, cfg: AttentionConfig) -> jax.Array:
    attend = functools.partial(jax.nn.dot_product_attention, scale=cfg.scale, implementation=implementation)
    if mask.times is not None:
        return attend(q, k, v, mask=mask.allowed(q.shape[1], k.shape[1]))
    window = None if mask.window is None else (mask.window - 1, 0)
    allowed = None if mask.segments_BS is None else mask.allowed(q.shape[1], k.shape[1])
    return attend(q, k, v, mask=allowed, is_causal=True, local_window_size=window)


def xla_mix(q, k, v, mask, cfg, keys_B, rate):
    """`jax.nn.dot_product_attention` compiled by XLA; scores in float32."""
    return jax_mix("xla", q, k, v, mask, cfg)


HEADS = P(BATCH, None, RULES["heads"], None)  # how rows of heads are spread over devices


def cudnn_mix(q, k, v, mask, cfg, keys_B, rate):
    """cuDNN's fused attention through `jax.nn.dot_product_attention`: NVIDIA GPUs, 16-bit types, shared key/value heads, windows."""
    attend = lambda q, k, v: jax_mix("cudnn", q, k, v, mask, cfg)
    # It can be partitioned, but only where the compiler has spread queries, keys and values alike.
    return per_device(attend, (HEADS, HEADS, HEADS), HEADS)(q, k, v)


LANES = 128  # of a TPU's vector unit: splash takes rows and blocks that are multiples of it


def splash_block(most: int | None, length: int, head_bytes: int) -> int:
    """The largest block of at most so many tokens (None: what fits) that divides a row of this length, a multiple of LANES."""
    if most is None:
        most = max(LANES, min(1024, 2**18 // head_bytes))
    return max(b for b in range(LANES, most + 1, LANES) if length % b == 0)


def splash_mix(q, k, v, mask: Mask, cfg: AttentionConfig, keys_B, rate):
    """The Pallas splash kernel of JAX: TPU; scores never leave the chip, and blocks that see nothing are left out. What its
    backward pass needs besides q, k and v, the result and the logarithm of the softmax's sum, is named "context"."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    S, K = q.shape[1], q.shape[3]
    bq, bkv = (splash_block(most, S, K * q.dtype.itemsize) for most in (cfg.block_q, cfg.block_kv))
    blocks = kernel.BlockSizes(bq, bkv, bkv, bq, bkv, bkv, use_fused_bwd_kernel=True)
    seen = masks.CausalMask((S, S)) if mask.window is None else masks.LocalMask((S, S), (mask.window - 1, 0), 0)

    def of_device(q_BSHK, k_BSGK, v_BSGK, segments_BS):
        splash = kernel.make_splash_mha(
            masks.MultiHeadMask([seen] * q_BSHK.shape[2]),
            block_sizes=blocks,
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=cfg.softcap,
            residual_checkpoint_name="context",
        )
        # Consecutive query heads share a key/value head.
        heads_first = [x.swapaxes(1, 2) for x in (scaled(q_BSHK, cfg), k_BSGK, v_BSGK)]
        ids = None if segments_BS is None else kernel.SegmentIds(segments_BS, segments_BS)
        return jax.vmap(lambda q, k, v, ids: splash(q, k, v, segment_ids=ids))(*heads_first, ids).swapaxes(1, 2)

    return per_device(of_device, (HEADS, HEADS, HEADS, P(BATCH, None)), HEADS)(q, k, v, mask.segments_BS)


class Needs(NamedTuple):
    """What an implementation is asked for: facts of the settings and of the rows."""

    dtype: str
    length: int  # queries of a row
    head_dim: int
    softcap: bool = False
    dropout: bool = False  # of attention weights
    segments: bool = False
    cached: bool = False  # the keys are those of earlier tokens
    spread: bool = True  # the rows divide evenly over the devices
    capability: float | None = None  # of an NVIDIA GPU ("compute capability"); None: unknown, or another device


def any_shape(needs: Needs) -> None:
    return None


def cudnn_shape(needs: Needs) -> str | None:
    # As JAX and cuDNN check it when the program is compiled (jax/_src/cudnn/fused_attention_stablehlo.py).
    if needs.capability is not None and needs.capability < 8:
        return f"it needs an NVIDIA GPU of compute capability 8.0 (Ampere), this is {needs.capability}"
    largest = 128 if needs.capability is not None and needs.capability < 9 else 256
    if needs.head_dim % 8 or needs.head_dim > largest:
        return f"it takes heads of a multiple of 8 up to {largest}, not of {needs.head_dim} (model.attention.head_dim)"
    return uneven(needs)


def uneven(needs: Needs) -> str | None:
    return None if needs.spread else "the rows do not divide evenly over the devices (batch_size)"


def splash_shape(needs: Needs) -> str | None:
    if needs.length % LANES:
        return f"it takes rows of a multiple of {LANES} tokens, not of {needs.length} (seq_len)"
    return uneven(needs)


class Kernel(NamedTuple):
    """An implementation of `mix`, where it runs and what it cannot do."""

    apply: Callable  # (q, k, v, mask, cfg, dropout keys, rate) -> [B, S, H, K] in v's dtype
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    softcap: bool = True
    dropout: bool = False
    segments: bool = True
    cached: bool = True
    shape: Callable[[Needs], str | None] = any_shape  # why it cannot take rows or heads of this size
    names_context: bool = False  # gives what the backward pass needs the name "context" itself
    reads: tuple[str, ...] = ()  # settings of AttentionConfig that it alone reads


IMPLEMENTATIONS = {
    "reference": Kernel(reference_mix, dropout=True),
    "blocked": Kernel(blocked_mix, ("cpu",), cached=False),
    "xla": Kernel(xla_mix, softcap=False),
    "cudnn": Kernel(
        cudnn_mix,
        ("gpu",),
        ("bfloat16", "float16"),
        softcap=False,
        segments=False,  # it could by a bias of S x S for each row, which is what it is there to avoid
        cached=False,
        shape=cudnn_shape,
    ),
    "splash": Kernel(
        splash_mix,
        ("tpu",),
        ("float32", "bfloat16"),
        cached=False,
        shape=splash_shape,
        names_context=True,
        reads=("block_q", "block_kv"),
    ),
}
AUTO = ("splash", "cudnn", "blocked", "xla", "reference")  # in order of preference


def refusal(name: str, platform: str | None, needs: Needs) -> str | None:
    """Why an implementation cannot do this, or None. platform None: it is not asked about."""
    kernel = IMPLEMENTATIONS[name]
    if platform is not None and platform not in kernel.platforms:
        return f"it runs on {' and '.join(kernel.platforms)}, this is {platform}"
    if needs.softcap and not kernel.softcap:
        return "it has no soft-cap (model.attention.softcap)"
    if needs.dropout and not kernel.dropout:
        return "it has no dropout of attention weights (model.attention.dropout=0 leaves the other dropouts on)"
    if needs.dtype not in kernel.dtypes:
        return f"it takes {' and '.join(kernel.dtypes)}, not {needs.dtype} (model.dtype)"
    if needs.segments and not kernel.segments:
        return "it does not separate documents (data.isolate_documents)"
    if needs.cached and not kernel.cached:
        return "it does not read cached keys"
    return kernel.shape(needs)


def choose(implementation: str, platform: str | None, needs: Needs) -> str:
    """The implementation that will run. Raises ValueError where one was named that cannot; only "auto" may choose."""
    if implementation != "auto":
        why = refusal(implementation, platform, needs)
        if why:
            can = [n for n in IMPLEMENTATIONS if not refusal(n, platform, needs)]
            raise ValueError(
                f"model.attention.implementation={implementation}: {why}; these can: {', '.join(['auto', *can])}"
            )
        return implementation
    return next(n for n in AUTO if not refusal(n, platform, needs))


def mix(q_BSHK, k_BTGK, v_BTGK, mask: Mask, cfg: AttentionConfig, keys_B=None, rate: float = 0.0) -> jax.Array:
    """The weighted mean of the values that each query may see, [B, S, H, K] in v's dtype; softmax in float32."""
    B, S, _, K = q_BSHK.shape
    # One that is named may be compiled here for devices that are elsewhere.
    device = jax.devices()[0] if cfg.implementation == "auto" else None
    needs = Needs(
        dtype=str(q_BSHK.dtype),
        length=S,
        head_dim=K,
        softcap=cfg.softcap is not None,
        dropout=keys_B is not None and rate > 0,
        segments=mask.segments_BS is not None,
        cached=mask.times is not None,
        spread=B % row_shards() == 0,
        capability=capability(device),
    )
    kernel = IMPLEMENTATIONS[choose(cfg.implementation, None if device is None else device.platform, needs)]
    y_BSHK = kernel.apply(q_BSHK, k_BTGK, v_BTGK, mask, cfg, keys_B, rate)
    return y_BSHK if kernel.names_context else checkpoint_name(y_BSHK, "context")


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
    y_BSHK = mix(q_BSHK, k_BSGK, v_BSGK, mask, cfg, ctx.dropout_keys_B, rate)
    return checkpoint_name(linear(y_BSHK, params["o"], params.get("o_bias"), inputs=2), "o"), stacks


ATTENTION = {
    "full": Layer(qkvo_params, lambda cfg: None),
    "sliding": Layer(qkvo_params, lambda cfg: cfg.window, reads=("window",)),
}
