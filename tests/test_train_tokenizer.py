"""Training a tokenizer: what it writes, and what it refuses."""

import json

import pytest

from minitf.data.tokenizer_files import make_tokenizer
from tools import train_tokenizer

WORDS = "the quick brown fox jumps over the lazy dog and 12345 others; def f(x):\n    return x\n"


def arguments(folder, *options, vocab_size=300, inputs=("*.txt",)):
    given = [str(folder / name) for name in inputs]
    return ["--input", *given, "--output", str(folder / "out"), "--vocab_size", str(vocab_size), *options]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.txt").write_text(WORDS * 20)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"meta": {"text": w}}) + "\n" for w in WORDS.split()))
    return tmp_path


def test_any_text_comes_back_and_digits_stand_alone(folder, capsys):
    assert train_tokenizer.main(arguments(folder)) == 0
    assert "vocabulary 300; " in capsys.readouterr().out
    tokenizer = make_tokenizer(str(folder / "out"), [])
    assert tokenizer.specials == {"eos": 0, "turn_start": 1, "turn_end": 2}
    assert json.loads((folder / "out" / "tokenizer_config.json").read_text()) == {"eos_token": "<|endoftext|>"}
    text = "\ufeffthe fox\r\n  \t 12345 <|endoftext|> é漢😀\x00\n\n".encode()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.specials.values())
    assert len(tokenizer.encode(b"12345")) == 5
    assert len(tokenizer.encode(b" the the")) == 2  # merges were learnt


def test_same_inputs_give_the_same_file(folder):
    files = []
    for _ in range(2):
        assert train_tokenizer.main(arguments(folder, vocab_size=280)) == 0
        files.append((folder / "out" / "tokenizer.json").read_bytes())
    assert files[0] == files[1]


def test_records_and_more_special_tokens(folder, capsys):
    more = ("--text_key", "meta.text", "--special", "<|x|>", "<|endoftext|>")
    assert train_tokenizer.main(arguments(folder, *more, inputs=("b.jsonl",), vocab_size=5000)) == 0
    out = capsys.readouterr().out
    assert f"{len(''.join(WORDS.split()))} bytes of text read" in out
    assert "of 5,000 asked for: the text has no more pairs to merge" in out
    vocabulary = json.loads((folder / "out" / "tokenizer.json").read_text())["model"]["vocab"]
    assert vocabulary["<|x|>"] == 3


def test_max_bytes_ends_the_reading(folder, capsys):
    assert train_tokenizer.main(arguments(folder, "--max_bytes", "100")) == 0
    assert ": 100 bytes of text read" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(vocab_size=258), "--vocab_size 258: 256 bytes and 3 special tokens need 259"),
        (dict(inputs=("c.txt",)), "no such file, directory or pattern"),
        (dict(inputs=("empty.txt",)), "no documents"),
        (dict(inputs=("b.jsonl",)), "b.jsonl:1: has no key 'text'; it has 'meta'"),
        (dict(inputs=("a.txt", "bad.txt")), "bad.txt: is not UTF-8 at byte 1 (0xff)"),
    ],
)
def test_mistakes_are_named(folder, capsys, change, message):
    (folder / "empty.txt").write_text("")
    (folder / "bad.txt").write_bytes(b"a\xff")
    with pytest.raises(SystemExit, match="2"):
        train_tokenizer.main(arguments(folder, **change))
    assert message in capsys.readouterr().err
    assert not (folder / "out").exists()


def test_a_store_keeps_its_tokenizer(folder, capsys):
    (folder / "out").mkdir()
    (folder / "out" / "manifest.json").write_text("{}")
    with pytest.raises(SystemExit, match="2"):
        train_tokenizer.main(arguments(folder))
    assert "is a token store" in capsys.readouterr().err
