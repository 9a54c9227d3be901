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

    def begins(self, start: int, ids: np.ndarray) -> np.ndarray:
        """bool [n]: at which of the tokens ids = self.ids[start : start + n], but the first, a document begins."""
        out = np.zeros(len(ids), bool)
        if self.offsets is not None:
            first, end = np.searchsorted(self.offsets, (start + 1, start + len(ids)))
            out[self.offsets[first:end] - start] = True
        else:
            out[1:] = ids[:-1] == self.eos
        return out


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
        try:
            ids = np.lib.format.open_memmap(path, mode="r")  # maps numbers only: it cannot unpickle
        except ValueError as e:
            raise ValueError(f"{path}: no NumPy file of numbers: {e}") from None
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
        if not 0 <= i < self._len:
            raise IndexError(f"row {i} of {self._len}")
        start = i * self._seq_len
        window = np.asarray(self._store.ids[start : start + self._seq_len + 1])
        if window.max() >= self._store.vocab_size or window.min() < 0:
            at = int(((window < 0) | (window >= self._store.vocab_size)).argmax())
            raise DataError(
                f"{self._store.name}: id {window[at]} at token {start + at} is not below the vocabulary size {self._store.vocab_size}"
            )
        n = len(window) - 1

        def padded(values: Any, dtype: type) -> np.ndarray:
            out = np.zeros(self._seq_len, dtype)
            out[:n] = values
            return out

        row = {
            "inputs": padded(window[:-1], np.int32),
            "targets": padded(window[1:], np.int32),
            "weights": padded(1, np.float32),
        }
        if self._isolate:
            begins = self._store.begins(start, window)
            here = np.arange(n)
            row["weights"] = padded(~begins[1:], np.float32)
            row["segments"] = padded(np.cumsum(begins[:n]) + 1, np.int32)
            row["positions"] = padded(here - np.maximum.accumulate(here * begins[:n]), np.int32)
        return row

    def dataset(self) -> grain.MapDataset:
        return grain.MapDataset.source(self)
