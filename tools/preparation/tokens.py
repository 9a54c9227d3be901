"""Tokenises each unit of the input into its own files: ids, ends of documents, and progress, so that a killed run can resume."""

import contextlib
import fcntl
import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minitf.data import long_texts, store
from minitf.data.frame import start_of
from minitf.data.tokenizer import Tokenizer
from minitf.data.tokenizer_files import HuggingFaceTokenizer, make_tokenizer
from tools.preparation import documents
from tools.preparation.directory import UNFINISHED, read_json, write_json
from tools.preparation.documents import FORMATS, Reading, Span
from tools.preparation.duplicates import Shingles
from tools.preparation.workers import Say

CHUNK = 32 << 20  # bytes of text after which a unit's progress is recorded
BATCH = 2 << 20  # bytes of text encoded at a time
TRIED = 8  # texts per unit that are decoded and compared with the input
# sha: first half of the sha256; end: tokens of the unit up to the document's end; bytes: of its text, -1 if unknown.
DOCUMENT = np.dtype([("sha", ">u8", (2,)), ("end", "<i8"), ("bytes", "<i8")])
COUNTS = ("documents", "empty", "bad", "tokens", "uncounted", "tried", "lossy")


class Work(NamedTuple):
    """What all processes share: paths and options. `near`: signatures of near duplicates are needed."""

    directory: Path
    tokenizer: str
    dtype: str
    reading: Reading
    skip_bad: bool
    near: bool

    @property
    def unfinished(self) -> Path:
        return self.directory / UNFINISHED

    @property
    def masks(self) -> bool:
        return self.reading.format != "text"

    def unit(self, number: int, suffix: str) -> Path:
        return self.unfinished / f"unit-{number:05}.{suffix}"


load_tokenizer = functools.cache(lambda name: make_tokenizer(name, [], "--tokenizer"))


class Writer:
    """Writes a unit's files. Truncates them to the sizes in the progress record: anything after was not committed."""

    def __init__(self, work: Work, number: int, stack: contextlib.ExitStack):
        self.record = work.unit(number, "json")
        suffixes = ["bin", "docs"] + ["mask"] * work.masks + ["near"] * work.near
        self.files = {s: stack.enter_context(open(work.unit(number, s), "ab")) for s in suffixes}
        fcntl.flock(self.files["bin"], fcntl.LOCK_EX)  # a worker of a killed run may not have exited yet
        self.progress = read_json(self.record) or {
            "done": False,
            "read": 0,  # bytes of the input
            "records": 0,
            "sizes": dict.fromkeys(suffixes, 0),
            "counts": dict.fromkeys(COUNTS, 0),
            "first_bad": None,
        }
        self.work, self.counts = work, self.progress["counts"]
        self.tokenizer = load_tokenizer(work.tokenizer)
        self.pieces = long_texts.pieces_for(self.tokenizer)
        self.end = (self._special("eos"), FORMATS[work.reading.format].end_counts)
        start = start_of(self.tokenizer)
        self.start = None if start is None else np.array([start], work.dtype)
        for suffix, size in self.progress["sizes"].items():
            if os.path.getsize(self.files[suffix].name) < size:
                raise ValueError(f"{self.files[suffix].name}: is shorter than it was; --overwrite begins anew")
            self.files[suffix].truncate(size)
        self.items: list[bytes | np.ndarray] = []  # texts and ids to be encoded and written
        self.counting: list[bool] = []  # for each item, whether its tokens are targets
        # Documents that end in `items`: (items up to their end, sha, bytes of text).
        self.ended: list[tuple[int, bytes, int]] = []
        self.signatures: list[np.ndarray] = []  # of the documents in `ended`
        self.waiting = self.since = 0  # bytes of text in items; bytes encoded since the last commit

    def _special(self, role: str) -> np.ndarray:
        return np.array([self.tokenizer.specials[role]], self.work.dtype)

    def _add(self, item: bytes | np.ndarray, counts: bool) -> None:
        self.items.append(item)
        self.counting.append(counts)

    def document(self, parts: list[documents.Part], say: Callable[[], None]) -> None:
        """Adds a document. Its hash is the sha256 of its text; several parts are joined by zero bytes."""
        sha, size = hashlib.sha256(), 0
        lengths = self.tokenizer.byte_lengths
        shingles = Shingles() if self.work.near else None
        if self.start is not None:
            # It is a target if the first part is: always in text, not before a prompt.
            self._add(self.start, parts[0][1])
        for i, (content, counts) in enumerate(parts):
            sha.update(b"\0" if i else b"")
            if isinstance(content, str):
                sha.update(content.encode())
                self._add(self._special(content), counts)
            elif isinstance(content, documents.Ids):
                for block, ids in enumerate(content.blocks):
                    if block == 0 and self.start is not None and ids[0] == self.start[0]:
                        ids = ids[1:]  # the data already have the start token
                    sha.update(ids)
                    size = -1 if lengths is None else size + int(lengths[ids].sum())
                    self._add(ids, counts)
                    self.waiting += ids.nbytes
                    self._encode_many(say)
            else:
                for number, piece in enumerate(self.pieces(content)):
                    sha.update(piece)
                    size += len(piece)
                    if shingles:
                        shingles.add(piece)
                    self._add(long_texts.Behind(piece) if number else piece, counts)
                    self.waiting += len(piece)
                    self._encode_many(say)
        self._add(*self.end)
        self.ended.append((len(self.items), sha.digest()[:16], size))
        if shingles:
            self.signatures.append(shingles.signature())

    def _encode_many(self, say: Callable[[], None]) -> None:
        if self.waiting >= BATCH:
            self.encode()
            say()

    def encode(self) -> None:
        """Encodes and writes all items."""
        if not self.items:
            return
        texts = [x for x in self.items if isinstance(x, bytes)]
        encoded = encode_all(self.tokenizer, texts)
        tried = [
            (text, ids) for text, ids in zip(texts, encoded, strict=True) if not isinstance(text, long_texts.Behind)
        ]
        for text, ids in tried[: TRIED - self.counts["tried"]]:
            self.counts["tried"] += 1
            self.counts["lossy"] += self.tokenizer.decode(ids) != text
        found = iter(encoded)
        arrays = [next(found) if isinstance(x, bytes) else x for x in self.items]
        lengths = np.array([len(a) for a in arrays])
        ids = np.concatenate(arrays).astype(self.work.dtype, copy=False)
        ends = self.counts["tokens"] + np.cumsum(lengths)
        self.files["bin"].write(ids)
        if self.work.masks:
            mask = np.repeat(np.array(self.counting, store.MASK), lengths)
            self.files["mask"].write(mask)
            self.counts["uncounted"] += int(len(mask) - mask.sum())
        if self.work.near:
            self.files["near"].write(b"".join(self.signatures))
        if self.ended:
            items, shas, sizes = zip(*self.ended, strict=True)
            ended = np.zeros(len(items), DOCUMENT)
            ended["sha"] = np.frombuffer(b"".join(shas), ">u8").reshape(-1, 2)
            ended["end"], ended["bytes"] = ends[np.array(items) - 1], sizes
            self.files["docs"].write(ended)
        self.counts["documents"] += len(self.ended)
        self.counts["tokens"] += len(ids)
        self.since += self.waiting
        self.items, self.counting, self.ended, self.signatures, self.waiting = [], [], [], [], 0

    def commit(self, read: int, done: bool = False) -> None:
        """Makes everything so far durable, and records it as done. `read`: bytes of input read; `done`: the unit is complete."""
        self.encode()
        for suffix, file in self.files.items():
            file.flush()
            os.fsync(file.fileno())
            self.progress["sizes"][suffix] = os.path.getsize(file.name)
        self.progress |= {"read": read, "done": done}
        write_json(self.record, self.progress)
        self.since = 0


def encode_all(tokenizer: Tokenizer, texts: list[bytes]) -> list[np.ndarray]:
    """Ids of each text, or of each piece of one."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return [tokenizer.encode(t) for t in texts]
    behind = [isinstance(t, long_texts.Behind) for t in texts]
    of = lambda want: [t.decode() for t, b in zip(texts, behind, strict=True) if b == want]
    whole, pieces = iter(tokenizer.encode_batch(of(False))), iter(long_texts.encode_behind(tokenizer, of(True)))
    return [next(pieces if b else whole) for b in behind]


def tokenise(work: Work, number: int, spans: list[Span], say: Say) -> None:
    """Writes a unit's documents to its files, resuming where an earlier run stopped."""
    with contextlib.ExitStack() as stack:
        writer = Writer(work, number, stack)
        progress, counts, position = writer.progress, writer.counts, documents.Position()
        if progress["done"]:
            return
        done = progress["records"]
        for n, record in enumerate(documents.read_records(spans, work.reading, position)):
            if n < done:
                continue
            try:
                parts = record.parts()
            except documents.Unreadable:
                raise
            except ValueError as e:
                message = f"{record.where()}: {e}"
                if not work.skip_bad:
                    raise ValueError(f"{message} (--skip_bad leaves such out)") from None
                progress["first_bad"] = progress["first_bad"] or message
                counts["bad"] += 1
            else:
                counts["empty"] += not parts
                try:
                    if parts:
                        writer.document(parts, lambda: say(position.bytes))
                except documents.Unreadable:
                    raise
                except ValueError as e:
                    raise ValueError(f"{record.where()}: {e}") from None
            progress["records"] = n + 1
            if writer.since + writer.waiting >= CHUNK:
                writer.commit(position.bytes)
        writer.commit(position.bytes, done=True)
        say(position.bytes)
