"""What follows a step: pure functions of the settings, the step and what the processes have agreed on."""

import ast

import pytest
from common import ROOT, TINY, change

from minitf.loop import Due, decide, evaluation_due, is_saved

pytestmark = pytest.mark.core

STEPS = 10
NOTHING = Due(evaluate=False, sample=False, save=False, profile=False, end=False)
QUIET = change(TINY, steps=STEPS, eval_every=None, sample_every=None, checkpoint__every=None)
BUSY = change(TINY, steps=STEPS, eval_every=4, sample_every=3, checkpoint__every=5, checkpoint__last=True)


def after(step, cfg=QUIET, *, stopped=False, late=False, traced=False):
    return decide(cfg, step, STEPS, stopped=stopped, late=late, traced=traced)


def steps_with(what, cfg=BUSY):
    return [step for step in range(1, STEPS + 1) if getattr(after(step, cfg), what)]


def test_nothing_follows_a_step_of_which_nothing_is_due():
    assert after(3) == NOTHING
    assert not any(after(3))
    assert after(STEPS) == NOTHING._replace(end=True)


def test_what_is_done_every_few_steps_is_done_behind_these():
    assert steps_with("evaluate") == [4, 8, 10]  # and behind the last one
    assert steps_with("sample") == [3, 6, 9, 10]
    assert steps_with("save") == [5, 10]
    assert steps_with("end") == [10]


def test_a_run_that_is_told_to_stop_saves_and_leaves_the_rest():
    for step in range(1, STEPS):
        due = after(step, BUSY, stopped=True)
        assert (due.evaluate, due.sample, due.end) == (False, False, True)
        assert is_saved(BUSY.checkpoint, due, improved=False, ended=True)


@pytest.mark.parametrize(("flag", "field"), [("late", "save"), ("traced", "profile")])
def test_the_clock_saves_and_a_trace_waits_for_its_step(flag, field):
    assert after(3, **{flag: True}) == NOTHING._replace(**{field: True})


def test_no_evaluation_is_due_before_the_first_step():
    assert not evaluation_due(BUSY, 0, STEPS)
    assert not evaluation_due(BUSY, 0, 0)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("keep_best", [2, None])
def test_a_state_is_saved_where_it_is_due_the_best_or_the_last(last, keep_best):
    cfg = change(BUSY, checkpoint__last=last, checkpoint__keep_best=keep_best).checkpoint
    saved = lambda due, **facts: is_saved(cfg, due, **{"improved": False, "ended": False} | facts)
    assert saved(NOTHING._replace(save=True))
    assert saved(NOTHING, improved=True) == (keep_best is not None)
    assert saved(NOTHING._replace(end=True), ended=True) == last
    assert not saved(NOTHING)


def functions_of(name):
    tree = ast.parse((ROOT / "minitf" / f"{name}.py").read_text())
    return {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}, tree


def test_the_loop_fits_a_page():
    functions, tree = functions_of("loop")
    train = functions["train"]
    (loop,) = [n for n in ast.walk(train) if isinstance(n, ast.For)]
    assert train.end_lineno - train.lineno < 120
    assert loop.end_lineno - loop.lineno < 60
    assert not any(isinstance(n, ast.Nonlocal | ast.Global) for n in ast.walk(tree))
