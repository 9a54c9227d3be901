"""The command line of a config: files, overrides, help."""

import argparse
from pathlib import Path
from typing import Any

import pytest
from common import ROOT, change

from minitf import checks, command_line, config, settings
from minitf.config import Config
from minitf.settings import flat
from tools import document_settings

FIELDS = settings.fields(Config)
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
each_setting = pytest.mark.parametrize("field", FIELDS, ids=lambda f: f.name)


def get(cfg: Config, name: str) -> Any:
    return flat(cfg)[name]


def same(value: Any, expected: Any) -> bool:
    """Equal, and of the same type: 1 is not 1.0."""
    return value == expected and type(value) is type(expected)


def parse(*argv: Any) -> Config:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--config", required=True)
    return command_line.parse_args(list(map(str, argv)), parser)[1]


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
    monkeypatch.setattr(command_line, "validate", lambda cfg: None)


# ---- overrides


@each_setting
def test_every_setting_can_be_overridden(field, write, unchecked):
    file = write()
    for text, expected in SAMPLES[field.kind]:
        for argv in (
            [f"--config.{field.name}={text}", "--config", file],
            ["--config", file, f"--config.{field.name}={text}"],
            [f"--config={file}", f"-config.{field.name}={text}"],
        ):
            cfg = parse(*argv)
            assert same(get(cfg, field.name), expected)
        if field.kind is not bool:
            assert parse(f"--config.{field.name}", text, "--config", file) == cfg
        others = [f.name for f in FIELDS if f.name != field.name]
        assert all(get(cfg, other) == get(Config(), other) for other in others)


@pytest.mark.parametrize("field", [f for f in FIELDS if f.optional], ids=lambda f: f.name)
def test_every_optional_setting_can_be_set_to_none_and_back(field, write, unchecked):
    (_, value), *_ = SAMPLES[field.kind]
    to_value = write(f"c.{field.name} = {value!r}", name="value.py")
    assert same(get(parse("--config", to_value), field.name), value)
    assert get(parse("--config", to_value, f"--config.{field.name}=None"), field.name) is None
    to_none = write(f"c.{field.name} = None", name="none.py")
    assert get(parse("--config", to_none), field.name) is None
    for text, expected in SAMPLES[field.kind]:
        assert same(get(parse("--config", to_none, f"--config.{field.name}={text}"), field.name), expected)


@pytest.mark.parametrize("field", [f for f in FIELDS if not f.optional], ids=lambda f: f.name)
def test_no_other_setting_can_be_none(field, write, unchecked):
    with pytest.raises(ValueError) as e:
        parse("--config", write(f"c.{field.name} = None"))
    assert str(e.value).startswith(f"{field.name}=None: ")
    if field.kind not in (str, tuple[str, ...]):  # texts may be of that word
        with pytest.raises(ValueError, match=f"--config.{field.name}=None: must be"):
            parse("--config", write(), f"--config.{field.name}=None")


@pytest.mark.parametrize("field", [f for f in FIELDS if f.kind is bool], ids=lambda f: f.name)
@pytest.mark.parametrize("in_file", [True, False])
def test_flags_without_a_value_switch_on_and_off(field, in_file, write, unchecked):
    file = write(f"c.{field.name} = {in_file}")
    assert get(parse("--config", file, f"--config.{field.name}"), field.name) is True
    assert get(parse(f"--config.{field.name}", "--config", file), field.name) is True
    assert get(parse("--config", file, f"--noconfig.{field.name}"), field.name) is False


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


@pytest.mark.parametrize("name", [f.name for f in FIELDS if f.kind is float])
def test_float_setting_takes_an_integer_in_a_file(name, write, unchecked):
    assert same(get(parse("--config", write(f"c.{name} = 1")), name), 1.0)


def test_settings_outside_the_declaration_are_refused_though_a_file_unlocks(write):
    with pytest.raises(ValueError, match="stepps: no such setting; did you mean 'steps'"):
        parse("--config", write("c.unlock()", "c.stepps = 3"))


# ---- help


def printed(capsys, *argv) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as e:
        parse("--help_settings", *argv)
    return e.value.code, *capsys.readouterr()


def test_help_describes_every_setting_with_default_limits_and_kinds(capsys):
    status, out, _ = printed(capsys)
    assert status == 0
    for f in FIELDS:
        assert f"--config.{f.name}: " in out
        assert f.setting.meaning in out
        assert command_line.limits(f) in out
        for kind, meaning in checks.kinds(f.setting).items():
            assert f"{kind}: {meaning}" in out


def test_help_of_a_setting_or_section_is_of_that_alone(capsys):
    _, out, _ = printed(capsys, "model.attention.window")
    assert out.splitlines() == [
        "--config.model.attention.window: int = 256",
        "    positions that a query of a sliding layer sees, its own included",
        "    limits: at least 1 and at most 2147483647",
        "    read by: model.pattern=sliding, model.attention.kind=sliding",
        "    stays as it is when a run resumes",
    ]
    _, out, _ = printed(capsys, "mesh")
    names = [line.split(":")[0] for line in out.splitlines() if line.startswith("--config.")]
    assert names == [f"--config.{f.name}" for f in FIELDS if f.name.startswith("mesh.")]


def test_help_of_an_unknown_setting_names_the_nearest(capsys):
    status, out, err = printed(capsys, "model.atention")
    assert (status, out) == (2, "")
    assert "--help_settings model.atention: no such setting or section; did you mean 'model.attention'?" in err


def test_the_page_of_settings_is_current():
    """`python -m tools.document_settings` writes it."""
    assert (ROOT / "docs/settings.md").read_text() == document_settings.page()


# ---- a shorter run than the config file's

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
