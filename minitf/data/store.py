"""A long array of token ids and its cut into rows: everything is a function of an index, nothing is a stream.

Positions in a store are 64-bit: NumPy's on the host, never JAX's.
"""

import dataclasses
from pathlib import Path
from typing import Any

import grain
import numpy as np


class DataError(ValueError):
    """The data themselves are wrong: found while they are read."""


@dataclasses.dataclass(frozen=True)
class Store:
    """Token ids of one split, in memory or memory-mapped.

    ids:       unsigned integers [tokens].
    vocab_size: ids are below it; checked row by row as they are read.
    offsets:   int64 [documents + 1], where each document begins, and the end; None: not known.
    eos:       the id that ends a document, used where offsets are not known.
    """

    name: str
    ids: np.ndarray
    vocab_size: int
    offsets: np.ndarray | None = None
    eos: int | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def knows_documents(self) -> bool:
        return self.offsets is not None or self.eos is not None

    def documents(self, start: int, ids: np.ndarray) -> np.ndarray:
        """int64 numbers of the documents that the tokens ids = self.ids[start : start + n] belong to."""
        if self.offsets is not None:
            return np.searchsorted(self.offsets, np.arange(start, start + len(ids), dtype=np.int64), side="right")
        ended = ids == self.eos
        return np.cumsum(ended) - ended


def concatenated(name: str, documents: list[np.ndarray], vocab_size: int, dtype: np.dtype, eos: int | None) -> Store:
    """One store of many documents, each closed by eos where there is one; empty documents leave nothing."""
    documents = [d for d in documents if len(d)]
    end = [] if eos is None else [eos]
    parts = [np.concatenate([d, np.array(end, dtype)]) if end else d for d in documents]
    ids = np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)
    return Store(name, ids, vocab_size, np.cumsum([0, *map(len, parts)], dtype=np.int64))


def open_tokens(path: Path, dtype: str, vocab_size: int, eos: int | None) -> Store:
    """A flat file of token ids, memory-mapped: `.npy`, or raw little-endian integers of `dtype` (nanoGPT's `.bin`)."""
    if path.suffix == ".npy":
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"{path}: holds {ids.dtype}{list(ids.shape)}, not a line of integers")
        return Store(str(path), ids, vocab_size, eos=eos)
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size == 0 or size % width:
        raise ValueError(f"{path}: {size} bytes are no whole number of {dtype} ids (data.token_dtype)")
    return Store(str(path), np.memmap(path, np.dtype(dtype).newbyteorder("<"), "r"), vocab_size, eos=eos)


class Rows:
    """Random access to a store's rows of seq_len positions: row i covers tokens i*seq_len .. (i+1)*seq_len, its last token
    only as a target. A row is a dict of

    inputs, targets:     int32 [seq_len], targets being the inputs shifted by one;
    weights:             float32 [seq_len], 0 where the target must not count: padding, and with `isolate` a next document;
    segments, positions: int32 [seq_len], with `isolate` only: the document's number in the row from 1, 0 for padding; and the
                         position in the document.

    `tail`: the last tokens, too few for a row, make a padded one (for evaluation: each token counts once); else they are left
    out.
    """

    def __init__(self, store: Store, seq_len: int, *, isolate: bool = False, tail: bool = False):
        if len(store) < (2 if tail else seq_len + 1):
            raise ValueError(f"{store.name}: needs at least {2 if tail else seq_len + 1} tokens, found {len(store)}")
        if isolate and not store.knows_documents:
            raise ValueError(
                f"{store.name}: data.isolate_documents=True needs to know where documents end; set data.eos_id"
            )
        self._store, self._seq_len, self._isolate = store, seq_len, isolate
        self._len = -(-(len(store) - 1) // seq_len) if tail else (len(store) - 1) // seq_len

    def __len__(self) -> int:
        return self._len

    def __repr__(self) -> str:  # stable: Grain logs it
        return f"Rows({self._store.name!r}, seq_len={self._seq_len}, rows={self._len})"

    def __getitem__(self, i: Any) -> dict[str, np.ndarray]:
        i = int(i)
        start = i * self._seq_len
        window = np.asarray(self._store.ids[start : start + self._seq_len + 1]).astype(np.int64)
        bad = (window < 0) | (window >= self._store.vocab_size)
        if bad.any():
            at = int(bad.argmax())
            raise DataError(
                f"{self._store.name}: id {window[at]} at token {start + at} is not below the vocabulary size {self._store.vocab_size}"
            )
        n = len(window) - 1
        pad = (0, self._seq_len - n)
        row = {
            "inputs": np.pad(window[:-1], pad).astype(np.int32),
            "targets": np.pad(window[1:], pad).astype(np.int32),
            "weights": np.pad(np.ones(n, np.float32), pad),
        }
        if self._isolate:
            documents = self._store.documents(start, window)
            first = np.flatnonzero(np.r_[True, documents[1:n] != documents[: n - 1]])
            lengths = np.diff(np.r_[first, n])
            row["weights"][:n] = documents[1:] == documents[:-1]
            row["segments"] = np.pad(np.repeat(np.arange(1, len(first) + 1), lengths), pad).astype(np.int32)
            row["positions"] = np.pad(np.arange(n) - np.repeat(first, lengths), pad).astype(np.int32)
        return row

    def dataset(self) -> grain.MapDataset:
        return grain.MapDataset.source(self)
