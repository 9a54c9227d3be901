"""Settings: from their defaults through a config file and the command line to checked dataclasses, and back."""

import argparse
import dataclasses
import functools
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
import pytest

from minitf import config
from minitf import params as P
from minitf.config import Config
from minitf.data.store import TOKENS
from minitf.distributed import Watchdog
from minitf.model.transformer import model_params
from minitf.optimizer import make_optimizer, make_schedule
from minitf.sharding import mesh_settings
from minitf.step import row_sums
from minitf.tables import check_unread, did_you_mean, pick
from tests.common import ROOT, TINY, change


class Setting(NamedTuple):
    name: str  # dotted
    kind: Any
    can_be_none: bool
    default: Any


def settings(cls: type = Config, prefix: str = "") -> Iterator[Setting]:
    for field in dataclasses.fields(cls):
        kind, can_be_none = config.optional(config.hints(cls)[field.name])
        if dataclasses.is_dataclass(kind):
            yield from settings(kind, f"{prefix}{field.name}.")
        else:
            yield Setting(prefix + field.name, kind, can_be_none, field.default)


SETTINGS = list(settings())
OPTIONAL = [s for s in SETTINGS if s.can_be_none]
BOOLEAN = [s for s in SETTINGS if s.kind is bool]
SAMPLES = {  # type -> texts of the command line and what they mean
    int: [("3", 3), ("-1", -1)],
    float: [("0.25", 0.25), ("1", 1.0), ("3e-4", 3e-4)],
    bool: [("true", True), ("False", False), ("1", True), ("no", False)],
    str: [("xyz", "xyz"), ("a/b c=d", "a/b c=d")],
    tuple[tuple[str, float], ...]: [
        ("a:0.7,b/c:2", (("a", 0.7), ("b/c", 2.0))),
        ("gs://a:1", (("gs://a", 1.0),)),
    ],
    tuple[int, int]: [("3,2", (3, 2)), ("3:2", (3, 2)), ("(3, 2)", (3, 2))],
    tuple[str, ...]: [("a", ("a",)), ("a,b", ("a", "b")), ("('a', 'b')", ("a", "b")), ("[a, b]", ("a", "b"))],
}
named = pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
optional = pytest.mark.parametrize("setting", OPTIONAL, ids=lambda s: s.name)


def get(cfg: Any, name: str) -> Any:
    for part in name.split("."):
        cfg = getattr(cfg, part)
    return cfg


def same(value: Any, expected: Any) -> bool:
    """Equal, and of the same type: 1 is not 1.0."""
    return value == expected and type(value) is type(expected)


def parse(*argv: Any) -> Config:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--config", required=True)
    return config.parse_args(list(map(str, argv)), parser)[1]


@pytest.fixture
def write(tmp_path):
    """Writes a config file of these statements and returns its path."""

    def write(*statements: str, name: str = "c.py", head: str = "def get_config():") -> Path:
        lines = ["from minitf import config", head, "    c = config.default()", *(f"    {s}" for s in statements)]
        path = tmp_path / name
        path.write_text("\n".join([*lines, "    return c", ""]))
        return path

    return write


@pytest.fixture
def unchecked(monkeypatch):
    """Values need not make sense."""
    monkeypatch.setattr(config, "validate", lambda cfg: None)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A config file of the cases' set-up."""
    path = tmp_path_factory.mktemp("configs") / "tiny.py"
    path.write_text(
        "import dataclasses\nfrom minitf import config\nfrom tests.common import TINY\n\n"
        "def get_config():\n    c = config.default()\n    c.update(dataclasses.asdict(TINY))\n    return c\n"
    )
    return path


# ---- dataclasses, ConfigDict, JSON


def test_defaults_survive_the_config_dict():
    assert config.freeze(config.default()) == Config()


def test_changed_settings_survive_the_config_dict(tiny):
    assert config.freeze(config.load_file(str(tiny))) == TINY


@pytest.mark.parametrize("cfg", [Config(), TINY, change(TINY, model__pattern=("full", "sliding"))])
def test_json_round_trip_is_exact(cfg):
    stored = json.loads(config.to_json(cfg))
    assert config.freeze(stored) == cfg
    assert config.missing(stored) == []


@named
def test_every_default_has_its_declared_type(setting):
    assert same(config.checked(setting.name, setting.default, config.find(setting.name)), setting.default)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda p: p.stem)
def test_shipped_configs_are_valid(path):
    assert f"--config configs/{path.name}" in path.read_text()
    parse("--config", path)


def test_older_config_loads_with_new_settings_at_their_defaults():
    stored = json.loads(config.to_json(TINY))
    del stored["log_every"], stored["loss"], stored["model"]["attention"]["window"], stored["optimizer"]["b1"]
    assert config.freeze(stored) == change(TINY, log_every=Config().log_every)
    assert set(config.missing(stored)) == {"log_every", "loss", "model.attention.window", "optimizer.b1"}


@pytest.mark.parametrize(
    ("section", "name", "message"),
    [
        ([], "stepps", "stepps: no such setting; did you mean 'steps'?"),
        (["model", "attention"], "number", "model.attention.number: no such setting"),
    ],
)
def test_unknown_setting_of_a_stored_config_is_refused(section, name, message):
    stored = json.loads(config.to_json(TINY))
    node = stored
    for part in section:
        node = node[part]
    node[name] = 3
    with pytest.raises(ValueError, match="no such setting") as e:
        config.freeze(stored)
    assert message in str(e.value)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"steps": 3.0}, "steps=3.0: is float, must be int or None"),
        ({"seq_len": None}, "seq_len=None: is NoneType, must be int"),
        ({"seq_len": True}, "seq_len=True: is bool, must be int"),
        ({"optimizer": {"b1": "0.9"}}, "optimizer.b1='0.9': is str, must be float"),
        ({"optimizer": {"b1": True}}, "optimizer.b1=True: is bool, must be float"),
        ({"data": {"shuffle": 1}}, "data.shuffle=1: is int, must be bool"),
        ({"model": {"pattern": "full"}}, "model.pattern='full': is str, must be tuple[str, ...] or None"),
        ({"model": {"pattern": ["full", 3]}}, "model.pattern=3: is int, must be str"),
        ({"model": 3}, "model=3: is a section; set its settings: num_layers, "),
        ({"data": {"path": ""}}, "data.path='': is empty, must be str or None"),
        ({"data": {"kind": ""}}, "data.kind='': is empty, must be str"),
    ],
)
def test_value_of_a_wrong_type_is_refused(stored, message):
    with pytest.raises(ValueError) as e:
        config.freeze(stored)
    assert message in str(e.value)


# ---- the command line


@named
def test_every_setting_can_be_overridden(setting, write, unchecked):
    file = write()
    for text, expected in SAMPLES[setting.kind]:
        for argv in (
            [f"--config.{setting.name}={text}", "--config", file],
            ["--config", file, f"--config.{setting.name}={text}"],
            [f"--config={file}", f"-config.{setting.name}={text}"],
        ):
            cfg = parse(*argv)
            assert same(get(cfg, setting.name), expected)
        if setting.kind is not bool:
            assert parse(f"--config.{setting.name}", text, "--config", file) == cfg
        others = [s.name for s in SETTINGS if s.name != setting.name]
        assert all(get(cfg, other) == get(Config(), other) for other in others)


@optional
def test_every_optional_setting_can_be_set_to_none_and_back(setting, write, unchecked):
    (_, value), *_ = SAMPLES[setting.kind]
    to_value = write(f"c.{setting.name} = {value!r}", name="value.py")
    assert same(get(parse("--config", to_value), setting.name), value)
    assert get(parse("--config", to_value, f"--config.{setting.name}=None"), setting.name) is None
    to_none = write(f"c.{setting.name} = None", name="none.py")
    assert get(parse("--config", to_none), setting.name) is None
    for text, expected in SAMPLES[setting.kind]:
        assert same(get(parse("--config", to_none, f"--config.{setting.name}={text}"), setting.name), expected)


@pytest.mark.parametrize("setting", [s for s in SETTINGS if not s.can_be_none], ids=lambda s: s.name)
def test_no_other_setting_can_be_none(setting, write, unchecked):
    with pytest.raises(ValueError) as e:
        parse("--config", write(f"c.{setting.name} = None"))
    assert str(e.value).startswith(f"{setting.name}=None: ")
    if setting.kind not in (str, tuple[str, ...]):  # texts may be of that word
        with pytest.raises(ValueError, match=f"--config.{setting.name}=None: must be"):
            parse("--config", write(), f"--config.{setting.name}=None")


@pytest.mark.parametrize("setting", BOOLEAN, ids=lambda s: s.name)
@pytest.mark.parametrize("in_file", [True, False])
def test_flags_without_a_value_switch_on_and_off(setting, in_file, write, unchecked):
    file = write(f"c.{setting.name} = {in_file}")
    assert get(parse("--config", file, f"--config.{setting.name}"), setting.name) is True
    assert get(parse(f"--config.{setting.name}", "--config", file), setting.name) is True
    assert get(parse("--config", file, f"--noconfig.{setting.name}"), setting.name) is False


def test_overrides_win_over_the_file_and_the_last_one_wins(write, unchecked):
    file = write("c.steps = 10", "c.model.dim = 32")
    cfg = parse("--config.steps=20", "--config", file, "--config.steps", "30", "--config.optimizer.b1=0.5")
    assert cfg == change(Config(), steps=30, model__dim=32, optimizer__b1=0.5)


def test_a_setting_that_refers_to_another_follows_its_override(write, unchecked):
    file = write("c.model.max_seq_len = c.get_ref('seq_len')")
    assert parse("--config", file, "--config.seq_len=32").model.max_seq_len == 32


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--config.stepps=3", "--config.stepps: no setting 'stepps' in the config; did you mean 'steps'?"),
        ("--config.model.dimm=3", "--config.model.dimm: no setting 'dimm' in model; did you mean 'dim'?"),
        ("--config.modl.dim=3", "--config.modl.dim: no setting 'modl' in the config; did you mean 'model'?"),
        ("--config.model.attention.heads=3", "no setting 'heads' in model.attention"),
        ("--config.=3", "no setting '' in the config"),
        ("--config.model=3", "--config.model: is a section; set its settings: model.num_layers, "),
        ("--config.model", "--config.model: is a section"),
        ("--config.model.dim.x=3", "--config.model.dim.x: model.dim is a setting, not a section"),
        ("--config.steps", "--config.steps: needs a value"),
        ("--config.steps --overwrite", "--config.steps=--overwrite: must be int or None"),
        ("--config.optimizer.b1=fast", "--config.optimizer.b1=fast: must be float"),
        ("--noconfig.steps", "--noconfig.steps: only a setting that is true or false"),
        ("--noconfig.data.shuffle=false", "--noconfig.data.shuffle=false: only a setting that is true or false"),
        ("--noconfig.data.shufle", "no setting 'shufle' in data; did you mean 'shuffle'?"),
        ("steps=3", "steps=3: overrides begin with dashes: --config.steps=3"),
        ("config.model.dim=3", "config.model.dim=3: overrides begin with dashes: --config.model.dim=3"),
        ("--config.data.path=", "data.path='': is empty"),
    ],
)
def test_mistaken_override_is_named(argv, message, write, unchecked):
    with pytest.raises(ValueError) as e:
        parse("--config", write(), *argv.split())
    assert message in str(e.value)


# ---- the config file


def test_file_argument_is_passed_to_get_config(write, unchecked):
    file = write("c.model.num_layers = int(layers)", head="def get_config(layers='5'):")
    assert parse("--config", file).model.num_layers == 5
    assert parse("--config", f"{file}:7").model.num_layers == 7
    assert parse("--config", f"{file}:7", "--config.model.num_layers=9").model.num_layers == 9


def test_file_whose_name_has_a_colon_loads(write, unchecked):
    assert parse("--config", write("c.steps = 3", name="a:b.py")).steps == 3


@pytest.mark.parametrize("form", ["c.py", "./c.py", "../{parent}/c.py", "{path}"])
@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("c.stepps = 3", "AttributeError: Key \"stepps\" does not exist"),
        ("c.stepps = 3", "the config is locked; did you mean 'steps'?"),
        ("c.model.dimm = 3", "; did you mean 'dim'?"),
        ("c.modle.dim = 3", "AttributeError: 'modle'; did you mean 'model'?"),
        ("c.model.dim = 3.5", "'dim'"),
        ("c.steps = 'ten'", "'steps'"),
        ("c.steps = 1 / 0", "ZeroDivisionError: division by zero"),
        ("c.steps = ", "SyntaxError: invalid syntax"),
        ("import json; json.loads('{')", "JSONDecodeError"),
        ("raise KeyError('nothing')", "KeyError: nothing"),
    ],
)  # fmt: skip
def test_mistake_in_a_config_file_gives_file_and_line(statement, message, form, write, tmp_path, monkeypatch):
    path = write("c.seed = 1", statement)
    monkeypatch.chdir(tmp_path)
    file = form.format(path=path, parent=tmp_path.name)
    with pytest.raises(ValueError) as e:
        config.load_file(file)
    assert str(e.value).startswith(f"{file}, line 5: ")
    assert message in str(e.value)
    assert "Other fields" not in str(e.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.py", "x = 1", "c.py: ValueError: it has no function get_config()"),
        ("c.py", "get_config = 3", "c.py: ValueError: it has no function get_config()"),
        ("c.py", "def get_config(): pass", "c.py: get_config() returned NoneType, not a ConfigDict"),
        ("c.py", "def get_config(size): pass", "c.py: TypeError: get_config() missing 1 required positional argument"),
        ("c.py", "import nosuchmodule", "c.py, line 1: ModuleNotFoundError: No module named 'nosuchmodule'"),
        ("c.py", "x = '\0'", "c.py: SyntaxError: source code string cannot contain null bytes"),
        ("c.json", "{}", "c.json: is no Python file with get_config()"),
    ],
)  # fmt: skip
def test_file_that_is_no_config_is_refused(name, text, message, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError) as e:
        config.load_file(str(path))
    assert message in str(e.value)


@pytest.mark.parametrize("name", ["nosuch.py", "nosuch.py:7", ".", "x" * 300 + ".py"])
def test_missing_config_file_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no such file"):
        config.load_file(name)


def test_file_that_takes_no_argument_refuses_one(write):
    with pytest.raises(ValueError, match=r"c.py: TypeError: get_config\(\) takes 0 positional arguments"):
        config.load_file(f"{write()}:7")


@pytest.mark.parametrize("name", [s.name for s in SETTINGS if s.kind is float])
def test_float_setting_takes_an_integer_in_a_file(name, write, unchecked):
    assert same(get(parse("--config", write(f"c.{name} = 1")), name), 1.0)


def test_settings_outside_the_declaration_are_refused_though_a_file_unlocks(write):
    with pytest.raises(ValueError, match="stepps: no such setting; did you mean 'steps'"):
        parse("--config", write("c.unlock()", "c.stepps = 3"))


# ---- tables


@dataclasses.dataclass(frozen=True)
class Choice:
    kind: str = "plain"
    everywhere: int = 1
    bend: float | None = None
    twist: int = 2


class Kind(NamedTuple):
    reads: tuple[str, ...] = ()


KINDS = {"plain": Kind(), "bent": Kind(("bend",)), "both": Kind(("bend", "twist"))}


@pytest.mark.parametrize(
    ("cfg", "chosen"),
    [
        (Choice(), ["plain"]),
        (Choice(everywhere=5), ["plain"]),
        (Choice(bend=0.5), ["bent"]),
        (Choice(bend=0.5, twist=3), ["both"]),
        (Choice(twist=3), ["plain", "both"]),
    ],
)
def test_setting_that_a_chosen_kind_reads_passes(cfg, chosen):
    check_unread("choice", cfg, KINDS, iter(chosen))


@pytest.mark.parametrize(
    ("cfg", "chosen", "message"),
    [
        (Choice(bend=0.5), ["plain"], "choice.bend=0.5 has no effect with plain; it is read by bent, both"),
        (Choice(twist=3), ["bent", "plain"], "choice.twist=3 has no effect with bent, plain; it is read by both"),
    ],
)
def test_changed_setting_that_no_chosen_kind_reads_is_refused(cfg, chosen, message):
    with pytest.raises(ValueError) as e:
        check_unread("choice", cfg, KINDS, chosen)
    assert str(e.value) == message


def test_unknown_kind_is_refused_with_the_known_ones():
    assert pick("choice.kind", KINDS, "bent") is KINDS["bent"]
    with pytest.raises(ValueError, match=r"choice\.kind: unknown kind 'bnet'; known: plain, bent, both"):
        pick("choice.kind", KINDS, "bnet")


def test_nearest_name_is_offered_only_where_one_is_near():
    assert did_you_mean("bnet", KINDS) == "; did you mean 'bent'?"
    assert did_you_mean("xyz", KINDS) == ""


# ---- validate

AT_LEAST_1 = """batch_size seq_len accumulation log_every eval_every eval_batches loss.chunk loss.passes data.threads data.prefetch
    model.num_layers model.dim model.vocab_size model.max_seq_len model.unroll model.mlp.hidden
    model.attention.num_heads model.attention.num_kv_heads model.attention.head_dim model.attention.window
    model.attention.rope_original_len mesh.fsdp_inner""".split()
ABOVE_0 = """optimizer.learning_rate optimizer.clip_norm optimizer.eps model.norm_eps model.logit_softcap
    model.attention.softcap model.attention.rope_base model.attention.rope_factor model.attention.scale
    model.attention.qk_norm_eps model.embedding_scale loss.z_loss""".split()
NOT_NEGATIVE = ["optimizer.weight_decay", "optimizer.end_learning_rate"]
BELOW_1 = """model.dropout model.attention.dropout optimizer.b1 optimizer.b2 optimizer.momentum
    optimizer.muon_momentum""".split()
KINDS_OF = """model.attention.kind model.attention.implementation model.attention.bias model.mlp.kind model.norm
    model.positions model.remat model.init model.dtype optimizer.kind optimizer.schedule optimizer.moment_dtype
    optimizer.nonfinite data.kind data.tokenizer mesh.collectives""".split()
READ_BY = {  # the kinds that read a setting, where TINY's does not
    "model.attention.window": "model.attention.kind=sliding",
    "model.attention.rope_factor": "model.positions=rope_llama3",
    "model.attention.rope_original_len": "model.positions=rope_llama3",
    "optimizer.end_learning_rate": "optimizer.schedule=linear",
    "optimizer.momentum": "optimizer.kind=sgd",
    "optimizer.muon_momentum": "optimizer.kind=muon",
    "mesh.fsdp_inner": "mesh.collectives=manual",
}


def each(names: list[str], values: tuple, message: str) -> list[tuple[str, str]]:
    """(overrides, message) of every name with every value."""
    return [(f"{n}={v} {READ_BY.get(n, '')}", f"{n}={v}: {message}") for n in names for v in values]


WSD = "optimizer.schedule=warmup_stable_decay"
TEXT = "data.kind=text data.path=x"

REFUSED = [
    *each(AT_LEAST_1, (0, -1), "must be at least 1"),
    *each(ABOVE_0, (0.0, "inf", "nan"), "must be a number above 0"),
    *each(NOT_NEGATIVE, (-0.1, "inf", "nan"), "must be a number of at least 0"),
    *each(BELOW_1, (-0.1, 1.0, "nan"), "must be at least 0 and below 1"),
    # what 32 bits make 0, infinity or 1 of
    *each(ABOVE_0, (1e-50, 1e39), "must be a number above 0, and so in float32"),
    *each(NOT_NEGATIVE, (1e-50, 1e39), "must be a number of at least 0, and so in float32"),
    *each(BELOW_1, (1e-50, 0.99999999), "must be at least 0 and below 1, and so in float32"),
    *each(["model.dropout"], (1e-9,), "must be at least 0 and below 1: 0, or above 2.98e-8"),
    ("model.dtype=float16 model.embedding_scale=1e5", "must be a number above 0, and so in float16, which it is used in"),
    ("optimizer.moment_dtype=bfloat16 optimizer.b1=0.999", "in bfloat16, which it is used in: 0, or from 1.18e-38 to 0.99609375"),
    ("optimizer.kind=lion optimizer.moment_dtype=bfloat16 optimizer.b2=0.999", "optimizer.b2=0.999: must be at least 0 and below 1"),
    ("optimizer.schedule=cosine optimizer.end_learning_rate=0.002", "must be at most optimizer.learning_rate=0.001"),
    # what timers, threads and integers of 32 bits take
    *each(AT_LEAST_1, (2**31, 2**63), "must be at least 1 and "),
    *each(["watchdog.at_least", "watchdog.factor"], (0.0, 1e10, "nan"), "must be a number above 0 and at most 1e+09"),
    *each(["distributed.start_timeout"], (0.5, 2147483640.0, "nan"), "must be at least 1 second and at most 1e+09"),
    *each(["data.workers"], (-1, 1025), "must be at least 0 and at most 1024"),
    ("max_run_time=12000d", "max_run_time=12000d: must be above 0 and at most 1e+09 seconds"),
    ("steps=None epochs=1e300", "epochs=1e+300: must be below 9223372036854775808 (2^63)"),
    *each([f"mesh.{a}" for a in mesh_settings()], (0, -2), "must be at least 1, or -1"),
    *[(f"{n}=nosuch", f"{n}: unknown kind 'nosuch'; known: ") for n in KINDS_OF],
    # the length
    ("steps=None", "steps=None, tokens=None, epochs=None: exactly one sets the length of the run"),
    ("tokens=100", "steps=3, tokens=100, epochs=None: exactly one sets the length of the run"),
    ("steps=None tokens=100 epochs=1", "steps=None, tokens=100, epochs=1.0: exactly one"),
    ("steps=-1", "steps=-1: must be at least 0"),
    ("steps=None tokens=-1", "tokens=-1: must be at least 0"),
    ("steps=None epochs=-0.5", "epochs=-0.5: must be at least 0"),
    ("steps=None epochs=inf", "epochs=inf: must be at least 0"),
    ("steps=None epochs=nan", "epochs=nan: must be at least 0"),
    ("steps=2147483648", "steps=2147483648: must be below 2147483648 (2^31)"),
    ("steps=1" + "0" * 400, "must be below 2147483648 (2^31)"),
    # seeds
    ("seed=-1", "seed=-1: must be from 0 to 4294967295 (2^32 - 1)"),
    ("seed=4294967296", "seed=4294967296: must be from 0 to 4294967295"),
    ("data.seed=-1", "data.seed=-1: must be from 0 to 4294967295"),
    ("data.seed=4294967296", "data.seed=4294967296: must be from 0 to 4294967295"),
    # sizes against each other
    ("accumulation=3", "batch_size=8: not divisible by accumulation=3"),
    ("model.dim=18", "model.dim=18: not divisible by model.attention.num_heads=4"),
    ("model.attention.num_kv_heads=3", "=4: not divisible by model.attention.num_kv_heads=3"),
    ("model.attention.num_kv_heads=8", "=4: not divisible by model.attention.num_kv_heads=8"),
    ("model.attention.head_dim=5", "model.attention.head_dim=5: model.positions=rope turns pairs"),
    ("model.dim=20", "model.attention.head_dim=5 (model.dim / model.attention.num_heads): "),
    ("seq_len=17", "seq_len=17: longer than model.max_seq_len=16"),
    # the pattern
    ("model.pattern=", "model.pattern=(): must be at least one attention kind, or None"),
    ("model.pattern=full,nosuch", "model.pattern: unknown kind 'nosuch'; known: full, sliding"),
    ("model.pattern=full model.attention.kind=sliding", "model.attention.kind='sliding' has no effect"),
    # settings that the chosen kinds do not read
    ("model.attention.window=8", "model.attention.window=8 has no effect with full; it is read by sliding"),
    ("model.pattern=full model.attention.window=8", "model.attention.window=8 has no effect with full"),
    ("model.attention.block_q=200", "model.attention.block_q=200: must be a multiple of 128"),
    (
        "model.attention.block_kv=256 model.attention.implementation=xla",
        "model.attention.block_kv=256 has no effect with xla; it is read by splash",
    ),
    ("model.positions=learned model.attention.rope_base=100", "rope_base=100.0 has no effect with learned"),
    ("optimizer.momentum=0.9", "optimizer.momentum=0.9 has no effect with adamw; it is read by sgd"),
    ("optimizer.kind=sgd optimizer.b1=0.5", "optimizer.b1=0.5 has no effect with sgd; it is read by adamw, lion, muon"),
    ("optimizer.end_learning_rate=1e-5", "optimizer.end_learning_rate=1e-05 has no effect with constant"),
    ("optimizer.decay_steps=2", "optimizer.decay_steps=2 has no effect with constant"),
    ("mesh.fsdp_inner=2", "mesh.fsdp_inner=2 has no effect with auto; it is read by manual"),
    ("mesh.collectives=manual mesh.tensor=2", "not mesh.tensor=2, mesh.dcn_tensor=1; set both to 1, or mesh.collectives=auto"),
    ("mesh.collectives=manual mesh.dcn_tensor=-1", "not mesh.tensor=1, mesh.dcn_tensor=-1; set both to 1"),
    ("data.path=x.txt", "data.path='x.txt' has no effect with synthetic; it is read by text, parquet"),
    (f"{TEXT} data.eos_id=3", "data.eos_id=3 has no effect with text; it is read by tokens"),
    # data
    (f"{TEXT} data.val_fraction=0", "data.val_fraction=0.0: must be above 0 and below 1"),
    (f"{TEXT} data.val_fraction=1", "data.val_fraction=1.0: must be above 0 and below 1"),
    # schedules
    ("optimizer.warmup_steps=-1", "optimizer.warmup_steps=-1: must be at least 0"),
    ("optimizer.warmup_steps=4", "optimizer.warmup_steps=4: longer than the run of 3 steps"),
    ("profile=0,2", "profile=(0, 2): must be two numbers of at least 1: the first step, and how many"),
    ("profile=1,0", "profile=(1, 0): must be two numbers of at least 1"),
    ("profile=2,3", "profile=2,3: ends with step 4, and the run has 3"),
    ("profile=2", "--config.profile=2: must be tuple[int, int] or None"),
    ("profile=1,1,1", "--config.profile=1,1,1: must be tuple[int, int] or None"),
    ("compiler_options.tpu=xla_a", "compiler_options.tpu: 'xla_a': must be NAME=VALUE"),
    ("compiler_options.gpu=a=1", "compiler_options.gpu: 'a=1': must be NAME=VALUE"),
    ("compiler_options.cpu=xla_a=", "compiler_options.cpu: 'xla_a=': must be NAME=VALUE"),
    ("compiler_options.cpu=xla_a=1,xla_b=2,xla_a=3", "compiler_options.cpu: 'xla_a=3': is there twice"),
    (f"{WSD} optimizer.decay_steps=0", "optimizer.decay_steps=0: must be from 1 to 3, the steps after warm-up"),
    (f"{WSD} optimizer.decay_steps=4", "optimizer.decay_steps=4: must be from 1 to 3"),
    (f"{WSD} optimizer.warmup_steps=2 optimizer.decay_steps=2", "optimizer.decay_steps=2: must be from 1 to 1"),
    (f"{WSD} optimizer.warmup_steps=3 optimizer.decay_steps=1", "optimizer.decay_steps=1: must be None where the warm-up takes all"),
    ("steps=1 optimizer.warmup_steps=1", "optimizer.warmup_steps=1: must be 0 in a run of one step, as the first update"),
]  # fmt: skip


def override(text: str) -> list[str]:
    return [f"--config.{o}" for o in text.split()]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[o.strip()[:60] for o, _ in REFUSED])
def test_validate_refuses(overrides, message, tiny):
    with pytest.raises(ValueError) as e:
        parse("--config", tiny, *override(overrides))
    assert message in str(e.value)


@pytest.mark.parametrize(
    "overrides",
    [
        *[f"{n}=1 {READ_BY.get(n, '')}" for n in ("log_every", "eval_every", "model.unroll", "model.attention.window")],
        *[f"{n}=0 {READ_BY.get(n, '')}" for n in NOT_NEGATIVE + BELOW_1],
        *[f"{n}={v} {READ_BY.get(n, '')}" for n in BELOW_1 for v in (1e-6, 0.9999999)],
        *[f"{n}={v} {READ_BY.get(n, '')}" for n in ABOVE_0 for v in (1.2e-38, 3.4e38)],
        "optimizer.schedule=cosine optimizer.end_learning_rate=0.001",
        "watchdog.at_least=1e9 watchdog.factor=1e9 distributed.start_timeout=1e9 max_run_time=11574d",
        *[f"{s.name}=None" for s in OPTIONAL if s.name != "steps"],
        "steps=0",
        "steps=2147483647",
        "steps=None tokens=0",
        "steps=None tokens=1" + "0" * 400,  # how many steps these are is known with the data
        "steps=None epochs=0.5 optimizer.warmup_steps=1000000",
        "seed=4294967295 data.seed=0",
        "accumulation=8",
        "seq_len=16",
        "model.max_seq_len=None seq_len=17",
        "model.dim=18 model.attention.head_dim=4",
        "model.attention.head_dim=5 model.positions=learned",
        "mesh.data=-1 mesh.fsdp=1",
        "mesh.collectives=manual mesh.dcn_data=-1 mesh.fsdp_inner=1",
        "model.pattern=full,sliding model.attention.window=8",
        "optimizer.kind=sgd optimizer.momentum=0.9",
        *[f"model.attention.bias={kind}" for kind in ("none", "qkv", "qkvo")],
        *[f"model.dtype={kind}" for kind in ("float32", "bfloat16", "float16")],
        *[f"optimizer.moment_dtype={kind}" for kind in ("float32", "bfloat16")],
        *[f"optimizer.nonfinite={kind}" for kind in ("stop", "skip")],
        "profile=1,3",
        "profile=3,1",
        "compiler_options.tpu=xla_a=1,xla_b=true",
        "optimizer.warmup_steps=3",
        "steps=0 optimizer.warmup_steps=3",
        f"{WSD} optimizer.decay_steps=3",
        f"{WSD} optimizer.warmup_steps=2 optimizer.decay_steps=1",
        "data.kind=tokens data.path=x data.eos_id=63 data.token_dtype=int32",
        f"{TEXT} data.val_path=y",
    ],
    ids=lambda o: o.strip()[:60],
)
def test_validate_accepts_the_border(overrides, tiny):
    parse("--config", tiny, *override(overrides))


NUMBERS = [s for s in SETTINGS if s.kind in (int, float)]
EXTREMES = {int: (0, 2**31 - 1, 2**31, 2**63, -(2**63)), float: (-0.0, 1e-300, 1e9, 1e10, 1e300, math.inf, math.nan)}


def accepted(cfg):
    try:
        config.validate(cfg)
        config.check_length(cfg, config.total_steps(cfg, rows=10**9))
    except ValueError:  # any other error fails the test
        return False
    return True


@pytest.mark.parametrize("setting", NUMBERS, ids=lambda s: s.name)
def test_an_extreme_number_is_refused_at_once_or_works(setting):
    for value in EXTREMES[setting.kind]:
        given = {"steps": None} if setting.name in ("tokens", "epochs") else {}
        cfg = change(TINY, **given, **{setting.name.replace(".", "__"): value})
        for reader in READ_BY.get(setting.name, "").split():
            name, kind = reader.split("=")
            cfg = change(cfg, **{name.replace(".", "__"): kind})
        if not accepted(cfg):
            continue
        if setting.name.startswith("optimizer."):
            schedule = make_schedule(cfg.optimizer, cfg.steps)
            make_optimizer(cfg.optimizer, model_params(cfg.model), schedule)
            assert math.isfinite(np.float32(schedule(1)))
        elif setting.name.startswith("watchdog."):
            watchdog = Watchdog(cfg.watchdog)
            watchdog._times.extend((1e3, 1e3))
            assert 0 < watchdog.limit() + 2 < threading.TIMEOUT_MAX
        elif setting.name in TRACED:
            batch = {name: jax.ShapeDtypeStruct((8, 16), kind) for name, kind in TOKENS.items()}
            jax.eval_shape(functools.partial(row_sums, cfg=cfg), P.abstract(model_params(cfg.model)), batch)


TRACED = [s.name for s in NUMBERS if s.name.startswith(("model.attention.", "loss.")) or s.name == "model.unroll"]


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        (dict(steps=7), 7),
        (dict(steps=None, tokens=0), 0),
        (dict(steps=None, tokens=8 * 16), 1),
        (dict(steps=None, tokens=8 * 16 + 1), 2),
        (dict(steps=None, tokens=10**12), math.ceil(10**12 / 128)),
        (dict(steps=None, epochs=1.0), 5),  # of 40 rows
        (dict(steps=None, epochs=1.01), 6),
        (dict(steps=None, epochs=0.0), 0),
    ],
)
def test_run_is_at_least_as_long_as_asked_for(length, steps):
    assert config.total_steps(change(TINY, **length), rows=40) == steps


@pytest.mark.parametrize(
    ("values", "steps", "message"),
    [
        (dict(optimizer__warmup_steps=6), 5, "optimizer.warmup_steps=6: longer than the run of 5 steps"),
        (dict(optimizer__decay_steps=6), 5, "optimizer.decay_steps=6: must be from 1 to 5"),
        (dict(profile=(5, 2)), 5, "profile=5,2: ends with step 6, and the run has 5"),
        (dict(), 2**31, "below 2147483648"),
    ],
)
def test_length_known_with_the_data_is_checked_too(values, steps, message):
    with pytest.raises(ValueError) as e:
        config.check_length(change(TINY, steps=None, **values), steps)
    assert message in str(e.value)


def test_default_config_dict_is_locked():
    c = config.default()
    assert isinstance(c, ml_collections.ConfigDict)
    with pytest.raises(AttributeError):
        c.stepps = 3


def test_compiler_options_are_given_by_platform_and_truth_in_the_compilers_words():
    given = config.CompilerOptions(cpu=("xla_a=true", "xla_b=x=y"), tpu=("xla_c=3", "xla_d=FALSE"))
    assert given.of("cpu") == {"xla_a": "True", "xla_b": "x=y"}
    assert given.of("gpu") == {}
    assert given.of("tpu") == {"xla_c": "3", "xla_d": "False"}


SCHEDULED = """
from minitf import config

def get_config():
    c = config.default()
    c.steps = 300
    c.optimizer.schedule = "warmup_stable_decay"
    c.optimizer.warmup_steps = 20
    c.optimizer.decay_steps = 60
    return c
"""


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"steps": 300}, (20, 60)),
        ({"steps": 600}, (20, 60)),
        ({"steps": 100}, (20, 60)),  # it fits
        ({"steps": 70}, (20, 14)),
        ({"steps": 10}, (1, 2)),
        ({"steps": 2}, (1, 1)),
        ({"steps": 1}, (0, 1)),
        ({"steps": 10, "optimizer.warmup_steps": 4}, (4, 2)),
    ],
)
def test_a_schedule_of_the_file_is_shortened_with_the_run_in_proportion(overrides, expected, tmp_path, capsys):
    (tmp_path / "c.py").write_text(SCHEDULED)
    cfg = parse("--config", tmp_path / "c.py", *(f"--config.{k}={v}" for k, v in overrides.items()))
    assert (cfg.optimizer.warmup_steps, cfg.optimizer.decay_steps) == expected
    err = capsys.readouterr().err
    assert ("in the place of the config file's 300: optimizer." in err) == (expected != (20, 60))


def test_what_the_command_line_gives_and_does_not_fit_is_refused(tmp_path):
    (tmp_path / "c.py").write_text(SCHEDULED)
    with pytest.raises(ValueError, match="warmup_steps=20: longer than the run of 10 steps"):
        parse("--config", tmp_path / "c.py", "--config.steps=10", "--config.optimizer.warmup_steps=20")
    with pytest.raises(ValueError, match="decay_steps=60: must be from 1 to 9"):
        parse("--config", tmp_path / "c.py", "--config.steps=10", "--config.optimizer.decay_steps=60")
