"""Sampling from a model: prefill of the prompts, then a compiled loop that decodes one token at a time with a key/value cache.

`Sampler` works on arrays; `text.complete` adds text. A row's result depends on its prompt, the settings, the seed and its number,
not on the other rows, the padding or how many tokens are decoded at a time.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from minitf import checks
from minitf.data.frame import Frame
from minitf.data.tokenizer import Tokenizer
from minitf.model.choose import with_best_kernels
from minitf.model.transformer import Cache, ModelConfig, hidden, logits, model_params, new_cache, pattern, places
from minitf.params import UNROUNDED, is_param, tree_map
from minitf.settings import setting
from minitf.sharding.devices import surroundings
from minitf.sharding.mesh import batch_shards, replicated
from minitf.sharding.rules import shardings
from minitf.sharding.seams import pin


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is drawn from the logits; applied in this order."""

    repetition_penalty: float = setting(
        1.0,
        "divides positive and multiplies negative logits of seen ids (arXiv:1909.05858); 1: off",
        at_least=0.01,
        at_most=100,
    )
    temperature: float = setting(1.0, "divides the logits; 0: the likeliest token", at_least=0, at_most=1000)
    top_k: int = setting(0, "draw from this many likeliest tokens, and those as likely as the last; 0: all", at_least=0)
    top_p: float = setting(
        1.0,
        "draw from the fewest likeliest tokens with this probability together (arXiv:1904.09751), and those as likely as the "
        "last; 1: all",
        **dict(above=0, at_most=1),
    )
    min_p: float = setting(
        0.0,
        "draw from tokens at least this likely, relative to the likeliest (arXiv:2407.01082); 0: all",
        at_least=0,
        at_most=1,
    )


PLAIN = Sampling()  # the model's own distribution
TEMPERATURE = 0.8  # default of generate and of samples: favours likely tokens a little more than PLAIN
COLDEST = 1e-5  # lower temperatures count as 0: dividing by less could overflow


def filtered(x_BV: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """The logits, with -inf for ids that a filter excludes; at least one id is left."""
    V = x_BV.shape[-1]
    descending = jnp.sort(x_BV, axis=-1, descending=True)
    k = jnp.where(top_k == 0, V, jnp.clip(top_k, 1, V))
    in_k = jnp.arange(V) < k
    probs = jax.nn.softmax(jnp.where(in_k, descending, -jnp.inf), axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs  # total probability of the likelier ids
    in_p = in_k & ((before < top_p) | (top_p >= 1))
    in_p = in_p.at[:, 0].set(True)
    last = jnp.min(jnp.where(in_p, descending, jnp.inf), axis=-1, keepdims=True)
    least = jnp.maximum(last, descending[:, :1] + jnp.log(min_p))
    return jnp.where(x_BV >= least, x_BV, -jnp.inf)


def draw(logits_BV: jax.Array, seen_BV: jax.Array, keys_B: jax.Array, how: dict[str, jax.Array]) -> jax.Array:
    """int32 [B]: a drawn id per row. how: the fields of `Sampling` as scalar arrays, so that other settings do not recompile."""
    penalty, temperature = how["repetition_penalty"], how["temperature"]
    punished = jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    x = jnp.where(seen_BV & (penalty != 1), punished, logits_BV)

    def random() -> jax.Array:
        top_k, top_p, min_p = filters = how["top_k"], how["top_p"], how["min_p"]
        y = x / temperature
        # Sorting the vocabulary costs more than everything else here.
        y = jax.lax.cond((top_k > 0) | (top_p < 1) | (min_p > 0), filtered, lambda y, *_: y, y, *filters)
        return jax.vmap(jax.random.categorical)(keys_B, y)

    found = jax.lax.cond(temperature >= COLDEST, random, lambda: jnp.argmax(x, axis=-1))
    return found.astype(jnp.int32)


# ---- a batch of rows


class State(NamedTuple):
    """State of the decoding loop."""

    cache: Cache
    last_B: jax.Array  # int32 [B], the newest id, which is not in the cache yet
    seen_BV: jax.Array  # bool [B, V], ids in prompt and text
    done_B: jax.Array  # bool [B]
    keys_B: jax.Array  # one key per row
    new: jax.Array  # int32 [], number of tokens drawn per row


class Drawn(NamedTuple):
    """New tokens of all rows."""

    ids: Any  # int32 [B, n], -1 after a row is done
    log_probs: Any  # float32 [B, n], natural, of the model's own distribution: before penalty, temperature and filters


def bucket(n: int, least: int = 16) -> int:
    """n rounded up to a power of two (up to 256) or a multiple of 256, at least `least`: few lengths mean few compilations."""
    return max(least, 1 << (n - 1).bit_length()) if n <= 256 else -(-n // 256) * 256


def apart(cfg: ModelConfig) -> ModelConfig:
    """The config of the same model with a pattern as long as the model, so that every layer has its own stack."""
    kinds = pattern(cfg)
    return dataclasses.replace(cfg, pattern=tuple(kinds[i % len(kinds)] for i in range(cfg.num_layers)))


def unstacked(stack: Any) -> list[Any]:
    """A tree of stacked arrays or stacked declarations as a list of trees, one per layer."""
    leaves = jax.tree.leaves(stack, is_leaf=is_param)
    n = leaves[0].full_shape[0] if is_param(leaves[0]) else leaves[0].shape[0]

    def one(leaf, i):
        return dataclasses.replace(leaf, stack=leaf.stack[1:]) if is_param(leaf) else leaf[i]

    return [jax.tree.map(lambda leaf, i=i: one(leaf, i), stack, is_leaf=is_param) for i in range(n)]


def layers_apart(blocks: tuple[Any, ...], cfg: ModelConfig) -> tuple[Any, ...]:
    """The blocks of the config `apart`, one stack per layer, from one stack per place."""
    layers = {
        n: layer
        for stack, place in zip(blocks, places(cfg), strict=True)
        for n, layer in zip(place.layers, unstacked(stack), strict=True)
    }
    return tuple(jax.tree.map(lambda a: a[None], layers[n]) for n in range(cfg.num_layers))


def prepared(params: Any, cfg: ModelConfig, mesh: jax.sharding.Mesh) -> tuple[Any, ModelConfig]:
    """(params, config) of the same model for sampling only: weights in the compute dtype, and on CPU each layer in a stack of its own,
    as slicing a layer out of a larger stack would copy it for every token."""
    by_layer = mesh.devices.flat[0].platform == "cpu"
    own_cfg = apart(cfg) if by_layer else cfg
    specs = model_params(own_cfg)

    def ready(params: Any) -> Any:
        own = dict(params, blocks=layers_apart(params["blocks"], cfg)) if by_layer else params
        return tree_map(lambda p, w: w if p.kind in UNROUNDED else w.astype(cfg.dtype), specs, own)

    return jax.jit(ready, out_shardings=shardings(specs, mesh))(params), own_cfg


class Sampler:
    """Samples from a model of this config on a mesh. Compiles one program per number of rows, prompt length and cache length, all of
    which are bucketed."""

    def __init__(
        self,
        cfg: ModelConfig,
        mesh: jax.sharding.Mesh,
        known: int | None = None,
        stops: Sequence[int] = (),
    ):
        """known: only ids below it are drawn (the tokenizer's size; None: all). stops: ids that end a text."""
        self._cfg = cfg
        # A tokenizer may have more ids than the model has embeddings.
        self._mesh, self._known = mesh, min(known or cfg.vocab_size, cfg.vocab_size)
        self.stops = tuple(stops)
        everywhere = replicated(mesh)
        self._prefill = jax.jit(self._first, static_argnames="length", out_shardings=(None, everywhere))
        self._decode = jax.jit(self._more, static_argnames="chunk", donate_argnums=1, out_shardings=(None, everywhere))

    @classmethod
    def of(cls, cfg: ModelConfig, mesh: jax.sharding.Mesh, tokenizer: Tokenizer, frame: Frame) -> "Sampler":
        """A sampler that draws the ids of this tokenizer and stops at the end ids of this frame."""
        return cls(cfg, mesh, tokenizer.vocab_size, frame.stops)

    @property
    def max_seq_len(self) -> int:
        return self._cfg.max_seq_len

    def room(self, prompts: Sequence[np.ndarray], most: int) -> list[int]:
        """Number of tokens that fit after each prompt, from 1 to `most`."""
        return [max(1, min(most, self.max_seq_len - len(ids))) for ids in prompts]

    def _emit(self, x_BD: jax.Array, params: Any, state: State, how: dict[str, jax.Array]) -> tuple[State, Drawn]:
        """Draws the next token from the activations at the last one."""
        raw = logits(params, x_BD[:, None], self._cfg)[:, 0]
        raw = jnp.where(jnp.arange(raw.shape[-1]) < self._known, raw, -jnp.inf)
        keys = jax.vmap(jax.random.fold_in, (0, None))(state.keys_B, state.new)
        ids = draw(raw, state.seen_BV, keys, how)
        rows = jnp.arange(len(ids))
        log_probs = raw[rows, ids] - jax.nn.logsumexp(raw, axis=-1)
        out = Drawn(jnp.where(state.done_B, -1, ids), jnp.where(state.done_B, 0.0, log_probs))
        done = state.done_B | jnp.isin(ids, jnp.array(self.stops, jnp.int32))
        return state._replace(
            last_B=ids, seen_BV=state.seen_BV.at[rows, ids].set(True), done_B=done, new=state.new + 1
        ), out

    def _first(
        self,
        params: Any,
        prompts_BS: jax.Array,
        first_B: jax.Array,
        done_B: jax.Array,
        numbers_B: jax.Array,
        seed: jax.Array,
        how: dict[str, jax.Array],
        *,
        length: int,
    ) -> tuple[State, Drawn]:
        """Prefill: processes the left-padded prompts, which begin at first_B, and draws one token."""
        prompts_BS = pin(prompts_BS)
        B, S = prompts_BS.shape
        cfg = with_best_kernels(self._cfg, self._mesh, S, rows=B, segments=True)  # padding is a segment of its own
        found = hidden(params, prompts_BS, cfg, cache=new_cache(self._cfg, first_B, length))
        in_prompt = jnp.arange(S) >= first_B[:, None]
        seen = jnp.zeros((B, self._cfg.vocab_size), bool).at[jnp.arange(B)[:, None], prompts_BS].max(in_prompt)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), numbers_B)
        state = State(found.cache, prompts_BS[:, -1], seen, done_B, keys, jnp.int32(0))
        return self._emit(found.x_BSD[:, -1], params, state, how)

    def _more(
        self,
        params: Any,
        state: State,
        stopped_B: jax.Array,
        limit: jax.Array,
        how: dict[str, jax.Array],
        *,
        chunk: int,
    ) -> tuple[State, Drawn]:
        """Draws `limit` <= chunk more tokens, or fewer if all rows are done."""
        B = len(state.last_B)
        cfg = with_best_kernels(self._cfg, self._mesh, 1, rows=B, cached=True)

        def going(carry: tuple) -> jax.Array:
            i, state, _ = carry
            return (i < limit) & ~jnp.all(state.done_B)

        def one(carry: tuple) -> tuple:
            i, state, drawn = carry
            found = hidden(params, state.last_B[:, None], cfg, cache=state.cache)
            state, new = self._emit(found.x_BSD[:, -1], params, state._replace(cache=found.cache), how)
            return i + 1, state, jax.tree.map(lambda a, b: a.at[:, i].set(b), drawn, new)

        nothing = Drawn(jnp.full((B, chunk), -1, jnp.int32), jnp.zeros((B, chunk), jnp.float32))
        state = state._replace(done_B=state.done_B | stopped_B)
        _, state, drawn = jax.lax.while_loop(going, one, (jnp.int32(0), state, nothing))
        return state, drawn

    def check(self, prompts: Sequence[np.ndarray], max_new_tokens: int | Sequence[int]) -> None:
        """Raises ValueError for a prompt that is empty or too long, or contains unknown ids, naming its number (from 1) if there are
        several."""
        for number, (ids, new) in enumerate(zip(prompts, of_each(max_new_tokens, prompts), strict=True), 1):
            which = "a prompt" if len(prompts) == 1 else f"prompt {number} of {len(prompts)}: a prompt"
            if not len(ids):
                raise ValueError(
                    f"{which} without tokens, and no token that begins a text: documents begin with their own"
                )
            if len(ids) + new > self.max_seq_len:
                raise ValueError(
                    f"{which} of {len(ids)} tokens and max_new_tokens={new}: {len(ids)} + {new} > "
                    f"model.max_seq_len={self.max_seq_len}"
                )
            wrong = [i for i in map(int, ids) if not 0 <= i < self._known]
            if wrong:
                raise ValueError(f"{which} with the id {wrong[0]}: the model has rows for 0 to {self._known - 1}")

    def stream(
        self,
        params: Any,
        prompts: Sequence[np.ndarray],
        max_new_tokens: int | Sequence[int],
        sampling: Sampling = PLAIN,
        *,
        seed: int = 0,
        numbers: Sequence[int] | None = None,
        chunk: int | None = None,
        stopped: np.ndarray | None = None,
    ) -> Iterator[Drawn]:
        """Yields the tokens after each prompt (ids, at least one) in pieces: the first token, then `chunk` at a time (None: all).

        max_new_tokens: one number for all prompts, or one per prompt.
        numbers: one per row, folded into the seed (None: 0, 1, 2, ...). stopped: bool [rows], which the caller may set between pieces
        for rows that need no more tokens. Raises ValueError if a prompt does not fit.
        """
        checks.check(sampling)
        self.check(prompts, max_new_tokens)
        limits = np.array(of_each(max_new_tokens, prompts))
        max_new_tokens = int(limits.max(initial=0))
        if max_new_tokens < 1:
            return
        within = lambda a, made, off: np.where(made + np.arange(a.shape[1]) < limits[:, None], a, off)
        n, shards = len(prompts), batch_shards(self._mesh)
        B = -(-bucket(n, 1) // shards) * shards
        S = bucket(max(map(len, prompts)))
        chunk = min(chunk or max_new_tokens, max_new_tokens)
        tokens, first = np.zeros((B, S), np.int32), np.full(B, S - 1, np.int32)
        for row, ids in enumerate(prompts):
            first[row] = S - len(ids)
            tokens[row, first[row] :] = ids
        padded = lambda values, rest: np.array([*values, *[rest] * (B - n)])
        number = padded(range(n) if numbers is None else numbers, 0).astype(np.uint32)
        numbers = vars(sampling) | {"top_k": min(sampling.top_k, self._cfg.vocab_size)}
        how = {k: np.array(v, np.int32 if k == "top_k" else np.float32) for k, v in numbers.items()}
        stopped = np.zeros(n, bool) if stopped is None else stopped

        with surroundings(self._mesh, self._cfg.dtype):
            state, drawn = self._prefill(
                params,
                tokens,
                first,
                np.arange(B) >= n,
                number,
                np.uint32(seed),
                how,
                length=bucket(S + max_new_tokens),
            )
        made = 1
        ids, log_probs = (np.asarray(a)[:n, None] for a in drawn)
        yield Drawn(within(ids, 0, -1), within(log_probs, 0, 0.0))
        while made < max_new_tokens:
            limit = min(chunk, max_new_tokens - made)
            with surroundings(self._mesh, self._cfg.dtype):
                state, drawn = self._decode(
                    params,
                    state,
                    padded(stopped | (limits <= made), True),
                    np.int32(limit),
                    how,
                    chunk=bucket(chunk, 1),
                )
            ids, log_probs = (np.asarray(a)[:n, :limit] for a in drawn)
            ids, log_probs = within(ids, made, -1), within(log_probs, made, 0.0)
            if (ids < 0).all():
                return
            made += limit
            yield Drawn(ids, log_probs)


def of_each(value: int | Sequence[int], prompts: Sequence[Any]) -> list[int]:
    """One value per prompt, from one for all or a sequence."""
    return [value] * len(prompts) if isinstance(value, int) else list(value)
