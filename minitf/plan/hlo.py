"""Analyses a compiled program from its HLO text (`compiled.as_text()`): how often each part runs, the compiler's own estimate of its
cycles, the collectives, and calls of Pallas kernels. Needs neither JAX nor the device.

Reads the HLO of three backends, which express the same facts differently: see each function.
"""

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

# ---- shapes


def elements(shape: str) -> list[str]:
    """Elements of a tuple shape, `(a, (b, c))` -> [`a`, `(b, c)`]; for an array shape, a list of itself."""
    shape = re.sub(r"/\*.*?\*/", "", shape).strip()
    if not shape.startswith("("):
        return [shape]
    found, depth, start = [], 0, 1
    for i, c in enumerate(shape):
        depth += (c in "([{") - (c in ")]}")
        if (c == "," and depth == 1) or (c == ")" and depth == 0):
            found.append(shape[start:i].strip())
            start = i + 1
    return [f for f in found if f]


def bits(dtype: str) -> int:
    """Bits per element: bf16 -> 16, f8e4m3fn -> 8, s4 -> 4; 0 for a token."""
    number = re.search(r"\d+", dtype)
    return 8 if dtype == "pred" else int(number[0]) if number else 0


def nbytes(shape: str) -> int:
    """Bytes of an array, or of all arrays in a tuple, without padding."""
    parts = elements(shape)
    if parts != [shape.strip()]:
        return sum(map(nbytes, parts))
    array = re.match(r"(\w+)\[([\d,<=]*)\]", parts[0])
    if array is None:
        return 0
    dims = [int(d.strip("<=")) for d in array[2].split(",") if d]
    return math.prod(dims) * bits(array[1]) // 8


# ---- computations


class Instruction(NamedTuple):
    name: str
    shape: str  # of the result
    op: str
    operands: str
    attributes: str  # the text after the operands

    def attribute(self, pattern: str) -> str | None:
        """First group of the pattern's first match in the attributes; None without a match."""
        found = re.search(pattern, self.attributes)
        return None if found is None else found[1]

    @property
    def op_name(self) -> str:
        """Its origin in the traced program; "" if unknown."""
        return self.attribute(r'op_name="((?:[^"\\]|\\.)*)"') or ""


class Module(NamedTuple):
    computations: dict[str, list[Instruction]]
    entry: str


BEGIN = re.compile(r"(ENTRY )?%?([\w.\-]+) .*->.*\{\s*$")
# The whole line must match: metadata of a kernel span several lines, one of which begins with a bracket.
END = re.compile(r"\}(, \w+=\S+)?")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)", re.DOTALL)


def closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i
    raise ValueError(f"HLO: no end of {text[start : start + 80]!r}")


def instruction(text: str) -> Instruction:
    """Parses `%name = SHAPE op(operands), attributes`. Raises ValueError for an unclosed bracket."""
    name, rest = INSTRUCTION.fullmatch(text).groups()
    end = closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opened = rest.index("(")
    closed = closing(rest, opened)
    return Instruction(name, shape, rest[:opened], rest[opened + 1 : closed], rest[closed + 1 :])


def parse(text: str) -> Module:
    """Parses a module's text. Raises ValueError if it has no ENTRY computation."""
    computations: dict[str, list[str]] = {}
    entry = current = None
    for line in text.splitlines():
        if current is None:
            begins = BEGIN.match(line)
            if begins:
                current = computations.setdefault(begins[2], [])
                entry = begins[2] if begins[1] else entry
        elif END.fullmatch(line):
            current = None
        elif INSTRUCTION.match(line):
            current.append(line)
        else:
            current[-1] += "\n" + line
    if entry is None:
        raise ValueError("HLO: the text has no ENTRY computation")
    return Module({name: list(map(instruction, lines)) for name, lines in computations.items()}, entry)


# ---- how often each computation runs


def names(text: str | None) -> list[str]:
    return re.findall(r"[\w.\-]+", text or "")


def trip_count(module: Module, loop: Instruction) -> int | None:
    """How often a while's body runs; None if it depends on data. HLO of CPU and GPU states it; on TPU it is the constant that the
    condition compares with the counter, which starts at 0."""
    known = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"')
    if known is not None:
        return int(known)
    condition = module.computations.get(loop.attribute(r"condition=%?([\w.\-]+)") or "", [])
    constants = {i.name: int(i.operands) for i in condition if i.op == "constant" and i.operands.isdigit()}
    compares = [i for i in condition if i.op == "compare"]
    if not compares:  # the compare is inside a fusion, which takes the constant as an operand
        for called in condition:
            inside = module.computations.get(called.attribute(r"calls=%?([\w.\-]+)") or "", [])
            given = names(re.sub(r"/\*.*?\*/", "", called.operands))
            for i in inside:
                if i.op == "parameter" and int(i.operands) < len(given) and given[int(i.operands)] in constants:
                    constants[i.name] = constants[given[int(i.operands)]]
                if i.op == "constant" and i.operands.isdigit():
                    constants[i.name] = int(i.operands)
            compares += [i for i in inside if i.op == "compare"]
    for compare in compares:
        more = {"LT": 0, "LE": 1}.get(compare.attribute(r"direction=(\w+)") or "")
        bound = [constants[n] for n in names(compare.operands) if n in constants]
        if more is not None and len(bound) == 1:
            return bound[0] + more
    return None


CALLED = {  # op -> pattern of the computations that it runs; scalar functions, such as a reduce's, are not counted
    "while": r"(?:body|condition)=(%?[\w.\-]+)",
    "conditional": r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=(%?[\w.\-]+))",
    "fusion": r"calls=(%?[\w.\-]+)",
    "call": r"to_apply=(%?[\w.\-]+)",
    "custom-call": r"called_computations=\{([^}]*)\}",
    # These run concurrently with their caller, on another core of the chip or on its links.
    "async-start": r"(?:calls|to_apply)=(%?[\w.\-]+)",
    "call-start": r"(?:calls|to_apply)=(%?[\w.\-]+)",
    "custom-call-start": r"called_computations=\{([^}]*)\}",
}


class Runs(NamedTuple):
    """How often each computation runs per execution of the module."""

    counts: dict[str, int]  # computations that run at all -> number of runs
    fused: frozenset[str]  # computations inside a fusion
    asynchronous: frozenset[str]  # computations that run concurrently with their caller
    unknown: tuple[str, ...]  # whiles whose trip count depends on data: counted as one iteration


def runs(module: Module) -> Runs:
    """Run counts of all computations. A while's body counts once per iteration; each branch of a conditional counts once, though
    only one of them runs."""
    calls: list[tuple[str, str, int]] = []  # (caller, callee, times)
    fused, asynchronous, unknown = set(), set(), []
    for caller, instructions in module.computations.items():
        for i in instructions:
            if i.op not in CALLED:
                continue
            times = trip_count(module, i) if i.op == "while" else 1
            if times is None:
                unknown.append(i.name)
            for found in re.findall(CALLED[i.op], i.attributes):
                for callee in names(" ".join(found) if isinstance(found, tuple) else found):
                    calls.append((caller, callee, 1 if times is None else times))
                    if i.op == "fusion":
                        fused.add(callee)
                    if i.op.endswith("-start"):
                        asynchronous.add(callee)
    callers: dict[str, list[tuple[str, int]]] = {}
    for caller, callee, times in calls:
        callers.setdefault(callee, []).append((caller, times))

    @functools.cache
    def count(name: str) -> int:
        if name == module.entry:
            return 1
        return sum(count(caller) * times for caller, times in callers.get(name, []))

    @functools.cache
    def within(name: str, kind: frozenset[str]) -> bool:
        return name in kind or any(within(caller, kind) for caller, _ in callers.get(name, []))

    counts = {name: count(name) for name in module.computations if count(name)}
    inside = lambda kind: frozenset(name for name in counts if within(name, frozenset(kind)))
    return Runs(counts, inside(fused), inside(asynchronous), tuple(unknown))


# ---- cycles


class Cost(NamedTuple):
    cycles: int  # sum over all runs
    count: int
    instruction: Instruction


def costs(module: Module, run: Runs) -> list[Cost]:
    """The compiler's cycle estimates for TPUs, largest first; CPU and GPU give none. They exclude collectives and kernels. A fusion's
    estimate includes its inside; computations on another core are left out."""
    found = []
    for name, count in run.counts.items():
        for i in () if name in run.fused | run.asynchronous else module.computations[name]:
            cycles = i.attribute(r'"estimated_cycles":"(\d+)"')
            if cycles is not None and int(cycles) < 2**62:  # larger values mean "no estimate"
                found.append(Cost(count * int(cycles), count, i))
    return sorted(found, key=lambda c: -c.cycles)


# ---- collectives

COLLECTIVE_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)
WIRE = {  # bytes that each of g devices sends on a ring, for a result of R bytes
    "all-reduce": lambda R, g: 2 * R * (g - 1) / g,
    "all-gather": lambda R, g: R * (g - 1) / g,
    "reduce-scatter": lambda R, g: R * (g - 1),
    "all-to-all": lambda R, g: R * (g - 1) / g,
    "ragged-all-to-all": lambda R, g: R * (g - 1) / g,
    "collective-permute": lambda R, g: R,
}


class Collective(NamedTuple):
    kind: str  # one of COLLECTIVE_KINDS
    axes: tuple[str, ...] | None  # mesh axes of its groups; None: the groups match no mesh axes
    group: tuple[int, ...]  # the first group: device indices in mesh order
    count: int  # runs per execution of the module
    nbytes: int  # bytes of one result on one device
    wire: float  # bytes that a device sends per run
    synchronous: bool  # not overlapped with computation
    instruction: Instruction


def in_order(dims: list[int], transposed: list[int] | None = None) -> list[int]:
    """0, 1, ... as an array of these dimensions, transposed and flattened."""
    order = range(len(dims)) if transposed is None else transposed
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    return [
        sum(n * strides[d] for n, d in zip(at, order, strict=True))
        for at in itertools.product(*(range(dims[d]) for d in order))
    ]


def consecutive(numbers: list[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(numbers[i : i + size]) for i in range(0, len(numbers), size)]


def along(mesh: Mapping[Any, int], axes: tuple) -> list[tuple[int, ...]]:
    """Groups of devices whose coordinates differ along these axes only."""
    all_axes = list(mesh)
    inner = [all_axes.index(a) for a in axes]
    outer = [i for i in range(len(all_axes)) if i not in inner]
    return consecutive(in_order(list(mesh.values()), outer + inner), math.prod(mesh[a] for a in axes))


def integers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def groups(i: Instruction, devices: int) -> list[tuple[int, ...]]:
    """Groups of device indices of a collective. HLO has four forms: `mesh['data'=2,'fsdp'=4] {'fsdp'}`,
    `[4,2]<=[2,4]T(1,0)`, `{{0,1},{2,3}}`, and source-target pairs; without any, all devices are one group."""
    named = re.search(r"replica_groups=mesh\[([^\]]*)\]([^{]*)\{([^}]*)\}", i.attributes)
    if named:
        found = named_groups(named[1], named[3])
        ids = re.search(r"device_ids=\((\S*)\)", named[2])
        numbers = ids and (iota(ids[1]) if ids[1].startswith("[") else integers(ids[1]))
        return [tuple(numbers[d] for d in group) for group in found] if numbers else found
    listed = re.search(r"replica_groups=(\[[\d,]+\]<=\S+?)(?:,\s|$)", i.attributes)
    if listed:
        return consecutive(iota(listed[1]), integers(listed[1].partition("<=")[0])[1])
    plain = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}", i.attributes)
    if plain:
        return [tuple(integers(g)) for g in re.findall(r"\{([^{}]*)\}", plain[1])]
    return [tuple(range(devices))]


def named_groups(mesh: str, axes: str) -> list[tuple[int, ...]]:
    """Groups along axes, such as `'b'`, of a mesh `'a'=2,'b'=8`, or along a factor of an axis: `'b':(2)4` is the factor 4 inside 2."""
    parts: dict[Any, int] = {}
    chosen = []
    for name, size in re.findall(r"'([^']+)'=(\d+)", mesh):
        parted = re.search(rf"'{re.escape(name)}':\((\d+)\)(\d+)", axes)
        sizes = [int(size)]
        if parted:
            before, n = int(parted[1]), int(parted[2])
            sizes = [before, n, int(size) // (before * n)]
        parts |= {(name, i): n for i, n in enumerate(sizes)}
        if f"'{name}'" in axes:
            chosen.append((name, 1 if parted else 0))
    return along(parts, tuple(chosen))


def iota(text: str) -> list[int]:
    """Device indices of `[..]<=[2,4]T(1,0)` or `[2,4]T(1,0)`, flattened."""
    dims, _, order = text.rpartition("<=")[2].partition("T")
    return in_order(integers(dims), integers(order) if order else None)


def axes_of(found: list[tuple[int, ...]], mesh: Mapping[str, int]) -> tuple[str, ...] | None:
    """The mesh axes that form these groups, without axes of size 1; None if none do."""
    wide = [a for a, n in mesh.items() if n > 1]
    as_sets = lambda gs: {frozenset(g) for g in gs}
    for n in range(len(wide) + 1):
        for axes in itertools.combinations(wide, n):
            if as_sets(along(mesh, axes)) == as_sets(found):
                return axes
    return None


def permuted(pairs: list[tuple[int, ...]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Mesh axes along which sources and targets differ."""
    sizes = list(mesh.values())
    place = lambda d: [d // math.prod(sizes[i + 1 :]) % n for i, n in enumerate(sizes)]
    differ = lambda i: any(place(a)[i] != place(b)[i] for a, b in pairs)
    return tuple(a for i, a in enumerate(mesh) if differ(i))


def result_bytes(i: Instruction, kind: str) -> int:
    """Bytes of a collective's result; for a -start op without its operands and synchronisation state, which its shape includes."""
    if i.op == kind or kind == "all-reduce":
        return nbytes(i.shape)
    return nbytes(elements(i.shape)[1])


def collectives(module: Module, run: Runs, mesh: Mapping[str, int]) -> list[Collective]:
    """Every collective of more than one device, with how often it runs. mesh: axis -> size.

    On TPU, a collective that overlaps computation appears in the fusions that start, continue and end it, and is counted where it
    starts. An all-reduce inside a fusion named after reduce-scatter is a reduce-scatter, and synchronous."""
    found = []
    for name, count in run.counts.items():
        instructions = module.computations[name]
        targets = {i.attribute(r'custom_call_target="([^"]*)"') for i in instructions if i.op == "custom-call"}
        starts = "AsyncCollectiveStart" in targets
        if (
            name in run.fused
            and not starts
            and ("AsyncCollectiveDone" in targets or name.startswith("async_collective_fusion"))
        ):
            continue
        for i in instructions:
            kind = i.op.removesuffix("-start")
            if kind not in COLLECTIVE_KINDS:
                continue
            among = groups(i, math.prod(mesh.values()))
            pairs = kind == "collective-permute"
            size, result = len(among[0]), result_bytes(i, kind)
            if size < 2:
                continue
            wire = WIRE[kind](result, size)
            if kind == "all-reduce" and name in run.fused and re.search("reduce[-_]scatter", name):
                kind, wire, result = "reduce-scatter", wire / 2, result // size
            found.append(
                Collective(
                    kind,
                    permuted(among, mesh) if pairs else axes_of(among, mesh),
                    among[0],
                    count,
                    result,
                    wire,
                    not i.op.endswith("-start") and not starts and name not in run.asynchronous,
                    i,
                )
            )
    return sorted(found, key=lambda c: -c.count * c.wire)


class Transfer(NamedTuple):
    """A transfer to other slices, through their hosts."""

    kind: str  # kind of the collective that it is part of
    count: int  # runs per execution of the module
    nbytes: int  # bytes that one device contributes
    instruction: Instruction


def transfers(module: Module, run: Runs) -> list[Transfer]:
    """Sends to other TPU slices. In such a module, collectives within a slice number its devices from 0."""
    found = []
    for name, count in run.counts.items():
        for i in module.computations[name]:
            kind = i.attribute(r'_xla_megascale_transfer_type="(\w+)"') if i.op == "send" else None
            if kind is not None:
                found.append(Transfer(kind.lower().replace("_", "-"), count, nbytes(elements(i.shape)[0]), i))
    return found


# ---- kernels

PALLAS = ("tpu_custom_call", "mosaic_gpu", "__gpu$xla.gpu.triton")  # targets of custom calls


class KernelCall(NamedTuple):
    name: str  # name of the Pallas call
    count: int  # runs per execution of the module
    operands: tuple[str, ...]  # shapes of the operands
    instruction: Instruction


def kernels(module: Module, run: Runs) -> list[KernelCall]:
    """Calls of Pallas kernels, for which the compiler has no estimates."""
    found = []
    for name, count in run.counts.items():
        for i in module.computations[name]:
            if i.op == "custom-call" and i.attribute(r'custom_call_target="([^"]*)"') in PALLAS:
                shapes = i.attribute(r"operand_layout_constraints=\{((?:[^{}]|\{[^{}]*\})*)\}") or ""
                path = re.sub(r"/pallas_call$", "", i.op_name).rpartition("/")[2]
                found.append(
                    KernelCall(path or re.sub(r"\.\d+$", "", i.name), count, tuple(elements(f"({shapes})")), i)
                )
    return found


# ---- arrays

# Ops that allocate no array.
VIEWS = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call opt-barrier optimization-barrier domain".split()
)


class Array(NamedTuple):
    shape: str  # bf16[8,128]
    nbytes: int
    op_name: str  # origin of one of them in the traced program; "" if the compiler does not give it
    count: int  # number of instructions that produce such an array, not all at the same time


def formed_arrays(module: Module, run: Runs) -> list[Array]:
    """Arrays that the program allocates in the device's main memory, by shape, largest first."""
    origins: dict[str, list[str]] = {}
    for name in run.counts:
        for i in () if name in run.fused else module.computations[name]:
            if i.op in VIEWS or i.op.endswith("-done"):
                continue
            for element in elements(i.shape):
                plain = re.match(r"\w+\[[\d,]*\]", element)
                # S(1) and above are other memories: the core's, the host's.
                if plain and not re.search(r"S\([1-9]\d*\)", element):
                    origins.setdefault(plain[0], []).append(i.op_name)

    def origin(found: list[str]) -> str:
        traced = Counter(n for n in found if n.startswith("jit(")) or Counter(found)
        return traced.most_common(1)[0][0]

    forms = [Array(shape, nbytes(shape), origin(found), len(found)) for shape, found in origins.items()]
    return sorted(forms, key=lambda a: -a.nbytes)
