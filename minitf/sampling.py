"""Text from a model: the prompts' forward pass, then a compiled loop of single tokens with cached keys and values.

Arrays first (`Sampler`), text on top (`complete`). What a row becomes depends on its prompt, the settings, the seed and its number,
not on the other rows, the padding or how many tokens are decoded at a time.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from minitf import params as P
from minitf import settings, sharding
from minitf.data.frame import Frame
from minitf.data.tokenizer import Tokenizer
from minitf.model.transformer import (
    Cache,
    ModelConfig,
    hidden,
    logits,
    model_params,
    new_cache,
    pattern,
    with_any_kernel,
)
from minitf.settings import setting, setting_of


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is drawn from the logits, in this order."""

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


TEMPERATURE = 0.8  # where none is given: a little likelier than the model's own distribution
COLDEST = 1e-5  # a temperature below counts as 0: dividing by less could overflow


def filtered(x_BV: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """The logits, -inf where a filter leaves an id out; never all of them."""
    V = x_BV.shape[-1]
    descending = jnp.sort(x_BV, axis=-1, descending=True)
    k = jnp.where(top_k == 0, V, jnp.clip(top_k, 1, V))
    in_k = jnp.arange(V) < k
    probs = jax.nn.softmax(jnp.where(in_k, descending, -jnp.inf), axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs  # of the likelier ones
    in_p = in_k & ((before < top_p) | (top_p >= 1))
    in_p = in_p.at[:, 0].set(True)
    last = jnp.min(jnp.where(in_p, descending, jnp.inf), axis=-1, keepdims=True)
    least = jnp.maximum(last, descending[:, :1] + jnp.log(min_p))
    return jnp.where(x_BV >= least, x_BV, -jnp.inf)


def draw(logits_BV: jax.Array, seen_BV: jax.Array, keys_B: jax.Array, how: dict[str, jax.Array]) -> jax.Array:
    """int32 [B]: an id for each row. `how`: the fields of `Sampling` as scalars, so that another setting is no other program."""
    penalty, temperature = how["repetition_penalty"], how["temperature"]
    punished = jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    x = jnp.where(seen_BV & (penalty != 1), punished, logits_BV)

    def random() -> jax.Array:
        top_k, top_p, min_p = filters = how["top_k"], how["top_p"], how["min_p"]
        y = x / temperature
        # Sorting a vocabulary costs more than all else here.
        y = jax.lax.cond((top_k > 0) | (top_p < 1) | (min_p > 0), filtered, lambda y, *_: y, y, *filters)
        return jax.vmap(jax.random.categorical)(keys_B, y)

    found = jax.lax.cond(temperature >= COLDEST, random, lambda: jnp.argmax(x, axis=-1))
    return found.astype(jnp.int32)


# ---- a batch of rows


class State(NamedTuple):
    """Rows in the making."""

    cache: Cache
    last_B: jax.Array  # int32 [B], the newest id, which the cache does not hold yet
    seen_BV: jax.Array  # bool [B, V], ids of prompt and text
    done_B: jax.Array  # bool [B]
    keys_B: jax.Array  # one key a row
    new: jax.Array  # int32 [], tokens behind the prompts


class Drawn(NamedTuple):
    """New tokens of all rows."""

    ids: Any  # int32 [B, n], -1 where a row was done
    log_probs: Any  # float32 [B, n], natural, of the model's own distribution: before penalty, temperature and filters


def bucket(n: int, least: int = 16) -> int:
    """A length of few different ones, at least n: a power of two up to 256, then a multiple of 256."""
    return max(least, 1 << (n - 1).bit_length()) if n <= 256 else -(-n // 256) * 256


def apart(cfg: ModelConfig) -> ModelConfig:
    """The same model in one period of all its layers."""
    kinds = pattern(cfg)
    return dataclasses.replace(cfg, pattern=tuple(kinds[i % len(kinds)] for i in range(cfg.num_layers)))


def layers_apart(blocks: tuple[Any, ...]) -> tuple[Any, ...]:
    """The stacks of `apart`, one for each layer, from those of the pattern's places."""
    places = [P.unstacked(stack) for stack in blocks]
    layers = [layer for period in itertools.zip_longest(*places) for layer in period if layer is not None]
    return tuple(jax.tree.map(lambda a: a[None], layer) for layer in layers)


def prepared(params: Any, cfg: ModelConfig, mesh: jax.sharding.Mesh) -> tuple[Any, ModelConfig]:
    """The same model where nothing but sampling is to come: weights in the compute dtype, and on a CPU each layer's apart, as
    slicing a layer out of a stack copies it there, for every token."""
    by_layer = mesh.devices.flat[0].platform == "cpu"
    own_cfg = apart(cfg) if by_layer else cfg
    specs = model_params(own_cfg)

    def ready(params: Any) -> Any:
        own = dict(params, blocks=layers_apart(params["blocks"])) if by_layer else params
        return P.tree_map(lambda p, w: w if p.kind in ("scale", "bias") else w.astype(cfg.dtype), specs, own)

    return jax.jit(ready, out_shardings=sharding.shardings(specs, mesh))(params), own_cfg


class Sampler:
    """Programs that sample from a model of this config on a mesh; one each for a number of rows, a length of prompts and a length
    of the cache, all of few different values."""

    def __init__(
        self,
        cfg: ModelConfig,
        mesh: jax.sharding.Mesh,
        known: int | None = None,
        stops: Sequence[int] = (),
    ):
        """known: ids below are drawn and no others (the tokenizer's; None: all). stops: ids that end a text."""
        # Rows are padded, which the kernel of the training may not know.
        self._cfg = with_any_kernel(cfg)
        # A tokenizer may know more ids than the model has rows.
        self._mesh, self._known = mesh, min(known or cfg.vocab_size, cfg.vocab_size)
        self.stops = tuple(stops)
        everywhere = sharding.replicated(mesh)
        self._prefill = jax.jit(self._first, static_argnames="length", out_shardings=(None, everywhere))
        self._decode = jax.jit(self._more, static_argnames="chunk", donate_argnums=1, out_shardings=(None, everywhere))

    @classmethod
    def of(cls, cfg: ModelConfig, mesh: jax.sharding.Mesh, tokenizer: Tokenizer, frame: Frame) -> "Sampler":
        """One that draws what this tokenizer reads, to where a text of this frame ends."""
        return cls(cfg, mesh, tokenizer.vocab_size, frame.stops)

    @property
    def max_seq_len(self) -> int:
        return self._cfg.max_seq_len

    def room(self, prompts: Sequence[np.ndarray], most: int) -> list[int]:
        """How many tokens fit behind each of the prompts: from 1 to `most`."""
        return [max(1, min(most, self.max_seq_len - len(ids))) for ids in prompts]

    def _emit(self, x_BD: jax.Array, params: Any, state: State, how: dict[str, jax.Array]) -> tuple[State, Drawn]:
        """The next token, from the activations at the last one."""
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
        """Reads the prompts, which begin at first_B and end together, and draws one token."""
        prompts_BS = sharding.pin(prompts_BS)
        B, S = prompts_BS.shape
        found = hidden(params, prompts_BS, self._cfg, cache=new_cache(self._cfg, first_B, length))
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
        """Draws `limit` more tokens, at most `chunk`, or fewer where all rows are done."""
        B = len(state.last_B)

        def going(carry: tuple) -> jax.Array:
            i, state, _ = carry
            return (i < limit) & ~jnp.all(state.done_B)

        def one(carry: tuple) -> tuple:
            i, state, drawn = carry
            found = hidden(params, state.last_B[:, None], self._cfg, cache=state.cache)
            state, new = self._emit(found.x_BSD[:, -1], params, state._replace(cache=found.cache), how)
            return i + 1, state, jax.tree.map(lambda a, b: a.at[:, i].set(b), drawn, new)

        nothing = Drawn(jnp.full((B, chunk), -1, jnp.int32), jnp.zeros((B, chunk), jnp.float32))
        state = state._replace(done_B=state.done_B | stopped_B)
        _, state, drawn = jax.lax.while_loop(going, one, (jnp.int32(0), state, nothing))
        return state, drawn

    def check(self, prompts: Sequence[np.ndarray], max_new_tokens: int | Sequence[int]) -> None:
        """Raises ValueError where a prompt is empty or too long, or holds ids that are not drawn, with its number from 1 where there
        are several."""
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
        sampling: Sampling = Sampling(),
        *,
        seed: int = 0,
        numbers: Sequence[int] | None = None,
        chunk: int | None = None,
        stopped: np.ndarray | None = None,
    ) -> Iterator[Drawn]:
        """The tokens behind each prompt (ids, at least one), piece by piece: the first alone, then `chunk` at a time (None: all).

        max_new_tokens: of all, or of each prompt.
        numbers: of the rows, folded into the seed (None: 0, 1, 2, ...). stopped: bool [rows], in which the caller may set, between
        pieces, which rows need no more. Raises ValueError where a prompt does not fit.
        """
        settings.check(sampling)
        self.check(prompts, max_new_tokens)
        limits = np.array(of_each(max_new_tokens, prompts))
        max_new_tokens = int(limits.max(initial=0))
        if max_new_tokens < 1:
            return
        within = lambda a, made, off: np.where(made + np.arange(a.shape[1]) < limits[:, None], a, off)
        n, shards = len(prompts), sharding.batch_shards(self._mesh)
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

        with sharding.surroundings(self._mesh, self._cfg.dtype):
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
            with sharding.surroundings(self._mesh, self._cfg.dtype):
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
    """A value for each prompt."""
    return [value] * len(prompts) if isinstance(value, int) else list(value)


# ---- text


def prompt_ids(tokenizer: Tokenizer, frame: Frame, prompt: str, *, specials: bool = False) -> np.ndarray:
    """int32: ids of a prompt, begun as the model's texts begin. `specials`: what spells a special token is one. Raises ValueError
    for what is no text."""
    try:
        text = prompt.encode()
    except UnicodeEncodeError as e:
        raise ValueError(f"the prompt: character {e.start} is half a surrogate pair, which is no text") from None
    return frame.prompt(tokenizer.encode(text, "the prompt", specials=specials))


class Completion:
    """What follows a prompt, growing token by token until a stop string, an id that ends a text, or the last token."""

    def __init__(self, tokenizer: Tokenizer, prompt: np.ndarray, stops: Sequence[str] = (), ends: Sequence[int] = ()):
        """stops: texts; one that spells a special token is that token, too. ends: ids."""
        self.ids: list[int] = []  # up to the one with which a stop string is complete, the end token not among them
        self.log_probs: list[float] = []
        self.reason: str | None = None  # "stop", "end", "length"; None: it goes on
        self.text = ""  # that will not change any more
        self._tokenizer, self._prompt, self._stops = tokenizer, prompt.tolist(), [s for s in stops if s]
        self._ends = dict.fromkeys(ends, "end") | {
            tokenizer.spelled[s]: "stop" for s in self._stops if s in tokenizer.spelled
        }
        self._before = len(tokenizer.decode(prompt))

    def _decoded(self) -> str:
        # With the prompt: in some tokenizers the text of an id depends on the ids before it.
        found = self._tokenizer.decode(np.array([*self._prompt, *self.ids]))[self._before :]
        return found.decode(errors="replace")

    def add(self, ids: Sequence[int], log_probs: Sequence[float]) -> None:
        """More tokens; those after its end are left out."""
        for id_, log_prob in zip(ids, log_probs, strict=True):
            if self.reason is not None or id_ < 0:
                return
            if id_ in self._ends:
                return self.finish(self._ends[id_])
            self.ids.append(int(id_))
            self.log_probs.append(float(log_prob))
            if self._stops:
                whole = self._decoded()
                ends = [whole.index(stop) for stop in self._stops if stop in whole]
                if ends:
                    self.text, self.reason = whole[: min(ends)], "stop"
                    return None
        # The end of the text may be a part of a character (its bytes read as U+FFFD), or of a stop string.
        whole = self._decoded().rstrip("�")
        held = max((n for stop in self._stops for n in range(1, len(stop)) if whole.endswith(stop[:n])), default=0)
        self.text = whole[: len(whole) - held]
        return None

    def finish(self, reason: str = "length") -> None:
        """Nothing more will come."""
        if self.reason is None:
            self.text, self.reason = self._decoded(), reason


def complete(
    sampler: Sampler,
    params: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[np.ndarray],
    max_new_tokens: int | Sequence[int],
    sampling: Sampling = Sampling(),
    *,
    seed: int = 0,
    numbers: Sequence[int] | None = None,
    stops: Sequence[str] = (),
    chunk: int | None = None,
    show: Callable[[list[Completion]], None] = lambda completions: None,
) -> list[Completion]:
    """The texts that follow the prompts (ids). `show` is called whenever they have grown; further keywords as of `Sampler.stream`;
    chunk: None: 16 where there are stop strings, else all. The texts do not depend on it."""
    found = [Completion(tokenizer, prompt, stops, sampler.stops) for prompt in prompts]
    chunk = chunk or (16 if any(stops) else None)
    stopped = np.zeros(len(prompts), bool)
    pieces = sampler.stream(
        params, prompts, max_new_tokens, sampling, seed=seed, numbers=numbers, chunk=chunk, stopped=stopped
    )
    for piece in pieces:
        for row, completion in enumerate(found):
            completion.add(piece.ids[row], piece.log_probs[row])
            stopped[row] = completion.reason is not None
        show(found)
    for completion in found:
        completion.finish()
    show(found)
    return found


# ---- while training


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """The texts that a run writes every `sample_every` steps."""

    prompts: tuple[str, ...] = setting(
        ("\n",), "beginnings of texts; an empty one: the beginning of a document", nonempty=True, may_change=True
    )
    max_new_tokens: int = setting(
        64, "tokens behind each prompt; fewer where model.max_seq_len is reached", at_least=1, may_change=True
    )
    temperature: float = setting_of(Sampling, "temperature", default=TEMPERATURE, may_change=True)
    top_k: int = setting_of(Sampling, "top_k", may_change=True)

    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_k=self.top_k)


PIECE = 64  # tokens that are drawn from one call of `between` to the next


def sample(
    sampler: Sampler,
    params: Any,
    tokenizer: Tokenizer,
    frame: Frame,
    cfg: SampleConfig,
    seed: int,
    between: Callable[[], None] = lambda: None,
) -> str:
    """What the model makes of the prompts, each under a line of its own. `between` is called between pieces of them; what it
    raises ends them."""
    prompts = fixed_prompts(sampler, tokenizer, frame, cfg)
    n = sampler.room(prompts, cfg.max_new_tokens)
    pieces = dict(chunk=PIECE, show=lambda completions: between())
    found = complete(sampler, params, tokenizer, prompts, n, cfg.sampling(), seed=seed, **pieces)
    return "\n".join(f"--- {text!r}\n{text}{c.text}" for text, c in zip(cfg.prompts, found, strict=True))


def fixed_prompts(sampler: Sampler, tokenizer: Tokenizer, frame: Frame, cfg: SampleConfig) -> list[np.ndarray]:
    """Raises ValueError for a prompt that cannot be gone on with."""
    found = []
    for prompt in cfg.prompts:
        try:
            found.append(prompt_ids(tokenizer, frame, prompt))
            sampler.check(found[-1:], 1)
        except ValueError as e:
            raise ValueError(f"sample.prompts: {prompt!r}: {e}") from None
    return found
