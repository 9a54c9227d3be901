"""Real processes, killed at random moments and started again, end as if nothing had been."""

import os
import random
import re
import signal

import pytest
from common import run_module
from etils import epath
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from minitf.runtime.log import json_lines
from tools import compare_runs
from tools.chaos import launch, wait_for
from tools.goodput import KINDS, spent

SMALL = (
    "steps=60 log_every=1 eval_every=10 eval_batches=1 batch_size=8 seq_len=16 accumulation=2 checkpoint.every=5 "
    "checkpoint.keep_best=1 model.dim=32 model.num_layers=2 model.mlp.hidden=32 model.dropout=0.1 data.kind=text "
)


def chaos(tmp_path, corpus, kills, steps, seed):
    settings = [*SMALL.split(), f"data.path={corpus / 'train.txt'}", f"steps={steps}"]
    return run_module(
        "tools.chaos",
        *("--workdir", tmp_path / "chaos", "--kills", kills, "--seed", seed, "--"),
        *("--config", "configs/tiny.py", *(f"--config.{s}" for s in settings)),
        XLA_FLAGS=os.environ.get("XLA_FLAGS", ""),  # compiled as fast as in other tests: it is bits that are compared
    )


@pytest.mark.slow
def test_killed_and_restarted_run_equals_the_undisturbed_bit_for_bit(tmp_path, corpus):
    kills, steps, seed = 20, 400, 1
    done = chaos(tmp_path, corpus, kills, steps, seed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^kill \d+ of", done.stdout, re.M)) == kills
    for what in ("data", "train/loss", "train/learning_rate"):
        assert f"{what}: equal in all {steps} steps that both recorded, 1 to {steps}" in done.stdout
    assert f"parameters: equal in all {steps // 5} steps that both recorded, 5 to {steps}" in done.stdout

    # TensorBoard's readers see each step once, whatever the kills left of the event files.
    disturbed = epath.Path(tmp_path / "chaos/disturbed")
    reader = EventAccumulator(str(disturbed), size_guidance={"scalars": 0}).Reload()
    for tag in ("train/loss", "train/tokens_seen"):
        assert [e.step for e in reader.Scalars(tag)] == list(range(1, steps + 1))
    lines = json_lines(disturbed / "metrics.jsonl")
    assert [line["step"] for line in lines if "train/loss" in line] == list(range(1, steps + 1))
    # Lost time is accounted for.
    seconds = spent(json_lines(disturbed / "events.jsonl"))
    assert list(seconds) == list(KINDS)
    assert all(s >= 0 for s in seconds.values())
    assert seconds["compiling"] > 0


def test_a_run_that_fails_by_itself_is_an_error(tmp_path, corpus):
    done = chaos(tmp_path, corpus, 1, -1, 0)
    assert done.returncode == 1
    assert "error: the undisturbed run failed; see " in done.stderr
    assert "steps=-1: must be at least 0" in (tmp_path / "chaos/undisturbed.log").read_text()


@pytest.mark.slow
def test_tiny_stopped_by_SIGTERM_at_a_random_step_equals_the_undisturbed_bit_for_bit(tmp_path):
    args = ["--config", "configs/tiny.py", "--config.steps=40", "--config.log_every=1"]
    whole, stopped = (epath.Path(tmp_path / name) for name in ("whole", "stopped"))
    assert launch(whole, args).wait() == 0
    process, step = launch(stopped, args), random.SystemRandom().randint(1, 30)  # a signal takes up to two steps
    assert wait_for(process, stopped, 0, "steps", step)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 3, step
    assert launch(stopped, args).wait() == 0
    lines, equal = compare_runs.compare(compare_runs.read(whole), compare_runs.read(stopped))
    assert equal, (step, lines)
    for what in ("data", "train/loss"):
        assert f"{what}: equal in all 40 steps that both recorded, 1 to 40" in lines
    assert "parameters: equal in all 1 steps that both recorded, 40 to 40" in lines
