"""How texts begin and end as token ids: decided here, once, from tokenizer and data, and stored with both stores and runs.

Preparation and loading write documents by it; evaluation, generation and export read it. So a model is scored and prompted as it
was trained.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minitf.data.chat import chatml
from minitf.data.tokenizer import Tokenizer

FRAME_FILE = "frame.json"  # in a work directory; a store has its frame in its manifest


@dataclasses.dataclass(frozen=True)
class Frame:
    """The frame of a text.

    start:    id that begins each text; None: a text begins with its own tokens.
    end:      id that closes each document; None: nothing does.
    first:    id from which the first token of a document's text is predicted: `start`, or else the `end` of the document before;
              None: nothing stands there, so that token is no target.
    stops:    ids that end a generated text: `end`, the end of a turn, the end ids of an imported model.
    template: chat template, in Jinja as Hugging Face writes it; None: the model has not learnt conversations.
    """

    start: int | None = None
    end: int | None = None
    first: int | None = None
    stops: tuple[int, ...] = ()
    template: str | None = None

    @property
    def opens(self) -> int | None:
        """The id that each document of the data begins with. Not `start` where there was no frame yet: prompts began with it, and
        documents did not."""
        return self.start if self.first == self.start else None

    def prompt(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """int32: the ids of a text to continue, as a document begins; an empty text is what its first token is predicted from."""
        begin = (
            [self.start] if self.start is not None else [self.first] if not len(ids) and self.first is not None else []
        )
        return np.array([*begin, *ids], np.int32)


def of_ids(end: int | None) -> Frame:
    """The frame of token ids from elsewhere, whose documents end with this id (None: not known)."""
    return Frame(end=end, first=end, stops=() if end is None else (end,))


def of_tokenizer(tokenizer: Tokenizer, *, conversations: bool = False) -> Frame:
    """The frame of texts that are encoded here: each begins with the start token that the tokenizer itself puts there, and ends with
    its end token. `conversations`: in ChatML, so that a turn's end ends a text, too."""
    start = start_of(tokenizer)
    frame = of_ids(tokenizer.specials.get("eos"))
    frame = dataclasses.replace(frame, start=start, first=frame.end if start is None else start)
    if not conversations:
        return frame
    stops = (*frame.stops, tokenizer.specials["turn_end"])
    return dataclasses.replace(frame, stops=tuple(dict.fromkeys(stops)), template=chatml(tokenizer, start))


def start_of(tokenizer: Tokenizer) -> int | None:
    """The id that the tokenizer puts before each text; None: none. Raises ValueError where it puts several."""
    if len(tokenizer.prefix) > 1:
        raise ValueError(
            f"tokenizer {tokenizer.name}: puts {len(tokenizer.prefix)} tokens before each text; at most one is supported"
        )
    return tokenizer.prefix[0] if tokenizer.prefix else None


def of_import(tokenizer: Tokenizer, ends: Sequence[int], template: str | None) -> Frame:
    """The frame of an imported model, as lm-evaluation-harness and transformers have it. `ends`: the end ids of its generation
    config. Where the tokenizer puts no start token, the first token of a text is predicted from the one that it names, else from
    the end token."""
    frame = of_tokenizer(tokenizer)
    first = tokenizer.specials.get("bos", frame.end) if frame.start is None else frame.start
    return dataclasses.replace(frame, first=first, stops=tuple(dict.fromkeys((*frame.stops, *ends))), template=template)


def of_before(tokenizer: Tokenizer | None, end: int | None = None) -> Frame:
    """The frame of stores and runs that have none: they are read as they were written, prompted with the tokenizer's start token
    and scored from its end token. `end`: of token ids without a tokenizer."""
    frame = of_ids(end if tokenizer is None else tokenizer.specials.get("eos"))
    return frame if tokenizer is None else dataclasses.replace(frame, start=start_of(tokenizer))


def in_rows(frame: Frame, follow: bool) -> Frame:
    """The frame as a model learns it. `follow`: in a row, a document is seen behind the end of the one before; else its first
    token is predicted from its start token or not at all."""
    return frame if follow or frame.start is not None else dataclasses.replace(frame, first=None)


def joined(frames: Mapping[str, Frame]) -> Frame:
    """The frame of several stores, by name, read as one: they begin and end alike. Raises ValueError where they do not."""
    (name, frame), *others = frames.items()
    for other, f in others:
        for field in ("start", "end", "first"):
            a, b = getattr(frame, field), getattr(f, field)
            if a != b:
                raise ValueError(
                    f"data.mixture: the texts of {name} and {other} have different frames: {field} {a} and {b}"
                )
        if f.template not in (None, frame.template):
            if frame.template is not None:
                raise ValueError(f"data.mixture: the conversations of {name} and {other} have different templates")
            frame = dataclasses.replace(frame, template=f.template)
    return dataclasses.replace(frame, stops=tuple(dict.fromkeys(i for f in frames.values() for i in f.stops)))


def to_tree(frame: Frame) -> dict[str, Any]:
    """The frame as JSON has it."""
    return dataclasses.asdict(frame)


def from_tree(tree: Any, source: str) -> Frame:
    """The reverse of `to_tree`. Raises ValueError naming the source for what is no frame."""
    ids = [tree.get(k) for k in ("start", "end", "first")] if isinstance(tree, dict) else [tree]
    known = {f.name for f in dataclasses.fields(Frame)}
    try:
        if any(i is not None and type(i) is not int for i in [*ids, *tree["stops"]]) or set(tree) != known:
            raise TypeError
        return Frame(**{**tree, "stops": tuple(tree["stops"])})
    except (TypeError, KeyError):
        raise ValueError(
            f"{source}: is no frame of texts (start, end, first, stops, template): {json.dumps(tree)}"
        ) from None
