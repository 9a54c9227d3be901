"""What a run would need and do on devices that are not here: python -m minitf.plan --config FILE --topology v5e:16x16

The real train step is compiled ahead of time for the topology, on this machine's CPU, and its program is read. Nothing is run, no
data are read and no device is touched. Needs the package libtpu: pip install '.[plan]'.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import minitf
from minitf import command_line, hlo, sharding, topology
from minitf import config as config_lib
from minitf import job as job_lib
from minitf import params as P
from minitf.config import Config
from minitf.data import pipeline
from minitf.data.datasets import DATASETS
from minitf.data.store import ISOLATED, TOKENS
from minitf.data.tokenizer import is_file_name, make_tokenizer
from minitf.metrics import DEVICES, Device, GiB, human
from minitf.model.attention import sizes
from minitf.model.transformer import REMAT, flops_per_token
from minitf.step import Batch
from minitf.tables import columns

DOES_NOT_FIT = 1  # exit status; 2: a mistake in settings, as everywhere
KERNEL_EFFICIENCY = 0.5  # share of peak FLOP/s that an attention kernel is taken to reach

# ---- the step, compiled


def vocabulary(cfg: Config) -> int:
    """The model's, without data. Raises ValueError where it follows from them."""
    if cfg.model.vocab_size is not None:
        return cfg.model.vocab_size
    d = cfg.data
    if "tokenizer" in DATASETS[d.kind].reads and (d.tokenizer == "bytes" or is_file_name(d.tokenizer)):
        return make_tokenizer(d.tokenizer, []).vocab_size
    raise ValueError(
        f"model.vocab_size=None: follows from the data (data.kind={d.kind}), which a plan does not read; give it by "
        "--config.model.vocab_size=N"
    )


def job_of(cfg: Config, devices: list) -> job_lib.Job:
    """The job on these devices, without data. Raises ValueError where they do not fit."""
    o = cfg.optimizer
    # A length in epochs follows from the data; the step is the same for any.
    steps = o.warmup_steps + (o.decay_steps or 1) if cfg.epochs is not None else config_lib.total_steps(cfg, 0)
    return job_lib.design(cfg, steps, vocabulary(cfg), devices)


def abstract_batch(job: job_lib.Job) -> Batch:
    """Shapes of a batch, laid out as the real ones are."""
    cfg, layout = job.cfg, sharding.batch_sharding(job.mesh)
    fields = ISOLATED if pipeline.has_segments(cfg.data) else TOKENS
    shape = (cfg.batch_size, cfg.seq_len)
    return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=layout) for name, dtype in fields.items()}


class TooLarge(Exception):
    """The program does not fit into a device's memory."""

    def __init__(self, needs: float, has: float):
        super().__init__(f"needs {gib(needs)} of {gib(has)}")
        self.needs, self.has = needs, has


UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
OUT_OF_MEMORY = (  # (needed, had), each number and unit, as compilers say it
    re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"),
    re.compile(r"Used ([\d.]+)([KMGT]?)i?B? of ([\d.]+)([KMGT]?)i?B? hbm"),
)


def too_large(message: str) -> TooLarge | None:
    """What a compiler's message says of memory that a program lacks."""
    for pattern in OUT_OF_MEMORY:
        if found := pattern.search(message):
            needs, unit, has, has_unit = found.groups()
            return TooLarge(float(needs) * UNITS[unit], float(has) * UNITS[has_unit])
    return None


def compile_step(job: job_lib.Job) -> tuple[jax.stages.Compiled, job_lib.Program]:
    """The program that training would run, and what it is for. Raises TooLarge; ValueError where the compiler refuses it."""
    functions = job_lib.program(job)
    with sharding.surroundings(job.mesh, job.cfg.model.dtype):
        try:
            lowered = functions.step.lower(functions.state, abstract_batch(job))
        except RuntimeError as e:  # JAX looks for it when it traces
            if "cuDNN" not in str(e):
                raise
            raise ValueError(
                "model.attention.implementation=cudnn: cuDNN is not here (pip install nvidia-cudnn-cu13); a plan with "
                "--config.model.attention.implementation=xla needs more memory than a run with cudnn"
            ) from None
        try:
            return lowered.compile(), functions
        except jax.errors.JaxRuntimeError as e:
            raise too_large(str(e)) or ValueError(f"the compiler refuses the train step: {topology.said(e)}") from None


# ---- what the program needs and does


def local_bytes(tree: Any) -> int:
    """Bytes on one device."""
    return sum(
        math.prod(a.sharding.shard_shape(a.shape)) * jax.numpy.dtype(a.dtype).itemsize for a in jax.tree.leaves(tree)
    )


def memory(compiled: jax.stages.Compiled, state: Any, batch: Batch) -> dict[str, int]:
    """Bytes on one device by kind. What is in `total` exists during a step."""
    m = compiled.memory_analysis()
    kinds = {
        "parameters": local_bytes(state.params),
        "optimizer state": local_bytes(state.opt_state),
        "batch": local_bytes(batch),
    }
    kinds["padding of these"] = m.argument_size_in_bytes - sum(kinds.values())
    kinds["outputs"] = m.output_size_in_bytes - m.alias_size_in_bytes
    kinds["temporary"] = m.temp_size_in_bytes
    return kinds | {
        "total": sum(kinds.values()),
        "peak": m.peak_memory_in_bytes,
        "code": m.generated_code_size_in_bytes,
        "host": m.host_temp_size_in_bytes,
    }


# Products of the size queries x keys x head that a call of a kernel does; a backward pass forms scores and their gradient anew.
PRODUCTS = {"splash_mha_fwd": 2, "splash_mqa_fwd": 2, "splash_mha_dkv": 5, "splash_mqa_dkv": 5}
PRODUCTS |= {"splash_mha_dq": 3, "splash_mqa_dq": 3}
APART = {"splash_mha_dkv": 4, "splash_mqa_dkv": 4}  # where a kernel of its own gives the gradient of the queries


def kernel_flops(found: list[hlo.Kernel], seen: float) -> list[dict[str, Any]]:
    """The kernels with their FLOPs a step on one device; None for those that are not known here. `seen`: the mean share of the
    square of queries and keys that a mask leaves."""
    apart = any("_dq" in k.name for k in found)
    rows = []
    for k in found:
        name = next((n for n in PRODUCTS if k.name.startswith(n)), None)
        flops = None
        if name is not None:
            products = APART.get(name, PRODUCTS[name]) if apart else PRODUCTS[name]
            floats = [shape for shape in k.operands if re.match(r"b?f\d+\[", shape)]
            dims = [[int(n) for n in re.search(r"\[([\d,]*)\]", shape)[1].split(",")] for shape in floats[:2]]
            queries, keys = dims[0], dims[1][-2]  # [..., heads, S, K], [..., T, K]
            flops = k.count * products * 2 * math.prod(queries) * keys * seen
        rows.append({"name": k.name, "count": k.count, "flops": flops})
    return rows


def in_a_slice(mesh: jax.sharding.Mesh) -> dict[str, int]:
    """The sizes of the mesh's axes within one slice, whose program numbers its own devices alone."""
    number = np.vectorize(lambda d: getattr(d, "slice_index", None) or 0)(mesh.devices)
    across = [len(set(np.moveaxis(number, i, 0).reshape(n, -1)[:, 0])) for i, n in enumerate(number.shape)]
    return {axis: n // k for (axis, n), k in zip(mesh.shape.items(), across, strict=True)}


def by_kind(module: hlo.Module, run: hlo.Runs, job: job_lib.Job) -> list[dict[str, Any]]:
    """Collectives of the same kind, axes and place, their calls and bytes a step on one device added up."""
    slices = sharding.hosts(list(job.mesh.devices.flat))
    rows: dict[tuple, dict[str, Any]] = {}

    def add(
        kind: str, axes: tuple[str, ...] | None, group: int, across: bool, count: int, wire: float, exposed: float
    ) -> None:
        row = rows.setdefault(
            (kind, axes, group, across),
            {
                "kind": kind,
                "axes": None if axes is None else list(axes),  # None: along no axes of the mesh
                "group": group,
                "across_slices": across,
                "count": 0,
                "wire_bytes": 0.0,
                "exposed_bytes": 0.0,
            },
        )
        row["count"] += count
        row["wire_bytes"] += count * wire
        row["exposed_bytes"] += count * exposed

    for c in hlo.collectives(module, run, in_a_slice(job.mesh)):
        add(c.kind, c.axes, len(c.group), False, c.count, c.wire, c.wire * c.synchronous)
    for t in hlo.transfers(module, run):
        # What is gathered is given in parts, of the others the whole.
        result = t.nbytes * slices if t.kind == "all-gather" else t.nbytes
        wire = hlo.WIRE.get(t.kind, hlo.WIRE["collective-permute"])(
            result / slices if t.kind == "reduce-scatter" else result, slices
        )
        add(t.kind, None, slices, True, t.count, wire, 0.0)
    return sorted(rows.values(), key=lambda r: -r["wire_bytes"])


def plan(job: job_lib.Job, name: str) -> dict[str, Any]:
    """What the job needs and does on the topology whose devices it is on; only that it does not fit where it does not."""
    cfg, mesh = job.cfg, job.mesh
    devices = list(mesh.devices.flat)
    device = DEVICES[devices[0].device_kind]
    tokens = cfg.batch_size * cfg.seq_len
    found: dict[str, Any] = {
        "topology": name,
        "device": devices[0].device_kind,
        "devices": len(devices),
        "slices": sharding.hosts(devices),
        "mesh": {a: n for a, n in mesh.shape.items() if n > 1 or a in sharding.mesh_settings()},
        "attention": job_lib.implementation(cfg, mesh),
        "remat": cfg.model.remat,
        "batch_size": cfg.batch_size,
        "accumulation": cfg.accumulation,
        "seq_len": cfg.seq_len,
        "parameters": P.count(job.specs)["total"],
        "tokens_per_step": tokens,
        "flops_per_token": flops_per_token(cfg.model, job.specs, cfg.seq_len),
        "flops_per_token_causal": flops_per_token(cfg.model, job.specs, cfg.seq_len, causal=True),
    }
    began = time.perf_counter()
    try:
        compiled, functions = compile_step(job)
    except TooLarge as e:
        return found | {
            "fits": False,
            "needs_bytes": e.needs,
            "has_bytes": e.has,
            "compile_s": time.perf_counter() - began,
        }
    found["compile_s"] = time.perf_counter() - began
    needs = memory(compiled, functions.state, abstract_batch(job))
    if sharding.platform(mesh) == "gpu" and needs["total"] > device.hbm:  # its compiler does not look
        return found | {"fits": False, "needs_bytes": needs["total"], "has_bytes": device.hbm}
    module = hlo.parse(compiled.as_text())
    run = hlo.runs(module)
    return found | {
        "fits": True,
        "has_bytes": device.hbm,
        "memory": needs,
        "largest": [a._asdict() for a in hlo.arrays(module, run)[:5]],
        **work(module, run, job, found),
    }


def work(module: hlo.Module, run: hlo.Runs, job: job_lib.Job, known: dict[str, Any]) -> dict[str, Any]:
    """What a step computes and sends, and how long that may take; with what is assumed."""
    cfg, devices = job.cfg, list(job.mesh.devices.flat)
    device = DEVICES[devices[0].device_kind]
    collectives = by_kind(module, run, job)
    dense = flops_per_token(cfg.model, job.specs, 0)  # products with weights
    H, _, K = sizes(cfg.model.attention, cfg.model.dim)
    seen = (known["flops_per_token_causal"] - dense) / (12 * H * K * cfg.model.num_layers * cfg.seq_len)
    kernels = kernel_flops(hlo.kernels(module, run), seen)
    costs = hlo.costs(module, run)
    cycles = sum(c.cycles for c in costs)
    exposed = sum(c["exposed_bytes"] for c in collectives)
    ideal = known["flops_per_token"] * known["tokens_per_step"] / len(devices) / device.flops
    result = {
        "cycles": cycles,
        "costs": [
            {"cycles": c.cycles, "count": c.count, "name": c.instruction.name, "op_name": c.instruction.op_name}
            for c in costs[:10]
        ],
        "kernels": kernels,
        "collectives": collectives,
        "wire_bytes": sum(c["wire_bytes"] for c in collectives),
        "exposed_bytes": exposed,
    }
    if device.clock is not None:
        compute = cycles / device.clock
        attention = sum(k["flops"] or 0 for k in kernels) / (KERNEL_EFFICIENCY * device.flops)
        sending = exposed / device.ici
        step = compute + attention + sending
        result["time"] = {
            "compute_s": compute,
            "kernels_s": attention,
            "exposed_s": sending,
            "step_s": step,
            "ideal_s": ideal,
            "tokens_per_s": known["tokens_per_step"] / step,
            "mfu": ideal / step,
            "mfu_causal": ideal / step * known["flops_per_token_causal"] / known["flops_per_token"],
        }
    return result | {"assumptions": assumptions(job, device, result, run.unknown)}


def assumptions(job: job_lib.Job, device: Device, found: dict[str, Any], unknown: tuple[str, ...]) -> list[str]:
    """What the figures take for granted."""
    if device.clock is None:
        return [
            "no time: the compiler estimates none for this device",
            "memory: of the data sheet's size the driver takes some, and JAX all but XLA_PYTHON_CLIENT_MEM_FRACTION (0.75)",
        ]
    told = [
        "modelled, not measured on hardware",
        f"compute: the compiler's estimated cycles, each times the turns of its loops, at {device.clock / 1e9:g} GHz; differences "
        "below 4 % are noise",
        f"exposed: bytes of collectives beside which nothing is computed, over all links of a chip at once "
        f"({device.ici / 1e9:g} GB/s); a ring along one axis of the torus may use only some of them. Other collectives take no time",
        f"MFU: {human(device.flops)}FLOP/s of bfloat16 a device, FLOPs of the full attention square; causal: of seen keys",
    ]
    if found["kernels"]:
        told.append(f"kernels: FLOPs of the seen part of the attention square at {KERNEL_EFFICIENCY:.0%} of the peak")
    if others := sorted({k["name"] for k in found["kernels"] if k["flops"] is None}):
        told.append(f"kernels that are not known here take no time: {', '.join(others)}")
    if any(c["across_slices"] for c in found["collectives"]):
        told.append("collectives across slices take no time: their network is not known here")
    if job.cfg.model.remat == "offload":
        told.append("copies to and from the host's memory take no time")
    if unknown:
        told.append(f"loops whose turns depend on data count once: {', '.join(unknown)}")
    if job.cfg.epochs is not None:
        told.append(f"epochs={job.cfg.epochs:g}: the number of steps follows from data, and changes nothing here")
    return told


# ---- other settings that fit


def with_settings(job: job_lib.Job, devices: list, remat: str, batch_size: int, accumulation: int) -> job_lib.Job:
    model = dataclasses.replace(job.cfg.model, remat=remat)
    cfg = dataclasses.replace(job.cfg, model=model, batch_size=batch_size, accumulation=accumulation)
    return job_lib.design(cfg, job.steps, model.vocab_size, devices)


def search(job: job_lib.Job, name: str) -> Iterator[dict[str, Any]]:
    """The plans of other settings: for each remat policy the batch in ever more parts until it fits; where it does in one part,
    ever larger batches until one does not, at most four times the config's."""
    cfg, devices = job.cfg, list(job.mesh.devices.flat)
    rows = cfg.batch_size // sharding.batch_shards(job.mesh)
    parts = [n for n in range(1, rows + 1) if rows % n == 0 and (n & (n - 1) == 0 or n == rows)]

    def tried(remat: str, batch_size: int, accumulation: int) -> dict[str, Any]:
        setting = f"model.remat={remat} batch_size={batch_size} accumulation={accumulation}"
        tell(f"{name}: {setting}")
        try:
            return plan(with_settings(job, devices, remat, batch_size, accumulation), name)
        except ValueError as e:
            known = {"topology": name, "remat": remat, "batch_size": batch_size, "accumulation": accumulation}
            return known | {"fits": False, "why": str(e)}

    for remat in REMAT:
        for accumulation in parts:
            yield (found := tried(remat, cfg.batch_size, accumulation))
            if found["fits"] or "why" in found:
                break
        if found["fits"] and accumulation == 1:
            for factor in (2, 4):
                yield (found := tried(remat, cfg.batch_size * factor, 1))
                if not found["fits"]:
                    break


# ---- what is printed


def tell(text: str) -> None:
    """Progress, which is not the result."""
    print(text, file=sys.stderr, flush=True)


def gib(n: float) -> str:
    """Of memory."""
    return f"{n / GiB:.3f} GiB" if n >= GiB / 100 else f"{n / 2**20:.3f} MiB"


def gb(n: float) -> str:
    """Of what is sent."""
    return f"{human(n)}B"


def fit(p: dict[str, Any]) -> str:
    if p["fits"]:
        return f"fits: {gib(p['memory']['total'])} of {gib(p['has_bytes'])} on a device"
    return p.get("why") or f"does not fit: needs {gib(p['needs_bytes'])} of {gib(p['has_bytes'])} on a device"


def place(c: dict[str, Any]) -> str:
    if c["across_slices"]:
        return "across slices"
    return "along no axes" if c["axes"] is None else f"along {', '.join(c['axes'])}"


def describe(p: dict[str, Any]) -> str:
    """A plan as text."""
    mesh = ", ".join(f"{axis}={n}" for axis, n in p["mesh"].items())
    across = f" in {p['slices']} slices" if p["slices"] > 1 else ""
    lines = [
        f"{p['topology']}: {p['devices']} x {p['device']}{across}, mesh {mesh}; attention {p['attention']}, remat {p['remat']}",
        f"{p['parameters']:,} parameters, {p['batch_size']} x {p['seq_len']} tokens a step in {p['accumulation']} parts",
        fit(p),
    ]
    if not p["fits"]:
        return "\n".join([*lines, "--search tries other settings"])
    m = p["memory"]
    rows = [(name, gib(n)) for name, n in m.items() if n or name in ("temporary", "total")]
    lines += ["", "bytes on a device", *(f"  {line}" for line in columns(rows))]
    lines += ["largest arrays that the step forms, not all at the same time"]
    shapes = [(a["shape"], gib(a["nbytes"]), f"{a['count']} times") for a in p["largest"]]
    lines += (
        [f"  {row}  {a['op_name']}" for row, a in zip(columns(shapes), p["largest"], strict=True)] if shapes else []
    )
    flops = p["flops_per_token"] * p["tokens_per_step"] / p["devices"]
    causal = p["flops_per_token_causal"] * p["tokens_per_step"] / p["devices"]
    lines += ["", f"FLOPs a step on a device: {human(flops)}, {human(causal)} counting seen keys only"]
    if p["collectives"]:
        head = ("collectives a step on a device", "group", "count", "sent", "exposed")
        rows = [
            (
                f"  {c['kind']} {place(c)}",
                str(c["group"]),
                str(c["count"]),
                gb(c["wire_bytes"]),
                gb(c["exposed_bytes"]),
            )
            for c in p["collectives"]
        ]
        rows.append(("  all", "", "", gb(p["wire_bytes"]), gb(p["exposed_bytes"])))
        lines += ["", *columns([head, *rows])]
    for k in p["kernels"]:
        lines.append(f"kernel {k['name']}: {k['count']} times, {human(k['flops'] or math.nan)}FLOPs")
    if "time" in p:
        t = p["time"]
        rows = [
            ("compute", f"{t['compute_s']:.4g} s", f"{p['cycles']:.4g} cycles"),
            ("attention kernels", f"{t['kernels_s']:.4g} s", ""),
            ("exposed collectives", f"{t['exposed_s']:.4g} s", ""),
            (
                "step",
                f"{t['step_s']:.4g} s",
                f"MFU {t['mfu']:.1%} (causal {t['mfu_causal']:.1%}), {t['tokens_per_s']:,.0f} tokens/s",
            ),
        ]
        lines += ["", "estimated time of a step", *(f"  {line}" for line in columns(rows))]
    lines += [f"  - {text}" for text in p["assumptions"]]
    return "\n".join([*lines, f"compiled in {p['compile_s']:.0f} s"])


COLUMNS = {
    "memory": lambda p: gib(p["memory"]["total"]) if p["fits"] else "does not fit",
    "of": lambda p: gib(p["has_bytes"]),
    "sent": lambda p: gb(p["wire_bytes"]),
    "exposed": lambda p: gb(p["exposed_bytes"]),
    "step": lambda p: f"{p['time']['step_s']:.4g} s",
    "tokens/s": lambda p: f"{p['time']['tokens_per_s']:,.0f}",
    "MFU": lambda p: f"{p['time']['mfu']:.1%}",
}


def table(plans: list[dict[str, Any]], first: dict[str, Any]) -> str:
    """A line for each plan; `first`: the columns that tell them apart."""

    def cell(show: Any, p: dict[str, Any]) -> str:
        try:
            return show(p)
        except KeyError:  # not known where it does not fit, or on this device
            return "-"

    shown = {**first, **COLUMNS}
    return "\n".join(columns([tuple(shown), *(tuple(cell(show, p) for show in shown.values()) for p in plans)]))


SETTINGS = {
    "remat": lambda p: p["remat"],
    "batch_size": lambda p: str(p["batch_size"]),
    "accumulation": lambda p: str(p["accumulation"]),
}


def searched(plans: list[dict[str, Any]]) -> str:
    """The table of a search, and which settings give the most tokens a second."""
    text = table(plans, SETTINGS)
    why = {p["why"] for p in plans if "why" in p}
    timed = [p for p in plans if "time" in p]
    if timed:
        best = max(timed, key=lambda p: p["time"]["tokens_per_s"])
        flags = {"model.remat": best["remat"], **{n: best[n] for n in ("batch_size", "accumulation")}}
        text += "\nmost tokens/s: " + " ".join(f"--config.{name}={value}" for name, value in flags.items())
    return "\n".join([text, *(f"refused: {w}" for w in sorted(why))])


# ---- the command line


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m minitf.plan",
        description="Compiles a config's train step for devices that are not here and says what it needs and does.",
        epilog=f"Topologies: {topology.KNOWN}. --config.NAME=VALUE changes a setting. Exit status: 0 it fits everywhere, 1 it does "
        "not, 2 a mistake in settings.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="a Python file with get_config()")
    parser.add_argument(
        "--topology",
        required=True,
        action="append",
        metavar="NAME",
        help="such as v5e:16x16; may be given several times",
    )
    parser.add_argument("--search", action="store_true", help="try remat policies, parts of a batch and larger batches")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    for name, value in topology.ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")  # a device that is here is left alone
    jax.config.update("jax_enable_compilation_cache", False)  # what it holds could only be read by the device
    try:
        args, cfg = command_line.parse_args(sys.argv[1:] if argv is None else argv, parser)
        jobs = {name: job_of(cfg, topology.find_devices(name)) for name in args.topology}
        plans, tries = [], {}
        for name, job in jobs.items():
            tell(f"{name}: compiling the train step, which takes minutes for a large model")
            plans.append(plan(job, name))
            if not args.json:
                print(("" if len(plans) == 1 else "\n") + describe(plans[-1]), flush=True)
            if args.search:
                tries[name] = list(search(job, name))
                if not args.json:
                    print("\n" + searched(tries[name]), flush=True)
        if args.json:
            versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}
            print(json.dumps({"plans": plans, "search": tries, "versions": {"minitf": minitf.__version__, **versions}}))
        elif len(plans) > 1:
            print("\n" + table(plans, {"topology": lambda p: p["topology"], "devices": lambda p: str(p["devices"])}))
    except ValueError as e:
        command_line.fail(str(e))
    return 0 if all(p["fits"] for p in plans) else DOES_NOT_FIT


if __name__ == "__main__":
    sys.exit(main())
