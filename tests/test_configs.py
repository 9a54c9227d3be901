import dataclasses

import pytest
from common import ROOT
from hf_models import HUB

from minitf import config
from minitf.huggingface.families import FREE, canonical, read_config
from minitf.model.transformer import model_params
from minitf.params import count_params
from minitf.settings import flat

FILES = sorted(p.name for p in (ROOT / "configs").glob("*.py"))


def load(name):
    return config.freeze(config.load_file(str(ROOT / "configs" / name)))


@pytest.mark.parametrize("file", FILES)
def test_every_config_is_valid_and_begins_with_its_command(file):
    config.validate(load(file))
    assert f"python -m minitf.train --config configs/{file}" in (ROOT / "configs" / file).read_text().split('"""')[1]


@pytest.mark.parametrize(
    ("file", "count"),
    [
        ("tutorial.py", 103_744),
        ("tiny.py", 1_980_096),
        ("tiny_moe.py", 6_409_920),
        ("gpt2_124m.py", 124_373_760),
        ("gpt2_124m.py:original", 124_439_808),
        ("llama3_8b.py", 8_030_261_248),
        ("llama3_70b.py", 70_553_706_496),
        ("mixtral_8x7b.py", 46_702_792_704),
        ("qwen3_30b_a3b.py", 30_532_122_624),
    ],
)
def test_parameter_counts(file, count):
    assert count_params(model_params(load(file).model))["total"] == count


@pytest.mark.parametrize("file", ["mixtral_8x7b.py", "qwen3_30b_a3b.py"])
def test_configs_of_mixtures_are_those_of_the_hub(file):
    name = {"mixtral_8x7b.py": "Mixtral-8x7B-v0.1", "qwen3_30b_a3b.py": "Qwen3-30B-A3B"}[file]
    model, hub = (flat(canonical(m)) for m in (load(file).model, read_config(HUB[name][0])))
    assert {n for n in hub if model[n] != hub[n]} <= FREE


def count_on_65_symbols(cfg):
    sized = dataclasses.replace(cfg.model, vocab_size=65, max_seq_len=cfg.seq_len)
    return count_params(model_params(sized))["total"]


@pytest.mark.parametrize(("file", "count"), [("char_cpu.py", 804_096), ("char_fast.py", 449_664)])
def test_parameter_counts_on_65_symbols(file, count):
    assert count_on_65_symbols(load(file)) == count


def test_char_fast_compares_with_char_cpu():
    fast, cpu = load("char_fast.py"), load("char_cpu.py")
    assert count_on_65_symbols(fast) <= count_on_65_symbols(cpu)
    # Both are scored on the same data in the same windows.
    assert (fast.data, fast.seq_len, fast.eval_batches) == (cpu.data, cpu.seq_len, cpu.eval_batches)
