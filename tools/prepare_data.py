"""Turns text into a store of token ids that training reads: data.kind="store", data.path=DIR.

python -m tools.prepare_data --input corpus/ more.jsonl.zst 'web/*.parquet' --output data/store --tokenizer tokenizers/bpe
python -m tools.prepare_data --input chats.jsonl --format chat --output data/chats --tokenizer tokenizers/bpe --pack 2048
python -m tools.prepare_data --output data/store --verify

A core encodes 1 to 4 MB of text a second; the disk holds the ids twice until the end. Killed at any time, the same command goes
on where it was, and the store is the same, byte for byte, whatever the kills and the number of workers. Each document ends with
the tokenizer's end mark; whether it is for validation follows from its text alone. Exit status: 0 done (also: already done),
1 a failure, or files that --verify finds changed, 2 a mistake in what was asked for, 3 stopped by Ctrl-C.

Files are read as tools/documents.py says. A record of --format text has a text (--text_key); of completion, `prompt` and
`completion`, of which only the latter counts in the loss; of chat, `messages`, of which the assistant's count. Rows of parquet
and tokens are numbered from 0, lines from 1. A process takes less than 2 GB, however long texts are; but lines of JSON and texts
in parquet have at most 256 MB. The documents' order takes about 100 bytes of memory a document.
"""

import argparse
import contextlib
import fcntl
import functools
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from minitf.data import store
from minitf.data.packing import add_plan, write_durably
from minitf.data.tokenizer import (
    CONFIG,
    FILE,
    SPELLINGS,
    HuggingFaceTokenizer,
    Tokenizer,
    make_tokenizer,
    save_tokenizer,
)
from tools import documents
from tools.documents import FORMATS, STDIN, Reading, Span

CHUNK = 32 << 20  # bytes of text after which a unit's progress is recorded
BATCH = 2 << 20  # bytes of text that are encoded at once
COPY = 8 << 20  # bytes of ids that are copied at once
TRIED = 8  # texts of each unit that are decoded again
PERMUTATIONS, SHINGLE = 128, 5  # of MinHash; words
NEIGHBOURS = 16  # documents of equal hash that each is compared with
DOCUMENT = np.dtype(
    [("sha", ">u8", (2,)), ("end", "<i8"), ("bytes", "<i8")]
)  # the sha256's first half; -1 bytes: not known
PLACE = np.dtype([("unit", "<i4"), ("start", "<i8"), ("tokens", "<i8")])
UNFINISHED = "unfinished"
OURS = re.compile(
    rf"({'|'.join(store.SPLITS)})-(\d{{5,}}\.(bin|idx|mask)|.+\.plan)(\.part)?|{store.MANIFEST}(\.part)?|{UNFINISHED}"
)
COUNTS = ("documents", "empty", "bad", "tokens", "uncounted", "tried", "lossy")

Say = Callable[[int], None]  # how much of a task is done


class Work(NamedTuple):
    """What every process knows."""

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


def write_json(path: Path, tree: Any) -> None:
    write_durably(path, (json.dumps(tree, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:
    """None where there is no such file."""
    return json.loads(path.read_text()) if path.exists() else None


load_tokenizer = functools.cache(lambda name: make_tokenizer(name, []))


# ---- near duplicates: the signature of a document


class Shingles:
    """MinHash signature of a document's words, five at a time, from its text piece by piece."""

    def __init__(self) -> None:
        from datasketch import MinHash

        self._hash = MinHash(PERMUTATIONS, hashfunc=zlib.crc32)
        self._words: list[bytes] = []  # the last ones, too few for a shingle
        self._rest = b""  # of a word
        self._any = False

    def add(self, piece: bytes) -> None:
        text = self._rest + piece
        words = text.split()
        # The last word may go on in the next piece.
        self._rest = words.pop() if words and not text[-1:].isspace() and len(words[-1]) < documents.BLOCK else b""
        self._update(words)

    def _update(self, words: list[bytes]) -> None:
        words = self._words + words
        for first in range(0, len(words) - SHINGLE + 1, 1 << 13):  # its arrays have a row for each
            last = min(first + (1 << 13), len(words) - SHINGLE + 1)
            self._hash.update_batch([b" ".join(words[i : i + SHINGLE]) for i in range(first, last)])
            self._any = True
        self._words = words[-(SHINGLE - 1) :]

    def signature(self) -> np.ndarray:
        self._update([self._rest] if self._rest else [])
        if not self._any:  # a document of fewer words
            self._hash.update(b" ".join(self._words))
        return self._hash.hashvalues.astype("<u4")


# ---- tokenise: each unit's documents into files of its own


class Writer:
    """A unit's files under way. What they hold beyond the sizes of the progress record was not finished, and goes."""

    def __init__(self, work: Work, number: int, stack: contextlib.ExitStack):
        self.record = work.unit(number, "json")
        suffixes = ["bin", "docs"] + ["mask"] * work.masks + ["near"] * work.near
        self.files = {s: stack.enter_context(open(work.unit(number, s), "ab")) for s in suffixes}
        fcntl.flock(self.files["bin"], fcntl.LOCK_EX)  # a worker of a killed run may still be dying
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
        self.pieces = documents.pieces_for(self.tokenizer)
        self.end = (self._special("eos"), FORMATS[work.reading.format].end_counts)
        for suffix, size in self.progress["sizes"].items():
            if os.path.getsize(self.files[suffix].name) < size:
                raise ValueError(f"{self.files[suffix].name}: is shorter than it was; --overwrite begins anew")
            self.files[suffix].truncate(size)
        self.items: list[bytes | np.ndarray] = []  # texts and ids that wait to be encoded and written
        self.counting: list[bool] = []  # of each item
        self.ended: list[
            tuple[int, bytes, int]
        ] = []  # documents that end in them: (items until there, sha, bytes of text)
        self.signatures: list[np.ndarray] = []  # of those documents
        self.waiting = self.since = 0  # bytes of text in items; since the last commit

    def _special(self, role: str) -> np.ndarray:
        return np.array([self.tokenizer.specials[role]], self.work.dtype)

    def _add(self, item: bytes | np.ndarray, counts: bool) -> None:
        self.items.append(item)
        self.counting.append(counts)

    def document(self, parts: list[documents.Part], say: Callable[[], None]) -> None:
        """Adds one. Its hash is that of its text; of several parts, joined by zero bytes."""
        sha, size = hashlib.sha256(), 0
        lengths = self.tokenizer.byte_lengths
        shingles = Shingles() if self.work.near else None
        for i, (content, counts) in enumerate(parts):
            sha.update(b"\0" if i else b"")
            if isinstance(content, str):
                sha.update(content.encode())
                self._add(self._special(content), counts)
            elif isinstance(content, documents.Ids):
                for ids in content.blocks:
                    sha.update(ids)
                    size = -1 if lengths is None else size + int(lengths[ids].sum())
                    self._add(ids, counts)
                    self.waiting += ids.nbytes
                    self._encode_many(say)
            else:
                for piece in self.pieces(content):
                    sha.update(piece)
                    size += len(piece)
                    if shingles:
                        shingles.add(piece)
                    self._add(piece, counts)
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
        """Writes the ids of what waits."""
        if not self.items:
            return
        texts = [x for x in self.items if isinstance(x, bytes)]
        encoded = encode_all(self.tokenizer, texts)
        for text, ids in zip(texts[: TRIED - self.counts["tried"]], encoded, strict=False):
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
        """What is written counts from here on."""
        self.encode()
        for suffix, file in self.files.items():
            file.flush()
            os.fsync(file.fileno())
            self.progress["sizes"][suffix] = os.path.getsize(file.name)
        self.progress |= {"read": read, "done": done}
        write_json(self.record, self.progress)
        self.since = 0


def encode_all(tokenizer: Tokenizer, texts: list[bytes]) -> list[np.ndarray]:
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.encode_batch([t.decode() for t in texts])
    return [tokenizer.encode(t) for t in texts]


def tokenise(work: Work, number: int, spans: list[Span], say: Say) -> None:
    """A unit's documents into its files, from where an earlier run stopped."""
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


# ---- assemble: which documents stay, in which order, and the shards


def repeated(shas: np.ndarray) -> np.ndarray:
    """bool [documents]: whether an earlier document has the same hash [documents, 2]."""
    order = np.lexsort((shas[:, 1], shas[:, 0]))  # stable: equal ones stay in order
    out = np.zeros(len(shas), bool)
    out[order[1:]] = (shas[order[1:]] == shas[order[:-1]]).all(axis=1)
    return out


class Signatures:
    """uint32 [documents, PERMUTATIONS] on the disk."""

    def __init__(self, work: Work, lengths: list[int]):
        self.parts = [
            np.memmap(work.unit(i, "near"), "<u4", "r", shape=(n, PERMUTATIONS))
            if n
            else np.zeros((0, PERMUTATIONS), "<u4")
            for i, n in enumerate(lengths)
        ]
        self.starts = np.cumsum([0, *lengths])

    def band(self, first: int, rows: int) -> np.ndarray:
        """uint64 [documents]: a hash of some columns."""
        keys = np.zeros(self.starts[-1], np.uint64)
        for part, start in zip(self.parts, self.starts, strict=False):
            here = keys[start : start + len(part)]
            for column in range(first, first + rows):
                here ^= part[:, column]
                here *= np.uint64(0x9E3779B97F4A7C15)
                here ^= here >> np.uint64(32)
        return keys

    def of(self, which: np.ndarray) -> np.ndarray:
        out = np.empty((len(which), PERMUTATIONS), np.uint32)
        units = np.searchsorted(self.starts, which, side="right") - 1
        for unit in np.unique(units):
            here = units == unit
            out[here] = self.parts[unit][which[here] - self.starts[unit]]
        return out


def nearly_repeated(signatures: Signatures, among: np.ndarray, threshold: float) -> np.ndarray:
    """Which of the documents `among` (ascending) are like an earlier one of them: documents that agree in a band of their
    signatures are compared, and what is alike in `threshold` of the signature hangs together."""
    from datasketch import MinHashLSH
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    lsh = MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS)
    n = len(among)
    group = np.arange(n)
    for band in range(lsh.b):
        keys = signatures.band(band * lsh.r, lsh.r)[among]
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        pairs = []
        for distance in range(1, NEIGHBOURS + 1):
            at = np.flatnonzero(keys[distance:] == keys[:-distance])
            if not len(at):
                break
            a, b = order[at], order[at + distance]
            apart = group[a] != group[b]
            a, b = a[apart], b[apart]
            for i in range(0, len(a), 1 << 14):
                x, y = a[i : i + (1 << 14)], b[i : i + (1 << 14)]
                alike = (signatures.of(among[x]) == signatures.of(among[y])).mean(axis=1) >= threshold
                pairs.append((x[alike], y[alike]))
        if pairs:
            a, b = (group[np.concatenate(x)] for x in zip(*pairs, strict=True))
            _, joined = connected_components(coo_array((np.ones(len(a), bool), (a, b)), shape=(n, n)), directed=False)
            group = joined[group]
    _, first = np.unique(group, return_index=True)
    return np.delete(among, first)


def choose(
    work: Work, units: int, settings: dict[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, int | None], dict]:
    """(PLACE of each document of each split, in the order of the store; bytes of text; numbers of duplicates)."""
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
        gone = nearly_repeated(Signatures(work, lengths), np.flatnonzero(stays), settings["near_threshold"])
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
    """(first, end) of the documents of each shard: at most so many tokens, or one document."""
    ends, shards, first = np.cumsum(tokens), [], 0
    while first < len(tokens):
        before = ends[first] - tokens[first]
        end = max(int(np.searchsorted(ends, before + most, side="right")), first + 1)
        shards.append((first, end))
        first = end
    return shards


def runs(places: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(unit, start, tokens) with documents that stand behind one another taken together."""
    breaks = (places["unit"][1:] != places["unit"][:-1]) | (
        places["start"][1:] != places["start"][:-1] + places["tokens"][:-1]
    )
    firsts = np.flatnonzero(np.r_[True, breaks])
    tokens = np.add.reduceat(places["tokens"], firsts)
    return zip(places["unit"][firsts].tolist(), places["start"][firsts].tolist(), tokens.tolist(), strict=True)


def write_file(path: Path, blocks: Iterator[bytes]) -> str:
    """The sha256 of what is now there, whole and on the disk."""
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
    """The documents' parts of the units' files."""
    done, told = 0, 0
    with contextlib.ExitStack() as stack:
        files: dict[int, BinaryIO] = {}
        for unit, start, tokens in runs(places):
            if unit not in files:
                if len(files) == 500:  # open at a time
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


# ---- processes


class WorkerDied(Exception):
    """A process ended, or failed, though nobody asked for what it could not do."""


def serve(pipe: Any, function: Callable[..., None], work: Work, threads: int) -> None:
    """Calls the function for each task that the pipe brings."""
    # A parent that was killed asks no more, and its next run begins where this task's files stand.
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    with contextlib.suppress(EOFError, ConnectionError):  # the parent is no more
        while True:
            task = pipe.recv()
            try:
                function(work, *task, lambda n: pipe.send(("done so far", n)))
                pipe.send(("done", None))
            except ValueError as e:
                pipe.send(("mistake", str(e)))
            except Exception:
                pipe.send(("failure", traceback.format_exc()))


def parallel(
    function: Callable[..., None], work: Work, tasks: list[tuple], workers: int, say: Callable[[int, int], None]
) -> None:
    """function(work, *task, say) of all tasks, in so many processes, in this one where one is enough. Raises ValueError as they
    do, and WorkerDied; no process is left behind."""
    workers = min(workers, len(tasks))
    if workers <= 1:
        for i, task in enumerate(tasks):
            function(work, *task, functools.partial(say, i))
        return
    context = multiprocessing.get_context("spawn")
    threads = max(1, cores() // workers)
    processes: dict[Any, Any] = {}  # by pipe
    left, busy = list(enumerate(tasks))[::-1], {}  # busy: the number of its task, by pipe

    def give(pipe: Any) -> None:
        busy[pipe], task = left.pop()
        with contextlib.suppress(ConnectionError):  # it has died: reading from it tells
            pipe.send(task)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is for this process alone
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            processes[ours] = context.Process(target=serve, args=(theirs, function, work, threads), daemon=True)
            processes[ours].start()
            theirs.close()
        signal.signal(signal.SIGINT, before)
        for pipe in processes:
            give(pipe)
        while busy:
            for pipe in multiprocessing.connection.wait(list(busy)):
                try:
                    kind, value = pipe.recv()
                except (EOFError, ConnectionError):
                    processes[pipe].join()
                    raise WorkerDied(f"a worker process died: {describe_exit(processes[pipe].exitcode)}") from None
                if kind == "done so far":
                    say(busy[pipe], value)
                elif kind == "mistake":
                    raise ValueError(value)
                elif kind == "failure":
                    raise WorkerDied(f"a worker process failed:\n{value}")
                elif left:
                    give(pipe)
                else:
                    del busy[pipe]
    finally:
        signal.signal(signal.SIGINT, before)
        for process in processes.values():
            process.kill()  # whenever that is: what it did since its last record is done again
            process.join()


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    name = signal.Signals(-code).name
    return name + (": the system may have run out of memory; fewer --workers take less" if name == "SIGKILL" else "")


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Progress:
    """How many bytes of a total are done: a bar on a terminal, else a line now and then."""

    EVERY = 10.0  # seconds between lines

    def __init__(self, what: str, total: int, by_task: dict[int, int]):
        from tqdm import tqdm

        self.what, self.total, self.by_task = what, total, dict(by_task)
        self.before = self.now = sum(by_task.values())
        self.start = self.told = time.monotonic()
        options = dict(desc=what, total=total, initial=self.now, unit="B", unit_scale=True, dynamic_ncols=True)
        self.bar = tqdm(**options) if sys.stderr.isatty() else None

    def __call__(self, task: int, done: int) -> None:
        self.now += done - self.by_task.get(task, 0)
        self.by_task[task] = done
        if self.bar is not None:
            self.bar.update(self.now - self.bar.n)
        elif (now := time.monotonic()) - self.told >= self.EVERY:
            self.told = now
            speed = max(self.now - self.before, 1) / (now - self.start)
            left = time.strftime("%H:%M:%S", time.gmtime(max(self.total - self.now, 0) / speed))
            print(
                f"{self.what}: {self.now / 1e6:.0f} of {self.total / 1e6:.0f} MB, {speed / 1e6:.3g} MB/s, {left} left",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


# ---- a preparation: its settings, its two phases, its manifest


def settings_of(args: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, Any]:
    """What decides the store, but for the inputs. Not --skip_bad: with it, a run that met a bad record goes on."""
    names = "format text_key token_dtype val_fraction seed shuffle dedup near_threshold shard_tokens"
    return {"tokenizer": tokenizer.fingerprint, **{name: getattr(args, name) for name in names.split()}}


def describe_inputs(paths: list[str]) -> list[dict[str, Any]]:
    """So that another file under the same name is noticed."""
    stats = {path: None if path == STDIN else os.stat(path) for path in paths}
    return [{"path": path, "size": s and s.st_size, "mtime_ns": s and s.st_mtime_ns} for path, s in stats.items()]


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Lines `name: old -> new` of two of {settings, inputs}."""
    lines = [
        f"--{k}: {old['settings'].get(k)} -> {v}" for k, v in new["settings"].items() if old["settings"].get(k) != v
    ]
    before, now = ({i["path"]: i for i in x["inputs"]} for x in (old, new))

    def state(inputs: dict[str, Any], path: str) -> str:
        if path not in inputs:
            return "not an input"
        return f"{inputs[path]['size']} bytes of mtime_ns {inputs[path]['mtime_ns']}"

    for path in {**before, **now}:
        if before.get(path) != now.get(path):
            lines.append(f"--input {path}: {state(before, path)} -> {state(now, path)}")
    if not lines and list(before) != list(now):
        lines.append("--input: the same files in another order")
    return lines


def foreign(directory: Path, of_a_store: bool) -> list[str]:
    """Names in a directory that this tool did not write."""
    if not directory.exists():
        return []
    known = OURS.fullmatch if of_a_store else lambda name: name == UNFINISHED
    return sorted(p.name for p in directory.iterdir() if not known(p.name) and p.name not in (FILE, CONFIG))


def claim(directory: Path) -> BinaryIO:
    """A file that is locked as long as it is open. Raises ValueError where another process has it."""
    (directory / UNFINISHED).mkdir(parents=True, exist_ok=True)
    lock = open(directory / UNFINISHED / "lock", "ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"--output {directory}: another process is preparing it") from None
    return lock


def clear(directory: Path) -> None:
    """Removes a store, finished or not. A tokenizer stays: it may be the one in use. Killed on the way, what is left says of
    nothing that it is done which is not."""
    (directory / store.MANIFEST).unlink(missing_ok=True)
    unfinished = [p for p in (directory / UNFINISHED).iterdir() if p.name not in ("settings.json", "lock")]
    records = [p for p in unfinished if p.suffix == ".json"]
    ours = [p for p in directory.iterdir() if OURS.fullmatch(p.name) and p.name != UNFINISHED]
    for path in (
        *records,
        *(p for p in unfinished if p not in records),
        *ours,
        directory / UNFINISHED / "settings.json",
    ):
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """A file's, or a directory's, contents on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def check_tokenizer(args: argparse.Namespace) -> Tokenizer:
    if args.tokenizer == "chars":
        raise ValueError(
            "--tokenizer chars: its alphabet comes from one text; bytes takes any, tools.train_tokenizer makes one"
        )
    tokenizer = load_tokenizer(args.tokenizer)
    for role in ["eos"] + ["turn_start", "turn_end"] * (args.format == "chat"):
        if role not in tokenizer.specials:
            raise ValueError(
                f"--tokenizer {args.tokenizer}: has no special token {role}, which "
                + ("ends a document" if role == "eos" else "--format chat needs")
                + f"; spellings that are known: {', '.join(SPELLINGS[role])}; {CONFIG} beside it may name another, {role}_token"
            )
    return tokenizer


def check_inputs(args: argparse.Namespace) -> list[str]:
    output = args.output.resolve()
    for given in args.input:
        if given != STDIN and output.is_relative_to(Path(given).resolve()):
            raise ValueError(f"--output {args.output}: lies inside --input {given}")
    paths = documents.find_files(args.input)
    if not paths:
        raise ValueError(f"--input {' '.join(args.input)}: no documents: no file there")
    inside = [p for p in paths if os.path.realpath(p).startswith(f"{output}{os.sep}")]
    if inside:
        raise ValueError(f"--input {inside[0]}: lies inside --output {args.output}")
    ids = [p for p in paths if documents.kind_of(p)[0] == "ids"]
    if ids and (args.dedup == "near" or args.format != "text"):
        setting = f"--format {args.format}" if args.format != "text" else "--dedup near"
        raise ValueError(f"{ids[0]}: holds token ids, and {setting} needs text")
    return paths


def prepare(args: argparse.Namespace) -> None:
    """Raises ValueError where a user must act, WorkerDied or OSError where the machine failed."""
    tokenizer, paths = check_tokenizer(args), check_inputs(args)
    if args.dedup == "near":
        Shingles()
    ours = {"settings": settings_of(args, tokenizer), "inputs": describe_inputs(paths)}
    directory = args.output
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"--output {directory}: is no directory")
    manifest = store.read_manifest(directory) if (directory / store.MANIFEST).exists() else None
    begun = read_json(directory / UNFINISHED / "settings.json")
    if not any((directory / UNFINISHED).glob("unit-*.json")):
        begun = None  # nothing is done that could be lost
    strange = foreign(directory, bool(manifest or begun or args.overwrite))
    if strange:
        raise ValueError(
            f"--output {directory}: holds {', '.join(strange[:5])}: not a store, so nothing is written there"
        )
    theirs = manifest.get("prepared") if manifest else begun
    if (manifest or begun) and not args.overwrite:
        changed = differences(theirs, ours) if theirs else ["it does not say how it was made"]
        if changed:
            state = "a finished store" if manifest else "an unfinished one"
            lines = [f"--output {directory}: is {state} of other settings; --overwrite begins anew:", *changed[:10]]
            raise ValueError("\n  ".join(lines + [f"and {len(changed) - 10} more"] * (len(changed) > 10)))
        if manifest:
            stdin = "; what standard input brings now was not looked at" if STDIN in paths else ""
            print(f"{directory}: already done{stdin}")
            shutil.rmtree(directory / UNFINISHED, ignore_errors=True)
            return
    with claim(directory):
        if args.overwrite or not begun:
            clear(directory)
            write_json(directory / UNFINISHED / "settings.json", ours)
        eos = tokenizer.specials["eos"]
        utf8 = isinstance(tokenizer, HuggingFaceTokenizer)
        work = Work(
            directory,
            args.tokenizer,
            store.ids_dtype(tokenizer.vocab_size).str,
            Reading(args.format, args.text_key, utf8, args.token_dtype, eos, tokenizer.vocab_size),
            args.skip_bad,
            args.dedup == "near",
        )
        numbers = tokenise_all(work, documents.make_units(paths, documents.UNIT), args.workers)
        if not numbers["documents"]:
            shutil.rmtree(work.unfinished)
            raise ValueError(
                f"--input {' '.join(args.input)}: no documents: {numbers['empty']} empty and {numbers['bad']} bad records"
            )
        assemble(work, ours, numbers, tokenizer, args.workers)


def tokenise_all(work: Work, units: list[list[Span]], workers: int) -> dict[str, Any]:
    """The sums of the units' counts."""
    records = [read_json(work.unit(i, "json")) for i in range(len(units))]
    tasks = []
    for i, (spans, record) in enumerate(zip(units, records, strict=True)):
        if spans[0].path == STDIN and not (record and record["done"]):
            if record:
                print("standard input is read again from its beginning", file=sys.stderr)
                work.unit(i, "json").unlink()
            tokenise(work, i, spans, lambda n: None)
        elif not (record and record["done"]):
            tasks.append((i, spans))
    if any(records):
        print(f"going on: {len(units) - len(tasks)} of {len(units)} units of the input are tokenised", file=sys.stderr)
    total = sum(span.size for _, spans in tasks for span in spans)
    read = {k: records[i]["read"] if records[i] else 0 for k, (i, _) in enumerate(tasks)}
    with contextlib.closing(Progress("tokenising", total, read)) as progress:
        parallel(tokenise, work, tasks, workers, progress)
    records = [read_json(work.unit(i, "json")) for i in range(len(units))]
    counts = {name: sum(r["counts"][name] for r in records) for name in COUNTS}
    first_bad = next((r["first_bad"] for r in records if r["first_bad"]), None)
    return {"units": len(units), "records": sum(r["records"] for r in records), **counts, "first_bad": first_bad}


def assemble(work: Work, ours: dict[str, Any], numbers: dict[str, Any], tokenizer: Tokenizer, workers: int) -> None:
    """The shards, the tokenizer, and the manifest when all else is on the disk."""
    directory, width = work.directory, np.dtype(work.dtype).itemsize
    chosen, text_bytes, duplicates = choose(work, numbers["units"], ours["settings"])
    masked = numbers["uncounted"] > 0
    names, tasks, total = {}, [], 0
    for split, places in chosen.items():
        places.tofile(work.unfinished / f"{split}.places")
        cuts = cut_shards(places["tokens"], ours["settings"]["shard_tokens"])
        names[split] = [store.shard_name(split, i) for i in range(len(cuts))]
        for i, (first, end) in enumerate(cuts):
            if not (work.unfinished / f"{names[split][i]}.json").exists():
                tasks.append((split, i, first, end, masked))
                total += int(places["tokens"][first:end].sum()) * width
    del chosen
    with contextlib.closing(Progress("writing shards", total, {})) as progress:
        parallel(write_shard, work, tasks, workers, progress)

    splits = {}
    for split in store.SPLITS:
        shards = [read_json(work.unfinished / f"{name}.json") for name in names[split]]
        splits[split] = {
            "documents": sum(s["documents"] for s in shards),
            "tokens": sum(s["tokens"] for s in shards),
            "bytes": text_bytes[split],
            "shards": shards,
            "plans": {},
        }
    told = {name: numbers[name] for name in ("records", "documents", "empty", "bad")} | duplicates
    save_tokenizer(tokenizer, directory)
    for name in (FILE, CONFIG):
        if (directory / name).exists():
            sync(directory / name)
    sync(directory)
    manifest = {
        "format": store.FORMAT,
        "version": store.VERSION,
        "dtype": work.dtype,
        "byteorder": "little",
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
        "masked": masked,
        "splits": splits,
        "prepared": {**ours, "numbers": told},
    }
    write_json(directory / store.MANIFEST, manifest)
    shutil.rmtree(work.unfinished)
    summarise(manifest, numbers)


def summarise(manifest: dict[str, Any], numbers: dict[str, Any]) -> None:
    told = manifest["prepared"]["numbers"]
    for name, split in manifest["splits"].items():
        text = (
            ""
            if not split["bytes"]
            else f", {split['bytes']:,} bytes of text, {split['tokens'] / split['bytes']:.4f} tokens a byte"
        )
        print(
            f"{name}: {split['documents']:,} documents, {split['tokens']:,} tokens{text}, {len(split['shards'])} shards"
        )
    print(
        f"{told['records']:,} records read: {told['empty']:,} empty, {told['bad']:,} bad; left out as duplicates: "
        f"{told['exact_duplicates']:,} exact, {told['near_duplicates']:,} near"
    )
    warnings = []
    if numbers["first_bad"]:
        warnings.append(f"bad records were left out; the first: {numbers['first_bad']}")
    if numbers["lossy"]:
        warnings.append(
            f"{numbers['lossy']} of {numbers['tried']} texts that were tried do not come back from their ids: the tokenizer "
            "changes text"
        )
    if manifest["prepared"]["settings"]["val_fraction"] and not manifest["splits"]["val"]["documents"]:
        warnings.append("no document fell into val; a larger --val_fraction gives some")
    if not manifest["splits"]["train"]["documents"]:
        warnings.append("all documents fell into val; a smaller --val_fraction leaves some to train on")
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


# ---- a finished store


def pack(directory: Path, lengths: list[int]) -> None:
    for length in lengths:
        plans = store.read_manifest(directory)["splits"]["train"]["plans"]
        if str(length) in plans:
            print(f"{directory}: has a plan for rows of {length} already")
        else:
            add_plan(directory, length)
            plans = {name: s["plans"][str(length)] for name, s in store.read_manifest(directory)["splits"].items()}
            print(f"rows of {length}: " + ", ".join(f"{name} {plan['rows']:,}" for name, plan in plans.items()))


def verify(directory: Path) -> int:
    """Exit status; what differs from the manifest is printed."""
    manifest = store.read_manifest(directory)
    expected: dict[str, str] = {}
    for split in manifest["splits"].values():
        for shard in split["shards"]:
            expected |= {f"{shard['name']}.{suffix}": sha for suffix, sha in shard["sha256"].items()}
        expected |= {plan["file"]: plan["sha256"] for plan in split["plans"].values()}

    def state(name: str) -> str | None:
        try:
            with open(store.inside(directory, name), "rb") as f:
                found = hashlib.file_digest(f, "sha256").hexdigest()
        except OSError as e:
            return f"{name}: {e.strerror}"
        return None if found == expected[name] else f"{name}: its sha256 is {found}, not {expected[name]}"

    with ThreadPoolExecutor(cores()) as pool:  # hashing does not hold the interpreter
        wrong = [line for line in pool.map(state, expected) if line]
    try:
        if make_tokenizer(f"{directory}/{FILE}", []).fingerprint != manifest["tokenizer"]["fingerprint"]:
            wrong.append(f"{FILE}: is not the tokenizer of these ids")
    except ValueError as e:
        wrong.append(str(e))
    for line in wrong:
        print(line)
    print(
        f"{directory}: {len(wrong)} of {len(expected) + 1} files are not as the manifest says"
        if wrong
        else f"{directory}: all {len(expected) + 1} files are as the manifest says"
    )
    return int(bool(wrong))


def number(kind: Callable[[str], Any], low: float, high: float = float("inf")) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text}: must be in {low} .. {high}")
        return value

    parse.__name__ = kind.__name__  # for argparse's messages
    return parse


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.prepare_data", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--input", nargs="+", metavar="PATH", help="files, directories, patterns, or - for JSON lines on standard input"
    )
    add("--output", required=True, type=Path, metavar="DIR")
    add("--tokenizer", metavar="NAME", help="bytes, or a tokenizer.json or its directory")
    add("--format", choices=FORMATS, default="text")
    add("--text_key", default="text", metavar="KEY", help="of --format text; dots lead into objects (default: text)")
    add("--token_dtype", choices=("uint16", "uint32"), default="uint16", help="of .bin files")
    add(
        "--val_fraction", type=number(float, 0, 1), default=0.005, metavar="X", help="of the documents (default: 0.005)"
    )
    add("--seed", type=number(int, 0), default=0, metavar="N", help="of the documents' order")
    add("--shuffle", action="store_true", default=True, help="documents in random order (default)")
    add("--no_shuffle", dest="shuffle", action="store_false", help="documents in the order of the input")
    add("--dedup", choices=("none", "exact", "near"), default="none", help="duplicates to leave out but for the first")
    add("--near_threshold", type=number(float, 0.1, 1), default=0.8, metavar="X", help="similarity of near duplicates")
    add("--shard_tokens", type=number(int, 1), default=2**29, metavar="N", help="the most in a shard (default: 2^29)")
    add("--pack", type=number(int, 1), nargs="+", default=[], metavar="LENGTH", help="rows to plan for data.packing")
    add("--workers", type=number(int, 1), default=cores(), metavar="N", help="processes (default: as many as cores)")
    add("--skip_bad", action="store_true", help="leave out, and count, records that cannot be read")
    add("--overwrite", action="store_true", help="begin anew where there is a store")
    add("--verify", action="store_true", help="compare the store's files with its manifest")
    args = parser.parse_args(argv)
    if args.input and not args.tokenizer:
        parser.error("--input needs --tokenizer")
    if not (args.input or args.pack or args.verify):
        parser.error("nothing to do: needs --input, --pack or --verify")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        if args.input:
            prepare(args)
        pack(args.output, args.pack)
        return verify(args.output) if args.verify else 0
    except ValueError as e:
        from minitf import config  # brings JAX, which workers do without

        config.fail(str(e))
    except (WorkerDied, OSError) as e:
        print(f"error: {e}; the same command goes on from here", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main())
