"""Paths that a user gives: one rule for all."""

import os

import pytest
from common import TINY

from minitf import evaluate, generate, train
from minitf.data import datasets, texts
from minitf.data.datasets import DataConfig
from minitf.huggingface.__main__ import main as convert
from minitf.paths import files_below, given
from minitf.workdir import begin, resolve
from tools import prepare_data, profile_summary, train_tokenizer
from tools.preparation import documents

TRAIN = ["--config", "configs/tiny.py"]


@pytest.mark.parametrize(
    ("main", "command", "setting"),
    [
        (train.main, [*TRAIN, "--workdir", ""], "--workdir"),
        (train.main, [*TRAIN, "--workdir", " ", "--overwrite"], "--workdir"),
        (train.main, ["--config", ""], "--config"),
        (evaluate.main, ["--workdir", ""], "--workdir"),
        (generate.main, ["--workdir", "", "--prompt", "a"], "--workdir"),
        (generate.main, ["--workdir", "w", "--prompts", ""], "--prompts"),
        (convert, ["import", "", "w"], "HF_DIR"),
        (convert, ["export", "w", ""], "HF_DIR"),
        (convert, ["export", "", "w"], "WORKDIR"),
        (prepare_data.main, ["--input", "x", "--tokenizer", "bytes", "--output", ""], "--output"),
        (prepare_data.main, ["--input", "", "--tokenizer", "bytes", "--output", "x"], "--input"),
        (prepare_data.main, ["--input", "x", "--tokenizer", "", "--output", "x"], "--tokenizer"),
        (train_tokenizer.main, ["--input", "x", "--output", "", "--vocab_size", "300"], "--output"),
        (profile_summary.main, [""], "DIR"),
    ],
)
def test_an_empty_path_is_refused_by_its_name(main, command, setting, tmp_path, monkeypatch, capsys):
    if "configs/tiny.py" not in command:
        monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(command)
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert setting in err
    assert "empty" in err or "needs --tokenizer" in err
    assert list(tmp_path.iterdir()) == []


def test_a_tilde_is_the_home_wherever_a_path_is_given(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("some text " * 9)
    command = [
        "--input",
        "~/x.txt",
        "--output",
        "~/store",
        "--tokenizer",
        "bytes",
        "--workers",
        "1",
        "--val_fraction",
        "0",
    ]
    assert prepare_data.main(command) == 0
    assert (tmp_path / "store/manifest.json").is_file()
    assert not (tmp_path / "~").exists()
    (tmp_path / "c.py").write_text("from minitf import config\n\nget_config = config.default\n")
    capsys.readouterr()
    assert train.main(["--config", "~/c.py", "--print_config", "--config.steps=1"]) == 0
    with pytest.raises(ValueError, match="x ~nobody_of_this_name"):
        given("~nobody_of_this_name/y", "x")


def test_a_config_json_says_what_to_give(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit):
        train.main(["--config", str(tmp_path / "config.json")])
    assert "is no Python file with get_config(); where it is the config.json of a run" in capsys.readouterr().err


def test_a_run_inside_the_checkpoints_of_another_is_refused(tmp_path):
    begin(resolve(str(tmp_path)), TINY)
    with pytest.raises(ValueError, match="lies inside the checkpoints of the run"):
        begin(resolve(str(tmp_path / "checkpoints/10")), TINY, overwrite=True)


def test_links_are_followed_each_file_once(tmp_path):
    corpus, elsewhere = tmp_path / "corpus", tmp_path / "mnt/part2"
    corpus.mkdir()
    elsewhere.mkdir(parents=True)
    (corpus / "a.txt").write_text("a")
    for i in range(3):
        (elsewhere / f"b{i}.txt").write_text(f"b{i}")
    (elsewhere / ".hidden").write_text("no")
    (corpus / "part2").symlink_to(elsewhere)
    (corpus / "again").symlink_to(elsewhere)
    (elsewhere / "loop").symlink_to(corpus)
    (corpus / "same.txt").symlink_to(corpus / "a.txt")
    (corpus / "broken.txt").symlink_to(corpus / "gone")
    names = [os.path.relpath(f, corpus) for f in files_below(corpus)]
    assert names == ["a.txt", "again/b0.txt", "again/b1.txt", "again/b2.txt"]
    assert len(documents.find_files([str(corpus)])) == 4
    found, _ = texts.read_text(str(corpus), "data.path")
    assert sorted(text for _, text in found) == [b"a", b"b0", b"b1", b"b2"]


def test_a_name_that_is_not_utf8_is_a_name(tmp_path):
    for name in (b"caf\xe9.txt", b"plain.txt"):
        with open(os.fsencode(tmp_path) + b"/" + name, "w") as f:
            f.write("words " * 100)
    cfg = DataConfig(kind="text", path=str(tmp_path), val_fraction=0.5)
    corpus = datasets.load(cfg, None)
    assert len(corpus.train) + len(corpus.val) == 2 * 601


def test_the_default_directory_is_named_by_the_config_file():
    assert train.default_workdir("configs/gpt2_124m.py:original") == "runs/gpt2_124m"
