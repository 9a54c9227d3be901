"""Prints what the time of a profile went to, by operations of the compiled programs.

python -m tools.profile_summary runs/tiny [--top N] [--json]

DIR is a work directory (its newest profile is used), a profile's own directory, or a *.xplane.pb file. The time of an operation is
from its start to its end; loops and calls exclude the operations inside them; concurrent operations all count in full. A TPU's
transfers concurrent with its operations are left out.
"""

import argparse
import bisect
import functools
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

from minitf import command_line
from minitf.paths import given

# ---- compiled programs, stored in a profile as HLO


class Instruction(NamedTuple):
    kind: str  # its opcode; for a fusion with its costliest part, for a custom call with its target
    source: str = ""  # JAX's name of the operation it was compiled from


Message = dict[int, list[Any]]  # field number -> integers or bytes: a protocol buffer's wire format has no other types


def varint(encoded: memoryview, i: int) -> tuple[int, int]:
    """(the variable-length integer that begins at byte i, position after it)"""
    value = shift = 0
    while True:
        value, shift, more = value | (encoded[i] & 127) << shift, shift + 7, encoded[i] & 128
        i += 1
        if not more:
            return value, i


def decode(encoded: memoryview) -> Message:
    message, i = defaultdict(list), 0
    while i < len(encoded):
        key, i = varint(encoded, i)
        number, wire = divmod(key, 8)
        if wire == 0:
            value, i = varint(encoded, i)
        else:
            size, i = (8, i) if wire == 1 else (4, i) if wire == 5 else varint(encoded, i)
            value, i = encoded[i : i + size], i + size
        message[number].append(value)
    return message


def text(message: Message, number: int) -> str:
    return bytes(message[number][0]).decode(errors="replace") if message[number] else ""


def integers(message: Message, number: int) -> list[int]:
    """A repeated field of integers, packed or not."""
    found = []
    for value in message[number]:
        if isinstance(value, int):
            found.append(value)
            continue
        i = 0
        while i < len(value):
            one, i = varint(value, i)
            found.append(one)
    return found


COSTLY = ("convolution", "dot", "custom-call", "sort", "scatter", "gather", "reduce", "transpose", "copy")


def of_module(encoded: memoryview) -> dict[str, Instruction]:
    """Name -> instruction of a serialized HloProto; field numbers are those of xla/service/hlo.proto."""
    computations = {c[5][0]: [decode(i) for i in c[2]] for c in map(decode, decode(decode(encoded)[1][0])[3])}

    def one(instruction: Message) -> Instruction:
        kind = text(instruction, 2)
        if kind == "fusion":
            parts = {text(i, 2) for c in integers(instruction, 38) for i in computations[c]}
            kind += next((f" with {part}" for part in COSTLY if part in parts), "")
        elif kind == "custom-call":
            kind += f" {text(instruction, 28)}"
        return Instruction(kind, text(decode(instruction[7][0]), 2) if instruction[7] else "")

    return {text(i, 1): one(i) for found in computations.values() for i in found}


# Decoded on demand: most of a process's programs do not run during a profile.
Instructions = Callable[[], dict[str, Instruction]]
Programs = dict[str, dict[int, Instructions]]  # module's name -> program's id -> its instructions


def instructions(xspace: bytes) -> Programs:
    """Instructions of all programs in an XSpace; field numbers are those of tsl/profiler/protobuf/xplane.proto."""
    found: Programs = defaultdict(dict)
    for plane in map(decode, decode(memoryview(xspace))[1]):
        for entry in plane[4] if text(plane, 2) == "/host:metadata" else []:
            described = decode(decode(entry)[2][0])
            module, program = named(text(described, 2))
            for proto in (p for stat in map(decode, described[5]) for p in stat[6]):
                found[module][program] = functools.cache(functools.partial(of_module, proto))
    return found


def named(module: str) -> tuple[str, int]:
    """(name, program id) of a module such as `jit_step(7)`; id 0 if there is none."""
    name, program = re.fullmatch(r"(.*?)(?:\((\d+)\))?", module).groups()
    return name, int(program or 0)


# ---- operations that ran


class Ran(NamedTuple):
    begin: float  # nanoseconds
    end: float
    module: str
    name: str
    instruction: Instruction


class Device(NamedTuple):
    ran: list[Ran]
    programs: list[tuple[float, float]]  # (begin, end) of each run of a program; [] if the profile has none


def look_up(programs: Programs, module: str, program: int, name: str, stats: dict[str, Any]) -> Instruction:
    # A program from the compilation cache may run under the id that it was compiled with.
    same_name = programs.get(module, {})
    first = [same_name[program]] if program in same_name else []
    known = next((found[name] for p in (*first, *same_name.values()) if name in (found := p())), None)
    if known is None:  # the profile has no HLO, or this is not an XLA instruction
        known = Instruction(stats.get("hlo_category") or re.sub(r"[.\d]+$", "", name))
    return known._replace(source=known.source or stats.get("tf_op", ""))


def cpu_devices(plane: Any, programs: Programs) -> list[Device]:
    """Devices of a CPU process, whose threads they share. Asynchronous operations return at once; an "end: " event has their end."""
    ends, found = {}, defaultdict(list)
    for line in plane.lines:
        for event in line.events:
            if event.name.startswith("ThreadpoolListener"):  # most events: skip them early
                continue
            stats = dict(event.stats)
            if event.name.startswith("end: "):
                ends[stats["_c"]] = event.start_ns
            elif "hlo_op" in stats:
                found[stats["device_ordinal"]].append((event.start_ns, event.start_ns + event.duration_ns, stats))
    devices = []
    for events in found.values():
        ran, runs = [], defaultdict(list)
        for begin, end, stats in events:
            end, module, name = max(end, ends.get(stats.get("_p"), end)), stats["hlo_module"], stats["hlo_op"]
            instruction = look_up(programs, module, stats["program_id"], name, stats)
            ran.append(Ran(begin, end, module, name, instruction))
            runs[stats["run_id"]].append((begin, end))
        spans = [(min(b for b, _ in run), max(e for _, e in run)) for run in runs.values()]
        devices.append(Device(ran, spans))
    return devices


def device(plane: Any, programs: Programs) -> Device:
    """A GPU, from the events of its streams, or a TPU, from its lines of operations and programs."""
    lines = {line.name: [(e.start_ns, e.start_ns + e.duration_ns, e) for e in line.events] for line in plane.lines}
    modules = sorted((begin, end, event.name) for begin, end, event in lines.get("XLA Modules", []))
    events = lines.get("XLA Ops") or [e for name, found in lines.items() if name.startswith("Stream") for e in found]
    ran = []
    for begin, end, event in events:
        stats = dict(event.stats)
        i = bisect.bisect_right(modules, (begin, math.inf)) - 1  # a TPU's operation runs within a program
        module, program = named(modules[i][2]) if i >= 0 else (stats.get("hlo_module", ""), stats.get("program_id", 0))
        name = stats.get("hlo_op") or re.match(r"%?([^ =]*)", event.name)[1]
        ran.append(Ran(begin, end, module, name, look_up(programs, module, program, name, stats)))
    return Device(ran, [m[:2] for m in modules])


def read(path: Path) -> tuple[list[Device], int]:
    """(devices of one process's profile that ran anything, number of annotated steps)"""
    data = path.read_bytes()
    programs, devices, steps = instructions(data), [], set()
    for plane in ProfileData.from_serialized_xspace(data).planes:
        if plane.name.startswith("/device:"):
            devices.append(device(plane, programs))
        elif plane.name == "/host:CPU":
            devices += cpu_devices(plane, programs)
            steps |= {n for line in plane.lines for e in line.events for k, n in e.stats if k == "step_num"}
    return [d for d in devices if d.ran], len(steps)


# ---- the summary

AROUND = ("while", "conditional", "call")  # instructions that contain others


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total


def own_times(ran: list[Ran]) -> list[tuple[Ran, float]]:
    """(operation, its nanoseconds without those of operations inside it)."""
    ran = sorted(ran, key=lambda r: (r.begin, -r.end))
    inside, around = defaultdict(list), []
    for i, r in enumerate(ran):
        around = [j for j in around if ran[j].end > r.begin]
        outer = next((j for j in reversed(around) if ran[j].end >= r.end), None)
        inside[outer].append((r.begin, r.end))
        if r.instruction.kind in AROUND:
            around.append(i)
    return [(r, r.end - r.begin - covered(inside[i])) for i, r in enumerate(ran)]


def summary(files: list[Path]) -> dict[str, Any]:
    """Times by operation and by kind, over all files of a profile. Raises ValueError if no operation ran."""
    hosts = [read(path) for path in files]
    devices = [d for found, _ in hosts for d in found]
    if not devices:
        raise ValueError(f"{files[0].parent}: no operation of a compiled program was recorded")
    operations: dict[tuple[str, str], dict[str, Any]] = {}
    kinds: dict[str, dict[str, Any]] = {}
    whole = busy = 0.0
    between = 0.0 if all(d.programs for d in devices) else None
    for d in devices:
        begin, end = min(r.begin for r in d.ran), max(r.end for r in d.ran)
        whole += end - begin
        busy += covered((r.begin, r.end) for r in d.ran)
        if between is not None:
            between += end - begin - covered((max(b, begin), min(e, end)) for b, e in d.programs)
        for r, ns in own_times(d.ran):
            names = {"module": r.module, "name": r.name, **r.instruction._asdict()}
            for row in (
                operations.setdefault((r.module, r.name), names | {"seconds": 0.0, "count": 0}),
                kinds.setdefault(r.instruction.kind, {"kind": r.instruction.kind, "seconds": 0.0, "count": 0}),
            ):
                row["seconds"] += ns * 1e-9
                row["count"] += 1
    total = sum(row["seconds"] for row in kinds.values())

    def ordered(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        shares = [row | {"share": row["seconds"] / total} for row in rows]
        return sorted(shares, key=lambda row: -row["seconds"])

    return {
        "profile": str(files[0].parent),
        "hosts": len(files),
        "devices": len(devices),
        "steps": max(steps for _, steps in hosts),  # annotated
        "seconds": whole * 1e-9 / len(devices),  # from a device's first operation to its last, mean over devices
        "idle": 1 - busy / whole,  # share of these seconds without an operation
        "between_programs": None if between is None else between / whole,  # share without a running program
        "kinds": ordered(kinds.values()),
        "operations": ordered(operations.values()),
    }


def find(place: Path) -> list[Path]:
    """The files of a profile, one per host. Raises ValueError if there are none."""
    if place.is_file():
        return [place]
    times = sorted(p for p in (place / "plugins/profile").glob("*") if any(p.glob("*.xplane.pb")))
    files = sorted((times[-1] if times else place).glob("*.xplane.pb"))
    if not files:
        raise ValueError(f"{place}: no profile; --config.profile=START,STEPS makes one")
    return files


def table(found: dict[str, Any], top: int) -> str:
    """The summary as text, with `top` rows per table."""
    steps, devices = found["steps"], found["devices"]
    parts = (steps or 1) * devices
    lines = [
        f"{found['profile']}: {devices} devices of {found['hosts']} hosts, {steps} steps",
        f"{found['seconds']:.3f} s from the first operation to the last; nothing ran in {found['idle']:.1%} of it",
    ]
    if found["between_programs"] is not None:
        lines[-1] += f", in {found['between_programs']:.1%} no program was under way"
    unit = "ms/step" if steps else "ms"

    def row(r: dict[str, Any], what: str) -> str:
        return f"{r['share']:7.1%} {r['seconds'] * 1e3 / parts:10.3f} {r['count'] / parts:9.1f}  {what}".rstrip()

    head = f"{'share':>7} {unit:>10} {'times':>9}  "
    lines += ["", head + "kind of operation", *(row(r, r["kind"]) for r in found["kinds"][:top])]
    lines += ["", head + "operation"]
    lines += [row(r, f"{r['name']} ({r['kind']})  {r['source']}") for r in found["operations"][:top]]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.profile_summary", description=__doc__.splitlines()[0])
    parser.add_argument("place", metavar="DIR", help="a work directory, a profile's directory or its file")
    parser.add_argument("--top", type=int, default=15, metavar="N", help="rows of each table (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one object with all rows")
    args = parser.parse_args(argv)
    try:
        if args.top < 1:
            raise ValueError(f"--top={args.top}: must be at least 1")
        found = summary(find(given(args.place, "DIR")))
    except ValueError as e:
        command_line.fail(str(e))
    print(json.dumps(found) if args.json else table(found, args.top))
    return 0


if __name__ == "__main__":
    sys.exit(main())
