"""The command line that goes on with text, and the texts that a run writes while it trains."""

import io
import json
import math
import sys

import jax
import pytest
from common import change, launch, series, text_config

from minitf import config, generate
from minitf import job as job_lib
from minitf.runtime.log import json_lines
from minitf.workdir import load_model


@pytest.fixture(scope="module")
def workdir(corpus, tmp_path_factory):
    """A run of a few steps over the bytes of the text."""
    directory = tmp_path_factory.mktemp("run") / "w"
    cfg = text_config(corpus, steps=4, checkpoint__last=True, data__tokenizer="bytes", model__vocab_size=320)
    cfg = change(cfg, model__max_seq_len=64)
    assert launch(cfg, directory)[0] == 0
    return directory


@pytest.fixture
def said(workdir, capsys, monkeypatch):
    """(status, standard output, standard error) of the command line, standard input being this text."""

    def call(*arguments, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            status = generate.main(["--workdir", str(workdir), "--mesh.fsdp", "1", "--mesh.data", "-1", *arguments])
        except SystemExit as e:
            status = e.code
        return status, *capsys.readouterr()

    return call


def test_the_prompt_and_its_continuation_are_printed_and_what_was_made(said):
    status, out, err = said("--prompt", "the ", "--max_new_tokens", "9", "--temperature", "0")
    assert status == 0
    assert out.startswith("the ")
    assert out.endswith("\n")
    assert "[9 tokens in " in err
    assert "ended by its length]" in err


def test_the_same_seed_gives_the_same_text_and_another_seed_another(said):
    ask = lambda *more: said("--prompt", "the ", "--max_new_tokens", "30", *more)[1]
    assert ask() == ask("--seed", "0") == ask("--chunk", "1")
    assert ask() != ask("--seed", "1")


def test_json_lines_hold_each_text_and_its_log_probabilities(said):
    status, out, _ = said(
        *("--prompt", "the ", "--prompt", "a", "--num_samples", "2", "--max_new_tokens", "7", "--json", "--log_probs")
    )
    lines = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert [line["prompt"] for line in lines] == ["the ", "the ", "a", "a"]
    for line in lines:
        assert line["tokens"] == len(line["ids"]) == len(line["log_probs"]) <= 7
        assert all(-math.inf < p <= 0 for p in line["log_probs"])
    assert lines[0]["ids"] != lines[1]["ids"]
    assert "ids" not in json.loads(said("--prompt", "a", "--json", "--max_new_tokens", "3")[1])


def test_batches_change_nothing(said, tmp_path):
    (tmp_path / "p.txt").write_text("one\n\ntwo two\nthree\n")
    ask = lambda *more: said("--prompts", str(tmp_path / "p.txt"), "--json", "--max_new_tokens", "9", *more)[1]
    assert [json.loads(line)["prompt"] for line in ask().splitlines()] == ["one", "two two", "three"]
    assert ask() == ask("--batch_size", "2") == ask("--batch_size", "1")


def test_prompts_come_from_lines_json_lines_and_standard_input(said, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a\\nb"}\n{"prompt": ""}\n')
    few = ("--json", "--max_new_tokens", "3")
    prompts = lambda out: [json.loads(line)["prompt"] for line in out.splitlines()]
    assert prompts(said("--prompts", str(tmp_path / "p.jsonl"), *few)[1]) == ["a\nb", ""]
    assert prompts(said("--prompts", "-", *few, stdin="x\ny\n")[1]) == ["x", "y"]
    assert prompts(said(*few, stdin="x\ny\n")[1]) == ["x\ny\n"]
    assert said("--max_new_tokens", "3", stdin="x\ny\n")[1].startswith("x\ny\n")


def test_a_stop_string_ends_the_text(said):
    free = json.loads(said("--prompt", "the ", "--max_new_tokens", "40", "--json", "--temperature", "1")[1])
    stop = free["text"][3:5]
    found = json.loads(
        said("--prompt", "the ", "--max_new_tokens", "40", "--json", "--temperature", "1", "--stop", stop)[1]
    )
    assert found["text"] == free["text"][: free["text"].index(stop)]
    assert found["reason"] == "stop"


def test_without_a_number_the_text_fills_what_the_model_tells_apart(said):
    found = json.loads(said("--prompt", "the ", "--json")[1])
    assert found["reason"] == "end" or found["tokens"] == 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "the ", "--max_new_tokens", "61"], "a prompt of 4 tokens and max_new_tokens=61: 4 + 61 > model.max_seq_len=64"),
        (["--prompt", "a", "--max_new_tokens", "0"], "--max_new_tokens=0: must be at least 1"),
        (["--prompt", "a", "--top_k", "-1"], "--top_k=-1: must be at least 0"),
        (["--prompt", "a", "--seed", "-1"], "--seed=-1: must be from 0 to"),
        (["--prompt", "a", "--stop", ""], "--stop: an empty text"),
        (["--prompt", "a", "--log_probs"], "--log_probs: is for --json"),
        (["--prompt", "a", "--prompts", "x"], "--prompt and --prompts: give one of them"),
        (["--prompts", "/nowhere/p.txt"], "--prompts /nowhere/p.txt: No such file or directory"),
        (["--prompts", "-"], "--prompts -: holds no prompt"),
        (["--prompt", "a", "--step", "3"], "no checkpoint of step 3; there are those of [4]"),
        (["--prompt", "a", "--mesh.tensor", "3", "--mesh.data", "1"], "mesh.expert=1, mesh.tensor=3: the product is 3"),
    ],
)  # fmt: skip
def test_mistakes_end_in_one_message_before_anything_is_written(arguments, message, said):
    status, out, err = said(*arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert message in err


def test_a_line_that_is_no_prompt_is_named(said, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    status, _, err = said("--prompts", str(tmp_path / "p.jsonl"))
    assert status == 2
    assert 'p.jsonl: line 2 has no text "prompt"' in err


def test_a_run_without_a_tokenizer_is_refused(tmp_path, capsys):
    from common import TINY

    launch(change(TINY, steps=1, checkpoint__last=True, mesh__fsdp=1), tmp_path / "w")
    with pytest.raises(SystemExit):
        generate.main(["--workdir", str(tmp_path / "w"), "--prompt", "a"])
    assert "has no tokenizer.json" in capsys.readouterr().err


def test_what_is_typed_wrongly_does_not_end_the_session(workdir, capsys, monkeypatch):
    lines = iter(["the ", "x" * 64, "a"])

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def typed(_):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", typed)
    assert generate.main(["--workdir", str(workdir), "--mesh.data", "-1", "--mesh.fsdp", "1"]) == 0
    out, err = capsys.readouterr()
    assert "error: a prompt of 64 tokens" in err
    assert err.count("tokens in ") == 2
    assert out.count("\n") >= 3


# ---- while training


def written(workdir):
    """The samples that TensorBoard shows: step -> text."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(workdir))
    events.Reload()
    tag = "samples/text_summary"
    return {e.step: e.tensor_proto.string_val[0].decode() for e in events.Tensors(tag)}


def test_samples_leave_training_as_it_is_and_stand_beside_evaluation_and_saving(corpus, tmp_path, capsys):
    plain = text_config(corpus, steps=5, model__dropout=0.1, eval_every=1, eval_batches=1, checkpoint__every=1)
    _, expected = launch(plain, tmp_path / "a")
    capsys.readouterr()
    cfg = change(plain, sample_every=1, sample__prompts=("the", "a"), sample__max_new_tokens=8)
    _, lines = launch(cfg, tmp_path / "b")
    for tag in ("train/loss", "eval/loss"):
        assert series(lines, tag) == series(expected, tag)
    found = written(tmp_path / "b")
    assert sorted(found) == [1, 2, 3, 4, 5]
    assert all("--- 'the'\n    the" in text for text in found.values())
    assert capsys.readouterr().out.count("  samples\n--- 'the'\nthe") == 5
    assert {e["step"] for e in json_lines(tmp_path / "b/events.jsonl") if e["event"] == "sample"} == {1, 2, 3, 4, 5}
    # What was saved is what the update gave: the same as without samples.
    for step in (4, 5):
        a, b = (load_model(tmp_path / name, step).params for name in "ab")
        assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), a, b))


def test_samples_come_at_their_steps_and_after_the_last(corpus, tmp_path):
    cfg = text_config(corpus, steps=5, sample_every=2, sample__prompts=("a",), sample__max_new_tokens=4)
    launch(cfg, tmp_path / "w")
    assert sorted(written(tmp_path / "w")) == [2, 4, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(sample_every=0), "sample_every=0: must be at least 1"),
        (dict(sample_every=1, sample__prompts=()), "sample.prompts=.*: must hold at least one"),
        (dict(sample_every=1, sample__temperature=-1.0), "sample.temperature=-1.0: must be at least 0"),
        (dict(sample__top_k=3), "has no effect where sample_every=None"),
    ],
)
def test_settings_of_samples_are_checked(changes, message, corpus):
    with pytest.raises(ValueError, match=message):
        config.validate(text_config(corpus, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(sample__prompts=("€",)), "sample.prompts: '€': the prompt: character '€' at 0"),
        (dict(sample__prompts=("",)), "sample.prompts: '': a prompt without tokens"),
        (dict(sample__prompts=("a" * 16,)), "sample.prompts: 'a+': a prompt of 16 tokens"),
        (
            dict(data__kind="synthetic", data__path=None, data__val_path=None, data__tokenizer="bytes"),
            "sample_every=1: data.kind=synthetic has no tokenizer",
        ),
    ],
)
def test_prompts_are_checked_before_the_run(changes, message, corpus):
    with pytest.raises(ValueError, match=message):
        job_lib.prepare(text_config(corpus, sample_every=1, **changes), jax.devices()[:1])
