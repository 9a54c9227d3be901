"""`python -m minitf.train` as a user meets it: exit statuses, messages, and what a run leaves in its work directory."""

import contextlib
import io
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from minitf import config, train
from minitf.runtime.log import StartUp
from minitf.workdir import begin, load_model, resolve, use_compilation_cache
from tests.common import ROOT, TINY, change, run_module, series
from tools import compare_runs

pytestmark = pytest.mark.usefixtures("rate_known")

CONFIG = """\"\"\"The cases' set-up.\"\"\"
import dataclasses
from minitf import config
from tests.common import TINY

def get_config():
    c = config.default()
    c.update(dataclasses.asdict(TINY))
    return c
"""
TEXT = "The quick brown fox jumps over the lazy dog.\n" * 40
BYTES = ["--config.data.kind=text", "--config.model.vocab_size=None", "--config.data.path"]


class Ended(NamedTuple):
    status: int
    out: str
    err: str


class Run(NamedTuple):
    workdir: Path
    status: int
    out: str
    err: str
    lines: list[dict]  # of metrics.jsonl
    overrides: tuple[str, ...]


def read_jsonl(workdir: Path) -> list[dict]:
    text = (workdir / "metrics.jsonl").read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def events(workdir: Path) -> EventAccumulator:
    return EventAccumulator(str(workdir)).Reload()


def tree(directory: Path) -> dict[str, bytes]:
    """Every file below and its bytes."""
    files = (p for p in directory.rglob("*") if p.is_file())
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in files}


def main(*args: Any) -> int:
    try:
        return train.main(list(map(str, args)))
    except SystemExit as e:
        return e.code


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("configs") / "cases.py"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """Trains the cases' set-up with these overrides, for tests that share the run."""

    def trained(*overrides: str) -> Run:
        workdir = tmp_path_factory.mktemp("trained") / "run"
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            status = main("--config", tiny, "--workdir", workdir, *(f"--config.{o}" for o in overrides))
        return Run(workdir, status, out.getvalue(), err.getvalue(), read_jsonl(workdir), overrides)

    return trained


@pytest.fixture
def workdir(tmp_path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def cli(tiny, workdir, capfd):
    """Runs the command line in this process on the cases' set-up and in `workdir`; words after them may change both."""

    def cli(*args: Any) -> Ended:
        capfd.readouterr()
        status = main("--config", tiny, "--workdir", workdir, *args)
        return Ended(status, *capfd.readouterr())

    return cli


@pytest.fixture
def refused(cli, workdir):
    """Runs the command line and returns the one message with which it refused, having made and said nothing else."""

    def refused(*args: Any) -> str:
        before = tree(workdir.parent)
        ended = cli(*args)
        assert ended.status == 2
        assert ended.err.startswith("error: ")
        assert ended.err.count("\n") == 1
        assert "Traceback" not in ended.err
        assert tree(workdir.parent) == before
        assert not (workdir.is_dir() and not any(workdir.iterdir())), "an empty work directory was left"
        return ended.err

    return refused


# ---- a whole run


@pytest.fixture(scope="module")
def finished(trained, tmp_path_factory) -> Run:
    """Five steps on bytes of text, logged at 2, 4 and 5, evaluated at 3 and 5."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    length = ["steps=5", "log_every=2", "eval_every=3", "eval_batches=2"]
    return trained("data.kind=text", f"data.path={path}", "model.vocab_size=None", *length)


def test_finished_run_ends_with_status_0(finished):
    assert finished.status == 0


def test_the_first_step_says_where_the_time_since_the_start_went(cli, workdir):
    begun = ["imports", "processes", "devices", "data", "peak rate"]
    for steps, state in ((2, "init"), (3, "restore")):
        ended = cli(f"--config.steps={steps}", "--config.checkpoint.last=True")
        lines = map(json.loads, (workdir / "events.jsonl").read_text().splitlines())
        told = [e for e in lines if e["event"] == "first_step"][-1]
        assert told["step"] == (1 if state == "init" else 3)
        assert list(told["phases"]) == [*begun, state, "compile", "step", "other"]
        assert all(seconds >= 0 for seconds in told["phases"].values())
        assert sum(told["phases"].values()) == pytest.approx(told["seconds"])
        assert ended.out.count("first step after ") == 1
        assert StartUp.described(told) in ended.out


def test_metrics_hold_one_object_for_each_logged_step(finished):
    assert [line["step"] for line in finished.lines if "params/total" in line] == [0]
    assert [line["step"] for line in finished.lines if "train/loss" in line] == [2, 4, 5]
    assert [line["step"] for line in finished.lines if "eval/loss" in line] == [3, 5]
    assert len(finished.lines) == 6


@pytest.mark.parametrize(
    ("steps", "tags"),
    [
        ([0], "params/total params/embedding params/non_embedding"),
        ([2, 4, 5], "train/loss train/learning_rate train/grad_norm train/tokens_seen train/skipped_steps"),
        ([2, 4, 5], "perf/step_time_s perf/tokens_per_s perf/mfu perf/data_wait_frac"),
        ([2], "perf/compile_time_s"),
        ([3, 5], "eval/loss eval/perplexity eval/bits_per_byte eval/tokens"),
    ],
)
def test_tags_stand_at_their_steps_as_finite_numbers(finished, steps, tags):
    for tag in tags.split():
        of = series(finished.lines, tag)
        assert list(of) == steps, tag
        assert all(type(v) in (int, float) and math.isfinite(v) for v in of.values()), tag


def test_metrics_agree_with_one_another(finished):
    first, *_ = finished.lines
    assert first["params/total"] == first["params/embedding"] + first["params/non_embedding"]
    assert series(finished.lines, "train/tokens_seen") == {n: n * 8 * 16 for n in (2, 4, 5)}
    assert series(finished.lines, "train/learning_rate") == pytest.approx(dict.fromkeys((2, 4, 5), 1e-3))
    for line in finished.lines:
        if "eval/loss" in line:
            assert line["eval/tokens"] == 180  # a tenth of 1,800 bytes and the end token, all but the first
            assert line["eval/perplexity"] == pytest.approx(math.exp(line["eval/loss"]))
        if "train/loss" in line:
            assert line["perf/tokens_per_s"] == pytest.approx(8 * 16 / line["perf/step_time_s"])
            assert 0 <= line["perf/data_wait_frac"] <= 1
            assert line["perf/mfu"] > 0


def test_tensorboard_holds_the_same_scalars(finished):
    reader = events(finished.workdir)
    expected = {tag for line in finished.lines for tag in line if tag != "step"}
    assert set(reader.Tags()["scalars"]) == expected
    for tag in expected:
        written = {e.step: e.value for e in reader.Scalars(tag)}
        assert written == {step: np.float32(value) for step, value in series(finished.lines, tag).items()}


def test_tensorboard_holds_the_config(finished):
    (event,) = events(finished.workdir).Tensors("config/text_summary")
    assert json.loads(event.tensor_proto.string_val[0]) == json.loads((finished.workdir / "config.json").read_text())


def test_config_json_holds_the_resolved_settings(finished):
    stored = json.loads((finished.workdir / "config.json").read_text())
    cfg, missing = config.from_stored(stored)
    assert missing == []
    expected = change(
        TINY, steps=5, log_every=2, eval_every=3, eval_batches=2, data__kind="text", data__path=cfg.data.path
    )
    assert cfg == change(expected, model__vocab_size=259)  # the tokenizer's, though the settings left it open


def test_run_says_what_it_runs_on(finished):
    for words in (
        "devices: 8 x cpu, mesh data=1, fsdp=8, expert=1, tensor=1",
        "data text: 1,800 bytes, sha256 ",
        "model.attention.implementation=auto",
        "blocks/0/attention/q",
        "training for 5 steps of 8 x 16 tokens",
        "step 4/5  loss ",
        "step 5/5  evaluation loss ",
        f"tensorboard --logdir {finished.workdir}",
    ):
        assert words in finished.out
    assert "validation tokens\n" not in finished.out  # evaluations are of all


# ---- the work directory


def test_a_finished_run_without_a_checkpoint_is_not_begun_again_unasked(finished, refused):
    before = tree(finished.workdir)
    settings = [f"--config.{s}" for s in finished.overrides]
    message = refused("--workdir", finished.workdir, *settings)
    assert f"--workdir {finished.workdir}: holds a run that has finished and kept no checkpoint" in message
    assert "--overwrite" in message
    assert tree(finished.workdir) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/7/state", "events.out.tfevents.1.host"])
def test_traces_of_a_run_without_its_config_are_not_deleted_unasked(name, refused, workdir):
    (workdir / name).parent.mkdir(parents=True)
    (workdir / name).write_text("precious")
    assert name.partition("/")[0] in refused("--config.steps=0")


def test_overwrite_starts_anew_and_deletes_only_what_runs_write(finished, cli, workdir):
    shutil.copytree(finished.workdir, workdir)
    ours = set(tree(workdir))
    mine = {"notes.txt": b"mine", "config.json.bak": b"mine", "sub/metrics.jsonl": b"mine"}
    for name, content in {**mine, "checkpoints/7/state": b"of the older run"}.items():
        (workdir / name).parent.mkdir(parents=True, exist_ok=True)
        (workdir / name).write_bytes(content)
    assert cli("--config.steps=0", "--overwrite").status == 0
    files = tree(workdir)
    assert {name: files.pop(name) for name in mine} == mine
    assert json.loads(files["config.json"])["steps"] == 0
    assert [line["step"] for line in read_jsonl(workdir)] == [0]
    assert len(files) == len(ours - {"tokenizer.json"})  # the new run has no text
    assert all(tag.startswith("params/") for tag in events(workdir).Tags()["scalars"])


def test_a_link_is_taken_away_but_not_what_it_points_to(workdir, tmp_path):
    (tmp_path / "disk/7").mkdir(parents=True)
    (tmp_path / "disk/7/state").write_text("precious")
    workdir.mkdir()
    (workdir / "checkpoints").symlink_to(tmp_path / "disk")
    (workdir / "metrics.jsonl").symlink_to("gone")
    begin(resolve(str(workdir)), TINY, overwrite=True)
    assert (tmp_path / "disk/7/state").read_text() == "precious"
    assert [p.name for p in workdir.iterdir()] == ["config.json"]


def test_directory_with_a_users_own_files_is_free(workdir):
    workdir.mkdir()
    (workdir / "notes.txt").write_text("mine")
    assert begin(resolve(str(workdir)), TINY) == (False, [])
    assert (workdir / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("form", ["run", "./run/", "../{name}/run", "{path}/link/run", "~/run"])
def test_work_directory_may_be_given_in_any_form(form, workdir, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert str(resolve(form.format(name=tmp_path.name, path=tmp_path))) == str(workdir.resolve())


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("file", "is a file"),
        ("file/run", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("~nosuchuser/run", "~nosuchuser"),
        ("loop/run", "loop"),
    ],
)
def test_impossible_work_directory_is_refused(path, message, refused, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    assert message in refused("--config.steps=0", "--workdir", path)


# ---- settings


@pytest.mark.parametrize("argv", [[], ["--config.steps=7", "--config.model.pattern=full,sliding"]])
def test_print_config_prints_json_that_loads_and_runs_nothing(argv, cli, workdir):
    ended = cli("--print_config", *argv)
    expected = change(TINY, steps=7, model__pattern=("full", "sliding")) if argv else TINY
    assert (ended.status, ended.err) == (0, "")
    assert config.from_stored(json.loads(ended.out))[0] == expected
    assert not workdir.exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--config.stepps=3", "--config.stepps: no setting 'stepps' in the config; did you mean 'steps'?"),
        ("--config.model.dimm=3", "--config.model.dimm: no setting 'dimm' in model; did you mean 'dim'?"),
        ("--noconfig.data.shufle", "no setting 'shufle' in data; did you mean 'shuffle'?"),
        ("config.steps=3", "overrides begin with dashes: --config.steps=3"),
    ],
)
def test_mistyped_override_is_named_with_the_nearest_setting(argv, message, refused):
    assert message in refused(argv)


@pytest.mark.parametrize("argv", ["--steps=3", "--conf.steps=3", "--cfg.model.dim=3", "--config_steps=3", "--overwrit"])
def test_wrong_prefix_is_named(argv, cli, workdir):
    ended = cli(argv)
    assert ended.status == 2
    assert f"unrecognized arguments: {argv}" in ended.err
    assert not workdir.exists()


@pytest.mark.parametrize("text", ["1", "1.0", "1e0"])
def test_float_setting_given_an_integer_is_a_float(text, cli):
    learning_rate = json.loads(cli("--print_config", f"--config.optimizer.learning_rate={text}").out)["optimizer"][
        "learning_rate"
    ]
    assert learning_rate == 1.0
    assert type(learning_rate) is float


NO_INTEGERS = ("1e3", "10.0", "10.5", "")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        *[(f"steps={text}", "must be int or None; integers are written in full") for text in NO_INTEGERS],
        *[(f"seq_len={text}", "must be int; integers are written in full") for text in (*NO_INTEGERS, "None")],
        ("optimizer.learning_rate=", "must be float"),
        ("data.shuffle=maybe", "must be bool"),
        ("data.shuffle=", "must be bool"),
    ],
)  # fmt: skip
def test_value_of_another_type_is_refused(override, message, refused):
    assert f"--config.{override}: {message}" in refused(f"--config.{override}")


def test_section_given_a_value_is_refused(refused):
    assert "--config.model: is a section; set its settings: model.num_layers, " in refused("--config.model=3")


@pytest.mark.parametrize("name", ["seed", "data.seed"])
@pytest.mark.parametrize("seed", [2**32, 2**40, -1])
def test_seed_that_jax_would_alias_is_refused_with_the_range(name, seed, refused):
    assert f"{name}={seed}: must be at least 0 and at most 4294967295" in refused(f"--config.{name}={seed}")


@pytest.mark.parametrize("seed", [0, 2**31, 2**32 - 1])
def test_seed_within_the_range_is_used_as_it_is(seed, cli):
    assert json.loads(cli("--print_config", f"--config.seed={seed}").out)["seed"] == seed


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_sequence_longer_than_the_positions_is_refused(positions, refused):
    message = refused(f"--config.model.positions={positions}", "--config.seq_len=24")
    assert "seq_len=24: longer than model.max_seq_len=16" in message


# ---- length and schedule


def test_warm_up_as_long_as_the_run_is_a_ramp(cli, workdir):
    argv = ["--config.steps=10", "--config.optimizer.warmup_steps=10", "--config.optimizer.learning_rate=1"]
    assert cli(*argv, "--config.optimizer.schedule=cosine").status == 0
    rates = series(read_jsonl(workdir), "train/learning_rate")
    assert rates == pytest.approx({n: (n - 1) / 10 for n in range(1, 11)}, abs=1e-6)


@pytest.mark.parametrize("length", [["--config.steps=10"], ["--config.steps=None", "--config.tokens=1280"]])
def test_warm_up_longer_than_the_run_is_refused(length, refused):
    message = refused(*length, "--config.optimizer.warmup_steps=11")
    assert "optimizer.warmup_steps=11: longer than the run of 10 steps" in message


def test_zero_steps_end_with_status_0(cli, workdir):
    ended = cli("--config.steps=0")
    assert (ended.status, ended.err) == (0, "")
    assert "0 steps: nothing to train" in ended.out
    assert [line["step"] for line in read_jsonl(workdir)] == [0]


def test_negative_steps_are_refused(refused):
    assert "steps=-1: must be at least 0" in refused("--config.steps=-1")


# ---- the mesh

DOES_NOT_DIVIDE = {  # overrides -> what the message names: (setting, value, axis, size)
    "batch_size=6 mesh.data=8 mesh.fsdp=1": ("batch_size=6", "data=8"),
    "batch_size=8 accumulation=3": ("batch_size=8", "accumulation=3"),
    "batch_size=8 accumulation=2 mesh.data=8 mesh.fsdp=1": ("batch_size=8", "accumulation=2", "8 devices", "data=8"),
    "model.attention.num_heads=6 model.attention.num_kv_heads=3 model.attention.head_dim=4 mesh.tensor=2": (
        "axis 'kv_heads' has size 3",
        "mesh axis 'tensor' of size 2",
    ),
    "model.dim=20 model.attention.head_dim=4 mesh.fsdp=8": ("axis 'embed' has size 20", "mesh axis 'fsdp' of size 8"),
    "model.vocab_size=65 mesh.tensor=2": ("axis 'vocab' has size 65", "'tensor' of size 2", "model.vocab_size=65", "divides is 66"),
}  # fmt: skip


@pytest.mark.parametrize("overrides", DOES_NOT_DIVIDE, ids=lambda o: o.partition(" mesh")[0])
def test_size_that_does_not_divide_is_refused_by_name(overrides, refused):
    message = refused(*(f"--config.{o}" for o in overrides.split()))
    for part in DOES_NOT_DIVIDE[overrides]:
        assert part in message


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        ("model.attention.num_heads=6 model.attention.num_kv_heads=3 model.attention.head_dim=4 mesh.tensor=2",
         "model.attention.num_kv_heads=3"),
        ("model.dim=20 model.attention.head_dim=4 mesh.fsdp=8", "model.dim=20"),
        ("model.mlp.hidden=33 mesh.tensor=2", "model.mlp.hidden=33"),
    ],
)  # fmt: skip
def test_refusal_names_the_setting_too(overrides, setting, refused):
    assert setting in refused(*(f"--config.{o}" for o in overrides.split()))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("mesh.data=3", "mesh.data=3, mesh.fsdp=-1, mesh.expert=1, mesh.tensor=1: 8 devices are not divisible by 3"),
        ("mesh.data=3 mesh.fsdp=1", "mesh.data=3, mesh.fsdp=1, mesh.expert=1, mesh.tensor=1: the product is 3, but there are 8 "),
        ("mesh.data=16", "mesh.data=16, mesh.fsdp=-1, mesh.expert=1, mesh.tensor=1: 8 devices are not divisible by 16"),
        ("mesh.data=16 mesh.fsdp=1", "mesh.data=16, mesh.fsdp=1, mesh.expert=1, mesh.tensor=1: the product is 16, but "),
        ("mesh.data=-1", "mesh.data=-1, mesh.fsdp=-1, mesh.expert=1, mesh.tensor=1: at most one axis may be -1"),
    ],
)  # fmt: skip
def test_mesh_that_does_not_use_every_device_is_refused(overrides, message, refused):
    assert message in refused(*(f"--config.{o}" for o in overrides.split()))


def test_the_rest_is_filled_and_the_global_batch_stays(cli):
    ended = cli("--config.mesh.data=-1", "--config.mesh.fsdp=1", "--config.mesh.tensor=2", "--config.steps=0")
    assert ended.status == 0
    assert "mesh data=4, fsdp=1, expert=1, tensor=2" in ended.out
    assert "training for 0 steps of 8 x 16 tokens" in ended.out


# ---- attention that cannot run


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "model.attention.implementation=cudnn",
            "implementation=cudnn: it runs on gpu, this is cpu; these can: auto, ",
        ),
        (
            "model.attention.implementation=splash",
            "implementation=splash: it runs on tpu, this is cpu; these can: auto, ",
        ),
        ("model.attention.implementation=xla model.attention.softcap=30", "implementation=xla: it has no soft-cap"),
        ("model.attention.implementation=xla model.dropout=0.1", "implementation=xla: it has no dropout"),
    ],
)
def test_chosen_attention_that_cannot_run_is_refused_with_the_reason(overrides, message, refused):
    assert message in refused(*(f"--config.{o}" for o in overrides.split()))


# ---- mistakes in files and data


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "user.py: no such file"),
        ("def get_config(:", "user.py, line 1: SyntaxError: "),
        (CONFIG.replace("return c", "c.model.dimm = 3"), "user.py, line 9: AttributeError: Key \"dimm\" does not"),
        (CONFIG.replace("return c", "return 1 / 0"), "user.py, line 9: ZeroDivisionError: division by zero"),
        ("", "user.py: ValueError: it has no function get_config()"),
    ],
)  # fmt: skip
def test_mistake_in_a_config_file_is_one_message(text, message, refused, tmp_path):
    if text is not None:
        (tmp_path / "user.py").write_text(text)
    assert message in refused("--config", tmp_path / "user.py")


def test_without_a_config_the_usage_is_shown(capfd):
    assert main() == 2
    err = capfd.readouterr().err
    assert "usage: python -m minitf.train" in err
    assert "--config" in err


@pytest.mark.parametrize(
    ("content", "overrides", "message"),
    [
        (None, "", "text.txt: no such file"),
        (b"", "", "no text"),
        (b"too short", "", "needs at least 17 tokens, found "),
        (
            b"long enough to train",
            "data.val_fraction=0.01 eval_every=1 data.tokenizer=chars",
            "needs at least 2 tokens, found ",
        ),
        (TEXT.encode() + b"\xff" + TEXT.encode(), "data.tokenizer=chars", "text.txt: not UTF-8 at byte 1800 (0xff)"),
        (
            TEXT.encode(),
            "model.vocab_size=64",
            "model.vocab_size=64 is smaller than the 259 ids of data.tokenizer=bytes",
        ),
    ],
)
def test_mistake_in_the_data_is_one_message(content, overrides, message, refused, tmp_path):
    if content is not None:
        (tmp_path / "text.txt").write_bytes(content)
    assert message in refused(*BYTES, tmp_path / "text.txt", *(f"--config.{o}" for o in overrides.split()))


def test_bad_id_found_while_reading_is_one_message(cli, tmp_path):
    ids = np.arange(64 * 40, dtype=np.uint16) % 64
    ids[100] = 64
    ids.tofile(tmp_path / "ids.bin")
    ended = cli("--config.data.kind=tokens", f"--config.data.path={tmp_path / 'ids.bin'}", "--noconfig.data.shuffle")
    assert ended.status == 2
    assert ended.err.startswith("error: ")
    assert "ids.bin (train): id 64 at token 100 is not below the vocabulary size 64" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("long", [False, True])
def test_bad_id_of_the_validation_split_is_found_before_training(long, refused, tmp_path, monkeypatch):
    """Anywhere in it; of a very long one, where evaluations read."""
    ids = np.arange(64 * 40, dtype=np.uint16) % 64
    ids.tofile(tmp_path / "train.bin")
    ids[0 if long else -1] = 64
    ids.tofile(tmp_path / "val.bin")
    if long:
        monkeypatch.setattr("minitf.data.pipeline.CHECKED", 100)
    settings = ["data.kind=tokens", f"data.path={tmp_path}", "eval_every=5", "eval_batches=1"]
    message = refused(*(f"--config.{s}" for s in settings))
    assert f"val.bin: id 64 at token {0 if long else 2559} is not below the vocabulary size 64" in message


# ---- losses that are not finite

DIVERGES = [
    "steps=4",
    "optimizer.kind=sgd",
    "optimizer.learning_rate=1e18",
]  # parameters near 1e18: their norm is finite


@pytest.fixture(scope="module")
def skipping(trained) -> Run:
    return trained(*DIVERGES, "optimizer.nonfinite=skip")


def test_nonfinite_loss_ends_with_status_4_and_names_the_step(trained, skipping):
    stopped = trained(*DIVERGES, "log_every=100")
    assert stopped.status == 4
    (first, *_) = (n for n, loss in series(skipping.lines, "train/loss").items() if loss is None)
    assert f"error: not finite at step {first}: loss nan" in stopped.err
    assert "this update was not applied" in stopped.err
    assert "optimizer.nonfinite=skip" in stopped.err


def test_nonfinite_skip_goes_on_and_counts(skipping):
    assert skipping.status == 0
    losses = series(skipping.lines, "train/loss")
    bad = [loss is None for loss in losses.values()]  # JSON has no NaN
    assert bad == [False, True, True, True]
    assert series(skipping.lines, "train/skipped_steps") == {n: sum(bad[:n]) for n in losses}
    assert skipping.out.count(": skipped") == 3


def test_nonfinite_update_is_not_applied(skipping):
    for line in skipping.lines:
        norms = {tag: value for tag, value in line.items() if tag.startswith(("norm/parameter/", "norm/update/"))}
        if line["step"] == 1:
            good = norms
        elif line["step"] > 1:
            assert norms == {tag: value if "parameter" in tag else 0.0 for tag, value in good.items()}
    assert all(math.isfinite(value) for value in good.values())


# ---- a process of its own


@pytest.fixture
def process(tiny, tmp_path):
    """Starts a process that trains for long and waits until its metrics hold some words; killed in the end if it still lives."""
    metrics, started = tmp_path / "run/metrics.jsonl", []

    def start(words: str, *overrides: str) -> subprocess.Popen:
        settings = ["--config.steps=2000", "--config.checkpoint.last=True", *overrides]
        command = [sys.executable, "-m", "minitf.train", "--config", tiny, "--workdir", tmp_path / "run", *settings]
        env = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(ROOT)}
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process = subprocess.Popen([*map(str, command)], env=env, **pipes)
        started.append(process)
        for _ in range(1200):
            if metrics.exists() and words in metrics.read_text():
                return process
            with contextlib.suppress(subprocess.TimeoutExpired):
                pytest.fail(f"ended early with status {process.wait(0.1)}: {process.stderr.read()}")
        pytest.fail("no such step was logged")

    yield start
    for p in started:
        p.kill()
        p.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_signal_ends_after_a_whole_step_saves_it_and_the_same_command_goes_on(number, process, cli, workdir):
    alive = process('"step": 20,')
    # A second run in its directory is refused meanwhile.
    assert f"another run writes there (process {alive.pid} on " in refused_beside(cli)
    alive.send_signal(number)
    out, err = alive.communicate(timeout=60)
    assert alive.returncode == 3
    assert "Traceback" not in err
    _, *lines = read_jsonl(workdir)
    last = len(lines)
    assert [line["step"] for line in lines] == list(range(1, last + 1))
    assert f"stopped by {number.name} after step {last} of 2000; the same command goes on" in out
    assert [p.name for p in (workdir / "checkpoints").iterdir()] == [str(last)]

    # The interrupted run and one that was not are the same, a few steps later.
    more = [f"--config.steps={last + 3}", "--config.mesh.fsdp=1", "--config.checkpoint.last=True"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *args: jax.local_devices()[:1])
        assert f"resuming after step {last} of {last + 3}" in cli(*more).out
        whole = workdir.parent / "whole"
        assert cli(*more, "--workdir", whole).status == 0
    lines, equal = compare_runs.compare(*(compare_runs.read(resolve(str(w))) for w in (workdir, whole)))
    assert equal, lines
    assert f"train/loss: equal in all {last + 3} steps that both recorded, 1 to {last + 3}" in lines


def refused_beside(cli) -> str:
    ended = cli("--config.steps=2000", "--config.checkpoint.last=True", "--config.mesh.fsdp=8")
    assert ended.status == 2
    return ended.err


@pytest.mark.slow
def test_a_full_disk_ends_the_run_with_the_reason_and_the_earlier_checkpoint_whole(process, cli, workdir):
    alive = process('"step": 20,', "--config.checkpoint.every=15", "--config.model.mlp.hidden=2000")
    # No file may grow from now on beyond what arrays need: the second save fails, as on a disk that is full.
    resource.prlimit(alive.pid, resource.RLIMIT_FSIZE, (60_000, 60_000))
    _, err = alive.communicate(timeout=60)
    assert alive.returncode == 1
    good = json.loads(next(workdir.glob("checkpoints/*/about/metadata")).read_text())["step"]
    assert re.fullmatch(
        rf"error: the checkpoint of step \d+ could not be written: File too large; the newest complete checkpoint is of step {good}\n",
        err,
    )
    assert load_model(workdir).step == good


def test_max_run_time_ends_with_status_3_after_saving(cli, workdir, monkeypatch):
    # This process is older than a second: it stops after its first step, as all before it ends within the time that it is given.
    monkeypatch.setattr("minitf.runtime.watch.BY_ITSELF", 600.0)
    ended = cli("--config.steps=9", "--config.max_run_time=1s", "--config.checkpoint.last=True")
    assert ended.status == 3
    assert "stopped by max_run_time after step 1 of 9; the same command goes on" in ended.out
    assert [p.name for p in (workdir / "checkpoints").iterdir()] == ["1"]


@pytest.mark.parametrize(
    ("setting", "variable", "directory"),
    [
        (None, None, "{runs}/.compilation_cache"),
        ("elsewhere", None, "{here}/elsewhere"),
        ("none", None, None),
        (None, "/of/jax", None),
    ],
)
def test_compiled_programs_are_kept_beside_the_work_directory(setting, variable, directory, tmp_path, monkeypatch):
    updates = {}
    monkeypatch.setattr(jax.config, "update", updates.__setitem__)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    if variable is not None:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", variable)
    use_compilation_cache(setting, resolve("runs/a"))
    expected = directory and directory.format(runs=tmp_path / "runs", here=tmp_path)
    assert updates.get("jax_compilation_cache_dir") == expected


def test_init_from_nothing_is_refused(refused, tmp_path):
    assert "nowhere: holds no checkpoints" in refused(f"--config.init_from={tmp_path / 'nowhere'}")


def test_all_checkpoints_damaged_is_a_failure_and_no_fresh_start(cli, workdir):
    argv = ["--config.steps=2", "--config.checkpoint.last=True"]
    assert cli(*argv).status == 0
    (workdir / "checkpoints/2/about/metadata").write_text("")
    before = read_jsonl(workdir)
    ended = cli(*argv)
    assert ended.status == 1
    assert re.match(r"error: .*/checkpoints: no checkpoint can be read\n  step 2: ", ended.err)
    assert "Traceback" not in ended.err
    assert read_jsonl(workdir) == before


def test_default_work_directory_is_named_after_the_config_file(tiny, tmp_path):
    ended = run_module(
        "minitf.train", "--config", tiny, "--config.steps=1", cwd=tmp_path, XLA_FLAGS=os.environ.get("XLA_FLAGS", "")
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [line["step"] for line in read_jsonl(tmp_path / "runs/cases")] == [0, 1]
    assert config.from_stored(json.loads((tmp_path / "runs/cases/config.json").read_text()))[0] == change(TINY, steps=1)


def test_mistake_is_one_line_on_stderr_and_status_2(tiny, tmp_path):
    ended = run_module("minitf.train", "--config", tiny, "--config.model.dimm=3", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(
        "error: --config.model.dimm: no setting 'dimm' in model; did you mean 'dim'?; --help_settings"
    )
    assert ended.stderr.count("\n") == 1
    assert not any(tmp_path.iterdir())
