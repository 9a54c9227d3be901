"""The decoder-only transformer: embedding, scanned blocks, final norm, head."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from minitf.model.attention import (
    ATTENTION,
    RATE,
    AttentionConfig,
    Context,
    LayerCache,
    Stacks,
    attention,
    sizes,
)
from minitf.model.experts import Aux, Tokens, mlp, mlp_params
from minitf.model.mlp import MlpConfig
from minitf.model.ops import (
    dropout,
    layer_norm,
    matmul,
    rms_norm,
    rope_frequencies,
    rope_table,
    softcap,
    stretched,
)
from minitf.model.remat import REMAT, rematerialised
from minitf.params import SCHEMES, Param, stacked, with_inits, zeros
from minitf.settings import setting
from minitf.sharding.seams import gather, lookup, pin, pin_cache

DTYPES = {
    "float32": "as the master weights",
    "bfloat16": "half the bytes, float32's range",
    "float16": "half the bytes",
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    num_layers: int = setting(4, "blocks", at_least=1)
    dim: int = setting(256, "width of the residual stream", at_least=1)
    vocab_size: int | None = setting(None, "rows of the embedding; None: the tokenizer's size", at_least=1)
    max_seq_len: int | None = setting(None, "positions that the model can tell apart; None: seq_len", at_least=1)
    dtype: str = setting("float32", "dtype of products and activations", one_of=lambda: DTYPES, may_change=True)
    positions: str = setting("rope", "how positions are encoded", one_of=lambda: POSITIONS, reads_in="attention")
    norm: str = setting("rms_norm", "normalisation of the residual stream", one_of=lambda: NORMS)
    norm_eps: float = setting(1e-6, "added to the variance or mean square", above=0)
    post_norms: bool = setting(False, "also normalise what attention and MLP return, before it is added")
    embedding_scale: float | None = setting(
        None, "factor of token embeddings on their way in (not in a tied head); None: 1", above=0
    )
    tie_embeddings: bool = setting(False, "the head is the embedding, transposed")
    logit_softcap: float | None = setting(
        None, "logits become logit_softcap * tanh(logits / logit_softcap); None: unchanged", above=0
    )
    dropout: float = setting(0.0, "dropout rate after embedding, attention and MLP", **RATE)
    init: str = setting("fixed", "standard deviation of initial weights", one_of=lambda: SCHEMES)
    pattern: tuple[str, ...] | None = setting(
        None,
        "attention kinds of one period of layers; None: attention.kind in every layer",
        **dict(one_of=lambda: ATTENTION, reads_in="attention", in_place_of="attention.kind", nonempty=True),
    )
    remat: str = setting("products", "what the backward pass recomputes", one_of=lambda: REMAT, may_change=True)
    unroll: int = setting(1, "periods of layers in one iteration of the scan", at_least=1, may_change=True)
    attention: AttentionConfig = AttentionConfig()
    mlp: MlpConfig = MlpConfig()


# ---- norms


class Norm(NamedTuple):
    meaning: str
    params: Callable  # (dim) -> declarations
    apply: Callable  # (params, x, eps) -> x
    reads: tuple[str, ...] = ()  # settings of ModelConfig that only it reads


def scale_params(dim: int) -> dict[str, Param]:
    return dict(scale=Param((dim,), ("norm",), "scale"))


def scale_bias_params(dim: int) -> dict[str, Param]:
    return dict(scale_params(dim), bias=Param((dim,), ("norm",), "bias"))


def offset_params(dim: int) -> dict[str, Param]:
    return dict(scale=Param((dim,), ("norm",), "scale", init=zeros))


NORMS = {
    "rms_norm": Norm("RMSNorm", scale_params, lambda p, x, eps: rms_norm(p["scale"], x, eps)),
    "rms_norm_offset": Norm(
        "RMSNorm whose scale is stored less 1 (Gemma)",
        offset_params,
        lambda p, x, eps: rms_norm(1 + p["scale"], x, eps),
    ),
    "layer_norm": Norm(
        "LayerNorm with scale and bias", scale_bias_params, lambda p, x, eps: layer_norm(p["scale"], p["bias"], x, eps)
    ),
    "layer_norm_no_bias": Norm(
        "LayerNorm with scale alone", scale_params, lambda p, x, eps: layer_norm(p["scale"], None, x, eps)
    ),
}


# ---- positions: a table added to the embedding, or a rotation inside attention


def position_params(cfg: ModelConfig) -> dict[str, Param]:
    return dict(position_embedding=Param((cfg.max_seq_len, cfg.dim), ("positions", "embed"), "embedding"))


def no_params(cfg: ModelConfig) -> dict[str, Param]:
    return {}


def plain_frequencies(cfg: AttentionConfig, head_dim: int) -> jax.Array:
    return rope_frequencies(head_dim, cfg.rope_base)


def llama3_frequencies(cfg: AttentionConfig, head_dim: int) -> jax.Array:
    low, high = cfg.rope_low_freq_factor, cfg.rope_high_freq_factor
    return stretched(plain_frequencies(cfg, head_dim), cfg.rope_factor, low, high, cfg.rope_original_len)


class Positions(NamedTuple):
    meaning: str
    params: Callable  # (cfg) -> declarations beside the token embedding
    # (cfg.attention, head size) -> rotation of queries and keys in radians per position, [K/2]; None: no rotation
    frequencies: Callable[[AttentionConfig, int], jax.Array] | None = None
    reads: tuple[str, ...] = ()  # settings of AttentionConfig that only it reads


STRETCHED = ("rope_factor", "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_len")
POSITIONS = {
    "learned": Positions("a table added to the embedding", position_params),
    "rope": Positions("RoPE (arXiv:2104.09864)", no_params, plain_frequencies, reads=("rope_base",)),
    "rope_llama3": Positions(
        "RoPE with stretched wavelengths (Llama 3.1)", no_params, llama3_frequencies, reads=("rope_base", *STRETCHED)
    ),
    "none": Positions("not at all", no_params),
}


# ---- declarations


def pattern(cfg: ModelConfig) -> tuple[str, ...]:
    """Attention kinds of one period of layers."""
    return cfg.pattern or (cfg.attention.kind,)


class Place(NamedTuple):
    """A stack of equal layers."""

    layers: range  # their numbers in the model
    attention: str
    mlp: MlpConfig


def sections(cfg: ModelConfig) -> tuple[tuple[Place, ...], ...]:
    """The places of each run of layers that repeats: dense layers before a mixture, if any, then all others. Layers follow one another
    place by place, then period by period."""
    kinds, m = pattern(cfg), cfg.mlp
    dense = dataclasses.replace(m, router="none", hidden=m.dense_hidden or m.hidden)
    begin = min(m.dense_first, cfg.num_layers)
    runs = ((0, begin, len(kinds)), (begin, cfg.num_layers, math.lcm(len(kinds), m.every)))

    def place(layer: int, end: int, period: int) -> Place:
        mixed = layer >= begin and (layer + 1) % m.every == 0
        return Place(range(layer, end, period), kinds[layer % len(kinds)], m if mixed else dense)

    found = (tuple(place(i, end, n) for i in range(first, min(first + n, end))) for first, end, n in runs)
    return tuple(section for section in found if section)


def places(cfg: ModelConfig) -> tuple[Place, ...]:
    """All places, in the order of params["blocks"]."""
    return tuple(place for section in sections(cfg) for place in section)


def block_params(cfg: ModelConfig, place: Place) -> dict[str, Any]:
    norm = NORMS[cfg.norm].params
    specs = dict(
        attention_norm=norm(cfg.dim),
        attention=ATTENTION[place.attention].params(cfg.attention, cfg.dim),
        mlp_norm=norm(cfg.dim),
        mlp=mlp_params(place.mlp, cfg.dim),
    )
    if cfg.post_norms:
        specs |= dict(attention_post_norm=norm(cfg.dim), mlp_post_norm=norm(cfg.dim))
    return specs


def model_params(cfg: ModelConfig) -> dict[str, Any]:
    """Declarations of the whole model; `blocks` holds one stack of layers per place."""
    specs = dict(
        embedding=Param((cfg.vocab_size, cfg.dim), ("vocab", "embed"), "embedding"),
        **POSITIONS[cfg.positions].params(cfg),
        blocks=tuple(stacked(block_params(cfg, place), len(place.layers)) for place in places(cfg)),
        final_norm=NORMS[cfg.norm].params(cfg.dim),
    )
    if not cfg.tie_embeddings:
        specs["head"] = Param((cfg.dim, cfg.vocab_size), ("embed", "vocab"), "head", inputs=1)
    return with_inits(specs, cfg.init, cfg.num_layers)


# ---- functions

EMBEDDING, ATTENTION_WEIGHTS, ATTENTION_OUT, MLP_OUT = range(4)  # dropout sites, folded into the keys


def fold(keys_B: jax.Array | None, data: Any) -> jax.Array | None:
    return None if keys_B is None else jax.vmap(jax.random.fold_in, (0, None))(keys_B, data)


def drop(x: jax.Array, keys_B: jax.Array | None, site: int, rate: float) -> jax.Array:
    return x if keys_B is None or not rate else dropout(fold(keys_B, site), x, rate)


def block(
    params: Any, x: jax.Array, cfg: ModelConfig, place: Place, ctx: Context, tokens: Tokens | None = None
) -> tuple[jax.Array, Stacks, Aux]:
    """x + attention(norm(x)), then x + mlp(norm(x)), [B, S, D] -> [B, S, D]; the updated cache stacks; and a mixture's sums over
    tokens. With post_norms the outputs of attention and MLP are normalised before they are added."""

    def norm(name: str, x: jax.Array) -> jax.Array:
        return NORMS[cfg.norm].apply(params[name], x, cfg.norm_eps)

    def post(name: str, y: jax.Array) -> jax.Array:
        return norm(name, y) if cfg.post_norms else y

    keys = ctx.dropout_keys_B
    inner = ctx._replace(dropout_keys_B=fold(keys, ATTENTION_WEIGHTS))
    y, stacks = attention(
        params["attention"], norm("attention_norm", x), cfg.attention, inner, ATTENTION[place.attention]
    )
    x = checkpoint_name(x + drop(post("attention_post_norm", y), keys, ATTENTION_OUT, cfg.dropout), "attention_out")
    y, aux = mlp(params["mlp"], norm("mlp_norm", x), place.mlp, tokens)
    return x + drop(post("mlp_post_norm", y), keys, MLP_OUT, cfg.dropout), stacks, aux


def embed(params: Any, tokens_BS: jax.Array, positions_BS: jax.Array, cfg: ModelConfig) -> jax.Array:
    def rows(name: str, ids_BS: jax.Array) -> jax.Array:
        return lookup(params[name], model_params(cfg)[name], ids_BS, cfg.dtype)

    x = rows("embedding", tokens_BS)
    if cfg.embedding_scale is not None:
        x *= cfg.embedding_scale
    return x + rows("position_embedding", positions_BS) if "position_embedding" in params else x


class Cache(NamedTuple):
    """Keys and values of the tokens so far. Rows of different lengths are left-padded, so that they end together."""

    stacks: tuple[Stacks, ...]  # one per place, [layers, B, T, G, K]
    now: jax.Array  # int32 [], time of the next token
    first_B: jax.Array  # int32 [B], time of each row's first token


def new_cache(cfg: ModelConfig, first_B: jax.Array, length: int) -> Cache:
    """An empty cache for rows of at most `length` tokens, padding included; sliding layers store only their window."""
    _, G, K = sizes(cfg.attention, cfg.dim)

    def empty(place: Place) -> Stacks:
        T = min(ATTENTION[place.attention].window(cfg.attention) or length, length)
        shape = (len(place.layers), len(first_B), T, G, K)
        return tuple(pin_cache(jnp.zeros(shape, cfg.dtype)) for _ in "kv")

    return Cache(tuple(map(empty, places(cfg))), jnp.int32(0), first_B)


class Hidden(NamedTuple):
    x_BSD: jax.Array  # activations after the final norm in cfg.dtype, the input of `logits` and of the loss
    cache: Cache | None  # updated with these tokens
    aux: tuple[Aux, ...]  # `balance_sums` of the layers [layers, B, ...] of each place; {} for places without a mixture


def hidden(
    params: Any,
    tokens_BS: jax.Array,
    cfg: ModelConfig,
    *,
    positions: jax.Array | None = None,
    segments: jax.Array | None = None,
    dropout_keys: jax.Array | None = None,
    cache: Cache | None = None,
    weights: jax.Array | None = None,
) -> Hidden:
    """The forward pass up to the final norm.

    positions: [B, S]; None: 0, 1, 2, ... segments: [B, S], tokens see only tokens of an equal number. dropout_keys: [B], one key
    per row (already folded with seed, step and row); None: no dropout. cache: keys and values of the preceding tokens; tokens_BS
    then holds the first tokens of all rows (new cache) or one token per row, and positions and segments follow from the cache.
    weights: float32 [B, S], of the tokens in the loss, over which `aux` is summed; None: no sums.
    """
    S = tokens_BS.shape[1]
    if cache is not None:
        times = cache.now + jnp.arange(S)
        positions = jnp.maximum(times - cache.first_B[:, None], 0)
        segments = (times >= cache.first_B[:, None]).astype(jnp.int32) if S > 1 else None
    elif positions is None:
        positions = jnp.broadcast_to(jnp.arange(S), tokens_BS.shape)
    frequencies = POSITIONS[cfg.positions].frequencies
    head_dim = sizes(cfg.attention, cfg.dim)[2]
    rope = None if frequencies is None else rope_table(positions, frequencies(cfg.attention, head_dim))

    x = embed(params, tokens_BS, positions, cfg)
    x = pin(drop(x, fold(dropout_keys, cfg.num_layers), EMBEDDING, cfg.dropout))

    tokens = None if weights is None else Tokens(weights, segments)

    def layer(place: Place, x: jax.Array, stacks: Stacks, period: jax.Array, layer_params: Any) -> Any:
        layer_params, x = gather(layer_params, block_params(cfg, place), cfg.dtype), checkpoint_name(x, "layer_in")
        keys = fold(dropout_keys, place.layers.start + period * place.layers.step)
        ctx = Context(rope, segments, keys, cfg.dropout)
        if cache is not None:
            ctx = ctx._replace(cache=LayerCache(*stacks, period, cache.now, cache.first_B))
        x, stacks, aux = block(layer_params, x, cfg, place, ctx, tokens)
        return pin(x), stacks, aux

    def body(layers: list[Callable], carry: Any, scanned: tuple[jax.Array, tuple]) -> tuple[tuple, tuple[Aux, ...]]:
        (x, stacks), (period, blocks), sums = carry, scanned, []
        stacks = list(stacks)
        for i, layer_params in enumerate(blocks):
            x, stacks[i], aux = layers[i](x, stacks[i], period, layer_params)
            sums.append(aux)
        return (x, stacks), tuple(sums)

    all_stacks, all_aux = [], []
    for section in sections(cfg):
        # Without a cache the carry holds empty tuples in its place, so that one scan body serves both cases.
        first, n = len(all_stacks), len(section)
        stacks = [()] * n if cache is None else list(cache.stacks[first : first + n])
        periods = functools.partial(body, [rematerialised(functools.partial(layer, p), cfg.remat) for p in section])
        # Whole periods first; the layers left over are one shorter period.
        whole, blocks = len(section[-1].layers), params["blocks"][first : first + n]
        rest = sum(len(place.layers) > whole for place in section)
        scanned = jnp.arange(whole), blocks if not rest else jax.tree.map(lambda a: a[:whole], blocks)  # noqa: B023
        (x, stacks), aux = jax.lax.scan(periods, (x, stacks), scanned, unroll=min(cfg.unroll, whole))
        if rest:
            left_over = jax.tree.map(lambda a: a[whole], blocks[:rest])  # noqa: B023
            (x, stacks), last = periods((x, stacks), (jnp.int32(whole), left_over))
            joined = jax.tree.map(lambda many, one: jnp.concatenate([many, one[None]]), aux[:rest], last)
            aux = joined + aux[rest:]
        all_stacks, all_aux = all_stacks + stacks, [*all_aux, *aux]
    x = NORMS[cfg.norm].apply(params["final_norm"], x, cfg.norm_eps)
    new = None if cache is None else Cache(tuple(all_stacks), cache.now + S, cache.first_B)
    return Hidden(x, new, tuple(all_aux))


def head_name(cfg: ModelConfig) -> str:
    """Name of the parameter that is the head: "head" [D, V], or "embedding" [V, D] if tied."""
    return "embedding" if cfg.tie_embeddings else "head"


def head_weight(head: jax.Array, cfg: ModelConfig) -> jax.Array:
    """The head's parameter in cfg.dtype, all-gathered along fsdp."""
    return gather(head, model_params(cfg)[head_name(cfg)], cfg.dtype)


def head_logits(w: jax.Array, x: jax.Array, cfg: ModelConfig) -> jax.Array:
    """float32 logits [..., V]; w: from `head_weight`. Products in the compute dtype, summed and soft-capped in float32."""
    y = matmul(x, w, transposed=cfg.tie_embeddings, dtype=jnp.float32)
    return softcap(y, cfg.logit_softcap)


def logits(params: Any, x_BSD: jax.Array, cfg: ModelConfig) -> jax.Array:
    """float32 logits [B, S, V] from `hidden`'s x_BSD."""
    return head_logits(head_weight(params[head_name(cfg)], cfg), x_BSD, cfg)


def model(params: Any, tokens_BS: jax.Array, cfg: ModelConfig, **kwargs: Any) -> jax.Array:
    """float32 logits [B, S, V]; keywords as in `hidden`."""
    return logits(params, hidden(params, tokens_BS, cfg, **kwargs).x_BSD, cfg)
