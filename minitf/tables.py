"""Tables of choices: each is a dict from name to functions; `pick` looks one up."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """A table entry without a function."""

    meaning: str
    reads: tuple[str, ...] = ()  # settings that this kind uses and not every kind does


def did_you_mean(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def pick(setting: str, table: Mapping[str, Any], kind: str) -> Any:
    """table[kind]. Raises ValueError naming the setting and the known kinds."""
    if kind not in table:
        raise ValueError(f"{setting}: unknown kind {kind!r}; known: {', '.join(table)}")
    return table[kind]
