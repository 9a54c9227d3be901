import dataclasses

import pytest
from common import ROOT

from minitf import config
from minitf.model.transformer import model_params
from minitf.params import count_params

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
        ("gpt2_124m.py", 124_373_760),
        ("gpt2_124m.py:original", 124_439_808),
        ("llama3_8b.py", 8_030_261_248),
        ("llama3_70b.py", 70_553_706_496),
    ],
)
def test_parameter_counts(file, count):
    assert count_params(model_params(load(file).model))["total"] == count


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
