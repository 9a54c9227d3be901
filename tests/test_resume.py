"""A run that is stopped, killed or starved goes on as if nothing had been: same rows, losses, rates and parameters, to the bit."""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import psutil
import pytest
from common import ROOT, TINY, change, launch, series, slow, text_config
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from watched_rows import Watched

from minitf import job as job_lib
from minitf import loop, services
from minitf.data import datasets, pipeline
from minitf.data.store import DataError
from minitf.params import named
from minitf.runtime import watch
from minitf.runtime.checkpoint import Checkpoints
from minitf.runtime.log import json_lines
from minitf.runtime.writer import MetricWriter
from minitf.sharding.devices import surroundings
from minitf.sharding.mesh import MeshConfig
from minitf.workdir import begin, check_params, checkpoints_of, differences, load_model, resolve
from tests.test_checkpoint import largest_file, truncate
from tools import compare_runs

pytestmark = pytest.mark.usefixtures("rate_known")


def saving(corpus, **changes):
    """A run that saves: dropout, accumulation and shuffling are on."""
    defaults = dict(steps=20, accumulation=2, model__dropout=0.1, checkpoint__last=True, checkpoint__keep=None)
    return text_config(corpus, **(defaults | changes))


def about(workdir, step):
    """What the checkpoint of a step says."""
    with checkpoints_of(resolve(str(workdir))) as checkpoints:
        return checkpoints.about(step)


def same(a, b) -> None:
    """Asserts that two runs recorded the same batches, losses and parameters in all steps that both recorded."""
    lines, equal = compare_runs.compare(*(compare_runs.read(resolve(str(w))) for w in (a, b)))
    assert equal, "\n".join(lines)


def final(workdir):
    return jax.tree.map(np.asarray, load_model(workdir).params)


class Killed(BaseException):
    """What no handler of the run may catch for its own ends."""


@contextlib.contextmanager
def killed_after(step):
    """The run dies as soon as it has logged this step."""
    write = MetricWriter.write

    def dying(self, at, values):
        write(self, at, values)
        if at == step and "train/loss" in values:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricWriter, "write", dying)
        with contextlib.suppress(Killed):
            yield
            raise AssertionError(f"the run lived on after step {step}")


@pytest.fixture(scope="module", autouse=True)
def programs_shared():
    """Runs of this process with the same step share its traces: they are alike, and most of the time of so short a run."""
    real, made = job_lib.program, {}

    def program(job):
        assert job.cfg.optimizer.schedule == "constant"  # else the number of steps would be part of the step
        alike = dict(steps=None, log_every=1, eval_every=None, init_from=None, checkpoint=TINY.checkpoint)
        key = change(job.cfg, **alike), job.mesh
        if key not in made:
            made[key] = real(job)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "program", program)
        yield


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    """The work directory of a run of these settings that nothing disturbed."""

    @functools.cache
    def undisturbed(**changes):
        workdir = tmp_path_factory.mktemp("undisturbed") / "w"
        status, _ = launch(saving(corpus, **changes), workdir)
        assert status == 0
        return workdir

    return undisturbed


# ---- the same run


@pytest.mark.parametrize("cut", [13, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 10))])  # 5: an epoch's edge
def test_interrupted_run_equals_the_uninterrupted(corpus, undisturbed, tmp_path, cut):
    whole = undisturbed()
    launch(saving(corpus, steps=cut), tmp_path / "w")
    status, lines = launch(saving(corpus), tmp_path / "w")
    assert status == 0
    assert list(series(lines, "train/loss")) == list(range(1, 21))
    for tag in ("train/loss", "train/learning_rate", "train/grad_norm", "train/tokens_seen"):
        assert series(lines, tag) == series(json_lines(resolve(str(whole)) / "metrics.jsonl"), tag)
    same(whole, tmp_path / "w")
    jax.tree.map(np.testing.assert_array_equal, final(whole), final(tmp_path / "w"))
    assert about(tmp_path / "w", 20)["arrays"] == about(whole, 20)["arrays"]  # the optimizer's state too
    # The comparison is worth something: batches differ from step to step, and each epoch has its own order.
    batches = compare_runs.read(resolve(str(whole))).batches
    assert len(set(batches.values())) == 20


@pytest.mark.slow
def test_killed_run_equals_the_undisturbed(corpus, undisturbed, tmp_path):
    with killed_after(17):
        launch(saving(corpus, checkpoint__every=5), tmp_path / "w")
    status, _ = launch(saving(corpus, checkpoint__every=5), tmp_path / "w")
    assert status == 0
    same(undisturbed(checkpoint__every=5), tmp_path / "w")


@pytest.mark.slow
def test_dropout_goes_on_where_it_was(corpus, undisturbed, tmp_path):
    changes = dict(model__dropout=0.5, data__shuffle=False)
    whole = undisturbed(**changes)
    launch(saving(corpus, steps=10, **changes), tmp_path / "w")
    launch(saving(corpus, **changes), tmp_path / "w")
    same(whole, tmp_path / "w")
    # Without shuffling step 11 sees the batch of step 1: a dropout that began again would give its masks again.
    batches = compare_runs.read(resolve(str(whole))).batches
    assert batches[1] == batches[11]


LOADERS = [
    dict(shuffle=s, isolate_documents=i, threads=t) for s in (True, False) for i in (True, False) for t in (1, 4)
]
CONTINUE = """
import json, sys
from tests.test_resume import batches_of
json.dump(batches_of(*json.load(sys.stdin)), sys.stdout)
"""


def batches_of(folder, positions, n):
    """For every way to load and every position the ids of the next n batches."""
    out = []
    for loader in LOADERS:
        cfg = change(TINY.data, kind="text", path=folder, **loader)
        store = datasets.load(cfg, None).train
        rows = pipeline.training_rows(store, 16, cfg, seed=3)
        layout = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        for start in positions:
            found = pipeline.batches(rows, 8, layout, cfg, start)
            out.append([np.asarray(next(found)["inputs"]).tolist() for _ in range(n)])
    return out


def test_a_new_process_goes_on_at_any_position(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"document {i}: " + "abcdefgh"[i % 8] * (10 + i))
    positions = (0, 1, 7)
    whole = batches_of(str(folder), (0,), 27)
    done = subprocess.run(
        [sys.executable, "-c", CONTINUE],
        input=json.dumps([str(folder), positions, 20]),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
    )
    expected = [w[start : start + 20] for w in whole for start in positions]
    assert json.loads(done.stdout) == expected
    assert len({json.dumps(e) for e in expected}) == 2 * len(positions)  # shuffled or not, in every position


@pytest.mark.parametrize("every", [3, pytest.param(7, marks=pytest.mark.slow)])
def test_saving_evaluating_and_logging_change_nothing(corpus, undisturbed, tmp_path, every):
    cfg = saving(corpus, checkpoint__every=every, eval_every=every, log_every=every, checkpoint__keep=1)
    status, _ = launch(cfg, tmp_path / "w")
    assert status == 0
    same(undisturbed(), tmp_path / "w")


def test_evaluating_and_saving_every_step_saves_the_values_after_it(corpus, undisturbed, tmp_path):
    cfg = saving(corpus, steps=5, eval_every=1, checkpoint__every=1)
    assert launch(cfg, tmp_path / "w")[0] == 0
    for step in (3, 5):
        assert about(tmp_path / "w", step)["arrays"] == about(undisturbed(steps=step), step)["arrays"]


@pytest.mark.parametrize(("minutes", "saved"), [(1e-9, ["1", "2", "3"]), (60.0, ["3"]), (None, ["3"])])
def test_saves_go_by_the_clock_too(corpus, tmp_path, minutes, saved):
    launch(saving(corpus, steps=3, checkpoint__every_minutes=minutes), tmp_path / "w")
    assert sorted(p.name for p in (tmp_path / "w/checkpoints").iterdir()) == saved


def test_checkpoints_count_optimizer_steps(corpus, tmp_path):
    launch(saving(corpus, steps=12, accumulation=4, checkpoint__every=6), tmp_path / "w")
    assert sorted(p.name for p in (tmp_path / "w/checkpoints").iterdir()) == ["12", "6"]
    assert about(tmp_path / "w", 6)["data"]["next_batch"] == 6


def test_a_stopped_run_saves_at_once_and_evaluates_when_it_goes_on(corpus, undisturbed, tmp_path, monkeypatch):
    cfg = saving(corpus, steps=10, eval_every=2)

    def beat(self, step):  # the first step of a start has ended
        signal.raise_signal(signal.SIGTERM)
        monkeypatch.setattr(loop.Watchdog, "beat", lambda self, step: None)

    for _ in range(4):
        monkeypatch.setattr(loop.Watchdog, "beat", beat)
        assert launch(cfg, tmp_path / "w")[0] == watch.INTERRUPTED  # each time after two steps
    assert about(tmp_path / "w", 8)["evaluation"] is None
    monkeypatch.undo()
    _, lines = launch(cfg, tmp_path / "w")
    whole = undisturbed(steps=10, eval_every=2)
    assert list(series(lines, "eval/loss")) == [2, 4, 6, 8, 10]
    assert series(lines, "eval/loss") == series(json_lines(resolve(str(whole)) / "metrics.jsonl"), "eval/loss")
    same(whole, tmp_path / "w")


@pytest.mark.parametrize("doing", slow(["evaluate", "sample"], but=["evaluate"]))
def test_a_stop_in_the_middle_of_long_work_is_acted_on_at_once(doing, corpus, undisturbed, tmp_path, monkeypatch):
    """A signal while an evaluation or a sample takes long: what is done is saved, and the evaluation is made up for."""
    cfg = saving(corpus, steps=10, eval_every=4, sample_every=4, sample__prompts=("a",))
    release = threading.Event()

    def long(*args):
        signal.raise_signal(signal.SIGTERM)
        release.wait(60)

    monkeypatch.setattr(loop, doing, long)
    monkeypatch.setattr("minitf.runtime.watch.BY_ITSELF", 0.1)
    assert launch(cfg, tmp_path / "w")[0] == watch.INTERRUPTED
    assert not release.is_set()
    monkeypatch.undo()
    release.set()
    assert [p.name for p in (tmp_path / "w/checkpoints").iterdir()] == ["4"]
    assert (about(tmp_path / "w", 4)["evaluation"] is None) == (doing == "evaluate")
    status, lines = launch(cfg, tmp_path / "w")
    assert status == 0
    assert list(series(lines, "eval/loss")) == [4, 8, 10]
    same(undisturbed(steps=10, eval_every=4, sample_every=4, sample__prompts=("a",)), tmp_path / "w")


def test_a_stop_in_the_last_evaluation_leaves_it_to_the_next_start(corpus, tmp_path, monkeypatch):
    cfg = saving(corpus, steps=3, eval_every=10)
    real = loop.evaluate

    def stopped(*args):
        handler = signal.getsignal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        while signal.getsignal(signal.SIGTERM) is handler:  # it runs on the main thread, which waits for this one
            threading.Event().wait(0.01)
        return real(*args)  # asks at its first batch

    monkeypatch.setattr(loop, "evaluate", stopped)
    assert launch(cfg, tmp_path / "w")[0] == watch.INTERRUPTED
    monkeypatch.undo()
    for _ in range(2):
        status, lines = launch(cfg, tmp_path / "w")
        assert status == 0
    assert list(series(lines, "eval/loss")) == [3]


@pytest.mark.parametrize("doing", ["starting_state", "compiled_step", "batches"])
def test_a_stop_before_the_first_step_ends_the_start(doing, corpus, tmp_path, monkeypatch):
    cfg = saving(corpus, steps=3)
    release = threading.Event()

    def long(*args):
        signal.raise_signal(signal.SIGTERM)
        release.wait(60)

    if doing == "batches":
        monkeypatch.setattr(
            pipeline.HostBatches, "__getitem__", lambda self, k: self if isinstance(k, slice) else long()
        )
    else:
        monkeypatch.setattr(services, doing, long)
    monkeypatch.setattr("minitf.runtime.watch.BY_ITSELF", 0.1)
    with pytest.raises(watch.Stopped, match="SIGTERM"):
        launch(cfg, tmp_path / "w")
    assert not release.is_set()
    release.set()
    monkeypatch.undo()
    assert json_lines(tmp_path / "w/events.jsonl")[-1]["reason"] == "SIGTERM"
    assert launch(cfg, tmp_path / "w")[0] == 0


# ---- other meshes


@pytest.fixture(scope="module")
def on_eight(corpus, tmp_path_factory):
    """A run on (1, 8, 1): saved after step 5, and gone on for ten steps."""
    cfg = saving(corpus, model__vocab_size=64, mesh__fsdp=8, checkpoint__every=5, steps=15, accumulation=1)
    workdir = tmp_path_factory.mktemp("eight") / "w"
    with killed_after(6):
        launch(cfg, workdir, devices=8)
    shutil.copytree(workdir, workdir.parent / "at5")
    launch(cfg, workdir, devices=8)
    return cfg, workdir.parent / "at5", workdir


BY_HAND = MeshConfig(data=2, fsdp=4, tensor=1, collectives="manual", fsdp_inner=2)
SMALLER = (
    MeshConfig(data=1, fsdp=1, tensor=1),
    MeshConfig(data=1, fsdp=2, tensor=1),
    MeshConfig(data=2, fsdp=2, tensor=1),
)


@pytest.mark.parametrize(
    "mesh",
    [MeshConfig(data=2, fsdp=2, tensor=2), *(pytest.param(m, marks=pytest.mark.slow) for m in (BY_HAND, *SMALLER))],
    ids=lambda m: f"{m.data}x{m.fsdp}x{m.tensor}-{m.collectives}",
)
def test_saved_on_eight_devices_goes_on_on_others(on_eight, tmp_path, mesh):
    cfg, at5, eight = on_eight
    shutil.copytree(at5, tmp_path / "w")
    devices = mesh.data * mesh.fsdp * mesh.tensor
    cfg = change(cfg, mesh=mesh)
    job = job_lib.prepare(cfg, jax.devices()[:devices])
    with (
        surroundings(job.mesh, job.cfg.model.dtype),
        checkpoints_of(resolve(str(tmp_path / "w"))) as checkpoints,
    ):
        restored = checkpoints.restore_newest(
            job_lib.program(job).state
        )  # verified against the checksums of eight devices
        assert restored.about["step"] == int(restored.tree.step) == restored.about["data"]["next_batch"] == 5
    status, lines = launch(cfg, tmp_path / "w", devices=devices)
    assert status == 0
    expected = json_lines(resolve(str(eight)) / "metrics.jsonl")
    assert series(lines, "train/loss") == pytest.approx(series(expected, "train/loss"), abs=1e-5)
    assert list(series(lines, "train/loss")) == list(range(1, 16))
    # The same rows, whatever the mesh.
    a, b = (compare_runs.read(resolve(str(w))).batches for w in (tmp_path / "w", eight))
    assert a == b


@pytest.mark.slow
@pytest.mark.parametrize(("saved_on", "restored_on"), [((1, 1, 2), (1, 1, 1)), ((1, 1, 1), (1, 1, 2))])
def test_saved_on_one_tensor_axis_restored_on_another(corpus, tmp_path, saved_on, restored_on):
    def cfg(mesh, **changes):
        return saving(corpus, model__vocab_size=64, mesh__tensor=mesh[2], accumulation=1, **changes)

    launch(cfg(saved_on, steps=5), tmp_path / "w", devices=math.prod(saved_on))
    _, lines = launch(cfg(restored_on, steps=8), tmp_path / "w", devices=math.prod(restored_on))
    _, whole = launch(cfg(saved_on, steps=8), tmp_path / "whole", devices=math.prod(saved_on))
    assert series(lines, "train/loss") == pytest.approx(series(whole, "train/loss"), abs=1e-5)


# ---- what a second start does


def refusal(*args, **kwargs) -> str:
    with pytest.raises((ValueError, services.Refused)) as refused:
        launch(*args, **kwargs)
    return str(refused.value)


def test_finished_run_says_so_and_changes_nothing(corpus, tmp_path, capsys, monkeypatch):
    launch(saving(corpus, steps=5), tmp_path / "w")
    before = {p: p.read_bytes() for p in (tmp_path / "w").rglob("*") if p.is_file() and p.name != "events.jsonl"}
    monkeypatch.setattr(loop, "training_batches", None)  # neither read nor compiled for
    capsys.readouterr()
    for _ in range(2):
        status, _ = launch(saving(corpus, steps=5), tmp_path / "w")
        assert status == 0
    assert capsys.readouterr().out.count("step 5 of 5 is already done; to go on, give more steps") == 2
    after = {p: p.read_bytes() for p in (tmp_path / "w").rglob("*") if p.is_file() and p.name != "events.jsonl"}
    assert after == before


def test_zero_steps_save_step_0_and_can_go_on(corpus, undisturbed, tmp_path):
    assert launch(saving(corpus, steps=0), tmp_path / "w")[0] == 0
    assert about(tmp_path / "w", 0)["data"]["next_batch"] == 0
    assert launch(saving(corpus), tmp_path / "w")[0] == 0
    same(undisturbed(), tmp_path / "w")


def test_another_batch_size_is_refused_with_both(corpus, tmp_path):
    launch(saving(corpus, steps=5, batch_size=4), tmp_path / "w")
    message = refusal(saving(corpus, steps=10, batch_size=8), tmp_path / "w")
    assert "holds a run with other settings\n  batch_size: 4 -> 8\n" in message


def test_a_more_steps_go_on_and_say_from_where(corpus, tmp_path, capsys):
    launch(saving(corpus, steps=5), tmp_path / "w")
    launch(saving(corpus, steps=8, optimizer__learning_rate=0.25), tmp_path / "w")
    out = capsys.readouterr().out
    assert (
        "resuming after step 5 of 8\nlearning rate of step 6: 0.001 (constant) by the schedule of the checkpoint, 0.25"
        in out
    )


def test_another_schedule_says_old_and_new_rate_of_its_first_step(corpus):
    """By steps, by kind, by a length in tokens; the same schedule says nothing."""
    job = job_lib.prepare(saving(corpus, optimizer__schedule="linear", optimizer__learning_rate=1.0), jax.devices()[:1])
    said = functools.partial(job_lib.schedule_change, job)

    def checkpoint(**changes):
        return {"step": 5, "config": dataclasses.asdict(change(job.cfg, **changes))}

    old, new = (
        "0.5 (linear over 10 steps) by the schedule of the checkpoint",
        "0.75 (linear over 20 steps) by that of now",
    )
    assert said(checkpoint(steps=10), 5) == f"learning rate of step 6: {old}, {new}"
    assert said(checkpoint(steps=None, tokens=10 * 8 * 16), 5) == f"learning rate of step 6: {old}, {new}"
    assert said(checkpoint(steps=5), 4).startswith(
        "learning rate of step 6: 0.2 (linear over 5 steps)"
    )  # one was skipped
    assert said(checkpoint(optimizer__schedule="constant"), 5).startswith("learning rate of step 6: 1 (constant) by")
    assert "0.5 (linear over 20 steps)" in said(checkpoint(optimizer__warmup_steps=10), 5)
    assert said(checkpoint(eval_every=7), 5) is None
    same_rate = job._replace(cfg=change(job.cfg, optimizer__schedule="constant"), steps=40)
    assert job_lib.schedule_change(same_rate, checkpoint(optimizer__schedule="constant"), 5) is None


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (dict(model__dim=32), "model.dim: 16 -> 32"),
        (dict(seed=1), "seed: 0 -> 1"),
        (dict(seq_len=8), "seq_len: 16 -> 8"),
        (dict(optimizer__kind="lion", optimizer__b2=None), "optimizer.kind: adamw -> lion"),
        (dict(data__shuffle=False), "data.shuffle: True -> False"),
        (dict(model__attention__num_kv_heads=4, seed=2), "seed: 0 -> 2\n  model.attention.num_kv_heads: 2 -> 4"),
    ],
)
def test_b_what_must_not_change_is_refused_with_old_and_new(corpus, tmp_path, changes, lines):
    config_of = lambda cfg: job_lib.prepare(cfg, jax.devices()[:1]).cfg
    workdir = resolve(str(tmp_path))
    begin(workdir, config_of(saving(corpus, steps=1)))
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(ValueError, match="holds a run with other settings") as refused:
        begin(workdir, config_of(saving(corpus, steps=5, **changes)))
    message = str(refused.value)
    assert f"\n  {lines}\n" in message
    assert "--overwrite" in message
    assert (tmp_path / "config.json").read_bytes() == before


def test_c_other_contents_of_the_data_are_refused(corpus, tmp_path):
    path = tmp_path / "train.txt"
    path.write_text((corpus / "train.txt").read_text())
    cfg = saving(corpus, steps=5, data__path=str(path))
    launch(cfg, tmp_path / "w")
    path.write_text((corpus / "train.txt").read_text()[::-1])
    assert "data sha256: " in refusal(change(cfg, steps=8), tmp_path / "w")
    # The same contents elsewhere are the same data.
    assert launch(saving(corpus, steps=8), tmp_path / "w")[0] == 0


def test_overwrite_starts_anew_and_saves_below_the_older_steps(corpus, tmp_path):
    launch(saving(corpus, steps=8), tmp_path / "w")
    _, lines = launch(saving(corpus, steps=6, seed=5, checkpoint__every=3), tmp_path / "w", overwrite=True)
    assert list(series(lines, "train/loss")) == [1, 2, 3, 4, 5, 6]
    assert sorted(p.name for p in (tmp_path / "w/checkpoints").iterdir()) == ["3", "6"]


@pytest.mark.slow
def test_what_may_change_may_and_is_told(corpus, undisturbed, tmp_path):
    cfg = saving(corpus, steps=10)
    launch(cfg, tmp_path / "w")
    free = dict(log_every=5, accumulation=4, data__threads=2, profile=(12, 2))
    more = dict(model__remat="full", model__unroll=2, model__dtype="bfloat16", optimizer__learning_rate=1e-4)
    assert differences(cfg, change(cfg, **more))[0] == []
    job = job_lib.prepare(saving(corpus, **free), jax.devices()[:1])
    found, changed = begin(resolve(str(tmp_path / "w")), job.cfg)
    assert found
    assert {line.split(":")[0].replace(".", "__") for line in changed} == {"steps", *free}
    _, lines = launch(saving(corpus, **free), tmp_path / "w")
    expected = series(json_lines(resolve(str(undisturbed())) / "metrics.jsonl"), "train/loss")
    assert series(lines, "train/loss")[20] == pytest.approx(expected[20], abs=1e-5)


def test_a_run_without_a_checkpoint_starts_anew_and_leaves_no_double_lines(corpus, undisturbed, tmp_path):
    with killed_after(3):
        launch(saving(corpus), tmp_path / "w")
    _, lines = launch(saving(corpus), tmp_path / "w")
    assert [line["step"] for line in lines] == list(range(21))
    same(undisturbed(), tmp_path / "w")


def test_settings_newer_than_the_run_are_at_their_defaults_and_unknown_ones_refused(corpus, tmp_path):
    launch(saving(corpus, steps=3), tmp_path / "w")
    path = tmp_path / "w/config.json"
    stored = json.loads(path.read_text())
    del stored["watchdog"]
    path.write_text(json.dumps(stored))
    job = job_lib.prepare(saving(corpus, steps=5), jax.devices()[:1])
    assert "new since: watchdog" in begin(resolve(str(tmp_path / "w")), job.cfg)[1]
    path.write_text(json.dumps(stored | {"watchdogs": {}}))
    assert "watchdogs: no such setting; did you mean 'watchdog'?" in refusal(saving(corpus, steps=5), tmp_path / "w")


# ---- its model


def test_load_model_needs_only_the_directory(on_eight):
    _, _, workdir = on_eight
    model = load_model(workdir)
    assert (model.step, model.cfg.model.vocab_size) == (15, 64)
    assert {len(a.devices()) for a in jax.tree.leaves(model.params)} == {1}
    saved = about(workdir, 15)["arrays"]
    assert {f"params/{name}" for name, _ in named(model.params)} == {n for n in saved if n.startswith("params/")}
    older = load_model(str(workdir), step=5)
    assert older.step == 5
    assert not np.array_equal(older.params["embedding"], model.params["embedding"])
    with pytest.raises(ValueError, match=r"no checkpoint of step 7; there are those of \[5, 10, 15\]"):
        load_model(workdir, step=7)


def test_init_from_takes_the_parameters_alone(corpus, undisturbed, tmp_path):
    source = undisturbed(steps=5)
    cfg = saving(corpus, steps=0, seed=7, init_from=str(source))
    launch(cfg, tmp_path / "w")
    jax.tree.map(np.testing.assert_array_equal, final(source), final(tmp_path / "w"))
    arrays, trained = about(tmp_path / "w", 0)["arrays"], about(source, 5)["arrays"]
    moments = [n for n in arrays if "/mu/" in n]
    assert moments
    assert all(arrays[n] != trained[n] for n in moments)  # the optimizer starts anew
    with pytest.raises(ValueError, match=r"shape of params/embedding: saved .*, wanted .*"):
        check_params(resolve(str(source)), job_lib.prepare(saving(corpus, model__dim=32), jax.devices()[:1]).specs)


# ---- faults


def test_resume_from_the_newest_good_checkpoint_is_told_and_loses_nothing(corpus, undisturbed, tmp_path, capsys):
    with killed_after(17):
        launch(saving(corpus, checkpoint__every=5), tmp_path / "w")
    truncate(largest_file(resolve(str(tmp_path / "w/checkpoints/15"))))
    capsys.readouterr()
    status, lines = launch(saving(corpus, checkpoint__every=5), tmp_path / "w")
    out = capsys.readouterr().out
    assert status == 0
    assert "warning: the checkpoint of step 15 is damaged" in out
    assert "going on from step 10" in out
    assert (tmp_path / "w/checkpoints/15.damaged").exists()
    assert list(series(lines, "train/loss")) == list(range(1, 21))
    same(undisturbed(checkpoint__every=5), tmp_path / "w")


def poisoned(at):
    """training_batches whose batch of this step makes the loss NaN."""
    real = job_lib.training_batches

    def batches(job, start, *args):
        for step, batch in enumerate(real(job, start, *args), start + 1):
            yield batch | {"weights": batch["weights"] * np.float32("nan")} if step == at else batch

    return batches


def test_nan_stops_the_run_and_is_never_saved(corpus, undisturbed, tmp_path, monkeypatch):
    cfg = saving(corpus, checkpoint__every=5)
    monkeypatch.setattr(loop, "training_batches", poisoned(7))
    with pytest.raises(services.NonFinite, match=r"^step 7: loss .*, gradient norm nan"):
        launch(cfg, tmp_path / "w")
    assert [p.name for p in (tmp_path / "w/checkpoints").iterdir()] == ["5"]
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(final(tmp_path / "w")))
    monkeypatch.undo()
    assert launch(cfg, tmp_path / "w")[0] == 0
    same(undisturbed(checkpoint__every=5), tmp_path / "w")


@pytest.mark.slow
def test_an_update_that_is_not_finite_is_neither_applied_nor_saved(corpus, tmp_path):
    # The loss and the gradient of step 1 are finite.
    cfg = saving(corpus, steps=1, optimizer__kind="sgd", optimizer__learning_rate=1e38)
    with pytest.raises(services.NonFinite, match=r"^step 1: loss .*, but the update .* is not finite"):
        launch(cfg, tmp_path / "w")
    assert list((tmp_path / "w/checkpoints").iterdir()) == []


def test_an_evaluation_that_meets_a_bad_id_ends_the_run_after_a_save(corpus, undisturbed, tmp_path, monkeypatch):
    """Which is so where the file has become another one since the start."""
    cfg = saving(corpus, eval_every=6, eval_batches=1)

    def evaluation_batches(*args):
        raise DataError("val.txt: id 99 at token 0 is not below the vocabulary size 64")
        yield

    monkeypatch.setattr(loop, "evaluation_batches", evaluation_batches)
    with pytest.raises(services.BatchError, match=r"^evaluation of step 6: val\.txt: id 99 at token 0"):
        launch(cfg, tmp_path / "w")
    assert [p.name for p in (tmp_path / "w/checkpoints").iterdir()] == ["6"]
    monkeypatch.undo()
    assert launch(cfg, tmp_path / "w")[0] == 0
    same(undisturbed(eval_every=6, eval_batches=1), tmp_path / "w")


def test_a_failing_record_ends_the_run_with_its_error_and_the_last_good_step(corpus, undisturbed, tmp_path):
    real = pipeline.training_rows

    def failing(*args):
        def check(i):
            if i == 7 * 8:
                raise RuntimeError("this record cannot be read")

        return Watched(real(*args), check)

    before = psutil.Process().children(
        recursive=True
    )  # other tests' may be there, such as Python's tracker of resources
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minitf.data.pipeline.training_rows", failing)
        with pytest.raises(
            services.BatchError, match=r"^the batch of step 8: RuntimeError: this record cannot be read"
        ):
            launch(saving(corpus), tmp_path / "w")
    assert [p.name for p in (tmp_path / "w/checkpoints").iterdir()] == ["7"]
    lines = json_lines(resolve(str(tmp_path / "w")) / "metrics.jsonl")
    assert list(series(lines, "train/loss")) == list(range(1, 8))  # of the steps that were done, nothing is lost
    # Rows are read by threads: there is no process that could die alone or stay behind.
    assert psutil.Process().children(recursive=True) == before
    assert launch(saving(corpus), tmp_path / "w")[0] == 0
    same(undisturbed(), tmp_path / "w")


# ---- what is logged


def test_what_was_logged_before_a_save_is_on_the_disk_when_it_begins(corpus, tmp_path, monkeypatch):
    # Else a kill after the save would lose it for good: the next process begins behind it.
    seen, save = {}, Checkpoints.save

    def looking(self, step, *args):
        scalars = EventAccumulator(str(tmp_path / "w")).Reload().Scalars("train/loss")
        seen[step] = [e.step for e in scalars], list(series(json_lines(tmp_path / "w/metrics.jsonl"), "train/loss"))
        return save(self, step, *args)

    monkeypatch.setattr(Checkpoints, "save", looking)
    launch(saving(corpus, steps=10, checkpoint__every=5), tmp_path / "w")
    assert seen == {step: (list(range(1, step + 1)),) * 2 for step in (5, 10)}


def test_every_new_best_is_saved(corpus, tmp_path):
    launch(saving(corpus, eval_every=4, checkpoint__keep=1, checkpoint__keep_best=1), tmp_path / "w")
    events = json_lines(tmp_path / "w/events.jsonl")
    losses = series(json_lines(tmp_path / "w/metrics.jsonl"), "eval/loss")
    best = [step for i, step in enumerate(losses) if losses[step] == min(list(losses.values())[: i + 1])]
    assert len(best) > 2
    assert [e["step"] for e in events if e["event"] == "save" and e["state"] == "end"] == sorted({*best, 20})


def test_tensorboard_and_json_have_each_step_once(corpus, tmp_path):
    cfg = saving(corpus, steps=30, checkpoint__every=10, eval_every=10)
    with killed_after(17):
        launch(cfg, tmp_path / "w")
    first = {e.step: e.wall_time for e in EventAccumulator(str(tmp_path / "w")).Reload().Scalars("train/loss")}
    # A kill tears the last line.
    with open(tmp_path / "w/metrics.jsonl", "a") as f:
        f.write('{"step": 18, "train/lo')
    _, lines = launch(cfg, tmp_path / "w")
    reader = EventAccumulator(str(tmp_path / "w")).Reload()
    for tag in reader.Tags()["scalars"]:
        steps = [e.step for e in reader.Scalars(tag)]
        assert steps == sorted(set(steps)), tag
        if tag.startswith("train/"):
            assert steps == list(range(1, 31)), tag
    assert [e.step for e in reader.Scalars("eval/loss")] == [10, 20, 30]
    second = {e.step: e.wall_time for e in reader.Scalars("train/loss")}
    assert all((second[n] == first[n]) == (n <= 10) for n in first)  # 11 to 17 are the resumed run's
    assert series(lines, "train/loss") == pytest.approx({e.step: e.value for e in reader.Scalars("train/loss")})
    assert list(series(lines, "train/loss")) == list(range(1, 31))
    text = (tmp_path / "w/metrics.jsonl").read_text()
    assert [json.loads(line)["step"] for line in text.splitlines()] == sorted(line["step"] for line in lines)


def test_events_tell_the_life_of_the_run(corpus, tmp_path):
    with killed_after(7):
        launch(saving(corpus, steps=10, checkpoint__every=5, eval_every=5), tmp_path / "w")
    launch(saving(corpus, steps=10, checkpoint__every=5, eval_every=5), tmp_path / "w")
    events = json_lines(resolve(str(tmp_path / "w")) / "events.jsonl")
    told = [e["event"] for e in events if e.get("state") != "begin" and e["event"] != "steps"]
    assert told == [
        *("start", "init", "compile", "first_step", "evaluation", "save", "stop"),
        *("start", "restore", "compile", "first_step", "evaluation", "save", "stop"),
    ]
    assert [e["reason"] for e in events if e["event"] == "stop"] == ["Killed: ", "done"]
    assert all(a["time"] <= b["time"] for a, b in itertools.pairwise(events))
    steps = [(e["first"], e["last"]) for e in events if e["event"] == "steps"]
    assert [n for first, last in steps for n in range(first, last + 1)] == [*range(1, 8), *range(6, 11)]
