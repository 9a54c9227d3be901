"""Reads text documents from files, and tokenizes them into a store in memory."""

import dataclasses
import glob
import hashlib
import importlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minitf.data import long_texts
from minitf.data.frame import Frame
from minitf.data.store import Store, check_rows, concatenated
from minitf.data.tokenizer import Tokenizer, id_dtype
from minitf.data.tokenizer_files import HuggingFaceTokenizer
from minitf.paths import FIRST_BYTES, container, files_below, given

Documents = list[tuple[str, bytes]]  # (name, text)


def hashed_to_val(name: str, fraction: float) -> bool:
    """Whether a document of this name belongs to validation. Adding or removing others does not change its split."""
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:4], "big") < fraction * 2**32


def split_by_name(documents: Documents, fraction: float) -> tuple[Documents, Documents]:
    """(training, validation) documents."""
    is_val = [hashed_to_val(name, fraction) for name, _ in documents]
    return tuple([d for d, v in zip(documents, is_val, strict=True) if v == want] for want in (False, True))


# Skipped parts of the standard library: tests, tables and generated files.
SKIPPED_DIRS = frozenset(
    "site-packages dist-packages __pycache__ test tests idle_test idlelib lib2to3 turtledemo pydoc_data ensurepip encodings".split()
)
STDLIB_VAL_FRACTION = 13 / 256


def stdlib_documents(root: str) -> Iterator[tuple[str, bytes]]:
    """(path relative to root, text) of the interpreter's own modules, sorted by name within each directory."""
    for directory, dirs, files in os.walk(root):
        dirs[:] = sorted(d for d in dirs if d not in SKIPPED_DIRS and not d.startswith("config-"))
        for file in sorted(files):
            if file.endswith(".py") and not file.startswith("_sysconfigdata"):  # differs between machines
                path = Path(directory, file)
                # Some installations have CR LF; the text must be the same everywhere.
                yield path.relative_to(root).as_posix(), path.read_bytes().replace(b"\r\n", b"\n")


def find_files(pattern: str, setting: str) -> tuple[list[tuple[str, Path]], bool]:
    """((name, path) of each file, whether the pattern is one file). The pattern: a file, a directory (all files below it) or a glob.
    Names are relative to the directory or to the glob's fixed part: split and checksum do not depend on where the files are."""
    path = given(pattern, setting)
    if path.is_file():
        return [(path.name, path)], True
    if path.is_dir():
        root = path
        files = sorted(map(Path, files_below(path)))
    else:
        root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
        files = [Path(p) for p in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(p)]
    if not files:
        raise ValueError(
            f"{setting}={pattern}: no such file, no files in such a directory, and no match of such a glob"
        )
    return [(p.relative_to(root).as_posix(), p) for p in files], False


def read_text(pattern: str, setting: str) -> tuple[Documents, bool]:
    """(one document per file from `find_files`, whether the pattern is one file). Raises ValueError for binary containers."""
    files, single = find_files(pattern, setting)
    texts = [(name, path.read_bytes()) for name, path in files]
    for (_, path), (_, text) in zip(files, texts, strict=True):
        kind = container(text[:FIRST_BYTES])
        if kind is not None:
            raise ValueError(
                f"{setting}={pattern}: {path} is {kind} by its first bytes, not text; python -m tools.prepare_data makes a store "
                "of files of records and of compressed ones"
            )
    return texts, single


LIMIT = 2**30  # bytes of text that may be tokenized at startup


def texts_of(source: str, rows: Iterator[Any], at_all: int) -> Documents:
    """Rows of a table as documents, named by their numbers. `at_all`: bytes of all rows. Raises ValueError if a row is not text, or
    above LIMIT."""
    if at_all > LIMIT:
        raise ValueError(
            f"data.path: {source} holds {at_all / 1e9:.1f} GB, too much to tokenize at each start; "
            "python -m tools.prepare_data makes a store of it once"
        )
    out = []
    for i, text in enumerate(rows):
        if not isinstance(text, str | bytes):
            raise ValueError(f"{source}, row {i}: is {type(text).__name__}, not a text")
        out.append((f"{source} {i}", text.encode() if isinstance(text, str) else text))
    return out


def column(table: Any, source: str, text_key: str) -> Documents:
    """The text column of a pyarrow table."""
    if text_key not in table.column_names:
        raise ValueError(f"data.text_key={text_key}: {source} has the columns {', '.join(table.column_names)}")
    found = table.column(text_key)
    return texts_of(source, (text for chunk in found.chunks for text in chunk.to_pylist()), found.nbytes)


def arrow(module: str) -> Any:
    try:
        return importlib.import_module(f"pyarrow{module}")
    except ImportError:
        raise ValueError("data.kind: needs the package pyarrow: pip install '.[data]'") from None


def tokenized(name: str, texts: Documents, tokenizer: Tokenizer, frame: Frame, rows: int | None = None) -> Store:
    """Documents, framed and tokenized, as a store in memory. Raises DataError for an id not below `rows`; None: not checked."""
    size = tokenizer.vocab_size
    ids = [long_texts.encode(tokenizer, text, doc) for doc, text in texts]
    if rows is not None and rows < size:
        for (doc, _), found in zip(texts, ids, strict=True):
            check_rows(found, rows, doc)
    store = concatenated(name, ids, size, id_dtype(size), frame.end, frame.opens)
    return dataclasses.replace(store, text_bytes=sum(len(text) for _, text in texts))


def characters(tokenizer: Tokenizer, texts: Documents) -> str:
    """Distinct characters of texts, to be checked with `lost_note`; "" for minitf's own tokenizers, which lose none."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return ""
    return "".join(set().union(*(text.decode() for _, text in texts)))
