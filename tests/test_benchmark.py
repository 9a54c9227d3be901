"""tools.benchmark: what it measures, two sides in turns, and a mistake in its arguments."""

import json

import pytest
from common import run_module

FIELDS = (
    "tokens_per_s tokens_per_s_best step_time_s step_time_s_best cpu_time_per_step_s mfu mfu_causal peak_flops compile_s "
    "temp_bytes argument_bytes peak_rss_bytes parameters"
).split()


def benchmark(*args: str):
    # Compilation is most of the time here, and how fast the step runs is not looked at.
    flags = "--xla_backend_optimization_level=0"
    return run_module("tools.benchmark", "--config", "configs/tutorial.py", *args, XLA_FLAGS=flags)


def measured(*args: str) -> dict:
    done = benchmark("--json", *args)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_one_config_gives_every_figure():
    result = measured("--steps", "4")
    assert all(result[name] > 0 for name in FIELDS), result
    assert result["parameters"] == 103_744  # the README's count of the tutorial's model
    assert result["steps"] == 4
    assert result["minor_faults_per_step"] >= 0
    assert result["skipped_steps"] == 0
    assert result["step_time_s_best"] <= result["step_time_s"]
    assert result["tokens_per_s"] == pytest.approx(result["tokens_per_step"] / result["step_time_s"])
    assert result["mfu_causal"] < result["mfu"] < 1


def test_two_configs_take_turns_and_overrides_reach_their_side():
    result = measured("--steps", "2", "--rounds", "2", "--config.batch_size=4", "--against.model.num_layers=1")
    a, b, ratio = result["a"], result["b"], result["ratio"]
    assert a["tokens_per_step"] == b["tokens_per_step"] == 4 * 16
    assert b["parameters"] < a["parameters"] == 103_744
    assert a["steps"] == b["steps"] == 4
    assert len(ratio["rounds"]) == 2
    assert 0 < ratio["min"] <= ratio["median"] <= ratio["max"]


@pytest.mark.slow
def test_compile_times_by_depth():
    result = measured("--depths", "1,2", "--rounds", "1")
    assert list(result["compile_s"]) == ["1", "2"]
    assert result["ratio"]["median"] == pytest.approx(result["compile_s"]["2"] / result["compile_s"]["1"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--config.model.dmi=8",), "--config.model.dmi: no setting 'dmi' in model"),
        (("--against.model.remat=ful",), "second side (configs/tutorial.py): model.remat: unknown kind 'ful'"),
        (("--against.batch_size=4", "--depths", "4,48"), "--depths: leave out --against"),
    ],
)
def test_a_mistake_gives_one_message_and_status_2(args, message):
    done = benchmark(*args)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr


def test_saving_is_measured_and_leaves_nothing(tmp_path):
    result = measured("--saves", str(tmp_path / "saves"), "--steps", "3", "--rounds", "2")
    assert result["bytes"] == 4 * (103_744 + 3)  # plain SGD: parameters, and three counts of steps
    assert all(value > 0 for value in result.values())
    assert 0 < result["blocked_share"] < 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--saves", "."], "exists already"),
        (["--saves", "x", "--depths", "1,2"], "--saves: leave out --depths"),
    ],
)
def test_measurements_that_exclude_each_other_are_refused(args, message):
    done = benchmark(*args)
    assert done.returncode == 2
    assert message in done.stderr
