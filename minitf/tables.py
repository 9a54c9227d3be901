"""Choices: every choice is a dict from a name to functions; these helpers look one up and check what it reads. And tables as text."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def did_you_mean(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def pick(setting: str, table: Mapping[str, Any], kind: str) -> Any:
    """table[kind]. Raises ValueError naming the setting and the known kinds."""
    if kind not in table:
        raise ValueError(f"{setting}: unknown kind {kind!r}; known: {', '.join(table)}")
    return table[kind]


def check_unread(prefix: str, cfg: Any, table: Mapping[str, Any], chosen: Iterable[str]) -> None:
    """Raises ValueError where a setting differs from its default though none of the chosen kinds reads it.

    An entry's `reads` names the settings that belong to some kinds only; a setting that no entry names is for all.
    """
    chosen = list(chosen)
    read = {f for kind in chosen for f in table[kind].reads}
    for field in dataclasses.fields(cfg):
        readers = [kind for kind, entry in table.items() if field.name in entry.reads]
        value = getattr(cfg, field.name)
        if readers and field.name not in read and value != field.default:
            kinds = ", ".join(sorted(set(chosen)))
            raise ValueError(
                f"{prefix}.{field.name}={value!r} has no effect with {kinds}; it is read by {', '.join(readers)}"
            )


def columns(lines: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Rows of cells as text: the first so many columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def cell(i: int, text: str) -> str:
        return text.ljust(widths[i]) if i < left else text.rjust(widths[i])

    return ["  ".join(cell(i, text) for i, text in enumerate(line)).rstrip() for line in lines]
