"""Frames: which special ids begin and end a text. Decided here, once, from tokenizer and data; saved in stores and in runs.

Preparation and loading add these ids to documents; evaluation, generation and export read the same frame, so that a model is
scored and prompted as it was trained.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minitf.data.chat import chatml
from minitf.data.tokenizer import Tokenizer

FRAME_FILE = "frame.json"  # of a work directory; a store has its frame in its manifest


@dataclasses.dataclass(frozen=True)
class Frame:
    """The special ids around a text.

    start:    id before each text; None: a text begins with its own tokens.
    end:      id after each document; None: none.
    first:    id from which the first token of a document's text is predicted: `start`, or else the `end` of the previous document;
              None: no id precedes that token, so it is not a target.
    stops:    ids that end generation: `end`, the end of a turn, the end ids of an imported model.
    template: chat template in Jinja, in Hugging Face's dialect; None: the model was not trained on conversations.
    """

    start: int | None = None
    end: int | None = None
    first: int | None = None
    stops: tuple[int, ...] = ()
    template: str | None = None

    @property
    def opens(self) -> int | None:
        """The id that each document of the data begins with; None: none. Before frames were stored, prompts began with `start` but
        documents did not: there `first` is `end`."""
        return self.start if self.first == self.start else None

    def prompt(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """int32 ids of a prompt, which begins as a document does; an empty prompt is the id that predicts a first token, if any."""
        begin = (
            [self.start] if self.start is not None else [self.first] if not len(ids) and self.first is not None else []
        )
        return np.array([*begin, *ids], np.int32)


def of_ids(end: int | None) -> Frame:
    """The frame of data that are token ids already, whose documents end with this id (None: unknown)."""
    return Frame(end=end, first=end, stops=() if end is None else (end,))


def of_tokenizer(tokenizer: Tokenizer, *, conversations: bool = False) -> Frame:
    """The frame of texts that minitf tokenizes: each begins with the start token that the tokenizer's post-processor adds, if any, and
    ends with its end token. `conversations`: in ChatML, so that the end of a turn also stops generation."""
    start = start_of(tokenizer)
    frame = of_ids(tokenizer.specials.get("eos"))
    frame = dataclasses.replace(frame, start=start, first=frame.end if start is None else start)
    if not conversations:
        return frame
    stops = (*frame.stops, tokenizer.specials["turn_end"])
    return dataclasses.replace(frame, stops=tuple(dict.fromkeys(stops)), template=chatml(tokenizer, start))


def start_of(tokenizer: Tokenizer) -> int | None:
    """The id that the tokenizer puts before each text; None: none. Raises ValueError if it puts several."""
    if len(tokenizer.prefix) > 1:
        raise ValueError(
            f"tokenizer {tokenizer.name}: puts {len(tokenizer.prefix)} tokens before each text; at most one is supported"
        )
    return tokenizer.prefix[0] if tokenizer.prefix else None


def of_import(tokenizer: Tokenizer, ends: Sequence[int], template: str | None) -> Frame:
    """The frame of an imported model, as in lm-evaluation-harness and transformers. `ends`: the end ids of its generation config.
    If the tokenizer adds no start token, the first token of a text is predicted from the start token that it declares, else from
    the end token."""
    frame = of_tokenizer(tokenizer)
    first = tokenizer.specials.get("bos", frame.end) if frame.start is None else frame.start
    return dataclasses.replace(frame, first=first, stops=tuple(dict.fromkeys((*frame.stops, *ends))), template=template)


def of_before(tokenizer: Tokenizer | None, end: int | None = None) -> Frame:
    """The frame of stores and runs made before frames were stored: prompted with the tokenizer's start token, scored from its end
    token. `end`: the end id if there is no tokenizer."""
    frame = of_ids(end if tokenizer is None else tokenizer.specials.get("eos"))
    return frame if tokenizer is None else dataclasses.replace(frame, start=start_of(tokenizer))


def in_rows(frame: Frame, follow: bool) -> Frame:
    """The frame as a model trains on it. `follow`: in a row, a document sees the end of the previous one; otherwise its first token is
    predicted from its start token or is not a target."""
    return frame if follow or frame.start is not None else dataclasses.replace(frame, first=None)


def joined(frames: Mapping[str, Frame]) -> Frame:
    """The common frame of several stores, given by name. Raises ValueError if their texts begin or end differently."""
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
    """The frame as a JSON object."""
    return dataclasses.asdict(frame)


def from_tree(tree: Any, source: str) -> Frame:
    """The inverse of `to_tree`. Raises ValueError naming the source if the tree is not a frame."""
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
