"""Preparing data: documents of every kind of file, a store that no kill and no number of workers changes, and refusals."""

import dataclasses
import functools
import gzip
import hashlib
import io
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from common import ROOT

from minitf.data import datasets, long_texts, store
from minitf.data.tokenizer import ByteTokenizer
from minitf.data.tokenizer_files import load_tokenizer
from tools import prepare_data, train_tokenizer
from tools.preparation import directory, documents, duplicates, tokens, workers

SPELT = "here <|endoftext|> ends <|im_end|> nothing"
MARKED = "\ufeffa\r\nb\n\n\tc"  # a mark, both line ends, none at the end
TEXTS = [
    MARKED,
    SPELT,
    "é漢😀 \u2028 x" * 3,
    "\n\n\n",
    " ",
    *(f"document {i} of these\n" * (i % 7 + 1) for i in range(40)),
]


@pytest.fixture(scope="session")
def bpe(tmp_path_factory):
    """The directory of a small trained tokenizer."""
    folder = tmp_path_factory.mktemp("bpe")
    (folder / "text.txt").write_text("".join(TEXTS) * 2)
    train_tokenizer.train([str(folder / "text.txt")], folder / "tokenizer", 300)
    return str(folder / "tokenizer")


def run(out, *inputs, tokenizer="bytes", **options):
    """Exit status of the tool; options by name, True for those without a value."""
    given = [str(i) for i in inputs]
    args = ["--input", *given, "--tokenizer", tokenizer, "--workers", "1"] if given else []
    for name, value in options.items():
        args += [f"--{name}", *([] if value is True else map(str, value if isinstance(value, list) else [value]))]
    return prepare_data.main([*args, "--output", str(out)])


def prepare(out, *inputs, **options):
    assert run(out, *inputs, **options) == 0
    return out


def refused(capsys, out, *inputs, **options):
    """The message of a mistake."""
    with pytest.raises(SystemExit, match="2"):
        run(out, *inputs, **options)
    err = capsys.readouterr().err
    assert err.count("error: ") == 1
    return err


def stored(out, split="train"):
    """(ids of each document, mask of each or False), read as training reads them."""
    s = store.open_split(out, store.read_manifest(out), split)
    bounds = list(zip(s.offsets[:-1].tolist(), s.offsets[1:].tolist(), strict=True))
    return [s.ids[a:b] for a, b in bounds], s.mask is not None and [s.mask[a:b] for a, b in bounds]


def texts(out, split="train"):
    tokenizer = load_tokenizer(out / "tokenizer.json")
    return [tokenizer.decode(ids).decode() for ids in stored(out, split)[0]]


def contents(out):
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}


def write_lines(path, records, opener=open):
    with opener(path, "wt", encoding="utf-8") as f:
        f.writelines(json.dumps(r, ensure_ascii=False) + "\n" for r in records)
    return path


def as_records(values, key="text"):
    return [{"id": i, key: v} for i, v in enumerate(values)]


# ---- what documents are


def write_files(folder):
    folder.mkdir()
    for i, text in enumerate(TEXTS):
        (folder / f"{i:03}.txt").write_bytes(text.encode())
    (folder / ".hidden").write_text("hidden")
    return folder


def write_zst(folder):
    frames = [zstandard.compress(json.dumps(r).encode() + b"\n") for r in as_records(TEXTS)]
    (folder / "x.jsonl.zst").write_bytes(b"".join(frames))  # a frame each
    return folder / "x.jsonl.zst"


def write_marked(folder):
    lines = "".join(json.dumps(r) + "\r\n\n" for r in as_records(TEXTS))
    (folder / "x.ndjson").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    return folder / "x.ndjson"


def write_parquet(folder, values=TEXTS):
    pq.write_table(pa.table({"id": range(len(values)), "text": values}), folder / "x.parquet", row_group_size=10)
    return folder / "x.parquet"


def write_nested(folder):
    table = pa.table({"meta": [{"a": {"text": t}, "b": 1} for t in TEXTS]})
    pq.write_table(table, folder / "y.parquet")
    return folder / "y.parquet"


def write_ids(folder):
    ids = [i for text in TEXTS for i in (*text.encode(), 256)]
    np.array(ids, "<u2").tofile(folder / "x.bin")
    return folder / "x.bin"


def write_compressed_texts(folder):
    (folder / "z").mkdir()
    for i, text in enumerate(TEXTS):
        packed = gzip.compress(text.encode()) if i % 2 else zstandard.compress(text.encode())
        (folder / "z" / f"{i:03}.txt.{'gz' if i % 2 else 'zst'}").write_bytes(packed)
    return folder / "z"


SOURCES = {
    "jsonl": lambda folder: write_lines(folder / "x.jsonl", as_records(TEXTS)),
    "gz": lambda folder: write_lines(folder / "x.jsonl.gz", as_records(TEXTS), gzip.open),
    "json.gz": lambda folder: write_lines(folder / "x.json.gz", as_records(TEXTS), gzip.open),
    "zst": write_zst,
    "marked ndjson": write_marked,
    "parquet": write_parquet,
    "nested parquet": write_nested,
    "nested jsonl": lambda folder: write_lines(folder / "x.jsonl", [{"meta": {"a": {"text": t}}} for t in TEXTS]),
    "files": lambda folder: write_files(folder / "files"),
    "pattern": lambda folder: write_files(folder / "files") / "*.txt",
    "compressed files": write_compressed_texts,
    "ids": write_ids,
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_kind_of_file_gives_the_same_documents(tmp_path, monkeypatch, bpe, source):
    monkeypatch.setattr(documents, "unit_size", lambda total: 100)  # so that units end inside of lines and documents
    path = SOURCES[source](tmp_path)
    key = {"text_key": "meta.a.text"} if "nested" in source else {}
    for tokenizer in ["bytes"] if source == "ids" else ["bytes", bpe]:
        out = prepare(
            tmp_path / "out", path, tokenizer=tokenizer, no_shuffle=True, val_fraction=0, overwrite=True, **key
        )
        assert texts(out) == TEXTS
        manifest = store.read_manifest(out)
        assert manifest["splits"]["train"]["bytes"] == sum(len(t.encode()) for t in TEXTS)
        assert not manifest["masked"]
        eos = load_tokenizer(out / "tokenizer.json").specials["eos"]
        for ids in stored(out)[0]:  # spelt in a text or not, it stands at the end and there alone
            assert np.flatnonzero(ids == eos).tolist() == [len(ids) - 1]


@pytest.mark.parametrize("source", ["jsonl", "ids"])
def test_each_document_is_in_one_unit_wherever_units_end(tmp_path, source):
    values = ["", "a", "bb", "a longer one", "c" * 30, "d"]
    if source == "jsonl":
        path, reading = write_lines(tmp_path / "x.jsonl", as_records(values)), documents.Reading()
    else:
        np.array([i for v in values for i in (*v.encode(), 256)], "<u2").tofile(tmp_path / "x.bin")
        path, reading = tmp_path / "x.bin", documents.Reading(eos=256, vocab_size=257)

    def text(parts):
        return b"".join(bytes(b.tolist()) if source == "ids" else b for x, _ in parts for b in getattr(x, "blocks", x))

    for unit in range(2, 80):
        units = documents.make_units([str(path)], unit)
        records = [r for spans in units for r in documents.read_records(spans, reading, documents.Position())]
        assert [text(r.parts()).decode() for r in records] == values


def test_units_are_small_enough_for_many_cores_and_large_enough_to_be_few():
    megabytes = [1, 100, 1000, 10_000, 100_000, 10_000_000]
    assert [documents.unit_size(n << 20) / 2**20 for n in megabytes] == [2, 2, 2, 9.765625, 97.65625, 256]


def test_standard_input_is_lines_of_json(tmp_path, monkeypatch, capsys):
    lines = "".join(json.dumps(r) + "\n" for r in as_records(TEXTS)).encode()
    stdin = lambda: monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(lines)))
    stdin()
    whole = contents(prepare(tmp_path / "out", "-", no_shuffle=True))
    # Killed after some of it: it begins again, and says so.
    monkeypatch.setattr(tokens, "CHUNK", 200)
    stdin()
    kill_at(monkeypatch, 4)
    with pytest.raises(Killed):
        run(tmp_path / "again", "-", no_shuffle=True)
    monkeypatch.undo()
    stdin()
    assert contents(prepare(tmp_path / "again", "-", no_shuffle=True)) == whole
    assert "standard input is read again from its beginning" in capsys.readouterr().err


def test_empty_documents_leave_nothing_and_end_nothing(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("")
    (folder / "b.txt").write_text("\n\n")
    (folder / "c.jsonl").write_text('{"text": ""}\n\n{"text": "x"}\n   \n')
    (folder / "d.txt").write_text("normal")
    (folder / "e.jsonl").write_text("")
    out = prepare(tmp_path / "out", folder, no_shuffle=True, val_fraction=0)
    assert texts(out) == ["\n\n", "x", "normal"]
    assert store.read_manifest(out)["prepared"]["numbers"]["empty"] == 2
    for nothing in ("a.txt", "e.jsonl"):
        message = refused(capsys, tmp_path / "none", folder / nothing)
        assert f"{nothing}: no documents" in message
    (tmp_path / "nothing").mkdir()
    assert "nothing: no documents" in refused(capsys, tmp_path / "none", tmp_path / "nothing")


def wide_tokenizer(folder, vocab_size=70_000):
    """A tokenizer of words w0, w1, ..."""
    import tokenizers

    words = {f"w{i}": i for i in range(vocab_size)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "w1"}')
    return str(folder)


def test_ids_above_16_bits_are_kept(tmp_path, capsys):
    (tmp_path / "x.txt").write_text("w69999 w5  w65536")
    out = prepare(tmp_path / "out", tmp_path / "x.txt", tokenizer=wide_tokenizer(tmp_path), val_fraction=0)
    assert np.dtype(store.read_manifest(out)["dtype"]) == np.uint32
    assert stored(out)[0][0].tolist() == [69999, 5, 65536, 1]
    assert "1 of 1 texts that were tried do not come back" in capsys.readouterr().err  # spaces are lost


def test_what_counts_in_completions(tmp_path, bpe):
    records = [
        {"prompt": "Q: 1 + 1?", "completion": " 2"},
        {"prompt": "", "completion": "x"},
        {"prompt": "", "completion": ""},
    ]
    path = write_lines(tmp_path / "x.jsonl", records)
    out = prepare(tmp_path / "out", path, tokenizer=bpe, format="completion", no_shuffle=True, val_fraction=0)
    tokenizer = load_tokenizer(out / "tokenizer.json")
    ids, masks = stored(out)
    assert len(ids) == 2
    prompt, completion = (tokenizer.encode(t.encode()).tolist() for t in ("Q: 1 + 1?", " 2"))
    assert ids[0].tolist() == prompt + completion + [tokenizer.specials["eos"]]
    assert masks[0].tolist() == [0] * len(prompt) + [1] * (len(completion) + 1)
    assert masks[1].tolist() == [1, 1]


def test_a_store_in_which_all_counts_has_no_masks(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", [{"prompt": "", "completion": "x"}])
    out = prepare(tmp_path / "out", path, format="completion", val_fraction=0)
    assert not store.read_manifest(out)["masked"]
    assert not list(out.glob("*.mask"))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_what_counts_in_chats(tmp_path, bpe, kind):
    chat = [
        ("system", "be <|im_end|> brief"),
        ("user", "hi"),
        ("assistant", "\nhello"),
        ("user", "?"),
        ("assistant", ""),
    ]
    records = [{"messages": [{"role": r, "content": c} for r, c in chat]}, {"messages": []}]
    if kind == "jsonl":
        path = write_lines(tmp_path / "x.jsonl", records)
    else:
        path = tmp_path / "x.parquet"
        pq.write_table(pa.Table.from_pylist(records), path)
    out = prepare(tmp_path / "out", path, tokenizer=bpe, format="chat", val_fraction=0)
    tokenizer = load_tokenizer(out / "tokenizer.json")
    encode = lambda text: tokenizer.encode(text.encode()).tolist()
    start, end, eos = (tokenizer.specials[role] for role in ("turn_start", "turn_end", "eos"))
    expected, counts = [], []
    for role, content in chat:
        answer = role == "assistant"
        for ids, c in (
            ([start], 0),
            (encode(f"{role}\n"), 0),
            (encode(content), answer),
            ([end], answer),
            (encode("\n"), 0),
        ):
            expected += ids
            counts += [int(c)] * len(ids)
    (ids,), (mask,) = stored(out)
    assert ids.tolist() == expected + [eos]
    assert mask.tolist() == counts + [0]
    text = "".join(f"{role}\n{content}\n" for role, content in chat)
    assert tokenizer.decode(ids).decode() == text
    assert store.read_manifest(out)["splits"]["train"]["bytes"] == len(text)


# ---- long documents

ALPHABET = [
    *"abcdefgh  \n\n",
    "\r\n",
    "\t",
    "é",
    "漢",
    "😀",
    "\u3000",
    "\u2028",
    "12",
    "    ",
    "the ",
    "\n\n\n",
    "--",
    "'s",
]


def test_pieces_of_a_text_give_the_ids_of_the_whole(bpe):
    tokenizer = load_tokenizer(Path(bpe) / "tokenizer.json")
    rng = random.Random(0)
    fits = functools.partial(long_texts.keeps_ids, tokenizer)
    cuts = 0
    for _ in range(10):
        text = "".join(rng.choice(ALPHABET) * rng.choice([1, 1, 1, 1, 9]) for _ in range(1500)).encode()
        ends = sorted(rng.sample(range(len(text)), 3))
        blocks = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
        found = list(long_texts.pieces(blocks, fits, size=64))
        assert b"".join(found) == text
        cuts += len(found) - 1
        assert np.array_equal(np.concatenate([tokenizer.encode(p) for p in found]), tokenizer.encode(text))
    assert cuts > 50  # and cut they were


def test_a_long_run_of_newlines_is_not_cut(tmp_path):
    (tmp_path / "x.txt").write_text(("x" + "\n" * 17) * 50)
    train_tokenizer.train([str(tmp_path / "x.txt")], tmp_path / "tokenizer", 290)
    tokenizer = load_tokenizer(tmp_path / "tokenizer" / "tokenizer.json")
    assert len(tokenizer.encode(b"\n" * 1024)) < 200  # several newlines are one token
    for n in range(8):
        text = b"a b\n" * 300 + b"\n" * (5000 + n) + b"a b\n" * 900
        found = list(long_texts.pieces([text], functools.partial(long_texts.keeps_ids, tokenizer), size=1000))
        assert len(found) > 2
        assert np.array_equal(np.concatenate([tokenizer.encode(p) for p in found]), tokenizer.encode(text))


def test_a_text_that_cannot_be_cut_is_refused(bpe):
    fits = functools.partial(long_texts.keeps_ids, load_tokenizer(Path(bpe) / "tokenizer.json"))
    with pytest.raises(ValueError, match="without a newline or space at which it could be cut"):
        list(long_texts.pieces([b"x" * 10_000], fits, size=100, window=5000))


def test_a_text_of_any_length_has_the_ids_of_the_whole(bpe, monkeypatch):
    tokenizer = load_tokenizer(Path(bpe) / "tokenizer.json")
    rng = random.Random(2)
    texts = ["".join(rng.choice(ALPHABET) for _ in range(9000)), "x" * 9000, "x y\n" * 99 + "x" * 9000]
    monkeypatch.setattr("minitf.data.long_texts.PIECE_BYTES", 500)
    monkeypatch.setattr("minitf.data.long_texts.pieces", functools.partial(long_texts.pieces, size=500))
    batches = []
    real = type(tokenizer).encode_batch
    for text in texts:
        whole = tokenizer.encode(text.encode())
        monkeypatch.setattr(
            type(tokenizer), "encode_batch", lambda s, b: batches.append(max(map(len, b))) or real(s, b)
        )
        assert np.array_equal(long_texts.encode(tokenizer, text.encode(), "x"), whole)
        monkeypatch.setattr(type(tokenizer), "encode_batch", real)
        assert max(batches) < 2000 or "x" * 9000 in text  # in pieces, where there is a place to cut
    with pytest.raises(ValueError, match=r"^x: not UTF-8 at byte 30000"):
        long_texts.encode(tokenizer, b"a b\n\n" * 6000 + b"\xff", "x")


def test_long_documents_are_stored_as_short_ones(tmp_path, monkeypatch, bpe):
    rng = random.Random(1)
    long = ["".join(rng.choice(ALPHABET) for _ in range(3000)) for _ in range(4)]
    folder = tmp_path / "in"
    folder.mkdir()
    for i, text in enumerate(long):
        (folder / f"{i}.txt").write_bytes(text.encode())
    expected = {t: contents(prepare(tmp_path / f"{len(t)}", folder, tokenizer=t, dedup="near")) for t in ("bytes", bpe)}
    for module in (documents, long_texts):
        monkeypatch.setattr(module, "BLOCK_BYTES", 999)
    monkeypatch.setattr(tokens, "BATCH", 700)
    monkeypatch.setattr("minitf.data.long_texts.pieces", functools.partial(long_texts.pieces, size=150))
    for tokenizer, files in expected.items():
        assert (
            contents(prepare(tmp_path / f"again{len(tokenizer)}", folder, tokenizer=tokenizer, dedup="near")) == files
        )


# ---- one store, whatever happens on the way


def test_the_number_of_workers_changes_nothing(tmp_path, monkeypatch, bpe):
    path = write_lines(tmp_path / "x.jsonl", as_records(TEXTS))
    options = dict(tokenizer=bpe, shard_tokens=300, val_fraction=0.2)
    monkeypatch.setattr(documents, "unit_size", lambda total: 700)
    one = contents(prepare(tmp_path / "one", path, **options))
    two = contents(prepare(tmp_path / "two", path, **options, workers=2))
    assert one == two
    assert "train-00002.bin" in one
    assert max(s["tokens"] for s in store.read_manifest(tmp_path / "one")["splits"]["train"]["shards"]) <= 300
    assert not multiprocessing_children()


def note(path, size, say):
    """What workers of the next test do."""
    with open(path / str(os.getpid()), "a") as f:
        f.write(f"{size}\n")


def test_the_largest_tasks_come_first(tmp_path):
    sizes = [3, 1, 4, 1, 5, 9, 2, 6]
    workers.parallel("test", note, [workers.Task((tmp_path, n - 1), n, done=1) for n in sizes], 2)
    done = [list(map(int, file.read_text().split())) for file in tmp_path.iterdir()]
    assert all(of_a_worker == sorted(of_a_worker, reverse=True) for of_a_worker in done)
    assert sorted(size for of_a_worker in done for size in of_a_worker) == sorted(n - 1 for n in sizes)


def multiprocessing_children():
    return [p for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())]


class Killed(BaseException):
    pass


def kill_at(monkeypatch, number, after=False):
    """The number-th record that the tool writes is its last deed, or what it no longer does."""
    real, calls = directory.write_whole, []

    def write(path, data):
        calls.append(path)
        if len(calls) == number:
            if after:
                real(path, data)
            raise Killed
        real(path, data)

    monkeypatch.setattr(directory, "write_whole", write)


def leave_torn(unfinished):
    """What a kill leaves behind the last record of a unit."""
    for record in unfinished.glob("unit-*.json"):
        if not json.loads(record.read_text())["done"]:
            for suffix in (".bin", ".docs", ".mask", ".near"):
                with open(record.with_suffix(suffix), "ab") as f:
                    f.write(b"torn!")


@pytest.mark.parametrize("after", [False, True])
def test_no_kill_changes_the_store(tmp_path, monkeypatch, capsys, bpe, after):
    records = [
        {"messages": [{"role": "user", "content": t}, {"role": "assistant", "content": t[::-1]}]}
        for t in [*TEXTS, *TEXTS]
    ]
    records[3] = {"no": "messages"}
    path = write_lines(tmp_path / "x.jsonl", records)
    options = dict(
        tokenizer=bpe, format="chat", dedup="near", skip_bad=True, val_fraction=0.3, shard_tokens=900, pack=[16]
    )
    monkeypatch.setattr(documents, "unit_size", lambda total: 4000)
    monkeypatch.setattr(tokens, "CHUNK", 700)
    monkeypatch.setattr(tokens, "BATCH", 300)
    whole = contents(prepare(tmp_path / "whole", path, **options))
    out, kills = tmp_path / "killed", 0
    for _ in range(100):
        with monkeypatch.context() as patch:
            kill_at(patch, 3, after)
            later = 4000 + 500 * kills  # the units stay those of the first run
            patch.setattr(documents, "unit_size", lambda total, size=later: size)
            try:
                assert run(out, path, **options) == 0
                break
            except Killed:
                kills += 1
                leave_torn(out / "unfinished")
    assert kills > 9
    assert contents(out) == whole
    assert "going on" in capsys.readouterr().err


def test_shuffling_is_a_function_of_the_seed(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", as_records(TEXTS))
    order = lambda name, **options: texts(prepare(tmp_path / name, path, val_fraction=0, **options))
    assert order("a") == order("b") != order("c", seed=1) != TEXTS
    assert sorted(order("a")) == sorted(TEXTS) == sorted(order("c", seed=1))


def test_a_text_stays_in_its_split(tmp_path):
    some, more = TEXTS[:30], ["new " + t for t in TEXTS] + TEXTS[::-1]
    a = write_lines(tmp_path / "a.jsonl", as_records(some))
    b = write_lines(tmp_path / "b.jsonl", as_records(more))
    first = prepare(tmp_path / "first", a, val_fraction=0.4)
    second = prepare(tmp_path / "second", b, a, val_fraction=0.4)
    for split in ("train", "val"):
        assert set(texts(first, split)) == set(texts(second, split)) & set(some)
    expected = [t for t in some if hashlib.sha256(t.encode()).digest()[0] < 0.4 * 256]
    assert set(expected) - set(texts(first, "val")) == set()
    assert len(expected) > 3


# ---- duplicates


def test_of_exact_duplicates_the_first_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "unit_size", lambda total: 200)
    values = ["a", "b", "a", "c ", "c", "b"] + TEXTS + TEXTS
    path = write_lines(tmp_path / "x.jsonl", as_records(values))
    out = prepare(tmp_path / "out", path, dedup="exact", no_shuffle=True, val_fraction=0)
    assert texts(out) == list(dict.fromkeys(values))
    assert store.read_manifest(out)["prepared"]["numbers"]["exact_duplicates"] == len(values) - len(set(values))


def test_of_near_duplicates_the_first_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "unit_size", lambda total: 5000)
    rng = random.Random(0)
    words = [f"word{i}" for i in range(500)]
    different = [" ".join(rng.choices(words, k=200)) for _ in range(20)]

    def changed(text, n):
        parts = text.split()
        for i in range(n):
            parts[i * 100 + 7] = "other"
        return " ".join(parts)

    values = [
        *different,
        *(changed(t, 1) for t in different[:8]),
        changed(different[0], 2),
        different[1],
        "a b",
        "a  b",
    ]
    path = write_lines(tmp_path / "x.jsonl", as_records(values))
    out = prepare(tmp_path / "out", path, dedup="near", no_shuffle=True, val_fraction=0)
    assert texts(out) == [*different, "a b"]
    numbers = store.read_manifest(out)["prepared"]["numbers"]
    assert (numbers["exact_duplicates"], numbers["near_duplicates"]) == (1, 10)
    # Half of the words are others: not alike enough.
    half = write_lines(tmp_path / "y.jsonl", as_records([different[0], different[0][:500] + different[1][500:]]))
    assert len(texts(prepare(tmp_path / "half", half, dedup="near", val_fraction=0))) == 2


def test_a_signature_depends_on_the_words_alone():
    text = " ".join(TEXTS[5:20]).encode()
    whole = duplicates.Shingles()
    whole.add(text)
    for size in (1, 7, 50):
        parts = duplicates.Shingles()
        for i in range(0, len(text), size):
            parts.add(text[i : i + size])
        assert np.array_equal(parts.signature(), whole.signature())


def test_documents_that_agree_in_one_band_only_stay(tmp_path):
    signatures = np.random.default_rng(0).integers(0, 2**32, (4, duplicates.PERMUTATIONS), np.uint32)
    signatures[1, :13] = signatures[0, :13]
    signatures[3, : int(0.9 * duplicates.PERMUTATIONS)] = signatures[2, : int(0.9 * duplicates.PERMUTATIONS)]
    signatures.astype("<u4").tofile(tmp_path / "near")
    found = duplicates.Signatures([tmp_path / "near"], [4])
    assert duplicates.nearly_repeated(found, np.arange(4), 0.8).tolist() == [3]
    assert duplicates.nearly_repeated(found, np.arange(3), 0.8).tolist() == []


# ---- refusals


BAD = {
    '{"text": "a"\n': "is no JSON: Expecting ',' delimiter at character 13",
    '{"txt": "a"}\n': "has no key 'text'; it has 'txt'",
    '{"text": 3}\n': "'text' is int, not a string",
    '{"text": null}\n': "'text' is NoneType, not a string",
    '{"text": "\\ud83d"}\n': "half a surrogate pair",
    '["text"]\n': "is list, not an object",
    "[" * 20_000 + "\n": "is no JSON that can be read",
    b'{"text": "\xff"}\n': "is not UTF-8 at byte 10 (0xff)",
    '{"text": "%s"}\n' % ("x" * 3000): "is longer than",
}


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_a_bad_line_is_named_or_left_out(tmp_path, monkeypatch, capsys, bad):
    monkeypatch.setattr(documents, "unit_size", lambda total: 50 if len(bad) < 10_000 else 5000)
    monkeypatch.setattr(documents, "LINE", 2000 if "longer" in BAD[bad] else 2**28)
    good = "".join(json.dumps(r) + "\n\n" for r in as_records(TEXTS[5:15])).encode()
    bad_line = bad if isinstance(bad, bytes) else bad.encode()
    path = tmp_path / "x.jsonl"
    path.write_bytes(good + bad_line + good)
    options = dict(no_shuffle=True, val_fraction=0)
    message = refused(capsys, tmp_path / "out", path, **options)
    assert f"x.jsonl:21: {BAD[bad]}" in message.replace("'text' has half", "half")
    assert "--skip_bad" in message
    # What was refused goes on where it stood.
    out = prepare(tmp_path / "out", path, skip_bad=True, **options)
    assert texts(out) == TEXTS[5:15] * 2
    assert store.read_manifest(out)["prepared"]["numbers"]["bad"] == 1
    assert "x.jsonl:21: " in capsys.readouterr().err


def test_bad_rows_and_files_are_named_or_left_out(tmp_path, capsys, bpe):
    folder = tmp_path / "in"
    folder.mkdir()
    write_parquet(folder, [*TEXTS[:20], None, "end"])
    (folder / "y.txt").write_bytes("é".encode() * 5 + b"\xe9 ")
    assert "x.parquet, row 20: 'text' is NoneType" in refused(capsys, tmp_path / "a", folder / "x.parquet")
    for size in (documents.BLOCK_BYTES, 7):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(documents, "BLOCK_BYTES", size)
            message = refused(capsys, tmp_path / "b", folder / "y.txt", tokenizer=bpe)
            assert "y.txt: is not UTF-8 at byte 10 (0xe9)" in message
    options = dict(no_shuffle=True, val_fraction=0)
    out = prepare(tmp_path / "c", folder, tokenizer=bpe, skip_bad=True, **options)
    assert texts(out) == [*TEXTS[:20], "end"]
    out = prepare(tmp_path / "d", folder / "y.txt", **options)
    assert ByteTokenizer().decode(stored(out)[0][0]) == (folder / "y.txt").read_bytes()


def test_a_torn_file_is_refused_even_when_bad_records_are_not(tmp_path, capsys):
    for name, pack in (
        ("x.jsonl.gz", gzip.compress),
        ("x.jsonl.zst", zstandard.compress),
        ("x.txt.zst", zstandard.compress),
    ):
        packed = pack(json.dumps({"text": random.Random(0).randbytes(5000).hex()}).encode())
        (tmp_path / name).write_bytes(packed[:-20])
        assert f"{name}: cannot be read to its end" in refused(capsys, tmp_path / "out", tmp_path / name, skip_bad=True)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    assert "x.parquet: no parquet file" in refused(capsys, tmp_path / "out", tmp_path / "x.parquet", skip_bad=True)


def test_foreign_ids_are_refused(tmp_path, capsys):
    np.array([5, 6, 256, 7, 300, 256], "<u2").tofile(tmp_path / "x.bin")
    message = refused(capsys, tmp_path / "out", tmp_path / "x.bin", skip_bad=True)
    assert "x.bin: id 300 at token 4 is not below the tokenizer's vocabulary size 259" in message
    (tmp_path / "x.bin").write_bytes(b"abc")
    assert "3 bytes are no whole number of uint16" in refused(capsys, tmp_path / "out", tmp_path / "x.bin")
    assert "--dedup near needs text" in refused(capsys, tmp_path / "out", tmp_path / "x.bin", dedup="near")


def test_mistakes_are_named(tmp_path, capsys, bpe):
    (tmp_path / "x.txt").write_text("x")
    wrong = functools.partial(refused, capsys, tmp_path / "out")
    assert "no such file, directory or pattern" in wrong(tmp_path / "y.txt")
    assert "chars: its alphabet" in wrong(tmp_path / "x.txt", tokenizer="chars")
    assert "has no special token turn_start" in wrong(tmp_path / "x.txt", format="chat")
    assert "--format completion needs records with prompt and completion" in wrong(
        tmp_path / "x.txt", format="completion"
    )
    assert "needs --tokenizer" in wrong(input=[tmp_path / "x.txt"])
    assert "nothing to do" in wrong()
    assert "1.5: must be in 0 .. 1" in wrong(tmp_path / "x.txt", val_fraction=1.5)
    assert "lies inside --input" in wrong(tmp_path)
    no_end = tmp_path / "no_end"
    no_end.mkdir()
    wide_tokenizer(no_end, 10)
    (no_end / "tokenizer_config.json").unlink()
    message = wrong(tmp_path / "x.txt", tokenizer=str(no_end))
    assert "has no special token eos, which ends a document" in message
    assert "<|endoftext|>" in message
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_other_settings_and_inputs_are_refused(tmp_path, monkeypatch, capsys):
    path = write_lines(tmp_path / "x.jsonl", as_records(TEXTS))
    out = prepare(tmp_path / "out", path)
    before = contents(out)
    capsys.readouterr()
    prepare(out, path)
    assert "already done" in capsys.readouterr().out
    message = refused(capsys, out, path, seed=3, dedup="exact")
    assert "is a finished store of other settings; --overwrite begins anew:" in message
    assert "--seed: 0 -> 3" in message
    assert "--dedup: none -> exact" in message
    # An unfinished one, and another file under the same name.
    monkeypatch.setattr(tokens, "CHUNK", 300)
    with monkeypatch.context() as patch:
        kill_at(patch, 4)
        with pytest.raises(Killed):
            run(tmp_path / "half", path)
    assert "is an unfinished one of other settings" in refused(capsys, tmp_path / "half", path, text_key="id")
    with open(path, "a") as f:
        f.write('{"text": "more"}\n')
    size = path.stat().st_size
    message = refused(capsys, tmp_path / "half", path)
    assert f"--input {path}: {size - 17} bytes of mtime_ns" in message
    assert f"-> {size} bytes" in message
    assert contents(out) == before
    overwritten = prepare(out, path, overwrite=True, seed=3)
    assert contents(overwritten) == contents(prepare(tmp_path / "new", path, seed=3))


def test_a_store_lists_its_inputs_in_a_file_of_its_own(tmp_path, capsys):
    paths = [write_lines(tmp_path / f"{name}.jsonl", as_records(TEXTS)) for name in "abc"]
    out = prepare(tmp_path / "out", *paths[:2])
    listed = (out / "inputs.json").read_bytes()
    assert [i["path"] for i in json.loads(listed)] == list(map(str, paths[:2]))
    assert store.read_manifest(out)["prepared"]["inputs"] == {
        "files": 2,
        "bytes": sum(p.stat().st_size for p in paths[:2]),
        "sha256": hashlib.sha256(listed).hexdigest(),
    }
    assert "a.jsonl" not in (out / "manifest.json").read_text()
    size = paths[2].stat().st_size
    assert f"--input {paths[2]}: not an input -> {size} bytes" in refused(capsys, out, *paths)
    assert "--input: the same files in another order" in refused(capsys, out, *paths[1::-1])
    for change in (lambda: (out / "inputs.json").write_bytes(listed[:-2]), (out / "inputs.json").unlink):
        change()
        assert "inputs.json, which lists its inputs, is missing or has changed" in refused(capsys, out, *paths[:2])
        assert run(out, verify=True) == 1
        assert "inputs.json: " in capsys.readouterr().out
    prepare(out, *paths[:2], overwrite=True)
    assert (out / "inputs.json").read_bytes() == listed


def test_what_is_no_store_is_left_alone(tmp_path, capsys):
    (tmp_path / "x.txt").write_text("x")
    for name in ("notes.md", "train-00000.bin"):
        out = tmp_path / name.replace(".", "")
        out.mkdir()
        (out / name).write_text("mine")
        assert f"holds {name}: not a store" in refused(capsys, out, tmp_path / "x.txt")
        assert contents(out) == {name: b"mine"}
    assert "notes.md" in refused(capsys, tmp_path / "notesmd", tmp_path / "x.txt", overwrite=True)


def test_two_at_a_time_are_refused(tmp_path, capsys):
    path = write_lines(tmp_path / "x.jsonl", as_records(TEXTS))
    with directory.claim(tmp_path / "out"):
        assert "another process is preparing it" in refused(capsys, tmp_path / "out", path)
    prepare(tmp_path / "out", path)


def test_verify_names_what_has_changed(tmp_path, capsys):
    path = write_lines(tmp_path / "x.jsonl", as_records(TEXTS))
    out = prepare(tmp_path / "out", path, val_fraction=0.3, pack=[8], shard_tokens=1000)
    capsys.readouterr()
    assert run(out, verify=True) == 0
    assert "files are as the manifest says" in capsys.readouterr().out
    for name in ("train-00001.bin", "val-00000.idx", "train-best_fit-8.plan"):
        data = (out / name).read_bytes()
        (out / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert run(out, verify=True) == 1
        assert f"{name}: its sha256 is" in capsys.readouterr().out
        (out / name).write_bytes(data)
    (out / "train-00001.bin").unlink()
    (out / "tokenizer.json").write_text('{"type": "chars", "alphabet": "x"}')
    assert run(out, verify=True) == 1
    shown = capsys.readouterr().out
    assert "train-00001.bin: No such file" in shown
    assert "tokenizer.json: is not the tokenizer of these ids" in shown


def test_plans_can_come_later(tmp_path, capsys):
    path = write_lines(tmp_path / "x.jsonl", as_records(TEXTS))
    at_once = contents(prepare(tmp_path / "a", path, val_fraction=0.3, pack=[8, 16]))
    later = prepare(tmp_path / "b", path, val_fraction=0.3)
    assert run(later, pack=[8]) == 0
    assert run(later, pack=[8, 16]) == 0
    assert "has a plan for rows of 8 already" in capsys.readouterr().out
    assert contents(later) == at_once


# ---- the real command

SMALL_UNITS = """
import sys
from tools import prepare_data
from tools.preparation import documents
documents.unit_size = lambda total: 1 << 20
sys.exit(prepare_data.main(sys.argv[1:]))
"""


def start(out, *inputs, **options):
    """The tool in a session of its own, with two workers."""
    command = [sys.executable, "-c", SMALL_UNITS, "--output", str(out), "--input", *map(str, inputs), "--workers", "2"]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes)


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A file that takes some seconds: 12 MB."""
    rng = random.Random(0)
    words = [*TEXTS[5].split(), *"the fox é 12 \n".split(" ")]
    lines = [" ".join(rng.choices(words, k=500)) for _ in range(5000)]
    return write_lines(tmp_path_factory.mktemp("many") / "x.jsonl", as_records(lines))


def wait_for_units(process, out, n):
    """Until n units have recorded progress and two workers are at others."""
    while len(list((out / "unfinished").glob("unit-*.json"))) < n:
        assert process.poll() is None, process.communicate()


@pytest.mark.slow
def test_kill_9_in_the_middle_changes_nothing(tmp_path, many, bpe):
    options = dict(tokenizer=bpe, dedup="exact")
    out = tmp_path / "out"
    for units in (1, 4):
        process = start(out, many, **options)
        wait_for_units(process, out, units)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert not (out / "manifest.json").exists()
    for path in (out, tmp_path / "whole"):
        process = start(path, many, **options)
        _, err = process.communicate()
        assert process.returncode == 0, err
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["a worker", "the tool", "ctrl-c"])
def test_no_process_is_left_behind(tmp_path, many, bpe, what):
    process = start(tmp_path / "out", many, tokenizer=bpe)
    wait_for_units(process, tmp_path / "out", 1)
    children = psutil.Process(process.pid).children(recursive=True)
    found = [p for p in children if "spawn_main" in " ".join(p.cmdline())]
    assert len(found) == 2
    if what == "a worker":
        found[1].kill()
    elif what == "the tool":
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    assert "Traceback" not in err
    if what == "a worker":
        assert process.returncode == 1
        assert "error: a worker process died: SIGKILL" in err
    elif what == "ctrl-c":
        assert process.returncode == 3
        assert err.splitlines()[-1] == "stopped; the same command goes on from here"


MEASURED = """
import re, sys
from tools import prepare_data
status = prepare_data.main(sys.argv[1:])
print(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1])
sys.exit(status)
"""  # not ru_maxrss: that holds what the process was before it became Python


def peak_memory(out, *args):
    """Most resident memory in bytes of a run in one process."""
    options = ["--output", out, "--workers", 1, "--val_fraction", 0, *args]
    command = [sys.executable, "-c", MEASURED, *map(str, options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1]) * 1024


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_a_long_text_takes_little_memory(tmp_path, request, tokenizer):
    name = request.getfixturevalue("bpe") if tokenizer == "bpe" else tokenizer
    size = 300 if tokenizer == "bytes" else 20
    block = (TEXTS[20] * 100_000)[: 2**20 - 1] + "\n"
    with open(tmp_path / "x.txt", "w") as f:
        for _ in range(size):
            f.write(block)
    peak = peak_memory(tmp_path / "out", "--input", tmp_path / "x.txt", "--tokenizer", name)
    assert peak < 300e6, peak
    manifest = store.read_manifest(tmp_path / "out")
    assert manifest["splits"]["train"]["bytes"] == size * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("letters", ["ascii", "wide"])
def test_a_long_line_takes_bounded_memory(tmp_path, letters):
    with open(tmp_path / "x.jsonl", "w") as f:
        f.write('{"text": "' + ("😀" if letters == "wide" else ""))
        for _ in range(250 if letters == "ascii" else 120):  # megabytes
            f.write("0123456789abcdef" * 2**16)
        f.write('"}\n')
    peak = peak_memory(tmp_path / "out", "--input", tmp_path / "x.jsonl", "--tokenizer", "bytes")
    assert peak < 1.7e9, peak


@pytest.mark.parametrize(
    ("missing", "options", "message"),
    [
        ("datasketch", ["--tokenizer", "bytes", "--dedup", "near"], "--dedup near needs the package datasketch"),
        ("tokenizers", ["--tokenizer", "DIR"], "needs the package tokenizers"),
        (None, ["--tokenizer", "nowhere.json"], "--tokenizer=nowhere.json: no such file"),
    ],
)
def test_what_is_not_installed_or_not_there_is_one_message(missing, options, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "tokenizer.json").write_text("{}")
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    options = [o.replace("DIR", str(tmp_path)) for o in options]
    with pytest.raises(SystemExit) as stopped:
        prepare_data.main(["--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "out"), *options])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_scripts_without_spaces_have_words(tmp_path):
    rng = random.Random(0)
    letters = {
        "chinese": [chr(c) for c in range(0x4E00, 0x4F00)],
        "thai": [chr(c) for c in range(0x0E01, 0x0E2F)],
        "minified": list("abcdefghij(){};=+.,"),
    }
    for name, some in letters.items():
        values = ["".join(rng.choices(some, k=400)) for _ in range(6)]
        alike = [v[:200] + some[0] + v[201:] for v in values[:3]]
        path = write_lines(tmp_path / f"{name}.jsonl", as_records([*values, *alike]))
        assert texts(prepare(tmp_path / name, path, dedup="near", no_shuffle=True, val_fraction=0)) == values


def test_words_do_not_depend_on_how_a_text_comes():
    rng = random.Random(0)
    for _ in range(300):
        some = ["a", "bc", " ", "\n", "你", "ก", "é", "x" * 30, "y" * 70, "\u3000", "😀"]
        text = "".join(rng.choices(some, k=rng.randrange(25))).encode()
        whole, parts, found, at = duplicates.Words(), duplicates.Words(), [], 0
        expected = whole.add(text, last=True)
        while at < len(text):
            n = rng.randrange(1, 20)
            found += parts.add(text[at : at + n])
            at += n
        assert found + parts.add(b"", last=True) == expected


# ---- what a file's name and its first bytes say


@pytest.mark.parametrize("name", ["x.json", "y.json", "x.json.gz", "x.jsonl.bz2", "x.jsonl.xz", "x.csv", "x.tsv"])
def test_records_are_read_whatever_holds_them(name, tmp_path):
    import bz2
    import csv
    import lzma

    values = ["plain", 'with "quotes", and\nlines', "ünïcode\t😀", "x" * 300_000]
    path = tmp_path / name
    if name == "y.json":
        path.write_text(json.dumps(as_records(values), indent=2), encoding="utf-8")
    elif name.endswith("sv"):
        with open(path, "w", newline="", encoding="utf-8-sig") as f:
            rows = csv.writer(f, delimiter="," if name == "x.csv" else "\t")
            rows.writerows([["id", "text"], *enumerate(values)])
    else:
        opener = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(path.suffix, open)
        write_lines(path, as_records(values), opener)
    out = prepare(tmp_path / "out", path, no_shuffle=True, val_fraction=0)
    assert texts(out) == values


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("x.json", b'{\n "a": 1\n}\n', "is neither lines of JSON objects nor an array"),
        ("x.json", b"[1, 2", "is no JSON"),
        ("x.csv", b"id,body\n1,a\n", "has no column 'text'; it has 'id', 'body'"),
        ("x.zip", b"PK\x03\x04rest", "such files are not read"),
        ("x.tar.gz", b"\x1f\x8b", "such files are not read"),
        ("x.txt", b"PK\x03\x04rest", "is zip by its first bytes, not text"),
        ("x", b"\x28\xb5\x2f\xfdrest", "is zstd by its first bytes, not text"),
        ("x.jsonl.xz", b"no xz", "cannot be read to its end"),
    ],
)
def test_what_holds_no_text_is_refused(name, contents, message, tmp_path, capsys):
    (tmp_path / name).write_bytes(contents)
    err = refused(capsys, tmp_path / "out", tmp_path / name)
    assert name in err
    assert message in err
    if name in ("x.zip", "x.txt", "x.csv"):  # but taken for text by a word
        assert texts(prepare(tmp_path / "out", tmp_path / name, as_text=True, val_fraction=0)) == [contents.decode()]


def test_a_key_of_records_without_records_is_refused(tmp_path, capsys):
    (tmp_path / "x.txt").write_text("some text")
    assert "--text_key body: has no effect" in refused(capsys, tmp_path / "out", tmp_path / "x.txt", text_key="body")


def test_a_long_text_has_its_ids_where_the_tokenizer_marks_each_text(tmp_path, monkeypatch):
    from tokenizers import Tokenizer, decoders, models, normalizers

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a", "ab"]
    model = models.BPE(
        {p: i for i, p in enumerate(pieces)}, [("▁", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    (tmp_path / "t").mkdir()
    tokenizer.save(str(tmp_path / "t/tokenizer.json"))
    rng = random.Random(0)
    text = "".join(rng.choices(["a", "b", " ", "\n", "ab", " a"], k=40_000))
    (tmp_path / "x.txt").write_text(text)
    monkeypatch.setattr("minitf.data.long_texts.PIECE_BYTES", 2000)
    monkeypatch.setattr(long_texts.pieces, "__defaults__", (2000, long_texts.WINDOW))
    out = prepare(tmp_path / "out", tmp_path / "x.txt", tokenizer=str(tmp_path / "t"), val_fraction=0)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert stored(out)[0][0].tolist() == [*ids, 2]
    # And so where a start encodes it.
    cfg = datasets.DataConfig(kind="text", path=str(tmp_path / "x.txt"), val_path=str(tmp_path / "x.txt"))
    train = datasets.load(dataclasses.replace(cfg, tokenizer=str(tmp_path / "t")), None).train
    assert train.ids.tolist()[-len(ids) - 1 :] == [*ids, 2]
