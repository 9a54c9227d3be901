"""Datasets: the kinds of data.kind, each loaded as a training and a validation store of token ids."""

import dataclasses
import hashlib
import json
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import grain
import numpy as np

from minitf.data import frame as frames
from minitf.data.frame import Frame
from minitf.data.mixture import check_mixture
from minitf.data.packing import PACKINGS
from minitf.data.store import MANIFEST, SPLITS, Store, inside, open_split, open_tokens, read_manifest
from minitf.data.texts import (
    STDLIB_VAL_FRACTION,
    Documents,
    arrow,
    characters,
    column,
    find_files,
    read_text,
    split_by_name,
    stdlib_documents,
    texts_of,
    tokenized,
)
from minitf.data.tokenizer import Tokenizer, as_unicode, id_dtype
from minitf.data.tokenizer_files import TOKENIZER_FILE, check_name, load_tokenizer, lost_note, make_tokenizer
from minitf.paths import given
from minitf.settings import LONGEST, setting


@dataclasses.dataclass(frozen=True)
class DataConfig:
    kind: str = setting("stdlib", "where text or tokens come from", one_of=lambda: DATASETS)
    path: str | None = setting(
        None,
        "text: a file, a directory or a pattern; tokens: a file, or a directory of both splits; store: the output of "
        "tools.prepare_data; None: where mixture is given, or the kind reads none",
        may_change=True,
    )
    mixture: tuple[tuple[str, float], ...] | None = setting(
        None,
        "stores and their weights, PATH:WEIGHT,...; None: path alone",
        **dict(above=0, nonempty=True, in_place_of="path", check=check_mixture, may_change=True),
    )
    val_path: str | None = setting(None, "the validation split; None: a part of path", may_change=True)
    val_fraction: float = setting(
        0.1, "validation's share: the end of one file, or of many files by a hash of their names", above=0, below=1
    )
    text_key: str = setting("text", "the column or field with the text")
    tokenizer: str = setting(
        "bytes",
        "how text becomes tokens: bytes, chars, or the path of a tokenizer.json or of its directory",
        check=lambda name, value: check_name(value, name),
    )
    token_dtype: str = setting("uint16", "dtype of raw token files", one_of=lambda: TOKEN_DTYPES)
    eos_id: int | None = setting(None, "the id that ends a document in token files; None: unknown", at_least=0)
    shuffle: bool = setting(True, "shuffle rows, anew in each epoch")
    packing: str = setting("concat", "how documents become rows", one_of=lambda: PACKINGS)
    isolate_documents: bool = setting(False, "documents that share a row do not see each other, positions restart")
    seed: int | None = setting(None, "seed of the shuffle; None: the run's seed", at_least=0, at_most=2**32 - 1)
    threads: int = setting(
        1, "threads that read rows; more for slow storage", at_least=1, at_most=1024, may_change=True
    )
    prefetch: int = setting(8, "batches read ahead", at_least=1, at_most=32767, may_change=True)
    workers: int = setting(
        0,
        "processes that read rows; 0: threads alone, unless a row takes long",
        at_least=0,
        at_most=1024,
        may_change=True,
    )
    timeout: float | None = setting(
        40.0,
        "seconds without a batch after which the reader counts as stalled; None: never",
        **dict(above=0, at_most=LONGEST, may_change=True),
    )


class Corpus(NamedTuple):
    """A loaded dataset."""

    train: Store
    val: Store
    tokenizer: Tokenizer | None  # None: the data are token ids already
    size: int  # bytes of data
    sha256: str  # identifies the data; `load_tokens` hashes samples only
    frame: Frame  # how its documents begin and end
    name: str = ""  # within a mixture
    note: str | None = None  # a message for the log of a run


Framing = Callable[[Tokenizer], Frame]  # the frame of texts tokenized at startup; a store has its frame in its manifest


class Source(NamedTuple):
    meaning: str
    load: Callable[[DataConfig, int | None, Framing], Corpus]  # (cfg, model.vocab_size, framing)
    reads: tuple[str, ...] = ()  # settings of DataConfig that only some kinds read, this one among them


def from_documents(name: str, train: Documents, val: Documents, cfg: DataConfig, framing: Framing) -> Corpus:
    """The corpus of two splits of documents. A character tokenizer takes its alphabet from both splits."""
    tokenizer = make_tokenizer(cfg.tokenizer, train + val)
    frame = framing(tokenizer)
    digest = hashlib.sha256()
    for doc, text in train + val:
        digest.update(os.fsencode(doc) + b"\0" + text)
    parts = (("train", train), ("val", val))
    stores = [tokenized(f"{name} ({split})", texts, tokenizer, frame) for split, texts in parts]
    note = lost_note(tokenizer, characters(tokenizer, train + val), "the texts")
    return Corpus(*stores, tokenizer, sum(len(t) for _, t in train + val), digest.hexdigest(), frame, note=note)


def load_stdlib(cfg: DataConfig, vocab_size: int | None, framing: Framing) -> Corpus:
    """The running interpreter's standard library: real text that needs no download. Differs between Python versions."""
    root = sysconfig.get_path("stdlib")
    documents = list(stdlib_documents(root))
    if not documents:
        raise ValueError(f"data.kind=stdlib: no *.py files in {root}; use data.kind=text with data.path")
    return from_documents("the standard library", *split_by_name(documents, STDLIB_VAL_FRACTION), cfg, framing)


def load_text(cfg: DataConfig, vocab_size: int | None, framing: Framing) -> Corpus:
    """UTF-8 text files. Bytes are unchanged, line ends and byte-order marks included."""
    train, single = read_text(named_path(cfg), "data.path")
    if cfg.val_path is None and single:
        # Cut at a share of the characters, so that none is split; of the bytes if the file is not UTF-8.
        (name, text), share = train[0], 1 - cfg.val_fraction
        try:
            chars = text.decode("utf-8")
            cut = len(chars[: int(len(chars) * share)].encode())
        except UnicodeDecodeError:
            if cfg.tokenizer != "bytes":
                as_unicode(text, name)  # raises now: the message has the position in the file, not in one split
            cut = int(len(text) * share)
        return from_splits(cfg, [(name, text[:cut])], [(name, text[cut:])], framing)
    val = None if cfg.val_path is None else read_text(cfg.val_path, "data.val_path")[0]
    return from_splits(cfg, train, val, framing)


def named_path(cfg: DataConfig) -> str:
    if cfg.path is None:
        raise ValueError(f"data.path=None: data.kind={cfg.kind} needs a file, a directory or a glob")
    return cfg.path


def from_splits(cfg: DataConfig, train: Documents, val: Documents | None, framing: Framing) -> Corpus:
    """The corpus of documents; val None: chosen by a hash of their names. Raises ValueError if no training document has text."""
    if val is None:
        train, val = split_by_name(train, cfg.val_fraction)
    if not any(text for _, text in train):
        raise ValueError(
            f"data.path={cfg.path}: no text in {len(train)} documents for training; {len(val)} for validation"
        )
    return from_documents(cfg.path, train, val, cfg, framing)


def load_files(cfg: DataConfig, framing: Framing, read: Callable[[str, Path, str], Documents]) -> Corpus:
    """The corpus of all files that data.path and data.val_path name; read(name, path, setting) returns one file's documents."""

    def all_of(pattern: str, setting: str) -> Documents:
        return [doc for name, path in find_files(pattern, setting)[0] for doc in read(name, path, setting)]

    val = None if cfg.val_path is None else all_of(cfg.val_path, "data.val_path")
    return from_splits(cfg, all_of(named_path(cfg), "data.path"), val, framing)


def load_parquet(cfg: DataConfig, vocab_size: int | None, framing: Framing) -> Corpus:
    """A column of parquet files, one document per row. Files are read whole: parquet has no random access to a row."""
    parquet = arrow(".parquet")

    def read(name: str, path: Path, setting: str) -> Documents:
        try:
            names = parquet.read_schema(path).names
            table = parquet.read_table(path, columns=[n for n in names if n == cfg.text_key] or None)
        except (OSError, ValueError) as e:  # pyarrow's errors are of these kinds
            raise ValueError(f"{setting}: {path}: {e}") from None
        return column(table, name, cfg.text_key)

    return load_files(cfg, framing, read)


def load_arrayrecord(cfg: DataConfig, vocab_size: int | None, framing: Framing) -> Corpus:
    """ArrayRecord files, each record the UTF-8 text of one document."""

    def read(name: str, path: Path, setting: str) -> Documents:
        try:
            source = grain.sources.ArrayRecordDataSource([str(path)])
        except Exception as e:  # Grain raises nothing narrower
            raise ValueError(f"{setting}: {path}: no ArrayRecord file: {e}") from None
        return texts_of(name, (source[i] for i in range(len(source))), path.stat().st_size)

    return load_files(cfg, framing, read)


def load_huggingface(cfg: DataConfig, vocab_size: int | None, framing: Framing) -> Corpus:
    """A folder written by `save_to_disk` of Hugging Face's datasets: one dataset, or several splits, of which train and validation
    (or val, or test) are used."""
    ipc, pyarrow = arrow(".ipc"), arrow("")

    def read(directory: Path, setting: str) -> Documents:
        state = directory / "state.json"
        if not state.is_file():
            raise ValueError(f"{setting}={directory}: no folder of datasets' save_to_disk: it has no state.json")
        described = json.loads(state.read_text())
        if described.get("_indices_files"):
            raise ValueError(f"{setting}={directory}: is a selection; save it after flatten_indices()")
        found = []
        for file in described["_data_files"]:
            with pyarrow.memory_map(str(inside(directory, file["filename"], state))) as mapped_file:
                found += column(ipc.open_stream(mapped_file).read_all(), file["filename"], cfg.text_key)
        return found

    directory = given(named_path(cfg), "data.path")
    val = None if cfg.val_path is None else read(given(cfg.val_path, "data.val_path"), "data.val_path")
    splits = directory / "dataset_dict.json"
    if not splits.is_file():
        return from_splits(cfg, read(directory, "data.path"), val, framing)
    names = json.loads(splits.read_text())["splits"]
    if "train" not in names:
        raise ValueError(f"data.path={directory}: has the splits {', '.join(names)}, not train; name one by its folder")
    held_out = next((name for name in ("validation", "val", "test") if name in names), None)
    if val is None and held_out is not None:
        val = read(directory / held_out, "data.path")
    return from_splits(cfg, read(directory / "train", "data.path"), val, framing)


TOKEN_DTYPES = dict.fromkeys(("uint8", "uint16", "uint32", "uint64", "int32", "int64"), "little-endian")


def load_tokens(cfg: DataConfig, vocab_size: int | None, framing: Framing) -> Corpus:
    """Flat files of token ids: nanoGPT's train.bin and val.bin, or one file whose end is the validation split."""
    if cfg.path is None:
        raise ValueError("data.path=None: data.kind=tokens needs a file, or a directory with train.bin and val.bin")
    if vocab_size is None:
        raise ValueError("model.vocab_size=None: data.kind=tokens has no tokenizer to take it from")
    if cfg.eos_id is not None and not 0 <= cfg.eos_id < vocab_size:
        raise ValueError(f"data.eos_id={cfg.eos_id}: must be below model.vocab_size={vocab_size}")
    path = given(cfg.path, "data.path")

    def find(directory: Path, split: str) -> Path:
        for suffix in (".bin", ".npy"):
            if (directory / (split + suffix)).is_file():
                return directory / (split + suffix)
        raise ValueError(f"data.path={cfg.path}: no {split}.bin or {split}.npy in this directory")

    if not path.exists():
        raise ValueError(f"data.path={cfg.path}: no such file or directory")
    files = [find(path, "train") if path.is_dir() else path]
    if cfg.val_path is not None:
        files.append(given(cfg.val_path, "data.val_path"))
        if not files[1].is_file():
            raise ValueError(f"data.val_path={cfg.val_path}: no such file")
    elif path.is_dir():
        files.append(find(path, "val"))
    stores = [open_tokens(f, cfg.token_dtype, vocab_size, cfg.eos_id) for f in files]
    # Names, lengths and both ends identify the files. Not all contents: a token file may be larger than memory.
    digest = hashlib.sha256()
    for f, s in zip(files, stores, strict=True):
        digest.update(f"{f.name} {len(s)}".encode() + s.ids[:4096].tobytes() + s.ids[-4096:].tobytes())
    if len(stores) == 1:
        (s,) = stores
        cut = int(len(s) * (1 - cfg.val_fraction))
        stores = [
            dataclasses.replace(s, name=f"{s.name} ({n})", ids=ids)
            for n, ids in (
                ("train", s.ids.part(0, cut)),
                (f"val, from token {cut} on", s.ids.part(cut, len(s))),
            )
        ]
    size = sum(f.stat().st_size for f in files)
    return Corpus(*stores, None, size, digest.hexdigest(), frames.of_ids(cfg.eos_id))


SYNTHETIC_PERIODS = 64


def load_synthetic(cfg: DataConfig, vocab_size: int | None, framing: Framing) -> Corpus:
    """The tutorial's counting task: 0, 1, 2, ... modulo vocab_size: the next id is always the current one plus one."""
    if vocab_size is None:
        raise ValueError("model.vocab_size=None: data.kind=synthetic counts modulo it")
    ids = (np.arange(vocab_size * SYNTHETIC_PERIODS + 1) % vocab_size).astype(id_dtype(vocab_size))
    store = Store("counting", ids, vocab_size)
    return Corpus(store, store, None, ids.nbytes, hashlib.sha256(ids.tobytes()).hexdigest(), Frame())


BEFORE = (  # for stores and runs from before frames were stored
    "was made before the frame of its texts was stored, and is read as then: documents without a start token, scored from the end "
    "token; prompts with the tokenizer's own start token"
)


def load_store(cfg: DataConfig, vocab_size: int | None, framing: Framing) -> Corpus:
    """A store written by `python -m tools.prepare_data`. Its sha256 covers shards and tokenizer, not its path."""
    if cfg.path is None:
        raise ValueError("data.path=None: data.kind=store needs the directory of a store, or data.mixture several")
    directory = given(cfg.path, "data.path")
    manifest = read_manifest(directory)
    tokenizer = load_tokenizer(directory / TOKENIZER_FILE)
    expected = manifest["tokenizer"]["fingerprint"]
    if tokenizer.fingerprint != expected:
        raise ValueError(
            f"{directory / TOKENIZER_FILE}: has fingerprint {tokenizer.fingerprint}, the store was made with {expected}"
        )
    shards = {split: [s["sha256"] for s in manifest["splits"][split]["shards"]] for split in SPLITS}
    identity = json.dumps([expected, shards], sort_keys=True)
    train, val = (open_split(directory, manifest, split) for split in SPLITS)
    size = (len(train) + len(val)) * np.dtype(manifest["dtype"]).itemsize
    written, note = manifest.get("frame"), None
    if written is None:
        frame = frames.of_before(tokenizer)
        note = f"{directory}: {BEFORE}"
    else:
        frame = frames.from_tree(written, str(directory / MANIFEST))
    return Corpus(train, val, tokenizer, size, hashlib.sha256(identity.encode()).hexdigest(), frame, note=note)


def load_none(cfg: DataConfig, vocab_size: int | None, framing: Framing) -> Corpus:
    """Raises ValueError: the run of an imported model has no data."""
    raise ValueError(
        "data.kind=none: the run's model was imported and has no data; evaluate takes some by --data, and a training in another "
        "work directory starts from its parameters by --config.init_from"
    )


SPLIT = ("val_path", "val_fraction")
DATASETS = {
    "none": Source("nothing: an imported model", load_none),
    "stdlib": Source("the sources of Python's standard library, on every machine", load_stdlib, reads=("tokenizer",)),
    "text": Source("text files", load_text, reads=("path", *SPLIT, "tokenizer")),
    "parquet": Source("a column of Parquet files", load_parquet, reads=("path", *SPLIT, "tokenizer", "text_key")),
    "arrayrecord": Source(
        "ArrayRecord files, a document a record", load_arrayrecord, reads=("path", *SPLIT, "tokenizer")
    ),
    "huggingface": Source(
        "a dataset that the package datasets has saved",
        load_huggingface,
        reads=("path", *SPLIT, "tokenizer", "text_key"),
    ),
    "tokens": Source("flat files of token ids", load_tokens, reads=("path", *SPLIT, "token_dtype", "eos_id")),
    "synthetic": Source("counting modulo the vocabulary: the tutorial's task", load_synthetic),
    "store": Source("what tools.prepare_data writes", load_store, reads=("path", "mixture")),
}


def load(cfg: DataConfig, vocab_size: int | None, framing: Framing = frames.of_tokenizer) -> Corpus:
    """The corpus of a config without a mixture. Raises ValueError for user errors, e.g. a vocab_size below the tokenizer's."""
    corpus = DATASETS[cfg.kind].load(cfg, vocab_size, framing)
    if corpus.tokenizer is not None and vocab_size is not None and corpus.tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"model.vocab_size={vocab_size} is smaller than the {corpus.tokenizer.vocab_size} ids of data.tokenizer={cfg.tokenizer}"
        )
    return corpus


def load_all(cfg: DataConfig, vocab_size: int | None, framing: Framing = frames.of_tokenizer) -> tuple[Corpus, ...]:
    """The corpora of a config: one, or those of its mixture, in order. Raises ValueError if their tokenizers differ."""
    if cfg.mixture is None:
        return (load(cfg, vocab_size, framing),)
    paths = [path for path, _ in cfg.mixture]
    # Directory names if they are distinct, else full paths.
    names = [Path(p).name for p in paths]
    names = names if len(set(names)) == len(names) else paths
    corpora = tuple(
        load(dataclasses.replace(cfg, path=path, mixture=None), vocab_size)._replace(name=name)
        for path, name in zip(paths, names, strict=True)
    )
    tokenizers = {path: c.tokenizer.fingerprint[:16] for path, c in zip(paths, corpora, strict=True)}
    if len(set(tokenizers.values())) > 1:
        listed = ", ".join(f"{path}: {fingerprint}" for path, fingerprint in tokenizers.items())
        raise ValueError(f"data.mixture: the stores have different tokenizers ({listed})")
    return corpora
