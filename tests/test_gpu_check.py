"""tools.gpu_check: what it measures and in which order, that it sees wrong attention, and that it keeps to its time."""

import json
import time

import pytest
from common import run_module

from minitf import config
from minitf.model import kernels
from minitf.model.remat import REMAT
from minitf.params import count_params
from tools import gpu_check

SMALL = {"seq_len": 128, "head_dim": 8}


@pytest.mark.parametrize("tiny", [False, True])
def test_every_policy_is_measured_with_every_shape_by_a_config_that_is_valid(tiny):
    requests = gpu_check.requests(tiny)
    names = [name for name, _, _ in requests]
    assert len(set(names)) == len(names)
    assert names[0] == "attention"
    shapes = gpu_check.TINY if tiny else gpu_check.SHAPES
    assert {f"train {shape} {remat}" for shape in shapes for remat in REMAT} <= set(names)
    first = next(i for i, name in enumerate(names) if name.startswith("train"))
    assert "decode" in names[first + 3 * len(shapes)]  # before the policies that tell less
    for _, _, request in json.loads(json.dumps(requests)):
        if "config" in request:
            config.validate(config.freeze(request["config"]))


def test_shapes_have_the_parameters_that_they_are_named_for():
    count = {name: count_params(gpu_check.model_params(m))["total"] for name, (m, _) in gpu_check.SHAPES.items()}
    assert 115e6 < count["124M"] < 130e6
    assert 330e6 < count["350M"] < 370e6
    assert 1.0e9 < count["1B"] < 1.2e9


@pytest.mark.slow
def test_attention_is_right_and_what_cannot_run_here_is_named():
    found = gpu_check.correctness(SMALL)
    assert found["right"] == {"reference": True, "blocked": True, "xla": True}
    assert found["skipped"] == {
        name: f"it runs on {kind}, this is cpu" for name, kind in (("cudnn", "gpu"), ("splash", "tpu"))
    }
    text = gpu_check.line("attention", found)
    assert "WRONG" not in text
    assert "cudnn      skipped: it runs on gpu, this is cpu" in text


def test_wrong_attention_is_seen(monkeypatch):
    blind = lambda q, k, v, mask, *rest: kernels.jax_mix("xla", q, k, v, mask._replace(window=None), *rest[:1])
    monkeypatch.setitem(kernels.IMPLEMENTATIONS, "xla", kernels.Kernel("sees too much", blind))
    found = gpu_check.correctness(SMALL)
    assert found["right"] == {"reference": True, "blocked": True, "xla": False}
    assert "WRONG" in gpu_check.line("attention", found)


def test_nothing_is_begun_when_the_time_is_up_and_all_figures_are_written(monkeypatch, tmp_path, capsys):
    begun = []

    def measured(until, name, part, request):
        begun.append(name)
        time.sleep(max(0.0, until - time.monotonic()))
        return {"device": "toy", "failed": "stopped"}

    monkeypatch.setattr(gpu_check, "measured_until", measured)
    assert gpu_check.main(["--tiny", "--minutes", "0.001", "--output", str(tmp_path / "found.json")]) == 1
    assert begun == ["attention"]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["results"] == {"attention": {"device": "toy", "failed": "stopped"}}
    assert len(found["left_out"]) == len(gpu_check.requests(True)) - 1
    assert "left out: experts blocks" in capsys.readouterr().out


def test_a_measurement_that_does_not_end_is_stopped():
    found = gpu_check.measured_until(time.monotonic() + 0.1, *gpu_check.requests(False)[-1])
    assert found["failed"] == "stopped: the time was up"


@pytest.mark.slow
def test_all_parts_run_on_a_cpu(tmp_path):
    done = run_module(
        *("tools.gpu_check", "--tiny", "--output", tmp_path / "found.json"),
        XLA_FLAGS="--xla_backend_optimization_level=0",
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["left_out"] == []
    assert list(found["results"]) == [name for name, _, _ in gpu_check.requests(True)]
    assert not [name for name, result in found["results"].items() if "failed" in result], done.stdout
    measured = [r for name, r in found["results"].items() if name.startswith(("train", "decode"))]
    assert all(r["tokens_per_s"] > 0 for r in measured)
    products = {name: r for name, r in found["results"].items() if name.startswith("experts")}
    assert {name for name, r in products.items() if "skipped" in r} == {"experts megablox", "experts mosaic"}
    assert all(max(r["errors"]) < 1e-2 for r in products.values() if "errors" in r)
    assert found["device"] in done.stdout
