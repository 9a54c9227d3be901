"""tools.benchmark: what it measures, two sides in turns, and a mistake in its arguments."""

import json

import pytest
from common import ROOT, launch, run_module, text_config

from minitf import config
from tools import benchmark_generate, peers

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
    assert result["parameters"] == 103_744  # docs/running.md's count of the tutorial's model
    assert result["steps"] == 4
    assert result["minor_faults_per_step"] >= 0
    assert result["skipped_steps"] == 0
    assert result["step_time_s_best"] <= result["step_time_s"]
    assert result["tokens_per_s"] == pytest.approx(result["tokens_per_step"] / result["step_time_s"])
    assert result["mfu_causal"] < result["mfu"] < 1


@pytest.mark.slow
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


@pytest.mark.slow
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


# ---- nanoGPT's step


def gpt_of(file, *overrides):
    cfg = config.load_file(str(ROOT / file))
    for name, value in overrides:
        cfg.update_from_flattened_dict({name: value})
    return peers.gpt_config(config.freeze(cfg), 65)


def test_the_peer_has_the_shape_of_the_config():
    expected = dict(block_size=64, vocab_size=65, n_layer=4, n_head=4, n_embd=128, dropout=0.0, bias=False)
    assert gpt_of("configs/char_cpu.py") == expected
    assert gpt_of("configs/char_cpu.py", ("model.norm", "layer_norm"))["bias"] is True


def test_a_config_that_the_peer_cannot_express_is_refused_by_setting():
    with pytest.raises(ValueError, match=r"^model.norm=rms_norm: nanoGPT's is layer_norm or layer_norm_no_bias"):
        gpt_of("configs/tiny.py")
    with pytest.raises(ValueError, match=r"^accumulation=2: nanoGPT's is 1"):
        gpt_of("configs/char_cpu.py", ("accumulation", 2))


@pytest.mark.slow
def test_a_directory_that_is_no_peer_is_refused(tmp_path):
    done = benchmark("--peer", str(tmp_path))
    assert done.returncode == 2
    assert f"--peer {tmp_path}: no checkout of nanoGPT" in done.stderr


@pytest.mark.slow
def test_transformers_takes_turns_with_the_family_that_expresses_the_config():
    pytest.importorskip("transformers", reason="the extra parity")
    result = measured(
        "--steps",
        "1",
        "--rounds",
        "1",
        "--config.model.positions=rope",
        "--config.model.mlp.kind=swiglu",
        "--peer",
        "transformers",
    )
    assert result["b"]["parameters"] == result["a"]["parameters"]
    assert result["ratio"]["median"] > 0


# ---- decoding


@pytest.fixture(scope="module")
def written(corpus, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run") / "w"
    launch(text_config(corpus, steps=1, checkpoint__last=True, model__max_seq_len=64), workdir)
    return workdir


def decoding(*args):
    return run_module("tools.benchmark_generate", *map(str, args), JAX_NUM_CPU_DEVICES="1")


@pytest.mark.slow
def test_decoding_gives_every_figure_of_each_batch_size(written):
    done = decoding(
        *("--workdir", written, "--batch_sizes", "1,3", "--new_tokens", 5, "--prompt", 4, "--rounds", 2, "--json")
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["batch_sizes"]
    assert list(found) == ["1", "3"]
    for figures in found.values():
        assert figures["tokens_per_s"]["minitf"] > 0
        assert figures["token_s"] > 0
        assert len(figures["token_to_sum"]["rounds"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--workdir", "nowhere"], "no config.json, so no run"),
        (["--new_tokens", "61"], "a prompt of 16 tokens and max_new_tokens=61"),
    ],
)
def test_a_mistake_in_measuring_decoding_gives_one_message(args, message, written):
    done = decoding("--workdir", written, *args)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert message in done.stderr


@pytest.mark.parametrize("sizes", ["0", "1,x", ""])
def test_batch_sizes_that_are_none_are_refused(sizes, capsys):
    with pytest.raises(SystemExit, match="2"):
        benchmark_generate.main(["--workdir", "nowhere", "--batch_sizes", sizes])
    assert f"--batch_sizes={sizes}: must be whole numbers of at least 1" in capsys.readouterr().err
