"""Prints what a run's wall-clock time went to, across all its restarts, from its events.jsonl.

python -m tools.goodput runs/tiny [--json]

Useful steps are those that led to the newest state; a step that was repeated after a kill counts as lost the first time. Time from
a process's last event to the start of the next process is "not running", which includes unrecorded work of a killed process.
"""

import argparse
import json
import sys
from typing import Any

from minitf import command_line
from minitf.runtime.log import json_lines
from minitf.runtime.writer import duration
from minitf.workdir import resolve

KINDS = {
    "useful steps": "steps, without the waits below",
    "lost steps": "steps that a restart did again",
    "waiting for data": "",
    "evaluation": "",
    "sampling": "texts by the model",
    "saving": "what the loop waited for; writing goes on behind the steps",
    "compiling": "",
    "starting": "interpreter, imports, data",
    "initial state": "making it, or restoring it",
    "other": "in a process, but none of these",
    "not running": "between a process's last event and the next one's start",
}
BLOCKS = {
    "evaluation": "evaluation",
    "sample": "sampling",
    "save": "saving",
    "compile": "compiling",
    "init": "initial state",
    "restore": "initial state",
}


def attempts(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The events of each process, in order."""
    out: list[list[dict[str, Any]]] = []
    for event in events:
        if event["event"] == "start":
            out.append([])
        if out:
            out[-1].append(event)
    return out


def spent(events: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds by KINDS. Raises ValueError if the events record no start."""
    processes = attempts(events)
    if not processes:
        raise ValueError("events.jsonl records no start")
    total = dict.fromkeys(KINDS, 0.0)
    ended = None
    for i, process in enumerate(processes):
        begins = process[0]["time"] - process[0]["process_age"]
        if ended is not None:
            total["not running"] += max(begins - ended, 0.0)
        ended = process[-1]["time"]
        here = dict.fromkeys(KINDS, 0.0)
        here["starting"] = process[0]["process_age"]
        # Steps from which later processes resumed: this process's work after the lowest of them is lost.
        went_on = [
            e["step"] for p in processes[i + 1 :] for e in p if e["event"] in ("init", "restore") and "seconds" in e
        ]
        kept = min(went_on, default=None)
        begun: dict[str, float] = {}
        for e in process:
            if e["event"] == "steps":
                useful = 1.0 if kept is None else min(max(kept - e["first"] + 1, 0) / (e["last"] - e["first"] + 1), 1.0)
                here["waiting for data"] += e["data_wait"]
                here["useful steps"] += (e["seconds"] - e["data_wait"]) * useful
                here["lost steps"] += (e["seconds"] - e["data_wait"]) * (1 - useful)
            elif e["event"] in BLOCKS and e["state"] == "begin":
                begun[e["event"]] = e["time"]
            elif e["event"] in BLOCKS:
                here[BLOCKS[e["event"]]] += e["time"] - begun.pop(e["event"])
        here["other"] = max(ended - begins - sum(here.values()), 0.0)
        total = {kind: total[kind] + here[kind] for kind in KINDS}
    return total


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.goodput", description=__doc__.splitlines()[0])
    parser.add_argument("workdir", metavar="WORKDIR")
    parser.add_argument("--json", action="store_true", help="one object with seconds")
    args = parser.parse_args(argv)
    try:
        workdir = resolve(args.workdir, "work directory")
        events = json_lines(workdir / "events.jsonl")
        total = spent(events)
    except ValueError as e:
        command_line.fail(f"{args.workdir}: {e}")
    if args.json:
        print(json.dumps({"processes": len(attempts(events)), "seconds": total}))
        return 0
    whole = sum(total.values())
    print(f"{duration(whole)} from the first start to the last event, {len(attempts(events))} processes")
    for kind, seconds in total.items():
        note = f"  ({KINDS[kind]})" if KINDS[kind] else ""
        print(f"{seconds / whole:7.1%}  {seconds:10.1f} s  {kind}{note}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
