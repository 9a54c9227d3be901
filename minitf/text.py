"""Prompts to texts: tokens, stop strings, streams; and the texts that a run writes while it trains."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minitf.data.frame import Frame
from minitf.data.tokenizer import Tokenizer
from minitf.sampling import PLAIN, TEMPERATURE, Sampler, Sampling
from minitf.settings import setting, setting_of

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
    sampling: Sampling = PLAIN,
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


SAMPLE_PIECE = 64  # tokens that are drawn from one call of `between` to the next


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
    pieces = dict(chunk=SAMPLE_PIECE, show=lambda completions: between())
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
