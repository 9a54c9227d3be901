"""From prompts to texts: token ids, stop strings, streaming; and the samples that a run writes while it trains."""

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
    """int32 ids of a prompt, with the beginning of the model's frame. specials: spelled special tokens become their ids. Raises
    ValueError for text that UTF-8 cannot encode."""
    try:
        text = prompt.encode()
    except UnicodeEncodeError as e:
        raise ValueError(f"the prompt: character {e.start} is half a surrogate pair, which is no text") from None
    return frame.prompt(tokenizer.encode(text, "the prompt", specials=specials))


class Completion:
    """The text after a prompt, growing token by token until a stop string, an end id, or the last token."""

    def __init__(self, tokenizer: Tokenizer, prompt: np.ndarray, stops: Sequence[str] = (), ends: Sequence[int] = ()):
        """stops: stop strings; one that spells a special token also matches its id. ends: ids that end the text."""
        self.ids: list[int] = []  # including the token that completes a stop string, excluding the end token
        self.log_probs: list[float] = []
        self.reason: str | None = None  # "stop", "end", "length"; None: not finished
        self.text = ""  # the part that will not change any more
        self._tokenizer, self._prompt, self._stops = tokenizer, prompt.tolist(), [s for s in stops if s]
        self._ends = dict.fromkeys(ends, "end") | {
            tokenizer.spelled[s]: "stop" for s in self._stops if s in tokenizer.spelled
        }
        self._before = len(tokenizer.decode(prompt))

    def _decoded(self) -> str:
        # Decoded with the prompt: in some tokenizers the text of an id depends on the ids before it.
        found = self._tokenizer.decode(np.array([*self._prompt, *self.ids]))[self._before :]
        return found.decode(errors="replace")

    def add(self, ids: Sequence[int], log_probs: Sequence[float]) -> None:
        """Appends tokens; ignores those after the end."""
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
        # The text may end in part of a character (its bytes decode to U+FFFD) or of a stop string: hold that back.
        whole = self._decoded().rstrip("�")
        held = max((n for stop in self._stops for n in range(1, len(stop)) if whole.endswith(stop[:n])), default=0)
        self.text = whole[: len(whole) - held]
        return None

    def finish(self, reason: str = "length") -> None:
        """Ends the text: no more tokens follow."""
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
    """Completions of the prompts (ids). show: called whenever they have grown. chunk (None: 16 with stop strings, else all tokens)
    does not affect the texts. Other keywords as in `Sampler.stream`."""
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
    """The samples that a run writes every `sample_every` steps."""

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


SAMPLE_PIECE = 64  # tokens drawn between two calls of `between`


def sample(
    sampler: Sampler,
    params: Any,
    tokenizer: Tokenizer,
    frame: Frame,
    cfg: SampleConfig,
    seed: int,
    between: Callable[[], None] = lambda: None,
) -> str:
    """Completions of the prompts, each under a header line. between: called between pieces of SAMPLE_PIECE tokens; an exception
    that it raises ends the sampling."""
    prompts = fixed_prompts(sampler, tokenizer, frame, cfg)
    n = sampler.room(prompts, cfg.max_new_tokens)
    pieces = dict(chunk=SAMPLE_PIECE, show=lambda completions: between())
    found = complete(sampler, params, tokenizer, prompts, n, cfg.sampling(), seed=seed, **pieces)
    return "\n".join(f"--- {text!r}\n{text}{c.text}" for text, c in zip(cfg.prompts, found, strict=True))


def fixed_prompts(sampler: Sampler, tokenizer: Tokenizer, frame: Frame, cfg: SampleConfig) -> list[np.ndarray]:
    """Ids of cfg.prompts. Raises ValueError for a prompt that cannot be continued."""
    found = []
    for prompt in cfg.prompts:
        try:
            found.append(prompt_ids(tokenizer, frame, prompt))
            sampler.check(found[-1:], 1)
        except ValueError as e:
            raise ValueError(f"sample.prompts: {prompt!r}: {e}") from None
    return found
