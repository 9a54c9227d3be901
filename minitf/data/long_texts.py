"""Splits long texts into pieces whose ids, encoded separately and concatenated, are those of the whole text."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from minitf.data.tokenizer import Tokenizer, as_unicode
from minitf.data.tokenizer_files import HuggingFaceTokenizer

BLOCK_BYTES = 8 << 20  # bytes of a text read at a time
PIECE_BYTES = 128 << 10  # bytes of a long text encoded at a time
NEAR = 512  # bytes on each side of a cut that are encoded to test whether it changes ids
WINDOW = 16 << 20  # bytes searched for a cut


def slices(blocks: Iterable[bytes]) -> Iterator[bytes]:
    for block in blocks:
        yield from (block[i : i + BLOCK_BYTES] for i in range(0, len(block), BLOCK_BYTES))


def place_for_cut(text: bytes, start: int, low: int, high: int, fits: Callable[[bytes, bytes], bool]) -> int | None:
    """Position in low .. high where the piece that begins at start may end: at a newline, else before a space; None: nowhere."""
    for mark, behind in ((b"\n", 1), (b"\n", 0), (b" ", 0)):
        at = low
        for _ in range(16):
            found = text.find(mark, at, high)
            if found < 0:
                break
            cut = found + behind
            if fits(text[max(cut - NEAR, start) : cut], text[cut : cut + NEAR]):
                return cut
            at = found + 1 + (high - low) // 32
    return None


def pieces(
    blocks: Iterable[bytes], fits: Callable[[bytes, bytes], bool], size: int = PIECE_BYTES, window: int = WINDOW
) -> Iterator[bytes]:
    """A text in pieces of about `size` bytes, cut only where `fits(text before, text after)`. Raises ValueError if `window` bytes have
    no such place."""
    text, low = b"", size
    for block in blocks:
        text, start = text + block, 0
        while len(text) - start >= low + size + NEAR:
            cut = place_for_cut(text, start, start + low, start + low + size, fits)
            if cut is not None:
                yield text[start:cut]
                start, low = cut, size
            elif low + size > window:
                raise ValueError(
                    f"a text has {window >> 20} MB without a newline or space at which it could be cut and keep its ids; "
                    "break it into several documents"
                )
            else:
                low += size
        text = text[start:]
    if text:
        yield text


class Behind(bytes):
    """A piece of a text that is not its first."""


ANCHOR = "\n"  # replaces the text before a piece


def encode_behind(tokenizer: HuggingFaceTokenizer, texts: list[str]) -> list[np.ndarray]:
    """Ids of texts that continue others. A tokenizer may prepend a mark to each text (SentencePiece's space, in Llama 2): then ANCHOR
    is encoded in front, gets the mark, and its ids are removed."""
    of_anchor, marked, behind = tokenizer.encode_batch([ANCHOR, "a", f"{ANCHOR}a"])
    if np.array_equal(np.concatenate([of_anchor, marked]), behind):
        return tokenizer.encode_batch(texts)
    return [ids[len(of_anchor) :] for ids in tokenizer.encode_batch([ANCHOR + text for text in texts])]


def keeps_ids(tokenizer: HuggingFaceTokenizer, before: bytes, behind: bytes) -> bool:
    """Whether two texts, encoded separately, give the ids of their concatenation."""
    left, right = before.decode(errors="ignore"), behind.decode(errors="ignore")  # far ends may split a character
    if not left.strip() or not right.strip():
        return False  # a run of spaces may extend beyond these bytes, and be one token with what follows
    (a, whole), (b,) = tokenizer.encode_batch([left, left + right]), encode_behind(tokenizer, [right])
    return np.array_equal(np.concatenate([a, b]), whole)


def pieces_for(tokenizer: Any) -> Callable[[Iterable[bytes]], Iterator[bytes]]:
    """A function that splits the blocks of a text into pieces whose concatenated ids are those of the whole; all pieces but the first
    must be encoded by `encode_behind`."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return slices
    return lambda blocks: pieces(blocks, functools.partial(keeps_ids, tokenizer))


TOGETHER = 16  # pieces encoded at a time, on the library's own threads


def encode(tokenizer: Tokenizer, text: bytes, source: str) -> np.ndarray:
    """The ids of `tokenizer.encode`, for a text of any length. Hugging Face's library would need a hundred times the memory of a long
    text to encode it at once."""
    if not isinstance(tokenizer, HuggingFaceTokenizer) or len(text) <= PIECE_BYTES:
        return tokenizer.encode(text, source)
    as_unicode(text, source)  # raises now: the message has the position in the whole text
    # The window is the whole text: if there is no place to cut, the rest is one piece.
    found = pieces(slices([text]), functools.partial(keeps_ids, tokenizer), window=len(text))
    ids = tokenizer.encode_batch([next(found).decode()])
    while some := list(itertools.islice(found, TOGETHER)):
        ids += encode_behind(tokenizer, [piece.decode() for piece in some])
    return np.concatenate(ids)
