"""Checks of config values against their declarations: limits of a value, and settings that only some choices read."""

import dataclasses
import functools
import math
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.numpy import finfo

from minitf.settings import Field, Setting, fields, flat
from minitf.tables import pick

INT32 = 2**31 - 1  # default upper limit of int settings: many are used as 32-bit integers


def kinds(declared: Setting) -> dict[str, str]:
    """Known values of a setting -> one-line meaning: the table entry itself if it is a string, else its `meaning` or the first
    line of its docstring. Empty for a setting without a table."""

    def line(entry: Any) -> str:
        if isinstance(entry, str):
            return entry
        return getattr(entry, "meaning", None) or entry.__doc__.split("\n")[0].rstrip(".")

    return {name: line(entry) for name, entry in declared.one_of().items()} if declared.one_of else {}


# ---- limits of a value


def rounded(value: float, dtype: str) -> float:
    """`value` rounded to a dtype, with subnormal numbers flushed to 0, as devices do."""
    info = finfo(dtype)
    with np.errstate(over="ignore"):
        x = float(np.asarray(value, info.dtype))
    return x if abs(x) >= info.smallest_normal else 0.0


def rounded_limits(declared: Setting, dtype: str) -> Setting:
    """The inclusive limits as the dtype has them: a limit itself is allowed, though it rounds to a number beyond it."""
    limits = {name: getattr(declared, name) for name in ("at_least", "at_most")}
    return dataclasses.replace(declared, **{n: rounded(v, dtype) for n, v in limits.items() if v is not None})


def within(declared: Setting, value: float) -> bool:
    s = declared
    return (
        -math.inf < value < math.inf
        and (s.at_least is None or value >= s.at_least)
        and (s.above is None or value > s.above)
        and (s.at_most is None or value <= s.at_most)
        and (s.below is None or value < s.below)
        and (s.multiple_of is None or value % s.multiple_of == 0)
    )


def constraint(declared: Setting) -> str:
    """The limits in words; "" if there are none."""
    s = declared
    bounds = {"at least": s.at_least, "above": s.above, "at most": s.at_most, "below": s.below}
    shown = lambda bound: str(bound) if isinstance(bound, int) else f"{bound:g}"
    words = [f"{word} {shown(bound)}" for word, bound in bounds.items() if bound is not None]
    words += [f"a multiple of {s.multiple_of}"] if s.multiple_of else []
    alternatives = [f"{value} ({meaning})" for value, meaning in s.also.items()]
    return ", or ".join([" and ".join(words)] * bool(words) + alternatives)


def with_type_limits(declared: Setting, kind: Any) -> Setting:
    """The declaration; an int setting without an upper limit gets `at_most=INT32`."""
    items = typing.get_args(kind) or (kind,)
    if int not in items or declared.at_most is not None or declared.below is not None:
        return declared
    return dataclasses.replace(declared, at_most=INT32)


def numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, tuple):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def check_value(name: str, value: Any, field: Field, dtype: str = "float32") -> None:
    """Raises ValueError naming the setting if a value of the right type is outside its limits. Floats must also be within the
    limits after rounding to `dtype`."""
    s = with_type_limits(field.setting, field.kind)
    if value is None or value in s.also:
        return
    if field.kind is int and not isinstance(value, int):
        raise ValueError(f"{name}={value}: must be int")
    if s.nonempty and not value:
        raise ValueError(f"{name}={value}: must hold at least one{', or be None' if field.optional else ''}")
    if s.one_of is not None:
        for item in value if isinstance(value, tuple) else (value,):
            pick(name, s.one_of(), item)
    for x in numbers(value):
        if not within(s, x):
            raise ValueError(f"{name}={value}: must be {constraint(s) or 'finite'}")
        if isinstance(x, float) and not (within(rounded_limits(s, dtype), y := rounded(x, dtype)) and (y or not x)):
            also = f" and {c}" if (c := constraint(s)) else ""
            raise ValueError(f"{name}={value}: must be finite{also}, and so in {dtype}, in which it is {y:g}")
    if s.check is not None:
        s.check(name, value)


# ---- settings that depend on a choice


def replaced(cfg: Any) -> dict[str, str]:
    """Settings without effect -> the setting that replaces each (see `Setting.in_place_of`)."""
    values, found = flat(cfg), {}
    for f in fields(type(cfg)):
        if f.setting.in_place_of and values[f.name] is not None:
            section = f.name.rpartition(".")[0]
            found[f"{section}.{f.setting.in_place_of}".lstrip(".")] = f.name
    return found


class Choice(NamedTuple):
    """A table whose entries list in `reads` the settings that only some kinds use; settings in no list apply to all kinds."""

    section: str  # dotted section of the settings in `reads`
    table: Mapping[str, Any]
    settings: list[str]  # names of the settings that choose from the table

    def full(self, name: str) -> str:
        return f"{self.section}.{name}".lstrip(".")


@functools.cache
def choices(cls: type) -> tuple[Choice, ...]:
    found: dict[tuple[str, int], Choice] = {}
    for f in fields(cls):
        table = f.setting.one_of() if f.setting.one_of else {}
        if any(getattr(entry, "reads", ()) for entry in table.values()):
            section = f"{f.name.rpartition('.')[0]}.{f.setting.reads_in}".strip(".")
            found.setdefault((section, id(table)), Choice(section, table, [])).settings.append(f.name)
    return tuple(found.values())


class Unread(NamedTuple):
    """A setting that none of the chosen kinds reads."""

    name: str
    used: list[str]
    readers: list[str]


def unread(cfg: Any) -> list[Unread]:
    values, instead, found = flat(cfg), replaced(cfg), []
    for choice in choices(type(cfg)):
        used: list[str] = []
        for name in choice.settings:
            value = None if name in instead else values[name]
            used += value if isinstance(value, tuple) else () if value is None else (value,)
        for name in dict.fromkeys(n for entry in choice.table.values() for n in entry.reads):
            if not any(name in choice.table[kind].reads for kind in used):
                readers = [kind for kind, entry in choice.table.items() if name in entry.reads]
                found.append(Unread(choice.full(name), list(dict.fromkeys(used)), readers))
    return found


def check(cfg: Any, prefix: str = "") -> None:
    """Raises ValueError for the first setting that is outside its limits, or that has no effect and differs from its default."""
    values = flat(cfg)
    declared = {f.name: f for f in fields(type(cfg))}
    for name, field in declared.items():
        check_value(prefix + name, values[name], field)
    for name, other in replaced(cfg).items():
        if values[name] != declared[name].default:
            raise ValueError(
                f"{prefix}{name}={values[name]!r} has no effect where {prefix}{other}={values[other]} is in its place"
            )
    for name, used, readers in unread(cfg):
        if values[name] != declared[name].default:
            raise ValueError(
                f"{prefix}{name}={values[name]!r} has no effect with {', '.join(used)}; it is read by {', '.join(readers)}"
            )
