"""Names the first step at which two runs differ: in settings, data, loss or parameters.

python -m tools.compare_runs runs/a runs/b

Compares the checksum of every step's batch, the losses of every logged step to the last bit, and the checksum of parameters at
steps that both runs saved, all from events.jsonl and metrics.jsonl; uses no device. Exit status: 0 equal, 1 different, 2 if a
directory is not a run.
"""

import argparse
import sys
from typing import Any, NamedTuple

from etils import epath

from minitf import command_line
from minitf.runtime.log import json_lines
from minitf.settings import flat
from minitf.workdir import resolve, stored_config


class Record(NamedTuple):
    """What a run recorded, by step; a repeated step has its last record."""

    config: dict[str, Any]
    batches: dict[int, str]
    metrics: dict[int, dict[str, Any]]
    parameters: dict[int, str]

    def series(self, tag: str) -> dict[int, Any]:
        return {step: values[tag] for step, values in self.metrics.items() if tag in values}


def read(workdir: epath.Path) -> Record:
    """The record of a run. Raises ValueError if the directory is not a run."""
    stored = stored_config(workdir)
    if stored is None:
        raise ValueError(f"{workdir}: no config.json, so no run")
    batches, parameters = {}, {}
    for event in json_lines(workdir / "events.jsonl"):
        if event["event"] == "steps":
            batches |= dict(zip(range(event["first"], event["last"] + 1), event["batches"], strict=True))
        elif event["event"] == "save" and event["state"] == "end":
            parameters[event["step"]] = event["parameters"]
    metrics: dict[int, dict[str, Any]] = {}
    for line in json_lines(workdir / "metrics.jsonl"):
        metrics.setdefault(line["step"], {}).update(line)
    return Record(flat(stored[0]), batches, metrics, parameters)


def first_difference(a: dict[int, Any], b: dict[int, Any]) -> int | None:
    """The first step that both have with different values; None: none."""
    return next((step for step in sorted(a.keys() & b.keys()) if a[step] != b[step]), None)


def compare(a: Record, b: Record) -> tuple[list[str], bool]:
    """(lines to print, whether the runs share steps with batches and are equal in all that both recorded)."""
    lines = [
        f"config {name}: {a.config[name]} | {b.config[name]}" for name in a.config if a.config[name] != b.config[name]
    ]
    equal = bool(a.batches.keys() & b.batches.keys())
    for what, x, y in (
        ("data", a.batches, b.batches),
        *((tag, a.series(tag), b.series(tag)) for tag in ("train/loss", "train/learning_rate", "eval/loss")),
        ("parameters", a.parameters, b.parameters),
    ):
        both = x.keys() & y.keys()
        step = first_difference(x, y)
        if step is not None:
            lines.append(f"{what}: differ first at step {step}: {x[step]} | {y[step]}")
            equal = False
        elif both:
            lines.append(f"{what}: equal in all {len(both)} steps that both recorded, {min(both)} to {max(both)}")
        else:
            lines.append(f"{what}: no step that both recorded")
    return lines, equal


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.compare_runs", description=__doc__.splitlines()[0])
    parser.add_argument("a", metavar="A", help="work directory")
    parser.add_argument("b", metavar="B", help="work directory")
    args = parser.parse_args(argv)
    try:
        records = [read(resolve(w, "work directory")) for w in (args.a, args.b)]
    except ValueError as e:
        command_line.fail(str(e))
    lines, equal = compare(*records)
    print("\n".join(lines))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
