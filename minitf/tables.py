"""Choices: every choice is a dict from a name to functions; `pick` looks one up. And tables as text."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """An entry of a table without a function of its own."""

    meaning: str
    reads: tuple[str, ...] = ()  # the settings that belong to some kinds only, this one among them


def did_you_mean(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def pick(setting: str, table: Mapping[str, Any], kind: str) -> Any:
    """table[kind]. Raises ValueError naming the setting and the known kinds."""
    if kind not in table:
        raise ValueError(f"{setting}: unknown kind {kind!r}; known: {', '.join(table)}")
    return table[kind]


def columns(lines: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Rows of cells as text: the first so many columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def cell(i: int, text: str) -> str:
        return text.ljust(widths[i]) if i < left else text.rjust(widths[i])

    return ["  ".join(cell(i, text) for i, text in enumerate(line)).rstrip() for line in lines]
