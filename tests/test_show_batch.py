import re

import numpy as np
import pytest
from common import make_store, some_texts

from minitf.data.tokenizer import ByteTokenizer
from tools import show_batch

BYTES = ByteTokenizer()


def row_of(segments, weights, text="abcdefghij"):
    """A row of the text's tokens; `segments` None: without."""
    ids = np.array([256 if c == "$" else ord(c) for c in text])
    row = {"inputs": ids[:-1], "targets": ids[1:], "weights": np.array(weights, np.float32)}
    return row if segments is None else {**row, "segments": np.array(segments)}


@pytest.mark.parametrize(
    ("row", "plain"),
    [
        (row_of(None, [1] * 9), "<a>bcdefghij"),
        (row_of(None, [1, 1, 1, 0, 0, 1, 1, 1, 1]), "<a>bcd<ef>ghij"),
        (row_of(None, [1] * 9, "ab$defghij"), "<a>b[eos]defghij"),
        (row_of([1, 1, 1, 2, 2, 2, 2, 2, 2], [1, 1, 0, 1, 1, 1, 1, 1, 1]), "<a>bc{2|<d>efghij"),
        (row_of([1, 1, 1, 2, 2, 2, 0, 0, 0], [1, 1, 0, 1, 1, 0, 0, 0, 0]), "<a>bc{2|<d>ef"),
        (row_of([1, 1, 1, 1, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0, 0]), "<abc>d"),
    ],
)
def test_marks_say_where_documents_begin_and_what_counts(row, plain):
    assert show_batch.rendered(row, BYTES, colour=False) == plain
    coloured = show_batch.rendered(row, BYTES, colour=True)
    assert re.sub(r"\x1b\[\d+m", "", coloured) == re.sub(r"<|>|\{\d\||\[|\]", "", plain)
    assert ("\x1b[2m" in coloured) == ("<" in plain)


def test_letters_of_several_bytes_are_whole_and_ids_without_a_tokenizer_are_numbers():
    ids = np.frombuffer("é€😀".encode(), np.uint8).astype(int)
    row = {"inputs": ids[:-1], "targets": ids[1:], "weights": np.zeros(len(ids) - 1), "segments": np.ones(len(ids) - 1)}
    row["weights"][:] = 1
    shown = show_batch.rendered(row, None, colour=False)
    assert shown == f"<{ids[0]} >{' '.join(map(str, ids[1:]))} "
    assert "€😀" in show_batch.rendered(row, BYTES, colour=False)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shown")
    store = make_store(folder / "store", some_texts(60), "--val_fraction", 0.2, "--pack", 32)
    lines = [
        "from minitf import config",
        "def get_config():",
        "    c = config.default()",
        "    c.steps, c.batch_size, c.seq_len = 1, 8, 32",
        f"    c.data.kind, c.data.path = 'store', {str(store)!r}",
        "    return c",
    ]
    (folder / "config.py").write_text("\n".join(lines))
    return str(folder / "config.py")


@pytest.mark.parametrize("packing", ["concat", "best_fit", "documents"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_the_command_shows_the_rows_of_a_batch(packing, split, config, capsys):
    arguments = ["--config", config, f"--config.data.packing={packing}", "--rows", "8", "--split", split]
    assert show_batch.main(arguments) == 0
    shown = capsys.readouterr().out
    assert shown.count("--- batch 0, row ") == 8
    assert "[eos]" in shown
    assert set(re.sub(r"---.*|\[eos\]|\{\d+\||[<>\s]", "", shown)) == set("abcd")
    assert show_batch.main([*arguments, "--color", "always"]) == 0
    assert "\033[7meos" in capsys.readouterr().out


def test_a_batch_that_is_not_there_is_refused(config, capsys):
    with pytest.raises(SystemExit) as stopped:
        show_batch.main(["--config", config, "--split", "val", "--batch", "99"])
    assert stopped.value.code == 2
    assert "--batch=99: must be below" in capsys.readouterr().err
