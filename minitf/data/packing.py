"""Packing: documents are assigned to rows ahead of time, so that row i is a function of i and needs no buffer.

A document of n tokens has n - 1 pairs (token, next token), and a row of seq_len positions holds seq_len pairs. A plan splits
documents longer than a row into chunks of a whole row; the remainders share rows with others. Each pair of each document is in
exactly one row. A chunk is a segment of its row: it does not see other chunks, and its positions begin at 0.
"""

import bisect
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minitf.data.store import (
    ISOLATED,
    MANIFEST,
    OFFSETS,
    SPLITS,
    TOKENS,
    OnDisk,
    Row,
    Rows,
    Store,
    filled_row,
    on_disk,
    open_split,
    read_manifest,
)
from minitf.paths import write_whole


class Plan(NamedTuple):
    """Assignment of pairs to rows.

    begins: int64 [rows + 1], the index of each row's first chunk, and the number of chunks.
    chunks: int64 [chunks, 2], (position in the store of the chunk's first token, its number of pairs).
    """

    begins: np.ndarray | OnDisk
    chunks: np.ndarray | OnDisk

    def __len__(self) -> int:
        return len(self.begins) - 1


def documents(store: Store) -> np.ndarray:
    """int64 [documents, 2]: (first token, number of pairs) of each document that has a pair."""
    assert store.offsets is not None
    found = np.stack([store.offsets[:-1], np.diff(store.offsets) - 1], axis=1)
    return found[found[:, 1] > 0]


def one_a_row(spans: np.ndarray, seq_len: int) -> Plan:
    """The plan with one row per span [spans, 2], in order; spans longer than a row are truncated."""
    chunks = np.stack([spans[:, 0], np.minimum(spans[:, 1], seq_len)], axis=1)
    return Plan(np.arange(len(chunks) + 1, dtype=np.int64), chunks)


def cut(spans: np.ndarray, length: int) -> np.ndarray:
    """Spans [spans, 2] split into chunks of `length` pairs, in order; the last chunk of a span may be shorter."""
    number = -(-spans[:, 1] // length)
    span = np.repeat(np.arange(len(spans)), number)
    before = length * (np.arange(len(span)) - np.repeat(np.cumsum(number) - number, number))
    return np.stack([spans[span, 0] + before, np.minimum(spans[span, 1] - before, length)], axis=1)


def best_fit(spans: np.ndarray, seq_len: int) -> Plan:
    """The plan that assigns chunks of spans [spans, 2] to rows: longest first, each to the fullest row with room for it (best-fit
    decreasing, arXiv:2404.10830). No token is dropped. Rows are ordered by their first token."""
    chunks = cut(spans, seq_len)
    row = np.zeros(len(chunks), np.int64)
    rooms: list[int] = []  # distinct amounts of room left in rows, ascending
    rows_with: dict[int, list[int]] = {}  # room -> rows with that much left
    rows = 0
    for i in np.argsort(-chunks[:, 1], kind="stable").tolist():
        length = int(chunks[i, 1])
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            row[i], left, rows = rows, seq_len - length, rows + 1
        else:
            room = rooms[at]
            row[i], left = rows_with[room].pop(), room - length
            if not rows_with[room]:
                del rows_with[room], rooms[at]
        if left > 0:
            if left not in rows_with:
                bisect.insort(rooms, left)
                rows_with[left] = []
            rows_with[left].append(int(row[i]))
    # Chunks are in the order of the store: sorting rows by their first chunk sorts them by their first token.
    _, first, row = np.unique(row, return_index=True, return_inverse=True)
    place = np.argsort(np.argsort(first))[row]
    order = np.argsort(place, kind="stable")
    return Plan(np.searchsorted(place[order], np.arange(rows + 1)), chunks[order])


class PackedRows:
    """Random access to the rows of a plan. `segments`: rows have segments and positions; if False, each row must have one chunk."""

    def __init__(self, store: Store, plan: Plan, seq_len: int, *, segments: bool):
        if not len(plan):
            raise ValueError(f"{store.name}: no document has two tokens")
        self.store, self.seq_len, self.fields = store, seq_len, ISOLATED if segments else TOKENS
        self._plan, self._segments, self._count = plan, segments, np.arange(seq_len, dtype=np.int32)

    def __len__(self) -> int:
        return len(self._plan)

    def __repr__(self) -> str:  # stable: Grain logs it
        return f"PackedRows({self.store.name!r}, seq_len={self.seq_len}, rows={len(self)})"

    __getitem__ = filled_row

    def fill(self, i: int, row: Row) -> None:
        """Writes row i into a blank row."""
        at, (first, end) = 0, self._plan.begins[i : i + 2].tolist()
        for number, (start, n) in enumerate(self._plan.chunks[first:end].tolist(), 1):
            here, window = slice(at, at + n), self.store.window(start, start + n + 1)
            row["inputs"][here], row["targets"][here] = window[:-1], window[1:]
            row["weights"][here] = self.store.counts(start + 1, start + n + 1)
            if self._segments:
                row["segments"][here], row["positions"][here] = number, self._count[:n]
            at += n


# ---- plans of a store on disk: one file of int64, first `begins`, then `chunks`


def add_plan(directory: Path, seq_len: int) -> None:
    """Adds the best-fit plan for rows of seq_len to both splits of a store; the manifest is written last."""
    manifest = read_manifest(directory)
    for split in SPLITS:
        plan = best_fit(documents(open_split(directory, manifest, split)), seq_len)
        contents = np.concatenate([plan.begins, plan.chunks.ravel()]).astype(OFFSETS).tobytes()
        file = f"{split}-best_fit-{seq_len}.plan"
        write_whole(directory / file, contents)
        manifest["splits"][split]["plans"][str(seq_len)] = {
            "file": file,
            "rows": len(plan),
            "chunks": len(plan.chunks),
            "sha256": hashlib.sha256(contents).hexdigest(),
        }
    write_whole(directory / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())


def open_plan(path: Path, described: dict[str, Any]) -> Plan:
    """A plan written by `add_plan`; `described`: its entry in the manifest. Raises ValueError if the file has the wrong size."""
    rows, chunks = described["rows"], described["chunks"]
    behind = (rows + 1) * OFFSETS.itemsize
    return Plan(OnDisk(str(path), OFFSETS, rows + 1), on_disk(path, OFFSETS, chunks, behind, (2,)))


# ---- kinds of packing


class Packing(NamedTuple):
    meaning: str
    rows: Callable[[Store, int, bool, bool], Any]  # (store, seq_len, isolate, tail) -> a sequence of rows
    reads: tuple[str, ...] = ()  # settings of DataConfig that only some kinds read, this one among them


def concatenated_rows(store: Store, seq_len: int, isolate: bool, tail: bool) -> Rows:
    return Rows(store, seq_len, isolate=isolate, tail=tail)


def planned(store: Store, seq_len: int, isolate: bool, tail: bool) -> PackedRows:
    """Rows of the store's own best-fit plan, or of a new one if the store is in memory."""
    check_offsets(store, "best_fit")
    if store.plans is None:
        plan = best_fit(documents(store), seq_len)
    elif seq_len in store.plans:
        plan = open_plan(*store.plans[seq_len])
    else:
        have = ", ".join(map(str, sorted(store.plans))) or "none"
        raise ValueError(
            f"{store.name}: has no best-fit plan for seq_len={seq_len} (there are: {have}); "
            f"python -m tools.prepare_data --output DIR --pack {seq_len} adds it"
        )
    return PackedRows(store, plan, seq_len, segments=True)


def one_document(store: Store, seq_len: int, isolate: bool, tail: bool) -> PackedRows:
    check_offsets(store, "documents")
    return PackedRows(store, one_a_row(documents(store), seq_len), seq_len, segments=False)


def check_offsets(store: Store, packing: str) -> None:
    if store.offsets is None:
        raise ValueError(
            f"{store.name}: data.packing={packing} needs to know where documents end; python -m tools.prepare_data makes a "
            "store that does"
        )


PACKINGS = {
    "concat": Packing(
        "one after another, cut every seq_len tokens: no padding, long documents are cut",
        concatenated_rows,
        reads=("isolate_documents",),
    ),
    "best_fit": Packing("side by side, isolated; only those longer than a row are cut; little padding", planned),
    "documents": Packing("one a row, what is longer than a row left out: for fine-tuning", one_document),
}
