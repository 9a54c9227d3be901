"""Settings: a field of a *Config dataclass declares its default, meaning, limits, and whether a run may change it when it resumes.

The check of its value, its help, its documentation and its tests are functions of this one declaration.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

LONGEST = 1e9  # seconds: three decades, and within what timers and locks take (threading.TIMEOUT_MAX)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a field declares besides its type and default. Limits hold for each item of a tuple."""

    meaning: str
    may_change: bool = False  # when a run resumes: it would still be the same run
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    multiple_of: int | None = None
    also: Mapping[Any, str] = dataclasses.field(
        default_factory=dict
    )  # values outside of the limits, and what each means
    one_of: Callable[[], Mapping[str, Any]] | None = None  # the table of known values; see `kinds`
    reads_in: str = ""  # the subsection in which the table's `reads` name settings; "": this one
    in_place_of: str = ""  # a setting of this section or below, dotted, that has no effect where this one is not None
    nonempty: bool = False  # of a tuple
    check: Callable[[str, Any], Any] | None = None  # (name, value): raises ValueError naming the setting


def setting(default: Any, meaning: str, **limits: Any) -> Any:
    """A dataclass field that is a setting; keywords as in `Setting`."""
    return dataclasses.field(default=default, metadata={"setting": Setting(meaning, **limits)})


def setting_of(cls: type, name: str, **changes: Any) -> Any:
    """A field with the declaration of another class's field; `changes`: its default or keywords of `Setting`."""
    (found,) = (f for f in fields(cls) if f.name == name)
    default = changes.pop("default", found.default)
    return dataclasses.field(default=default, metadata={"setting": dataclasses.replace(found.setting, **changes)})


class Field(NamedTuple):
    name: str  # dotted, from the class that was asked for
    kind: Any  # its type, without None
    optional: bool  # None is a value of it
    default: Any
    setting: Setting


@functools.cache
def hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def split_optional(annotation: Any) -> tuple[Any, bool]:
    """(int, True) for `int | None`, (int, False) for `int`."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        (inner,) = (a for a in typing.get_args(annotation) if a is not type(None))
        return inner, True
    return annotation, False


@functools.cache
def fields(cls: type, prefix: str = "") -> tuple[Field, ...]:
    """Every setting of a config class and of the classes inside it."""
    found: list[Field] = []
    for field in dataclasses.fields(cls):
        kind, optional = split_optional(hints(cls)[field.name])
        if dataclasses.is_dataclass(kind):
            found += fields(kind, f"{prefix}{field.name}.")
        else:
            found.append(Field(prefix + field.name, kind, optional, field.default, field.metadata["setting"]))
    return tuple(found)


def flat(cfg: Any, prefix: str = "") -> dict[str, Any]:
    """The value of every setting by its dotted name."""
    return {prefix + f.name: functools.reduce(getattr, f.name.split("."), cfg) for f in fields(type(cfg))}
