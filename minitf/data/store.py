"""Stores: long arrays of token ids, split into rows with random access by index; nothing is streamed.

Token positions are 64-bit NumPy integers on the host, never JAX arrays.
"""

import bisect
import dataclasses
import functools
import itertools
import json
import math
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from minitf.paths import inside


class DataError(ValueError):
    """Invalid data, found while reading them."""


def check_rows(ids: np.ndarray, rows: int, source: str, start: int = 0) -> None:
    """Raises DataError, naming source and token, if an id is not in [0, rows). `ids`: the source's tokens from number `start` on;
    `rows`: rows of the embedding table."""
    if len(ids) and (ids.max() >= rows or (ids.dtype.kind == "i" and ids.min() < 0)):
        at = int(((ids < 0) | (ids >= rows)).argmax())
        raise DataError(f"{source}: id {ids[at]} at token {start + at} is not below the vocabulary size {rows}")


class Joined:
    """The concatenation of arrays, read by slices without copying them all."""

    def __init__(self, parts: list[Any], starts: list[int] | None = None):
        self.parts = parts
        self.starts = np.cumsum([0, *map(len, parts)], dtype=np.int64).tolist() if starts is None else starts

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop, step = index.indices(len(self))
        assert step == 1
        i = bisect.bisect_right(self.starts, start) - 1
        if i == len(self.parts) or stop <= self.starts[i + 1]:
            i = min(i, len(self.parts) - 1)
            return self.parts[i][start - self.starts[i] : max(stop - self.starts[i], 0)]
        found = []
        while start < stop:
            end = min(stop, self.starts[i + 1])
            found.append(self.parts[i][start - self.starts[i] : end - self.starts[i]])
            start, i = end, i + 1
        return np.concatenate(found)


class Replaced:
    """An array of ids, read by slices, in which id `old` reads as `new`."""

    def __init__(self, ids: Any, old: int, new: int):
        self.ids, self.old, self.new = ids, old, new

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: slice) -> np.ndarray:
        ids = np.asarray(self.ids[index])
        return np.where(ids == self.old, np.asarray(self.new, np.min_scalar_type(self.new)), ids)


class Opened:
    """A file descriptor open for reading, closed when it is garbage-collected."""

    def __init__(self, path: str):
        self.number = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.number).atexit = False


@functools.lru_cache(maxsize=256)  # a store may have more shards than the limit of open files
def opened(path: str, number: int) -> Opened:
    """The open file. `number`: of the OnDisk that reads it, since a later one of the same path may be another file."""
    return Opened(path)


ARRAYS = itertools.count()


class OnDisk:
    """A file of numbers, [length, *shape], read by slices. Not memory-mapped: if a mapped file is truncated, reading it kills the
    process with SIGBUS."""

    def __init__(self, path: str, dtype: np.dtype, length: int, offset: int = 0, shape: tuple[int, ...] = ()):
        self.path, self.dtype, self.offset, self.shape = path, np.dtype(dtype), offset, shape
        self._length, self._size = length, self.dtype.itemsize * math.prod(shape)
        self._number = next(ARRAYS)

    def __setstate__(self, state: dict[str, Any]) -> None:  # unpickled in another process: numbers are per process
        vars(self).update(state, _number=next(ARRAYS))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: slice) -> np.ndarray:
        """A copy of the slice. Raises DataError if the file has become too short."""
        start, stop, step = index.indices(self._length)
        assert step == 1
        found = np.empty((max(stop - start, 0), *self.shape), self.dtype)
        left, at = found.reshape(-1).view(np.uint8), self.offset + start * self._size
        while len(left):
            read = os.preadv(opened(self.path, self._number).number, [left], at)
            if not read:
                whole = self.offset + self._length * self._size
                raise DataError(f"{self.path}: has become shorter: {os.stat(self.path).st_size} bytes, not {whole}")
            left, at = left[read:], at + read
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)

    def part(self, start: int, stop: int) -> "OnDisk":
        return OnDisk(self.path, self.dtype, stop - start, self.offset + start * self._size, self.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Store:
    """Token ids of one split, in memory or on disk.

    ids:        integers [tokens].
    vocab_size: upper bound of ids (exclusive); checked as they are read.
    offsets:    int64 [documents + 1], the first token of each document, and the number of tokens; None: unknown.
    eos:        the id that ends a document, used if offsets are unknown; None: unknown.
    mask:       uint8 [tokens], 1 where a token is a target; None: all are.
    text_bytes: bytes of the documents' text; None: unknown.
    plans:      seq_len -> (file of the packing plan (packing.Plan), its entry in the manifest); None: not a store on disk.
    """

    name: str
    ids: np.ndarray | OnDisk | Joined | Replaced
    vocab_size: int
    offsets: np.ndarray | None = None
    eos: int | None = None
    mask: np.ndarray | OnDisk | Joined | None = None
    text_bytes: int | None = None
    plans: dict[int, tuple[Path, dict[str, Any]]] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def knows_documents(self) -> bool:
        return self.offsets is not None or self.eos is not None

    def window(self, start: int, stop: int) -> np.ndarray:
        """The ids of tokens start .. stop (exclusive). Raises DataError if one is not below vocab_size."""
        ids = np.asarray(self.ids[start:stop])
        check_rows(ids, self.vocab_size, self.name, start)
        return ids

    def counts(self, start: int, stop: int) -> np.ndarray | int:
        """1 where a token of start .. stop (exclusive) is a target, else 0; the integer 1 without a mask."""
        return 1 if self.mask is None else self.mask[start:stop]

    def borders(self, start: int, ids: np.ndarray) -> np.ndarray:
        """Positions in ids = self.ids[start : start + n], ascending, where a document begins; position 0 is left out."""
        if self.offsets is None:
            return np.flatnonzero(ids[:-1] == self.eos) + 1
        first = self.offsets.searchsorted(start + 1)
        end = first + self.offsets[first : first + len(ids)].searchsorted(start + len(ids))
        found = self.offsets[first:end] - start
        # An empty document has the same offset as the next one.
        return np.unique(found) if (found[1:] == found[:-1]).any() else found


def concatenated(
    name: str,
    documents: list[np.ndarray],
    vocab_size: int,
    dtype: np.dtype,
    eos: int | None = None,
    start: int | None = None,
) -> Store:
    """A store in memory of documents, each between `start` and `eos` if given; empty documents are dropped."""
    documents = [d for d in documents if len(d)]
    before, behind = (np.array([] if i is None else [i], dtype) for i in (start, eos))
    parts = [np.concatenate([before, d, behind]) if len(before) + len(behind) else d for d in documents]
    ids = np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)
    return Store(name, ids, vocab_size, np.cumsum([0, *map(len, parts)], dtype=np.int64))


def open_tokens(path: Path, dtype: str, vocab_size: int, eos: int | None) -> Store:
    """The store of a flat file of token ids: `.npy`, or raw little-endian integers of `dtype` (nanoGPT's `.bin`)."""
    if path.suffix == ".npy":
        try:
            ids = np.lib.format.open_memmap(path, mode="r")  # cannot unpickle, unlike np.load
        except ValueError as e:
            raise ValueError(f"{path}: no NumPy file of numbers: {e}") from None
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"{path}: holds {ids.dtype}{list(ids.shape)}, not a line of integers")
        ids = OnDisk(str(path), ids.dtype, len(ids), ids.offset)
        return Store(str(path), ids, vocab_size, eos=eos)
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size == 0 or size % width:
        raise ValueError(f"{path}: {size} bytes are no whole number of {dtype} ids (data.token_dtype)")
    ids = OnDisk(str(path), np.dtype(dtype).newbyteorder("<"), size // width)
    check_width(ids, str(path), "data.token_dtype")
    return Store(str(path), ids, vocab_size, eos=eos)


def check_width(ids: np.ndarray | OnDisk, source: str, setting: str) -> None:
    """Raises ValueError if ids look like halves of wider integers: every second is 0, but not all."""
    some = np.asarray(ids[: 2 * (min(len(ids), 8192) // 2)])
    if len(some) >= 16 and not some[1::2].any() and some[::2].any():
        raise ValueError(
            f"{source}: every second id is 0: the file seems to hold wider ids than {ids.dtype.name} ({setting})"
        )


# ---- a store on disk: DIR/manifest.json, and for each shard of a split SPLIT-00000.bin (ids), .idx (offsets) and, if some tokens
# are not targets, .mask. The manifest is written last: a directory without one is not a store.

MANIFEST = "manifest.json"
STORE_FORMAT, STORE_VERSION = "minitf token store", 1
SPLITS = ("train", "val")
OFFSETS, MASK = np.dtype("<i8"), np.dtype("u1")


def ids_dtype(vocab_size: int) -> np.dtype:
    """The dtype of ids in a store on disk, little-endian."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def shard_name(split: str, i: int) -> str:
    return f"{split}-{i:05}"


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a store. Raises ValueError if the store is missing, incomplete or of another version."""
    path = directory / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"{directory}: no token store ({MANIFEST} is missing); python -m tools.prepare_data makes one, and goes on "
            "where it was stopped"
        )
    try:
        manifest = json.loads(path.read_text())
        found = (manifest["format"], manifest["version"])
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{path}: not readable: {e}") from None
    if found != (STORE_FORMAT, STORE_VERSION):
        raise ValueError(f"{path}: is {found[0]!r} version {found[1]}, not {STORE_FORMAT!r} version {STORE_VERSION}")
    return manifest


def on_disk(path: Path, dtype: np.dtype, length: int, offset: int = 0, shape: tuple[int, ...] = ()) -> OnDisk:
    """An array that extends to the end of its file. Raises ValueError if the file is missing or has another size."""
    size = path.stat().st_size if path.is_file() else None
    whole = offset + length * dtype.itemsize * math.prod(shape)
    if size != whole:
        found = "is missing" if size is None else f"has {size} bytes"
        raise ValueError(f"{path}: {found}, must have {whole}")
    return OnDisk(str(path), dtype, length, offset, shape)


def open_split(directory: Path, manifest: dict[str, Any], split: str) -> Store:
    """One split of a store on disk. Its offsets are loaded into memory: 8 bytes per document."""
    described = manifest["splits"][split]
    ids, masks, offsets, start = [], [], [np.zeros(1, np.int64)], 0
    for shard in described["shards"]:
        file = inside(directory, shard["name"], directory / MANIFEST)
        ids.append(on_disk(file.with_suffix(".bin"), np.dtype(manifest["dtype"]), shard["tokens"]))
        if manifest["masked"]:
            masks.append(on_disk(file.with_suffix(".mask"), MASK, shard["tokens"]))
        offsets.append(on_disk(file.with_suffix(".idx"), OFFSETS, shard["documents"] + 1)[1:] + start)
        start += shard["tokens"]

    def joined(parts: list[Any]) -> Any:
        return parts[0] if len(parts) == 1 else Joined(parts or [np.zeros(0, manifest["dtype"])])

    return Store(
        f"{directory} ({split})",
        joined(ids),
        manifest["vocab_size"],
        np.concatenate(offsets),
        mask=joined(masks) if manifest["masked"] else None,
        text_bytes=described["bytes"],
        plans={
            int(n): (inside(directory, plan["file"], directory / MANIFEST), plan)
            for n, plan in described["plans"].items()
        },
    )


# ---- rows


Row = dict[str, np.ndarray]

TOKENS = {"inputs": np.int32, "targets": np.int32, "weights": np.float32}  # fields of every row
ISOLATED = TOKENS | {"segments": np.int32, "positions": np.int32}  # fields of rows with isolated documents


def blank(fields: dict[str, Any], *shape: int) -> Row:
    """Arrays of padding: id 0, weight 0, segment 0."""
    return {name: np.zeros(shape, dtype) for name, dtype in fields.items()}


def filled_row(rows: Any, i: Any) -> Row:
    """Row i of Rows or PackedRows, as a dict of

    inputs, targets:     int32 [seq_len], targets being the inputs shifted by one;
    weights:             float32 [seq_len], 0 for targets without loss: padding, masked tokens, first tokens of isolated documents;
    segments, positions: int32 [seq_len], ISOLATED rows only: the document's number in the row from 1, 0 for padding; the position
                         in the document.
    """
    i = int(i)
    if not 0 <= i < len(rows):
        raise IndexError(f"row {i} of {len(rows)}")
    row = blank(rows.fields, rows.seq_len)
    rows.fill(i, row)
    return row


class Rows:
    """Random access to a store's rows of seq_len positions: row i covers tokens i*seq_len .. (i+1)*seq_len, the last one only as a
    target. `isolate`: documents that share a row do not see each other. `tail`: the last tokens, too few for a row, make a padded
    row (for evaluation: each token counts once); otherwise they are dropped."""

    def __init__(self, store: Store, seq_len: int, *, isolate: bool = False, tail: bool = False):
        if len(store) < (2 if tail else seq_len + 1):
            raise ValueError(f"{store.name}: needs at least {2 if tail else seq_len + 1} tokens, found {len(store)}")
        if isolate and not store.knows_documents:
            raise ValueError(
                f"{store.name}: data.isolate_documents=True needs to know where documents end; set data.eos_id"
            )
        self.store, self.seq_len, self.fields = store, seq_len, ISOLATED if isolate else TOKENS
        self._isolate, self._count = isolate, np.arange(seq_len, dtype=np.int32)
        self._len = -(-(len(store) - 1) // seq_len) if tail else (len(store) - 1) // seq_len

    def __len__(self) -> int:
        return self._len

    def __repr__(self) -> str:  # stable: Grain logs it
        return f"Rows({self.store.name!r}, seq_len={self.seq_len}, rows={self._len})"

    __getitem__ = filled_row

    def fill(self, i: int, row: Row) -> None:
        """Writes row i into a blank row."""
        start = i * self.seq_len
        window = self.store.window(start, start + self.seq_len + 1)
        n = len(window) - 1
        row["inputs"][:n], row["targets"][:n] = window[:-1], window[1:]
        row["weights"][:n] = self.store.counts(start + 1, start + n + 1)
        if self._isolate:
            borders = self.store.borders(start, window)
            row["weights"][borders - 1] = 0
            begin = 0
            for number, end in enumerate([*borders.tolist(), n], 1):
                row["segments"][begin:end] = number
                row["positions"][begin:end] = self._count[: min(end, n) - begin]
                begin = end
