"""Comparing runs, and accounting for their time, on records made by hand."""

import json

import pytest
from common import TINY

from minitf import config
from tools import compare_runs, goodput


def record(folder, cfg=TINY, batches=(), losses=None, parameters=None):
    """A work directory with these records."""
    folder.mkdir()
    (folder / "config.json").write_text(config.to_json(cfg))
    events = [{"event": "steps", "first": first, "last": first + len(b) - 1, "batches": b} for first, b in batches]
    events += [{"event": "save", "state": "end", "step": s, "parameters": p} for s, p in (parameters or {}).items()]
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    lines = [{"step": s, "train/loss": v} for s, v in (losses or {}).items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in lines))
    return str(folder)


FULL = dict(batches=[(1, ["a", "b", "c"])], losses={1: 3.0, 3: 2.0}, parameters={2: "p", 3: "q"})


def test_equal_runs_are_equal(tmp_path, capsys):
    # The second did steps 2 and 3 twice, the first time otherwise: what counts is the last time.
    again = FULL | {"batches": [(1, ["a", "x"]), (2, ["b", "c"])]}
    assert compare_runs.main([record(tmp_path / "a", **FULL), record(tmp_path / "b", **again)]) == 0
    out = capsys.readouterr().out
    assert "data: equal in all 3 steps that both recorded, 1 to 3" in out
    assert "train/loss: equal in all 2 steps that both recorded, 1 to 3" in out
    assert "eval/loss: no step that both recorded" in out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batches": [(1, ["a", "x", "c"])]}, "data: differ first at step 2: b | x"),
        ({"losses": {1: 3.0, 3: 2.0000000000000004}}, "train/loss: differ first at step 3: 2.0 | 2.0000000000000004"),
        ({"parameters": {2: "p", 3: "r"}}, "parameters: differ first at step 3: q | r"),
        ({"batches": []}, "data: no step that both recorded"),
    ],
)
def test_the_first_difference_is_named(tmp_path, capsys, changes, message):
    assert compare_runs.main([record(tmp_path / "a", **FULL), record(tmp_path / "b", **(FULL | changes))]) == 1
    assert message in capsys.readouterr().out.splitlines()


def test_other_settings_are_named(tmp_path, capsys):
    from common import change

    b = record(tmp_path / "b", cfg=change(TINY, model__dim=32), **FULL)
    assert compare_runs.main([record(tmp_path / "a", **FULL), b]) == 0
    assert "config model.dim: 16 | 32" in capsys.readouterr().out


def test_a_directory_that_is_no_run_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        compare_runs.main([str(tmp_path), str(tmp_path)])
    assert "no config.json, so no run" in capsys.readouterr().err


# ---- goodput

LIFE = [  # (time, event, more); the first process is killed after step 20 and the second goes on from step 10
    (103.0, "start", {"process_age": 3.0}),
    (103.0, "init", {"state": "begin"}),
    (105.0, "init", {"state": "end", "step": 0, "seconds": 2.0}),
    (105.0, "compile", {"state": "begin"}),
    (115.0, "compile", {"state": "end", "seconds": 10.0}),
    (125.0, "steps", {"first": 1, "last": 15, "seconds": 10.0, "data_wait": 1.0}),
    (125.0, "evaluation", {"state": "begin", "step": 15}),
    (127.0, "evaluation", {"state": "end", "step": 15, "seconds": 2.0}),
    (127.0, "sample", {"state": "begin", "step": 15}),
    (127.5, "sample", {"state": "end", "step": 15, "seconds": 0.5}),
    (127.5, "save", {"state": "begin", "step": 15}),
    (128.0, "save", {"state": "end", "step": 15, "seconds": 0.5}),
    (132.0, "steps", {"first": 16, "last": 20, "seconds": 4.0, "data_wait": 0.0}),
    (202.0, "start", {"process_age": 2.0}),
    (202.0, "restore", {"state": "begin"}),
    (205.0, "restore", {"state": "end", "step": 10, "seconds": 3.0}),
    (215.0, "steps", {"first": 11, "last": 20, "seconds": 9.0, "data_wait": 0.0}),
    (216.0, "stop", {"reason": "done"}),
]
EXPECTED = {
    "useful steps": 9.0 * 10 / 15 + 9.0,
    "lost steps": 9.0 * 5 / 15 + 4.0,
    "waiting for data": 1.0,
    "evaluation": 2.0,
    "sampling": 0.5,
    "saving": 0.5,
    "compiling": 10.0,
    "starting": 5.0,
    "initial state": 5.0,
    "other": 0.0 + 2.0,
    "not running": 200.0 - 132.0,
}


def test_every_second_is_accounted_for_once(tmp_path, capsys):
    events = [{"time": t, "event": e, **more} for t, e, more in LIFE]
    seconds = goodput.spent(events)
    assert seconds == pytest.approx(EXPECTED)
    assert sum(seconds.values()) == pytest.approx(216.0 - 100.0)
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events) + '{"torn')
    assert goodput.main([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"processes": 2, "seconds": pytest.approx(EXPECTED)}
    assert goodput.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "0:01:56 from the first start to the last event, 2 processes" in out
    assert "12.9%        15.0 s  useful steps" in out


def test_a_directory_without_events_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        goodput.main([str(tmp_path)])
    assert "events.jsonl records no start" in capsys.readouterr().err
