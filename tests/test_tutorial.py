"""The tutorial's five checks, on configs/tutorial.py through the real model and train step."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import ROOT, fit, run_module, run_python, series

from minitf import config
from minitf.data import datasets
from minitf.data.store import Rows
from minitf.model.transformer import model, model_params
from minitf.params import count_params, init_params
from minitf.runtime.log import json_lines
from minitf.training import step

CFG = config.freeze(config.load_file(str(ROOT / "configs/tutorial.py")))


@functools.cache
def tutorial():
    corpus = datasets.load(CFG.data, CFG.model.vocab_size)
    rows = Rows(corpus.train, CFG.seq_len)
    batch = {k: jnp.stack([rows[0][k], rows[1][k]]) for k in rows[0]}
    return init_params(model_params(CFG.model), jax.random.key(CFG.seed)), batch


def test_inputs_and_targets_are_the_tutorials():
    inputs = np.arange(2 * 16).reshape(2, 16) % 32
    np.testing.assert_array_equal(tutorial()[1]["inputs"], inputs)
    np.testing.assert_array_equal(tutorial()[1]["targets"], (inputs + 1) % 32)


def test_logits_have_the_tutorials_shape():
    weights, batch = tutorial()
    assert model(weights, batch["inputs"], CFG.model).shape == (2, 16, 32)


def test_parameters_and_gradients_are_finite():
    weights, batch = tutorial()
    (losses, _), grads = step.gradients(weights, batch, jnp.int32(0), CFG)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves((weights, grads, losses)))
    assert float(losses["loss"]) == pytest.approx(np.log(32), abs=0.2)


def test_a_fixed_batch_is_learnt_by_heart():
    _, batch = tutorial()
    history, _ = fit(CFG, [batch] * 1000)
    assert history[-1]["train/loss"] < 1.3
    assert history[0]["train/loss"] > 3


def test_later_tokens_do_not_change_earlier_logits():
    weights, batch = tutorial()
    ids = batch["inputs"]
    before, after = (model(weights, x, CFG.model) for x in (ids, ids.at[:, 9:].set((ids[:, 9:] + 7) % 32)))
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert not np.array_equal(before[:, 9:], after[:, 9:])


def test_the_parameter_count_is_the_tutorials():
    assert count_params(model_params(CFG.model))["total"] == 103_744


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """(the process of a short run, as users' are; its metrics)."""
    workdir = tmp_path_factory.mktemp("command") / "w"
    settings = ["--config.steps=30", "--config.log_every=1"]
    done = run_module("minitf.train", "--config", "configs/tutorial.py", "--workdir", workdir, *settings)
    assert done.returncode == 0, done.stderr
    return done, json_lines(workdir / "metrics.jsonl")


def test_the_command_prints_count_and_shape(command):
    assert "parameters: 103,744 " in command[0].stdout
    assert "[2,16,32]" in command[0].stdout


def test_the_plain_loop_has_the_losses_of_the_command(command):
    """docs/plain_loop.py trains with the core alone, and minitf.train changes no bit of it."""
    plain = ROOT / "docs/plain_loop.py"
    assert len(plain.read_text().splitlines()) <= 50
    code = "from plain_loop import train; print([loss for loss in train(30)])"
    done = run_python("-c", code, cwd=plain.parent)
    assert json.loads(done.stdout) == list(series(command[1], "train/loss").values())
