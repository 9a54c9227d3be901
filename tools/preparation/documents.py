"""Reads documents from files, for the tools that take text. A document's text is bytes, the same from every kind of file: byte-order
marks and CR LF are preserved, except for a mark at the start of a file of JSON lines, which belongs to no document.

By suffix: .jsonl and .ndjson are JSON lines, .json JSON lines or an array, .csv and .tsv tables whose first line names the columns,
.parquet rows, .bin flat token ids (nanoGPT's), anything else one document per file. .gz, .zst, .bz2 and .xz contain what the suffix
before them says, JSON lines if there is none. `-` is JSON lines on standard input. Files that are not text by their first bytes are
refused, and so are other containers; --as_text takes each file as the text of one document, whatever its name.
"""

import bz2
import codecs
import csv
import functools
import glob
import gzip
import io
import itertools
import json
import lzma
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from minitf.data.chat import chatml_pieces
from minitf.data.long_texts import BLOCK_BYTES
from minitf.data.store import check_width
from minitf.paths import FIRST_BYTES, container, files_below, given

LINE = 256 << 20  # bytes of the longest JSON line
STDIN = "-"


# ---- input files, and their division into units of work


KINDS = {".jsonl": "lines", ".ndjson": "lines", ".json": "json", ".csv": "table", ".tsv": "table"}
UNPACKED = {".parquet": "parquet", ".bin": "ids"}  # kinds that cannot be read compressed
# Containers that are refused: their bytes are not a document's text.
CLOSED = frozenset(
    ".zip .tar .tgz .tbz .tbz2 .txz .7z .rar .lz4 .arrow .feather .npy .npz .h5 .hdf5 .pkl .sqlite .db .pdf .docx".split()
)


def kind_of(path: str, as_text: bool = False) -> tuple[str, str]:
    """(lines, json, table, parquet, ids, text or closed; suffix of the compression or "")."""
    if as_text and path != STDIN:
        return "text", ""
    name, packed = path.lower(), ""
    for suffix in (".gz", ".zst", ".bz2", ".xz"):
        if name.endswith(suffix):
            name, packed = name.removesuffix(suffix), suffix
    suffix = Path(name).suffix
    if path == STDIN or (packed and suffix == ""):
        return "lines", packed
    if suffix in CLOSED or (packed and suffix in UNPACKED):
        return "closed", packed
    return (KINDS if packed else KINDS | UNPACKED).get(suffix, "text"), packed


def find_files(inputs: list[str]) -> list[str]:
    """Files named by the inputs (files, directories, patterns, `-`), in order, each once. Raises ValueError naming an input without a
    match."""
    found: list[str] = []
    for name in inputs:
        if name == STDIN:
            found.append(name)
            continue
        pattern = str(given(name, "--input"))
        matching = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not matching:
            raise ValueError(f"--input {name}: no such file, directory or pattern with a match")
        for path in map(os.path.abspath, matching):
            found += files_below(path) if os.path.isdir(path) else [path]
    return list(dict.fromkeys(found))


class Span(NamedTuple):
    """Part of a file: bytes start .. stop of lines or ids, row groups start .. stop of parquet, all of other files. A line or a
    document of ids belongs to the span in which it begins. `size`: bytes on disk."""

    path: str
    start: int
    stop: int
    size: int


def unit_size(total: int) -> int:
    """Bytes of input per unit of work: a function of the inputs' total bytes alone, so that the store does not depend on the number of
    workers. Small enough to occupy many cores, large enough to keep the number of units' files low."""
    return min(max(total // 1024, 2 << 20), 256 << 20)


def spans_of(path: str, unit: int = sys.maxsize, as_text: bool = False) -> list[Span]:
    kind, packed = kind_of(path, as_text)
    size = 0 if path == STDIN else os.path.getsize(path)
    if kind == "parquet":
        metadata = open_parquet(path).metadata
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        sizes = [sum(g.column(i).total_compressed_size for i in range(g.num_columns)) for g in groups]
        return [Span(path, i, i + 1, n) for i, n in enumerate(sizes)]
    if packed or path == STDIN or kind not in ("lines", "ids"):
        return [Span(path, 0, size, size)]
    return [Span(path, i, min(i + unit, size), min(unit, size - i)) for i in range(0, size, unit)]


def make_units(paths: list[str], unit: int, as_text: bool = False) -> list[list[Span]]:
    """All spans of the files, in order, in groups of about `unit` bytes: a function of files and `unit` alone."""
    units: list[list[Span]] = []
    room = 0
    for span in itertools.chain.from_iterable(spans_of(path, unit, as_text) for path in paths):
        if not units or span.size > room or STDIN in (span.path, units[-1][0].path):
            units.append([])
            room = unit
        units[-1].append(span)
        room -= span.size
    return units


# ---- records: candidates for documents


class Ids(NamedTuple):
    """Text that is already token ids, in blocks."""

    blocks: Iterable[np.ndarray]


# Part of a document: (text in blocks, or ids, or the role of a special id; whether its tokens are targets).
Part = tuple[Iterable[bytes] | Ids | str, bool]


class Record(NamedTuple):
    """where() names it in messages. parts() raises ValueError if it is not a document; [] if it is empty."""

    where: Callable[[], str]
    parts: Callable[[], list[Part]]


class Position:
    """Number of bytes of the input files that have been read; readers update it."""

    bytes = 0


class Reading(NamedTuple):
    """Options of the readers. `utf8`: text must be UTF-8. `eos`, `vocab_size`: used for token ids only."""

    format: str = "text"
    text_key: str = "text"
    utf8: bool = True
    token_dtype: str = "uint16"
    eos: int | None = None
    vocab_size: int = 0
    as_text: bool = False


def look_up(record: Any, key: str) -> Any:
    """record[key], or record["a"]["b"] for a key "a.b" that is not itself in the record. Raises ValueError if there is none."""
    if not isinstance(record, dict):
        raise ValueError(f"is {type(record).__name__}, not an object with the key {key!r}")
    if key in record:
        return record[key]
    head, _, rest = key.partition(".")
    if not rest or head not in record:
        raise ValueError(f"has no key {key!r}; it has {', '.join(map(repr, record)) or 'none'}")
    return look_up(record[head], rest)


def text_at(record: Any, key: str) -> bytes:
    text = look_up(record, key)
    if not isinstance(text, str):
        raise ValueError(f"{key!r} is {type(text).__name__}, not a string")
    if len(text) > LINE:
        raise ValueError(f"{key!r} is longer than {LINE >> 20} MB; a text of any length may be a file of its own")
    try:
        return text.encode()
    except UnicodeEncodeError as e:
        raise ValueError(f"{key!r} has half a surrogate pair at character {e.start}, which is no text") from None


def text_parts(record: Any, key: str) -> list[Part]:
    text = text_at(record, key)
    return [([text], True)] if text else []


def completion_parts(record: Any, key: str) -> list[Part]:
    prompt, completion = text_at(record, "prompt"), text_at(record, "completion")
    return [([prompt], False), ([completion], True)] if prompt or completion else []


def chat_parts(record: Any, key: str) -> list[Part]:
    """The turns of a conversation in ChatML."""
    messages = look_up(record, "messages")
    if not isinstance(messages, list):
        raise ValueError(f"'messages' is {type(messages).__name__}, not a list")
    turns = [{field: text_at(message, field).decode() for field in ("role", "content")} for message in messages]
    return [([x] if isinstance(x, bytes) else x, counts) for x, counts in chatml_pieces(turns)]


class Format(NamedTuple):
    columns: Callable[[str], tuple[str, ...]]  # --text_key -> columns that are read
    parts: Callable[[Any, str], list[Part]]  # (record, --text_key)
    end_counts: bool  # whether the end token of a document is a target


FORMATS = {
    "text": Format(lambda key: (key,), text_parts, True),
    "completion": Format(lambda key: ("prompt", "completion"), completion_parts, True),
    "chat": Format(lambda key: ("messages",), chat_parts, False),
}


# ---- compressed files


class ZstdFile(io.RawIOBase):
    """Reads all frames of a file. zstandard's own reader does not notice a truncated file."""

    def __init__(self, raw: BinaryIO):
        try:
            import zstandard
        except ImportError:
            raise ValueError(f"{raw.name}: needs the package zstandard: pip install '.[data]'") from None
        self._raw, self._error = raw, zstandard.ZstdError
        self._new_frame = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj
        self._frame, self._packed, self._out = None, b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._out:
            self._packed = self._packed or self._raw.read(4096)  # small reads: 4 bytes may expand to 128 kB
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("the file ends inside a frame")
                return 0
            self._frame = self._frame or self._new_frame()
            try:
                self._out = memoryview(self._frame.decompress(self._packed))
            except self._error as e:
                raise OSError(str(e)) from None
            self._packed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        n = min(len(buffer), len(self._out))
        buffer[:n], self._out = self._out[:n], self._out[n:]
        return n


STANDARD = {".gz": lambda raw: gzip.GzipFile(fileobj=raw), ".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile}


def opened(raw: BinaryIO, packed: str) -> BinaryIO:
    """A file of the decompressed contents of an open file."""
    if packed in STANDARD:
        return STANDARD[packed](raw)
    return io.BufferedReader(ZstdFile(raw), 1 << 20) if packed else raw


class Unreadable(ValueError):
    """A whole file cannot be read, not just one record of it."""


def torn(path: str, error: Exception) -> Unreadable:
    return Unreadable(f"{path}: cannot be read to its end: {error}")


TORN = (OSError, EOFError, zlib.error, lzma.LZMAError)


# ---- readers, by kind of file


def parse_line(line: bytes, reading: Reading) -> list[Part]:
    # One character beyond U+FFFF makes Python store all in four bytes each, and parsing holds the line twice.
    most = LINE // 2 if len(line) > LINE // 2 and re.search(b"[\xf0-\xf4]", line) else LINE
    if len(line) > most:
        raise ValueError(
            f"is longer than {most >> 20} MB, the most for such a line; a text of any length may be a file of its own"
        )
    try:
        record = json.loads(line.decode())
    except json.JSONDecodeError as e:
        raise ValueError(f"is no JSON: {e.msg} at character {e.pos}") from None
    except UnicodeDecodeError as e:
        raise ValueError(f"is not UTF-8 at byte {e.start} ({line[e.start]:#04x})") from None
    except (ValueError, RecursionError) as e:
        raise ValueError(f"is no JSON that can be read: {e}") from None
    return FORMATS[reading.format].parts(record, reading.text_key)


def lines_before(path: str, end: int) -> int:
    with open(path, "rb") as f:
        return sum(f.read(min(BLOCK_BYTES, end - at)).count(b"\n") for at in range(0, end, BLOCK_BYTES))


def skip_line(file: BinaryIO) -> int:
    """Reads to the start of the next line; returns the number of bytes read."""
    n = 0
    while part := file.readline(BLOCK_BYTES):
        n += len(part)
        if part.endswith(b"\n"):
            break
    return n


def line_records(span: Span, packed: str, reading: Reading, position: Position) -> Iterator[Record]:
    path, before, end = span.path, position.bytes, None if packed or span.path == STDIN else span.stop

    def where(number: int) -> str:
        return f"{'standard input' if path == STDIN else path}:{number + (lines_before(path, span.start) if span.start else 0)}"

    with sys.stdin.buffer if path == STDIN else open(path, "rb", 1 << 20) as raw:
        file, at = opened(raw, packed), span.start
        if span.start:
            raw.seek(span.start - 1)
            at += skip_line(file) - 1
        number = int(at > span.start)  # lines of the span so far; counts one that begins before the span
        while (end is None or at < end) and (line := file.readline(LINE + 1)):
            number += 1
            if len(line) > LINE and not line.endswith(b"\n"):
                at += skip_line(file)
            at += len(line)
            position.bytes = before + (raw.tell() if packed else at - span.start)
            if number == 1 and not span.start:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield Record(functools.partial(where, number), functools.partial(parse_line, line, reading))


def beginning(path: str, packed: str) -> bytes:
    """The first bytes of a file's contents."""
    try:
        with open(path, "rb") as raw:
            return opened(raw, packed).read(FIRST_BYTES)
    except TORN as e:
        raise torn(path, e) from None


def json_records(span: Span, packed: str, reading: Reading, position: Position) -> Iterator[Record]:
    """The elements of a JSON array, or the objects of JSON lines. Raises Unreadable if the file is neither."""
    path = span.path
    first = beginning(path, packed).removeprefix(codecs.BOM_UTF8).lstrip()
    if not first.startswith(b"["):
        with open(path, "rb") as raw:
            line = opened(raw, packed).readline(LINE + 1).removeprefix(codecs.BOM_UTF8).strip()
        try:
            one = json.loads(line) if line else None
        except (ValueError, RecursionError):
            one = line
        if one is not None and not isinstance(one, dict):
            raise Unreadable(
                f"{path}: is neither lines of JSON objects nor an array of them; --as_text takes it as one document"
            )
        yield from line_records(span, packed, reading, position)
        return
    contents = b"".join(itertools.islice(file_blocks(path, packed, position.bytes, position), LINE // BLOCK_BYTES + 1))
    if len(contents) > LINE:
        raise Unreadable(
            f"{path}: an array of JSON is read whole, and may have {LINE >> 20} MB; lines of JSON may be any number"
        )
    try:
        elements = json.loads(contents.decode("utf-8-sig"))
    except (ValueError, RecursionError) as e:
        raise Unreadable(f"{path}: is no JSON: {e}") from None
    for i, element in enumerate(elements):
        parts = functools.partial(FORMATS[reading.format].parts, element, reading.text_key)
        yield Record(functools.partial("{}, element {}".format, path, i), parts)


def table_records(span: Span, packed: str, reading: Reading, position: Position) -> Iterator[Record]:
    """The rows of comma- or tab-separated values. Raises Unreadable if a needed column is missing."""
    path, before = span.path, position.bytes
    csv.field_size_limit(LINE)
    with open(path, "rb") as raw:
        text = io.TextIOWrapper(opened(raw, packed), encoding="utf-8-sig", newline="")
        delimiter = "\t" if ".tsv" in Path(path.lower()).suffixes else ","
        rows = csv.DictReader(text, delimiter=delimiter, strict=True)
        try:
            for column in FORMATS[reading.format].columns(reading.text_key):
                if column not in (rows.fieldnames or ()):
                    has = ", ".join(map(repr, rows.fieldnames or ())) or "none"
                    raise Unreadable(f"{path}: has no column {column!r}; it has {has}")
            for row in rows:
                position.bytes = before + raw.tell()
                parts = functools.partial(FORMATS[reading.format].parts, row, reading.text_key)
                yield Record(functools.partial("{}:{}".format, path, rows.line_num), parts)
        except (csv.Error, UnicodeDecodeError) as e:
            raise Unreadable(f"{path}:{rows.line_num}: {e}") from None


def closed_records(span: Span, packed: str, reading: Reading, position: Position) -> Iterator[Record]:
    raise Unreadable(f"{span.path}: such files are not read; unpack it, or take it as one text by --as_text")
    yield


def open_parquet(path: str) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path}: needs the package pyarrow: pip install '.[data]'") from None
    try:
        return pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
    except (pyarrow.ArrowException, OSError) as e:
        raise ValueError(f"{path}: no parquet file: {e}") from None


def parquet_records(span: Span, packed: str, reading: Reading, position: Position) -> Iterator[Record]:
    import pyarrow

    file = open_parquet(span.path)
    names, columns = file.schema_arrow.names, FORMATS[reading.format].columns(reading.text_key)
    for column in columns:
        if column not in names and column.split(".")[0] not in names:
            raise ValueError(f"{span.path}: has no column {column!r}; it has {', '.join(map(repr, names))}")

    def parts(batch: Any, i: int) -> list[Part]:
        try:
            record = {name: batch.column(name)[i].as_py() for name in batch.schema.names}
        except UnicodeDecodeError as e:
            raise ValueError(f"is not UTF-8: {e.reason}") from None
        return FORMATS[reading.format].parts(record, reading.text_key)

    metadata, before = file.metadata, position.bytes
    row = first = sum(metadata.row_group(i).num_rows for i in range(span.start))
    group = metadata.row_group(span.start)
    # Fewer rows per batch if they are long: a batch is in memory.
    rows = max(1, min(1024, group.num_rows * (BLOCK_BYTES // 2) // max(group.total_byte_size, 1)))
    try:
        for batch in file.iter_batches(rows, row_groups=[span.start], columns=list(columns), use_threads=False):
            for i in range(len(batch)):
                yield Record(functools.partial("{}, row {}".format, span.path, row), functools.partial(parts, batch, i))
                row += 1
            position.bytes = before + span.size * (row - first) // max(group.num_rows, 1)
    except (pyarrow.ArrowException, *TORN) as e:
        raise torn(span.path, e) from None


def id_blocks(path: str, first: int, end: int, reading: Reading) -> Iterator[np.ndarray]:
    """Ids first .. end of a file. Raises Unreadable naming the first that is not below vocab_size."""
    dtype = np.dtype(reading.token_dtype).newbyteorder("<")
    for at in range(first, end, BLOCK_BYTES):
        ids = np.fromfile(path, dtype, min(BLOCK_BYTES, end - at), offset=at * dtype.itemsize)
        wrong = ids >= reading.vocab_size
        if wrong.any():
            i = int(wrong.argmax())
            raise Unreadable(
                f"{path}: id {ids[i]} at token {at + i} is not below the tokenizer's vocabulary size {reading.vocab_size}; "
                f"--token_dtype is {reading.token_dtype}"
            )
        yield ids.astype(np.uint32)


def id_records(span: Span, packed: str, reading: Reading, position: Position) -> Iterator[Record]:
    """The documents between end tokens, without these."""
    width, before = np.dtype(reading.token_dtype).itemsize, position.bytes
    size = os.path.getsize(span.path)
    if size % width:
        raise Unreadable(f"{span.path}: {size} bytes are no whole number of {reading.token_dtype} ids (--token_dtype)")
    start, stop, end = -(-span.start // width), -(-span.stop // width), size // width
    if start == 0:
        first = np.fromfile(span.path, np.dtype(reading.token_dtype).newbyteorder("<"), min(end, 8192))
        try:
            check_width(first, span.path, "--token_dtype")
        except ValueError as e:
            raise Unreadable(str(e)) from None

    def record(first: int, last: int) -> Record:
        where = functools.partial("{}, token {}".format, span.path, first)
        return Record(where, lambda: [(Ids(id_blocks(span.path, first, last, reading)), True)] if last > first else [])

    begin, at = (0 if start == 0 else None), max(start - 1, 0)  # a document begins after the end of another
    while at < end and not (begin is None and at >= stop - 1):
        ids = np.fromfile(span.path, np.dtype(reading.token_dtype).newbyteorder("<"), BLOCK_BYTES, offset=at * width)
        for mark in (np.flatnonzero(ids == reading.eos) + at).tolist():
            if begin is not None:
                position.bytes = before + min(mark * width - span.start, span.size)
                yield record(begin, mark)
            begin = mark + 1
            if begin >= stop:
                return
        at += len(ids)
    if begin is not None and begin < end:
        yield record(begin, end)


def file_blocks(path: str, packed: str, before: int, position: Position) -> Iterator[bytes]:
    try:
        with open(path, "rb") as raw:
            file = opened(raw, packed)
            while block := file.read(BLOCK_BYTES):
                position.bytes = before + raw.tell()
                yield block
    except TORN as e:
        raise torn(path, e) from None


def check_utf8(blocks: Iterable[bytes]) -> None:
    """Raises ValueError naming the first byte that is not UTF-8."""
    before, rest = 0, b""
    for block in itertools.chain(blocks, [None]):
        text = rest + (block or b"")
        try:
            _, n = codecs.utf_8_decode(text, "strict", block is None)
        except UnicodeDecodeError as e:
            raise ValueError(f"is not UTF-8 at byte {before + e.start} ({text[e.start]:#04x})") from None
        before, rest = before + n, text[n:]


def text_records(span: Span, packed: str, reading: Reading, position: Position) -> Iterator[Record]:
    if reading.format != "text":
        raise ValueError(
            f"{span.path}: is a file of text, and --format {reading.format} needs records "
            f"with {' and '.join(FORMATS[reading.format].columns(''))}: .jsonl or .parquet"
        )
    blocks = functools.partial(file_blocks, span.path, packed, position.bytes, position)
    kind = None if reading.as_text else container(beginning(span.path, packed))
    if kind is not None:
        raise Unreadable(
            f"{span.path}: is {kind} by its first bytes, not text; its name should say so, or --as_text takes it as one document"
        )

    def parts() -> list[Part]:
        first = list(itertools.islice(blocks(), 2))
        if reading.utf8:
            check_utf8(first if len(first) < 2 else blocks())
        return [(first if len(first) < 2 else blocks(), True)] if first else []

    yield Record(lambda: span.path, parts)


READERS = {
    "lines": line_records,
    "json": json_records,
    "table": table_records,
    "parquet": parquet_records,
    "ids": id_records,
    "text": text_records,
    "closed": closed_records,
}


def read_records(spans: list[Span], reading: Reading, position: Position) -> Iterator[Record]:
    """All records of spans. Raises Unreadable if a file cannot be read to its end."""
    before = 0
    for span in spans:
        kind, packed = kind_of(span.path, reading.as_text)
        position.bytes = before
        try:
            yield from READERS[kind](span, packed, reading, position)
        except TORN as e:
            raise torn(span.path, e) from None
        before += span.size
        position.bytes = before
