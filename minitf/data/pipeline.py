"""Datasets to global batches: which rows stand in which batch is a function of (seed, batch number), and of nothing else."""

import dataclasses
import glob
import hashlib
import itertools
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from absl import flags

from minitf.data.mixture import Mixture, Phase
from minitf.data.packing import PackedRows, best_fit, documents, one_a_row, open_plan
from minitf.data.store import SPLITS, Rows, Store, concatenated, open_split, open_tokens, read_manifest
from minitf.data.tokenizer import FILE, Tokenizer, id_dtype, load_tokenizer, make_tokenizer
from minitf.tables import pick


@dataclasses.dataclass(frozen=True)
class DataConfig:
    kind: str = "stdlib"  # see DATASETS
    path: str | None = (
        None  # of text: a file, a directory or a glob; of tokens: a file, or a directory of both splits; of store:
    )
    # the directory that tools.prepare_data wrote
    mixture: tuple[tuple[str, float], ...] | None = (
        None  # stores and their weights, in place of path; may change in a run
    )
    val_path: str | None = None  # of the validation split; None: part of path
    val_fraction: float = 0.1  # for validation: the end of one file, or a share of many, by a hash of their names
    tokenizer: str = "bytes"  # one of tokenizer.TOKENIZERS, or the path of a tokenizer.json
    token_dtype: str = "uint16"  # of raw token files
    eos_id: int | None = None  # the id that ends a document in token files; None: not known
    shuffle: bool = True  # rows, anew in each epoch
    packing: str = "concat"  # how documents become rows, see PACKINGS
    isolate_documents: bool = False  # documents that share a row do not see each other, positions restart
    seed: int | None = None  # of the shuffle; None: the run's seed
    threads: int = 2  # that read rows ahead of the step
    prefetch: int = 8  # batches read ahead
    workers: int = 0  # processes that read rows; 0: threads alone, enough unless reading a row takes long


class Corpus(NamedTuple):
    """What a dataset kind loads."""

    train: Store
    val: Store
    tokenizer: Tokenizer | None  # None: the ids came from elsewhere
    size: int  # bytes read
    sha256: str  # of them
    name: str = ""  # of one of several


class Source(NamedTuple):
    load: Callable[[DataConfig, int | None], Corpus]  # (cfg, model.vocab_size)
    reads: tuple[str, ...]


Documents = list[tuple[str, bytes]]  # (name, text)


def tokenized(name: str, texts: Documents, tokenizer: Tokenizer) -> Store:
    """Documents as a store in memory."""
    ids = [tokenizer.encode(text, doc) for doc, text in texts]
    eos = tokenizer.specials.get("eos")
    store = concatenated(name, ids, tokenizer.vocab_size, id_dtype(tokenizer.vocab_size), eos)
    return dataclasses.replace(store, text_bytes=sum(len(text) for _, text in texts))


def from_documents(name: str, train: Documents, val: Documents, cfg: DataConfig) -> Corpus:
    """Tokenizes documents. A character tokenizer takes its alphabet from both splits."""
    tokenizer = make_tokenizer(cfg.tokenizer, train + val)
    digest = hashlib.sha256()
    for doc, text in train + val:
        digest.update(doc.encode() + b"\0" + text)
    stores = (tokenized(f"{name} ({split})", texts, tokenizer) for split, texts in (("train", train), ("val", val)))
    return Corpus(*stores, tokenizer, sum(len(t) for _, t in train + val), digest.hexdigest())


def hashed_to_val(name: str, fraction: float) -> bool:
    """Whether a document of this name belongs to validation: its place never changes when others come or go."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") < fraction * 2**32


def split_by_name(documents: Documents, fraction: float) -> tuple[Documents, Documents]:
    """(training, validation) documents."""
    is_val = [hashed_to_val(name, fraction) for name, _ in documents]
    return tuple([d for d, v in zip(documents, is_val, strict=True) if v == want] for want in (False, True))


# Tests, tables and generated files of the standard library: no text to learn from.
SKIPPED_DIRS = frozenset(
    "site-packages dist-packages __pycache__ test tests idle_test idlelib lib2to3 turtledemo pydoc_data ensurepip encodings".split()
)
STDLIB_VAL_FRACTION = 13 / 256


def stdlib_documents(root: str) -> Iterator[tuple[str, bytes]]:
    """(path relative to root, text) of the interpreter's own modules, in the order of their names."""
    for directory, dirs, files in os.walk(root):
        dirs[:] = sorted(d for d in dirs if d not in SKIPPED_DIRS and not d.startswith("config-"))
        for file in sorted(files):
            if file.endswith(".py") and not file.startswith("_sysconfigdata"):  # that one describes the machine
                path = Path(directory, file)
                # Some installations have CR LF: the text should be the same everywhere.
                yield path.relative_to(root).as_posix(), path.read_bytes().replace(b"\r\n", b"\n")


def load_stdlib(cfg: DataConfig, vocab_size: int | None) -> Corpus:
    """The running interpreter's standard library: real text that is always there. Differs between Python versions."""
    root = sysconfig.get_path("stdlib")
    documents = list(stdlib_documents(root))
    if not documents:
        raise ValueError(f"data.kind=stdlib: no *.py files in {root}; use data.kind=text with data.path")
    return from_documents("the standard library", *split_by_name(documents, STDLIB_VAL_FRACTION), cfg)


def read_text(pattern: str, setting: str) -> tuple[Documents, bool]:
    """The text files that a file, a directory (all files below it) or a glob names, and whether it named one file. Their names
    begin below the directory or the glob's first wildcard: split and checksum are the same wherever the files lie."""
    path = Path(pattern).expanduser()
    if path.is_file():
        return [(path.name, path.read_bytes())], True
    if path.is_dir():
        root = path
        files = sorted(
            p for p in path.rglob("*") if p.is_file() and not any(s.startswith(".") for s in p.relative_to(path).parts)
        )
    else:
        root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
        files = [Path(p) for p in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(p)]
    if not files:
        raise ValueError(
            f"{setting}={pattern}: no such file, no files in such a directory, and no match of such a glob"
        )
    return [(p.relative_to(root).as_posix(), p.read_bytes()) for p in files], False


def load_text(cfg: DataConfig, vocab_size: int | None) -> Corpus:
    """UTF-8 text files. Bytes are kept as they are: line ends, byte-order marks and all."""
    if cfg.path is None:
        raise ValueError("data.path=None: data.kind=text needs a file, a directory or a glob")
    train, single = read_text(cfg.path, "data.path")
    if cfg.val_path is not None:
        val, _ = read_text(cfg.val_path, "data.val_path")
    elif single:
        # In characters, not in bytes, so that no character is cut; bytes where the file is not UTF-8.
        (name, text), share = train[0], 1 - cfg.val_fraction
        try:
            chars = text.decode("utf-8")
            cut = len(chars[: int(len(chars) * share)].encode())
        except UnicodeDecodeError:
            cut = int(len(text) * share)
        train, val = [(name, text[:cut])], [(name, text[cut:])]
    else:
        train, val = split_by_name(train, cfg.val_fraction)
    if not any(text for _, text in train):
        raise ValueError(f"data.path={cfg.path}: no text in {len(train)} files for training; {len(val)} for validation")
    return from_documents(cfg.path, train, val, cfg)


TOKEN_DTYPES = ("uint8", "uint16", "uint32", "uint64", "int32", "int64")  # little-endian


def load_tokens(cfg: DataConfig, vocab_size: int | None) -> Corpus:
    """Flat files of token ids: nanoGPT's train.bin and val.bin, or one file whose end is for validation."""
    if cfg.path is None:
        raise ValueError("data.path=None: data.kind=tokens needs a file, or a directory with train.bin and val.bin")
    if vocab_size is None:
        raise ValueError("model.vocab_size=None: data.kind=tokens has no tokenizer to take it from")
    pick("data.token_dtype", dict.fromkeys(TOKEN_DTYPES), cfg.token_dtype)
    if cfg.eos_id is not None and not 0 <= cfg.eos_id < vocab_size:
        raise ValueError(f"data.eos_id={cfg.eos_id}: must be below model.vocab_size={vocab_size}")
    path = Path(cfg.path).expanduser()

    def find(directory: Path, split: str) -> Path:
        for suffix in (".bin", ".npy"):
            if (directory / (split + suffix)).is_file():
                return directory / (split + suffix)
        raise ValueError(f"data.path={cfg.path}: no {split}.bin or {split}.npy in this directory")

    if not path.exists():
        raise ValueError(f"data.path={cfg.path}: no such file or directory")
    files = [find(path, "train") if path.is_dir() else path]
    if cfg.val_path is not None:
        files.append(Path(cfg.val_path).expanduser())
        if not files[1].is_file():
            raise ValueError(f"data.val_path={cfg.val_path}: no such file")
    elif path.is_dir():
        files.append(find(path, "val"))
    stores = [open_tokens(f, cfg.token_dtype, vocab_size, cfg.eos_id) for f in files]
    # Not of the contents: a token file may be larger than the memory. Names, sizes and both ends tell files apart.
    digest = hashlib.sha256()
    for f, s in zip(files, stores, strict=True):
        digest.update(f"{f.name} {len(s)}".encode() + s.ids[:4096].tobytes() + s.ids[-4096:].tobytes())
    if len(stores) == 1:
        (s,) = stores
        cut = int(len(s) * (1 - cfg.val_fraction))
        stores = [
            dataclasses.replace(s, name=f"{s.name} ({n})", ids=ids)
            for n, ids in (("train", s.ids[:cut]), (f"val, from token {cut} on", s.ids[cut:]))
        ]
    return Corpus(*stores, None, sum(f.stat().st_size for f in files), digest.hexdigest())


SYNTHETIC_PERIODS = 64


def load_synthetic(cfg: DataConfig, vocab_size: int | None) -> Corpus:
    """The tutorial's counting task: 0, 1, 2, ... modulo the vocabulary, so that the next id is always this one plus one."""
    if vocab_size is None:
        raise ValueError("model.vocab_size=None: data.kind=synthetic counts modulo it")
    ids = (np.arange(vocab_size * SYNTHETIC_PERIODS + 1) % vocab_size).astype(id_dtype(vocab_size))
    store = Store("counting", ids, vocab_size)
    return Corpus(store, store, None, ids.nbytes, hashlib.sha256(ids.tobytes()).hexdigest())


def load_store(cfg: DataConfig, vocab_size: int | None) -> Corpus:
    """What `python -m tools.prepare_data` wrote. Its identity is that of its shards and its tokenizer, wherever it lies."""
    if cfg.path is None:
        raise ValueError("data.path=None: data.kind=store needs the directory of a store, or data.mixture several")
    directory = Path(cfg.path).expanduser()
    manifest = read_manifest(directory)
    tokenizer = load_tokenizer(directory / FILE)
    expected = manifest["tokenizer"]["fingerprint"]
    if tokenizer.fingerprint != expected:
        raise ValueError(
            f"{directory / FILE}: has fingerprint {tokenizer.fingerprint}, the store was made with {expected}"
        )
    shards = {split: [s["sha256"] for s in manifest["splits"][split]["shards"]] for split in SPLITS}
    identity = json.dumps([expected, shards], sort_keys=True)
    train, val = (open_split(directory, manifest, split) for split in SPLITS)
    size = (len(train) + len(val)) * np.dtype(manifest["dtype"]).itemsize
    return Corpus(train, val, tokenizer, size, hashlib.sha256(identity.encode()).hexdigest())


DATASETS = {
    "stdlib": Source(load_stdlib, reads=("tokenizer",)),
    "text": Source(load_text, reads=("path", "val_path", "val_fraction", "tokenizer")),
    "tokens": Source(load_tokens, reads=("path", "val_path", "val_fraction", "token_dtype", "eos_id")),
    "synthetic": Source(load_synthetic, reads=()),
    "store": Source(load_store, reads=("path", "mixture")),
}


def load(cfg: DataConfig, vocab_size: int | None) -> Corpus:
    """The corpus that the config names. Raises ValueError for what a user can mend, a vocabulary too small among it."""
    corpus = pick("data.kind", DATASETS, cfg.kind).load(cfg, vocab_size)
    if corpus.tokenizer is not None and vocab_size is not None and corpus.tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"model.vocab_size={vocab_size} is smaller than the {corpus.tokenizer.vocab_size} ids of data.tokenizer={cfg.tokenizer}"
        )
    return corpus


def load_all(cfg: DataConfig, vocab_size: int | None) -> tuple[Corpus, ...]:
    """The corpora that the config names: one, or those of a mixture, in its order."""
    if cfg.mixture is None:
        return (load(cfg, vocab_size),)
    if cfg.path is not None:
        raise ValueError(f"data.path={cfg.path}: has no effect beside data.mixture={cfg.mixture}")
    paths = [path for path, _ in cfg.mixture]
    # By their last names, where these tell them apart.
    names = [Path(p).name for p in paths]
    names = names if len(set(names)) == len(names) else paths
    if len(set(names)) < len(names):
        raise ValueError(f"data.mixture={cfg.mixture}: names a store twice")
    corpora = tuple(
        load(dataclasses.replace(cfg, path=path, mixture=None), vocab_size)._replace(name=name)
        for path, name in zip(paths, names, strict=True)
    )
    tokenizers = {path: c.tokenizer.fingerprint[:16] for path, c in zip(paths, corpora, strict=True)}
    if len(set(tokenizers.values())) > 1:
        listed = ", ".join(f"{path}: {fingerprint}" for path, fingerprint in tokenizers.items())
        raise ValueError(f"data.mixture: the stores have different tokenizers ({listed})")
    return corpora


# ---- documents to rows


class Packing(NamedTuple):
    rows: Callable[[Store, int, DataConfig, bool], Any]  # (store, seq_len, cfg, tail) -> a sequence of rows
    reads: tuple[str, ...] = ()


def planned(store: Store, seq_len: int, cfg: DataConfig, tail: bool) -> PackedRows:
    """The plan that the store brings along; of texts that are loaded at the start, it is made now."""
    known_documents(store, cfg)
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


def one_document(store: Store, seq_len: int, cfg: DataConfig, tail: bool) -> PackedRows:
    known_documents(store, cfg)
    return PackedRows(store, one_a_row(documents(store), seq_len), seq_len, segments=False)


def known_documents(store: Store, cfg: DataConfig) -> None:
    if store.offsets is None:
        raise ValueError(
            f"{store.name}: data.packing={cfg.packing} needs to know where documents end; python -m tools.prepare_data makes a "
            "store that does"
        )


PACKINGS = {
    # Documents one after the other, cut every seq_len tokens: no padding, long documents are cut.
    "concat": Packing(
        lambda store, seq_len, cfg, tail: Rows(store, seq_len, isolate=cfg.isolate_documents, tail=tail),
        reads=("isolate_documents",),
    ),
    # Documents side by side, isolated; only those longer than a row are cut; little padding (best-fit decreasing).
    "best_fit": Packing(planned),
    # One document a row, and what is longer than a row is left out: for fine-tuning.
    "documents": Packing(one_document),
}


def rows_of(store: Store, seq_len: int, cfg: DataConfig, tail: bool = False) -> Any:
    """A sequence of rows, dicts like those of `store.Rows`. `tail`: every token once, the last row padded."""
    return pick("data.packing", PACKINGS, cfg.packing).rows(store, seq_len, cfg, tail)


def has_segments(cfg: DataConfig) -> bool:
    """Whether several documents of a row must not see each other."""
    return cfg.isolate_documents or cfg.packing == "best_fit"


# ---- rows to batches


def training_rows(store: Store, seq_len: int, cfg: DataConfig, seed: int) -> grain.MapDataset:
    """An endless dataset of rows, each epoch every row once, shuffled anew."""
    rows = grain.MapDataset.source(rows_of(store, seq_len, cfg)).seed(seed if cfg.seed is None else cfg.seed)
    return (rows.shuffle() if cfg.shuffle else rows).repeat(None)


def mixed_rows(stores: list[Store], phases: list[Phase], seq_len: int, cfg: DataConfig, seed: int) -> grain.MapDataset:
    """An endless dataset of the rows of one store, or of several in the proportions of the phases, each with its own epochs."""
    each = [training_rows(store, seq_len, cfg, seed) for store in stores]
    return each[0] if len(each) == 1 else Mixture(each, phases)


def evaluation_rows(
    store: Store, seq_len: int, cfg: DataConfig, batch_size: int, batches: int | None
) -> grain.MapDataset:
    """At most batches x batch_size rows (None: all), spread evenly over the store; then rows of weight 0 up to a whole batch."""
    return spread(rows_of(store, seq_len, cfg, tail=True), batch_size, batches)


def spread(rows: Any, batch_size: int, batches: int | None) -> grain.MapDataset:
    n = len(rows) if batches is None else min(len(rows), batches * batch_size)
    empty = {k: np.zeros_like(v) for k, v in rows[0].items()}
    padded = -(-n // batch_size) * batch_size
    return grain.MapDataset.range(padded).map(lambda i: rows[i * len(rows) // n] if i < n else empty)


class HostRows(grain.MapDataset):
    """This process's rows of every global batch: row r of batch k is row k * batch_size + r of the parent, on any host."""

    def __init__(self, parent: grain.MapDataset, batch_size: int, rows: list[int]):
        super().__init__(parent)
        self._batch_size, self._rows = batch_size, rows

    def __len__(self) -> int:
        return len(self._parent) // self._batch_size * len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        k, r = divmod(index, len(self._rows))
        return self._parent[k * self._batch_size + self._rows[r]]


def host_rows(sharding: jax.sharding.Sharding, batch_size: int) -> list[int]:
    """Which rows of a global batch the devices of this process hold."""
    slices = [index[0] for index in sharding.addressable_devices_indices_map((batch_size,)).values()]
    return sorted({r for s in slices for r in range(*s.indices(batch_size))})


def batches(
    rows: grain.MapDataset, batch_size: int, sharding: jax.sharding.Sharding, cfg: DataConfig, start: int = 0
) -> Iterator[dict[str, jax.Array]]:
    """Global batches from number `start` on, as arrays [batch_size, ...] laid out by `sharding`; rows are read ahead on threads."""
    local = host_rows(sharding, batch_size)
    # There is no remainder; Grain counts batches in integers only where it may drop one.
    mine = HostRows(rows, batch_size, local).batch(len(local), drop_remainder=True)[start:]
    options = grain.ReadOptions(num_threads=cfg.threads, prefetch_buffer_size=cfg.prefetch)
    found = mine.to_iter_dataset(options)
    if cfg.workers:
        if not flags.FLAGS.is_parsed():  # Grain's processes ask for them
            flags.FLAGS.mark_as_parsed()
        found = found.mp_prefetch(grain.MultiprocessingOptions(cfg.workers, per_worker_buffer_size=cfg.prefetch))
    batch_iterator = iter(found)
    try:
        for batch in batch_iterator:
            # A worker's arrays lie in memory that is shared with it and used again.
            yield {
                k: jax.make_array_from_process_local_data(
                    sharding, np.array(v) if cfg.workers else v, (batch_size, *v.shape[1:])
                )
                for k, v in batch.items()
            }
    finally:
        if cfg.workers:
            batch_iterator.close()
