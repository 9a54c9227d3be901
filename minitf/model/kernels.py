"""Attention kernels: the mask, the implementations, and what each supports."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from minitf.model.ops import dropout, softcap
from minitf.sharding.mesh import BATCH
from minitf.sharding.rules import RULES
from minitf.sharding.seams import per_device, row_shards
from minitf.tables import Kind


class Scores(NamedTuple):
    """How scores are computed, and in which blocks."""

    scale: float | None = None  # factor of q . k, before soft-cap and softmax; None: K ** -0.5
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap); None: unchanged
    block_q: int | None = None  # splash only: most queries (below: keys) per block; None: what fits
    block_kv: int | None = None

    def scale_of(self, K: int) -> float:
        return K**-0.5 if self.scale is None else self.scale


def scaled(q: jax.Array, scores: Scores) -> jax.Array:
    """Scaled queries [..., K], for kernels without a scale argument. Computed in float32 and rounded once: a scale in bfloat16 would
    be rounded too, with the same error for all queries."""
    return (q.astype(jnp.float32) * scores.scale_of(q.shape[-1])).astype(q.dtype)


class Times(NamedTuple):
    """Times of the queries and of the cached keys. Rows of different lengths end together: row b begins at time first_B[b]."""

    queries_S: jax.Array
    keys_T: jax.Array
    first_B: jax.Array


class Mask(NamedTuple):
    """A query sees itself and earlier keys of its own segment, the last `window` at most (None: all). Only kernels turn this
    into flags or a boolean mask."""

    window: int | None = None
    segments_BS: jax.Array | None = None
    times: Times | None = None  # set if keys are cached; None: queries and keys are the same consecutive tokens
    first_query: int = 0  # position in the row of the first query (below: key), for a block of the row
    first_key: int = 0

    def allowed(self, S: int, T: int) -> jax.Array:
        """bool [1 or B, 1, S, T]; a query always sees itself, so no row of the mask is empty."""
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


def reference_mix(q, k, v, mask: Mask, how: Scores, keys_B, rate: float) -> jax.Array:
    """Explicit scores [B, G, H/G, S, T] with a float32 softmax; supports every option."""
    B, S, H, K = q.shape
    G = k.shape[2]
    q = q.reshape(B, S, G, H // G, K)  # consecutive query heads share a key/value head
    scores = jnp.einsum("bsgrk,btgk->bgrst", q, k, preferred_element_type=jnp.float32)
    scores = softcap(scores * how.scale_of(K), how.softcap)
    scores = jnp.where(mask.allowed(S, k.shape[1])[:, :, None], scores, -jnp.inf)
    probs = jax.nn.softmax(scores, axis=-1)
    if keys_B is not None and rate:
        probs = dropout(keys_B, probs, rate)
    return jnp.einsum("bgrst,btgk->bsgrk", probs.astype(v.dtype), v).reshape(B, S, H, K)


@jax.custom_vjp
def query_key(q_BGSK: jax.Array, k_BGTK: jax.Array) -> jax.Array:
    """float32 [B, G, S, T]: q . k. Differs from autodiff in the gradient w.r.t. k: q, the smaller operand, is transposed. XLA's CPU
    compiler would materialise the transposed gradient of the scores, at a tenth of its usual speed."""
    return jax.lax.dot_general(q_BGSK, k_BGTK, (((3,), (3,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)


def query_key_fwd(q, k):
    return query_key(q, k), (q, k)


def query_key_bwd(kept, g):
    q, k = kept
    product = lambda a, b, dims: jax.lax.dot_general(a.astype(g.dtype), b.astype(g.dtype), (dims, ((0, 1), (0, 1))))
    dq, dk = product(g, k, ((3,), (2,))), product(q, g, ((2,), (2,))).swapaxes(2, 3)
    return dq.astype(q.dtype), dk.astype(k.dtype)


query_key.defvjp(query_key_fwd, query_key_bwd)


def blocked_mix(q, k, v, mask: Mask, how: Scores, keys_B, rate):
    """`reference` with one block of queries at a time against the keys that any of them sees, so that nearly half of the S x S
    scores are never computed."""
    B, S, H, K = q.shape
    G = k.shape[2]
    q = scaled(q, how).reshape(B, S, G, H // G, K).transpose(0, 2, 3, 1, 4)
    # Each block casts them back, so that the blocks' gradients are summed in float32.
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
        probs = jax.nn.softmax(jnp.where(seen, softcap(s, how.softcap), -jnp.inf), axis=-1)
        y = jnp.einsum("bgst,bgtk->bgsk", probs.astype(q.dtype).reshape(B, G, -1, T), v_block)
        parts.append(y.reshape(B, H, n, K))
    return jnp.concatenate(parts, axis=2).swapaxes(1, 2)


def jax_mix(implementation: str, q, k, v, mask: Mask, how: Scores) -> jax.Array:
    attend = functools.partial(jax.nn.dot_product_attention, scale=how.scale, implementation=implementation)
    if mask.times is not None:
        return attend(q, k, v, mask=mask.allowed(q.shape[1], k.shape[1]))
    window = None if mask.window is None else (mask.window - 1, 0)
    allowed = None if mask.segments_BS is None else mask.allowed(q.shape[1], k.shape[1])
    return attend(q, k, v, mask=allowed, is_causal=True, local_window_size=window)


def xla_mix(q, k, v, mask, how, keys_B, rate):
    """`jax.nn.dot_product_attention` compiled by XLA; scores in float32."""
    return jax_mix("xla", q, k, v, mask, how)


HEADS = P(BATCH, None, RULES["heads"], None)  # sharding of queries, keys and values


def cudnn_mix(q, k, v, mask, how, keys_B, rate):
    """cuDNN's fused attention through `jax.nn.dot_product_attention`: NVIDIA GPUs, 16-bit types, shared key/value heads, windows."""
    attend = lambda q, k, v: jax_mix("cudnn", q, k, v, mask, how)
    # The compiler can partition it only if queries, keys and values are sharded alike.
    return per_device(attend, (HEADS, HEADS, HEADS), HEADS)(q, k, v)


LANES = 128  # of a TPU's vector unit: splash needs lengths of rows and blocks that are multiples of it


def splash_block(most: int | None, length: int, head_bytes: int) -> int:
    """Largest block size of at most `most` tokens (None: what fits), a multiple of LANES, that divides the row length."""
    if most is None:
        most = max(LANES, min(1024, 2**18 // head_bytes))
    return max(b for b in range(LANES, most + 1, LANES) if length % b == 0)


def splash_mix(q, k, v, mask: Mask, how: Scores, keys_B, rate):
    """JAX's Pallas splash kernel for TPUs: scores never leave the chip, and fully masked blocks are skipped. Its residuals besides
    q, k and v, the result and the logarithm of the softmax's sum, have the checkpoint name "context"."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    S, K = q.shape[1], q.shape[3]
    bq, bkv = (splash_block(most, S, K * q.dtype.itemsize) for most in (how.block_q, how.block_kv))
    blocks = kernel.BlockSizes(bq, bkv, bkv, bq, bkv, bkv, use_fused_bwd_kernel=True)
    seen = masks.CausalMask((S, S)) if mask.window is None else masks.LocalMask((S, S), (mask.window - 1, 0), 0)

    def of_device(q_BSHK, k_BSGK, v_BSGK, segments_BS):
        splash = kernel.make_splash_mha(
            masks.MultiHeadMask([seen] * q_BSHK.shape[2]),
            block_sizes=blocks,
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=how.softcap,
            residual_checkpoint_name="context",
        )
        # Consecutive query heads share a key/value head.
        heads_first = [x.swapaxes(1, 2) for x in (scaled(q_BSHK, how), k_BSGK, v_BSGK)]
        ids = None if segments_BS is None else kernel.SegmentIds(segments_BS, segments_BS)
        return jax.vmap(lambda q, k, v, ids: splash(q, k, v, segment_ids=ids))(*heads_first, ids).swapaxes(1, 2)

    return per_device(of_device, (HEADS, HEADS, HEADS, P(BATCH, None)), HEADS)(q, k, v, mask.segments_BS)


class Needs(NamedTuple):
    """Requirements on a kernel, from the settings and the rows."""

    dtype: str
    length: int  # queries per row
    head_dim: int
    softcap: bool = False
    dropout: bool = False  # of attention weights
    segments: bool = False
    cached: bool = False  # keys and values are read from the cache
    spread: bool = True  # the rows divide evenly over the devices
    capability: float | None = None  # compute capability of an NVIDIA GPU; None: unknown, or another device


def any_shape(needs: Needs) -> None:
    return None


def cudnn_shape(needs: Needs) -> str | None:
    # The checks that JAX and cuDNN make when the program is compiled (jax/_src/cudnn/fused_attention_stablehlo.py).
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
    """An implementation of `mix`: where it runs and what it supports."""

    meaning: str
    apply: Callable  # (q, k, v, mask, Scores, dropout keys, rate) -> [B, S, H, K] in v's dtype
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    softcap: bool = True
    dropout: bool = False
    segments: bool = True
    cached: bool = True
    shape: Callable[[Needs], str | None] = any_shape  # why sizes of rows or heads do not fit; None: they do
    names_context: bool = False  # it names its residuals "context" itself
    reads: tuple[str, ...] = ()  # settings of AttentionConfig that only it reads


IMPLEMENTATIONS = {
    "reference": Kernel("explicit scores; every option", reference_mix, dropout=True),
    "blocked": Kernel("blocks of queries, on CPUs", blocked_mix, ("cpu",), cached=False),
    "xla": Kernel("jax.nn.dot_product_attention", xla_mix, softcap=False),
    "cudnn": Kernel(
        "cuDNN's fused attention, on NVIDIA GPUs",
        cudnn_mix,
        ("gpu",),
        ("bfloat16", "float16"),
        softcap=False,
        segments=False,  # possible only with an S x S bias per row, which the kernel exists to avoid
        cached=False,
        shape=cudnn_shape,
    ),
    "splash": Kernel(
        "JAX's Pallas kernel, on TPUs",
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
CHOICES = {"auto": Kind(f"the first that can: {', '.join(AUTO)}", reads=("block_q", "block_kv")), **IMPLEMENTATIONS}


def refusal(name: str, platform: str | None, needs: Needs) -> str | None:
    """Why a kernel cannot meet these needs; None if it can. platform None: not checked."""
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


def mix(
    q_BSHK, k_BTGK, v_BTGK, mask: Mask, how: Scores, implementation: str = "auto", keys_B=None, rate: float = 0.0
) -> jax.Array:
    """Weighted mean of the values that each query sees, [B, S, H, K] in v's dtype; softmax in float32. implementation: a key of
    IMPLEMENTATIONS, as chosen by choose.py; "auto" runs reference. Raises ValueError if the kernel cannot compute this."""
    name = "reference" if implementation == "auto" else implementation
    B, S, _, K = q_BSHK.shape
    needs = Needs(
        dtype=str(q_BSHK.dtype),
        length=S,
        head_dim=K,
        softcap=how.softcap is not None,
        dropout=keys_B is not None and rate > 0,
        segments=mask.segments_BS is not None,
        cached=mask.times is not None,
        spread=B % row_shards() == 0,
    )
    if why := refusal(name, None, needs):
        raise ValueError(f"model.attention.implementation={name}: {why}")
    kernel = IMPLEMENTATIONS[name]
    y_BSHK = kernel.apply(q_BSHK, k_BTGK, v_BTGK, mask, how, keys_B, rate)
    return y_BSHK if kernel.names_context else checkpoint_name(y_BSHK, "context")
