"""Long texts in pieces that are encoded one by one, and give the ids of the whole."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from minitf.data.tokenizer import Tokenizer, as_unicode
from minitf.data.tokenizer_files import HuggingFaceTokenizer

BLOCK_BYTES = 8 << 20  # bytes of a text that are in memory at a time
PIECE_BYTES = 128 << 10  # bytes of a long text that are encoded at a time
NEAR = 512  # bytes on each side of a cut that decide whether it changes ids
WINDOW = 16 << 20  # how far a cut is looked for


def slices(blocks: Iterable[bytes]) -> Iterator[bytes]:
    for block in blocks:
        yield from (block[i : i + BLOCK_BYTES] for i in range(0, len(block), BLOCK_BYTES))


def place_for_cut(text: bytes, start: int, low: int, high: int, fits: Callable[[bytes, bytes], bool]) -> int | None:
    """Where in low .. high the piece that begins at start may end: at a newline, else before a space."""
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
    """A text in pieces of about `size`, cut only where `fits` says of what stands before and behind that it is right. Raises
    ValueError where there is no such place in a window."""
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
    """A piece of a text, but not its first."""


ANCHOR = "\n"  # stands for the text before a piece


def encode_behind(tokenizer: HuggingFaceTokenizer, texts: list[str]) -> list[np.ndarray]:
    """Ids of texts that stand behind others. A tokenizer may put a mark before each text (SentencePiece's space, in Llama 2): then
    it is put before what stands for the other text, and its ids are taken away."""
    of_anchor, marked, behind = tokenizer.encode_batch([ANCHOR, "a", f"{ANCHOR}a"])
    if np.array_equal(np.concatenate([of_anchor, marked]), behind):
        return tokenizer.encode_batch(texts)
    return [ids[len(of_anchor) :] for ids in tokenizer.encode_batch([ANCHOR + text for text in texts])]


def keeps_ids(tokenizer: HuggingFaceTokenizer, before: bytes, behind: bytes) -> bool:
    """Whether a cut between two texts gives the ids of both together."""
    left, right = before.decode(errors="ignore"), behind.decode(errors="ignore")  # their far ends may be half a letter
    if not left.strip() or not right.strip():
        return False  # a run of spaces may go on further than can be seen here, and be one token with what follows
    (a, whole), (b,) = tokenizer.encode_batch([left, left + right]), encode_behind(tokenizer, [right])
    return np.array_equal(np.concatenate([a, b]), whole)


def pieces_for(tokenizer: Any) -> Callable[[Iterable[bytes]], Iterator[bytes]]:
    """What cuts a text into pieces whose ids, one behind the other, are those of the whole; all but the first are read by
    `encode_behind`."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return slices
    return lambda blocks: pieces(blocks, functools.partial(keeps_ids, tokenizer))


TOGETHER = 16  # pieces that are encoded at once, on as many threads as the library takes


def encode(tokenizer: Tokenizer, text: bytes, source: str) -> np.ndarray:
    """Ids of a text of any length, as `tokenizer.encode` gives them: of a long one at once, Hugging Face's library would take a
    hundred times its memory."""
    if not isinstance(tokenizer, HuggingFaceTokenizer) or len(text) <= PIECE_BYTES:
        return tokenizer.encode(text, source)
    as_unicode(text, source)  # raises, with the place in the whole
    # Where there is no place to cut, the rest is one piece.
    found = pieces(slices([text]), functools.partial(keeps_ids, tokenizer), window=len(text))
    ids = tokenizer.encode_batch([next(found).decode()])
    while some := list(itertools.islice(found, TOGETHER)):
        ids += encode_behind(tokenizer, [piece.decode() for piece in some])
    return np.concatenate(ids)
