"""Writes a store's shards: selects and orders documents, and copies their ids from the units' files."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from minitf.data import store
from tools.preparation.directory import write_json
from tools.preparation.duplicates import Signatures, nearly_repeated, repeated
from tools.preparation.tokens import DOCUMENT, Work
from tools.preparation.workers import Say

COPY = 8 << 20  # bytes of ids copied at a time
PLACE = np.dtype([("unit", "<i4"), ("start", "<i8"), ("tokens", "<i8")])


def choose(
    work: Work, units: int, settings: dict[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, int | None], dict]:
    """(by split, the PLACE of each document in store order; by split, bytes of text, None if unknown; numbers of duplicates)."""
    docs = [np.fromfile(work.unit(i, "docs"), DOCUMENT) for i in range(units)]
    lengths = [len(d) for d in docs]
    all_docs, places = np.concatenate(docs), np.zeros(sum(lengths), PLACE)
    places["unit"] = np.repeat(np.arange(units), lengths)
    places["start"] = np.concatenate([np.r_[0, d["end"]][:-1] for d in docs])
    places["tokens"] = all_docs["end"] - places["start"]
    shas = all_docs["sha"].astype(np.uint64)

    stays = np.ones(len(places), bool)
    numbers = {"exact_duplicates": 0, "near_duplicates": 0}
    if settings["dedup"] != "none":
        stays = ~repeated(shas)
        numbers["exact_duplicates"] = int(len(stays) - stays.sum())
    if settings["dedup"] == "near":
        signatures = Signatures([work.unit(i, "near") for i in range(units)], lengths)
        gone = nearly_repeated(signatures, np.flatnonzero(stays), settings["near_threshold"])
        numbers["near_duplicates"], stays[gone] = len(gone), False

    is_val = (shas[:, 0] >> np.uint64(32)) < settings["val_fraction"] * 2**32
    chosen, text_bytes = {}, {}
    for i, (split, here) in enumerate({"train": ~is_val, "val": is_val}.items()):
        which = np.flatnonzero(stays & here)
        sizes = all_docs["bytes"][which]
        text_bytes[split] = None if (sizes < 0).any() else int(sizes.sum())
        if settings["shuffle"]:
            which = np.random.default_rng([settings["seed"], i]).permutation(which)
        chosen[split] = places[which]
    return chosen, text_bytes, numbers


def cut_shards(tokens: np.ndarray, most: int) -> list[tuple[int, int]]:
    """(first, end) document of each shard: a shard has at most `most` tokens, or one longer document."""
    ends, shards, first = np.cumsum(tokens), [], 0
    while first < len(tokens):
        before = ends[first] - tokens[first]
        end = max(int(np.searchsorted(ends, before + most, side="right")), first + 1)
        shards.append((first, end))
        first = end
    return shards


def runs(places: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(unit, start, tokens) of each run of adjacent documents."""
    breaks = (places["unit"][1:] != places["unit"][:-1]) | (
        places["start"][1:] != places["start"][:-1] + places["tokens"][:-1]
    )
    firsts = np.flatnonzero(np.r_[True, breaks])
    tokens = np.add.reduceat(places["tokens"], firsts)
    return zip(places["unit"][firsts].tolist(), places["start"][firsts].tolist(), tokens.tolist(), strict=True)


def write_file(path: Path, blocks: Iterator[bytes]) -> str:
    """Writes a file atomically and durably; returns its sha256."""
    sha, part = hashlib.sha256(), path.with_name(path.name + ".part")
    with open(part, "wb", COPY) as f:
        for block in blocks:
            sha.update(block)
            f.write(block)
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, path)
    return sha.hexdigest()


def gather(work: Work, places: np.ndarray, suffix: str, width: int, say: Say) -> Iterator[bytes]:
    """The documents' parts of the units' files, in blocks. `width`: bytes per token."""
    done, told = 0, 0
    with contextlib.ExitStack() as stack:
        files: dict[int, BinaryIO] = {}
        for unit, start, tokens in runs(places):
            if unit not in files:
                if len(files) == 500:  # limit on open files
                    stack.close()
                    files.clear()
                files[unit] = stack.enter_context(open(work.unit(unit, suffix), "rb", 0))
            at, end = start * width, (start + tokens) * width
            while at < end:
                block = os.pread(files[unit].fileno(), min(COPY, end - at), at)
                assert block, files[unit].name
                yield block
                at += len(block)
                done += len(block)
                if done - told >= COPY:
                    say(done)
                    told = done


def write_shard(work: Work, split: str, number: int, first: int, end: int, masked: bool, say: Say) -> None:
    name, width = store.shard_name(split, number), np.dtype(work.dtype).itemsize
    places = np.fromfile(work.unfinished / f"{split}.places", PLACE, end - first, offset=first * PLACE.itemsize)
    offsets = np.r_[0, np.cumsum(places["tokens"])].astype(store.OFFSETS)
    file = work.directory / name
    sha256 = {
        "bin": write_file(file.with_suffix(".bin"), gather(work, places, "bin", width, say)),
        "idx": write_file(file.with_suffix(".idx"), iter([offsets.tobytes()])),
    }
    if masked:
        sha256["mask"] = write_file(file.with_suffix(".mask"), gather(work, places, "mask", 1, lambda n: None))
    shard = {"name": name, "tokens": int(offsets[-1]), "documents": len(places), "sha256": sha256}
    write_json(work.unfinished / f"{name}.json", shard)
    say(int(offsets[-1]) * width)
