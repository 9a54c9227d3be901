import pytest
from common import ROOT

from minitf import config, params
from minitf.model.transformer import model_params

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
    assert params.count(model_params(load(file).model))["total"] == count


def test_char_cpu_has_nanogpts_count_on_65_symbols():
    cfg = load("char_cpu.py")
    import dataclasses

    sized = dataclasses.replace(cfg.model, vocab_size=65, max_seq_len=cfg.seq_len)
    assert params.count(model_params(sized))["total"] == 804_096
