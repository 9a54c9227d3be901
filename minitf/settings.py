"""Settings: a field of a *Config dataclass declares its default, meaning, limits, and whether a run may change it when it resumes.

Value checks, --help, documentation and tests are derived from this one declaration.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

LONGEST = 1e9  # seconds, about 32 years; below the limit of timers and locks (threading.TIMEOUT_MAX)


@dataclasses.dataclass(frozen=True)
class Setting:
    """Declaration of a config field besides its type and default. Limits apply to each item of a tuple."""

    meaning: str
    may_change: bool = False  # whether a resumed run may use another value and still be the same run
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    multiple_of: int | None = None
    also: Mapping[Any, str] = dataclasses.field(default_factory=dict)  # values allowed outside the limits -> meaning
    one_of: Callable[[], Mapping[str, Any]] | None = None  # the table of known values; see `kinds`
    reads_in: str = ""  # subsection of the settings that the table's `reads` name; "": this section
    in_place_of: str = ""  # dotted name, within this section, of a setting without effect unless this one is None
    nonempty: bool = False  # for tuples: at least one item
    check: Callable[[str, Any], Any] | None = None  # (name, value): raises ValueError naming the setting


def setting(default: Any, meaning: str, **limits: Any) -> Any:
    """Returns a dataclass field that declares a setting; keywords: fields of `Setting`."""
    return dataclasses.field(default=default, metadata={"setting": Setting(meaning, **limits)})


def setting_of(cls: type, name: str, **changes: Any) -> Any:
    """Returns a field with the declaration of the field `name` of cls; `changes`: a new default, or fields of `Setting`."""
    (found,) = (f for f in fields(cls) if f.name == name)
    default = changes.pop("default", found.default)
    return dataclasses.field(default=default, metadata={"setting": dataclasses.replace(found.setting, **changes)})


class Field(NamedTuple):
    name: str  # dotted, relative to the class passed to `fields`
    kind: Any  # its type, without None
    optional: bool  # whether None is allowed
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
    """All settings of a config class and of its nested config classes."""
    found: list[Field] = []
    for field in dataclasses.fields(cls):
        kind, optional = split_optional(hints(cls)[field.name])
        if dataclasses.is_dataclass(kind):
            found += fields(kind, f"{prefix}{field.name}.")
        else:
            found.append(Field(prefix + field.name, kind, optional, field.default, field.metadata["setting"]))
    return tuple(found)


def flat(cfg: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> value of every setting."""
    return {prefix + f.name: functools.reduce(getattr, f.name.split("."), cfg) for f in fields(type(cfg))}
