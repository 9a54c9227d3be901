"""Settings' declarations: every one has limits and a meaning, and its check follows from it."""

import dataclasses
import math
from typing import NamedTuple

import pytest
from common import TINY

from minitf import checks, settings
from minitf.checks import check, check_value
from minitf.config import Config
from minitf.sampling import Sampling
from minitf.settings import flat, setting
from minitf.tables import Kind, did_you_mean, pick
from tools import fuzz_config

pytestmark = pytest.mark.core

FIELDS = settings.fields(Config)
each_setting = pytest.mark.parametrize("field", FIELDS, ids=lambda f: f.name)
FREE_TEXT = {"init_from", "compilation_cache", "data.path", "data.val_path", "data.text_key", "sample.prompts"}


def test_every_setting_declares_what_it_may_be():
    """Numbers have a lower limit, texts a table or a check."""
    for f in FIELDS:
        s = f.setting
        if f.kind in (int, float, tuple[int, int]):
            assert s.at_least is not None or s.above is not None, f.name
        elif f.kind is not bool and f.name not in FREE_TEXT:
            assert s.one_of is not None or s.check is not None, f.name


@each_setting
def test_a_setting_has_a_meaning_and_says_what_none_is(field):
    assert field.setting.meaning
    assert ("None:" in field.setting.meaning) == field.optional
    for meaning in checks.kinds(field.setting).values():
        assert meaning


@each_setting
def test_the_default_and_every_value_inside_of_its_limits_passes(field):
    allowed, _ = fuzz_config.values(field)
    for value in (field.default, *allowed):
        check_value(field.name, value, field)


@each_setting
def test_every_value_outside_of_its_limits_is_refused_by_name(field):
    _, others = fuzz_config.values(field)
    for value in others:
        with pytest.raises(ValueError) as e:
            check_value(field.name, value, field)
        assert field.name in str(e.value)


@dataclasses.dataclass(frozen=True)
class Limits:
    count: int = setting(1, "a count", at_least=1)
    size: int | None = setting(None, "a size; None: none", at_least=1, also={-1: "the rest"})
    block: int = setting(128, "a block", at_least=128, multiple_of=128)
    rate: float = setting(0.5, "a rate", at_least=0, below=1)
    eps: float = setting(1e-6, "added", above=0)
    pair: tuple[int, int] = setting((1, 1), "a pair", at_least=1)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", 0, "count=0: must be at least 1 and at most 2147483647"),
        ("count", 2**31, "count=2147483648: must be at least 1 and at most 2147483647"),
        ("size", 0, "size=0: must be at least 1 and at most 2147483647, or -1 (the rest)"),
        ("block", 200, "block=200: must be at least 128 and at most 2147483647 and a multiple of 128"),
        ("rate", 1.0, "rate=1.0: must be at least 0 and below 1"),
        ("rate", -0.1, "rate=-0.1: must be at least 0 and below 1"),
        ("rate", math.nan, "rate=nan: must be at least 0 and below 1"),
        ("rate", 0.99999999, "must be finite and at least 0 and below 1, and so in float32, in which it is 1"),
        ("rate", 1e-50, "must be finite and at least 0 and below 1, and so in float32, in which it is 0"),
        ("eps", 0.0, "eps=0.0: must be above 0"),
        ("eps", 1e-40, "must be finite and above 0, and so in float32, in which it is 0"),
        ("eps", 1e39, "must be finite and above 0, and so in float32, in which it is inf"),
        ("eps", math.inf, "eps=inf: must be above 0"),
        ("pair", (0, 2), "pair=(0, 2): must be at least 1 and at most 2147483647"),
        ("pair", (1, 2**31), "pair=(1, 2147483648): must be at least 1"),
    ],
)
def test_a_value_outside_of_its_limits_gives_the_limits(name, value, message):
    with pytest.raises(ValueError) as e:
        check(dataclasses.replace(Limits(), **{name: value}))
    assert message in str(e.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("count", 2**31 - 1),
        ("size", -1),
        ("block", 256),
        ("rate", 0.0),
        ("rate", 0.9999999),
        ("eps", 1.2e-38),
        ("eps", 3.4e38),
    ],
)
def test_a_value_at_its_limit_passes(name, value):
    check(dataclasses.replace(Limits(), **{name: value}))


def test_a_number_is_checked_in_the_dtype_that_uses_it():
    (rate,) = (f for f in settings.fields(Limits) if f.name == "rate")
    check_value("rate", 0.999, rate)
    with pytest.raises(ValueError, match="in bfloat16, in which it is 1"):
        check_value("rate", 0.999, rate, "bfloat16")


# ---- choices


@dataclasses.dataclass(frozen=True)
class Inner:
    kind: str = setting("plain", "a kind", one_of=lambda: KINDS)
    everywhere: int = setting(1, "for all kinds", at_least=1)
    bend: float | None = setting(None, "for some; None: none", above=0)
    twist: int = setting(2, "for others", at_least=0)


@dataclasses.dataclass(frozen=True)
class Outer:
    several: tuple[str, ...] | None = setting(
        None, "kinds; None: inner.kind", one_of=lambda: KINDS, reads_in="inner", in_place_of="inner.kind", nonempty=True
    )
    inner: Inner = Inner()


KINDS = {
    "plain": Kind("nothing special"),
    "bent": Kind("bent", ("bend",)),
    "both": Kind("bent and twisted", ("bend", "twist")),
}


def outer(several=None, **inner) -> Outer:
    return Outer(several, Inner(**inner))


@pytest.mark.parametrize(
    "cfg",
    [
        outer(),
        outer(everywhere=5),
        outer(kind="bent", bend=0.5),
        outer(kind="both", bend=0.5, twist=3),
        outer(("plain", "both"), twist=3),
    ],
)
def test_a_setting_that_a_kind_in_use_reads_passes(cfg):
    check(cfg)


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (outer(bend=0.5), "c.inner.bend=0.5 has no effect with plain; it is read by bent, both"),
        (outer(kind="bent", twist=3), "c.inner.twist=3 has no effect with bent; it is read by both"),
        (outer(("bent", "plain"), twist=3), "c.inner.twist=3 has no effect with bent, plain; it is read by both"),
        (outer(("bent",), kind="both"), "c.inner.kind='both' has no effect where c.several=('bent',) is in its place"),
        (outer(("bent", "nosuch")), "c.several: unknown kind 'nosuch'; known: plain, bent, both"),
        (outer(()), "c.several=(): must hold at least one, or be None"),
    ],
)
def test_a_changed_setting_without_effect_is_refused(cfg, message):
    with pytest.raises(ValueError) as e:
        check(cfg, "c.")
    assert str(e.value) == message


class Case(NamedTuple):
    choice: checks.Choice
    kind: str
    name: str  # of a setting that the kind does not read, and another does


def unread_cases() -> list[Case]:
    return [
        Case(choice, kind, name)
        for choice in checks.choices(Config)
        for name in dict.fromkeys(n for entry in choice.table.values() for n in entry.reads)
        for kind, entry in choice.table.items()
        if name not in entry.reads
    ]


@pytest.mark.parametrize("case", unread_cases(), ids=lambda c: f"{c.choice.settings[-1]}={c.kind} {c.name}")
def test_every_table_refuses_a_changed_setting_that_its_kind_does_not_read(case):
    field = next(f for f in FIELDS if f.name == case.choice.full(case.name))
    allowed, _ = fuzz_config.values(field)
    value = next(v for v in allowed if v != field.default)
    cfg = fuzz_config.replace(TINY, case.choice.settings[-1], case.kind)
    with pytest.raises(ValueError, match=f"{field.name}=.* has no effect") as e:
        check(fuzz_config.replace(cfg, field.name, value))
    assert "it is read by" in str(e.value)


def test_tables_that_read_settings_are_found():
    """Every table whose entries have `reads` is a choice of `settings.choices`, so that the test above sees it."""
    found = {id(choice.table) for choice in checks.choices(Config)}
    for f in FIELDS:
        table = f.setting.one_of() if f.setting.one_of else {}
        if any(getattr(entry, "reads", ()) for entry in table.values()):
            assert id(table) in found, f.name


def test_unknown_kind_is_refused_with_the_known_ones():
    assert pick("choice.kind", KINDS, "bent") is KINDS["bent"]
    with pytest.raises(ValueError, match=r"choice\.kind: unknown kind 'bnet'; known: plain, bent, both"):
        pick("choice.kind", KINDS, "bnet")


def test_nearest_name_is_offered_only_where_one_is_near():
    assert did_you_mean("bnet", KINDS) == "; did you mean 'bent'?"
    assert did_you_mean("xyz", KINDS) == ""


# ---- drawn from the declarations


def test_drawn_configs_are_built_or_refused_by_the_name_of_a_setting():
    ended = {"built": 0, "refused": 0}
    for drawn, result in fuzz_config.outcomes(300, seed=0):
        assert result.kind in ended, (drawn.changes, result)
        ended[result.kind] += 1
        assert flat(drawn.cfg)
    assert min(ended.values()) > 50


def test_an_inclusive_limit_is_a_value_though_float32_rounds_it_beyond():
    """float32 has 0.0099999998 for 0.01."""
    checks.check(Sampling(repetition_penalty=0.01))
    with pytest.raises(ValueError, match=r"0\.00999: must be at least 0\.01"):
        checks.check(Sampling(repetition_penalty=0.00999))
