"""Memory, FLOPs, communication and estimated time of a compiled train step; and a search over settings."""

import dataclasses
import math
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from minitf import job as job_lib
from minitf.model.attention import sizes
from minitf.model.flops import flops_per_token
from minitf.model.remat import REMAT
from minitf.params import count_params
from minitf.plan import hlo
from minitf.plan.program import OutOfMemory, abstract_batch, compile_step
from minitf.runtime.devices import DEVICES, Device
from minitf.runtime.terminal import human
from minitf.sharding.devices import host_count, platform_of
from minitf.sharding.mesh import batch_shards, mesh_settings, mesh_sizes
from minitf.training.step import Batch

DOES_NOT_FIT = 1  # exit status; 2: a mistake in settings, as in all commands
KERNEL_EFFICIENCY = 0.5  # fraction of peak FLOP/s that kernels are assumed to reach


# ---- figures of the compiled program


def local_bytes(tree: Any) -> int:
    """Bytes of a tree of sharded arrays on one device."""
    return sum(
        math.prod(a.sharding.shard_shape(a.shape)) * jax.numpy.dtype(a.dtype).itemsize for a in jax.tree.leaves(tree)
    )


def memory(compiled: jax.stages.Compiled, state: Any, batch: Batch) -> dict[str, int]:
    """Kind -> bytes on one device. `total` is the sum of the kinds before it, all allocated during a step."""
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


# Number of queries x keys x head size products per kernel call; the backward pass recomputes the scores, and then their gradient.
PRODUCTS = {"splash_mha_fwd": 2, "splash_mqa_fwd": 2, "splash_mha_dkv": 5, "splash_mqa_dkv": 5}
PRODUCTS |= {"splash_mha_dq": 3, "splash_mqa_dq": 3}
APART = {"splash_mha_dkv": 4, "splash_mqa_dkv": 4}  # if a separate kernel computes the gradient of the queries


def kernel_flops(found: list[hlo.KernelCall], seen: float, chosen: float) -> list[dict[str, Any]]:
    """The kernels with their FLOPs per step on one device; None for unknown kernels. seen: mean fraction of (query, key) pairs that
    the mask allows. chosen: mean number of rows, pairs of a token and an expert, that a grouped product multiplies; it has more, as
    buffers have room for experts that are used more than others."""
    apart = any("_dq" in k.name for k in found)
    rows = []
    for k in found:
        name, flops = next((n for n in PRODUCTS if k.name.startswith(n)), None), None
        floats = [shape for shape in k.operands if re.match(r"b?f\d+\[", shape)]
        dims = [[int(n) for n in re.search(r"\[([\d,]*)\]", shape)[1].split(",")] for shape in floats[:2]]
        if name is not None:
            products = APART.get(name, PRODUCTS[name]) if apart else PRODUCTS[name]
            queries, keys = dims[0], dims[1][-2]  # [..., heads, S, K], [..., T, K]
            flops = k.count * products * 2 * math.prod(queries) * keys * seen
        elif re.search(r"\bt?gmm\b", k.name):
            (most, inner), other = (
                dims  # [rows, D] and weights [experts, D, F] or [experts, F, D]; or, for a gradient, [rows, F]
            )
            outer = math.prod(other[1:]) // (inner if len(other) == 3 else 1)
            flops = k.count * 2 * min(most, chosen) * inner * outer
        rows.append({"name": k.name, "count": k.count, "flops": flops})
    return rows


def in_a_slice(mesh: jax.sharding.Mesh) -> dict[str, int]:
    """Sizes of the mesh axes within one slice; the program of a slice numbers only the slice's devices."""
    number = np.vectorize(lambda d: getattr(d, "slice_index", None) or 0)(mesh.devices)
    across = [len(set(np.moveaxis(number, i, 0).reshape(n, -1)[:, 0])) for i, n in enumerate(number.shape)]
    return {axis: n // k for (axis, n), k in zip(mesh.shape.items(), across, strict=True)}


def by_kind(module: hlo.Module, run: hlo.Runs, job: job_lib.Job) -> list[dict[str, Any]]:
    """Collectives by kind, axes, group size and whether they cross slices, with total calls and bytes per step on one device."""
    slices = host_count(list(job.mesh.devices.flat))
    rows: dict[tuple, dict[str, Any]] = {}

    def add(
        kind: str, axes: tuple[str, ...] | None, group: int, across: bool, count: int, wire: float, exposed: float
    ) -> None:
        row = rows.setdefault(
            (kind, axes, group, across),
            {
                "kind": kind,
                "axes": None if axes is None else list(axes),  # None: along no mesh axes
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
        # The compiler gives the bytes of one part for all-gathers, of the whole for other kinds.
        result = t.nbytes * slices if t.kind == "all-gather" else t.nbytes
        wire = hlo.WIRE.get(t.kind, hlo.WIRE["collective-permute"])(
            result / slices if t.kind == "reduce-scatter" else result, slices
        )
        add(t.kind, None, slices, True, t.count, wire, 0.0)
    return sorted(rows.values(), key=lambda r: -r["wire_bytes"])


def plan(job: job_lib.Job, name: str) -> dict[str, Any]:
    """All figures of the job on its topology `name`. If the step does not fit into memory, only the memory needed and available."""
    cfg, mesh = job.cfg, job.mesh
    devices = list(mesh.devices.flat)
    device = DEVICES[devices[0].device_kind]
    tokens = cfg.batch_size * cfg.seq_len
    found: dict[str, Any] = {
        "topology": name,
        "device": devices[0].device_kind,
        "devices": len(devices),
        "slices": host_count(devices),
        "mesh": {a: n for a, n in mesh.shape.items() if n > 1 or a in mesh_settings()},
        "attention": job_lib.implementation(cfg, mesh),
        "remat": cfg.model.remat,
        "batch_size": cfg.batch_size,
        "accumulation": cfg.accumulation,
        "seq_len": cfg.seq_len,
        "parameters": count_params(job.specs)["total"],
        "active_parameters": count_params(job.specs)["active"],
        "tokens_per_step": tokens,
        "flops_per_token": flops_per_token(cfg.model, job.specs, cfg.seq_len),
        "flops_per_token_causal": flops_per_token(cfg.model, job.specs, cfg.seq_len, causal=True),
    }
    began = time.perf_counter()
    try:
        compiled, functions = compile_step(job)
    except OutOfMemory as e:
        return found | {
            "fits": False,
            "needs_bytes": e.needs,
            "has_bytes": e.has,
            "compile_s": time.perf_counter() - began,
        }
    found["compile_s"] = time.perf_counter() - began
    needs = memory(compiled, functions.state, abstract_batch(job))
    if platform_of(mesh) == "gpu" and needs["total"] > device.hbm:  # the GPU's compiler does not check
        return found | {"fits": False, "needs_bytes": needs["total"], "has_bytes": device.hbm}
    module = hlo.parse(compiled.as_text())
    run = hlo.runs(module)
    return found | {
        "fits": True,
        "has_bytes": device.hbm,
        "memory": needs,
        "largest": [a._asdict() for a in hlo.formed_arrays(module, run)[:5]],
        **work(module, run, job, found),
    }


def work(module: hlo.Module, run: hlo.Runs, job: job_lib.Job, known: dict[str, Any]) -> dict[str, Any]:
    """Computation, communication and estimated time of a step, with the assumptions."""
    cfg, devices = job.cfg, list(job.mesh.devices.flat)
    device = DEVICES[devices[0].device_kind]
    collectives = by_kind(module, run, job)
    dense = flops_per_token(cfg.model, job.specs, 0)  # products with weights
    H, _, K = sizes(cfg.model.attention, cfg.model.dim)
    seen = (known["flops_per_token_causal"] - dense) / (12 * H * K * cfg.model.num_layers * cfg.seq_len)
    rows = known["tokens_per_step"] / cfg.accumulation / batch_shards(job.mesh) * cfg.model.mlp.experts_per_token
    kernels = kernel_flops(hlo.kernels(module, run), seen, rows)
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
        in_kernels = sum(k["flops"] or 0 for k in kernels) / (KERNEL_EFFICIENCY * device.flops)
        sending = exposed / device.ici
        step = compute + in_kernels + sending
        result["time"] = {
            "compute_s": compute,
            "kernels_s": in_kernels,
            "exposed_s": sending,
            "step_s": step,
            "ideal_s": ideal,
            "tokens_per_s": known["tokens_per_step"] / step,
            "mfu": ideal / step,
            "mfu_causal": ideal / step * known["flops_per_token_causal"] / known["flops_per_token"],
        }
    return result | {"assumptions": assumptions(job, device, result, run.unknown)}


def assumptions(job: job_lib.Job, device: Device, found: dict[str, Any], unknown: tuple[str, ...]) -> list[str]:
    """The assumptions behind the figures, as lines of text."""
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
    if job.cfg.model.mlp.router != "none":
        told.append("mixtures: as if all experts were used equally")
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


# ---- search over settings


def divided(job: job_lib.Job, expert: int) -> dict[str, int]:
    """Mesh settings with so many shards of the experts, on the same devices of fsdp x expert."""
    sizes = mesh_sizes(job.mesh)
    return {"fsdp": sizes["fsdp"] * sizes["expert"] // expert, "expert": expert}


def with_settings(
    job: job_lib.Job, devices: list, expert: int, remat: str, batch_size: int, accumulation: int
) -> job_lib.Job:
    model, mesh = dataclasses.replace(job.cfg.model, remat=remat), job.cfg.mesh
    if expert != job.mesh.shape["expert"]:
        mesh = dataclasses.replace(mesh, **divided(job, expert))
    cfg = dataclasses.replace(job.cfg, model=model, mesh=mesh, batch_size=batch_size, accumulation=accumulation)
    return job_lib.design(cfg, job.steps, model.vocab_size, devices)


def search(job: job_lib.Job, name: str) -> Iterator[dict[str, Any]]:
    """Yields plans of other settings: for each remat policy, more and more microbatches until the step fits; if it fits with one,
    larger and larger batches until one does not fit, up to four times the config's. For a mixture the best of these, likewise in
    parts, with other divisions of fsdp x expert between the two."""
    cfg, devices, own = job.cfg, list(job.mesh.devices.flat), job.mesh.shape["expert"]
    rows = cfg.batch_size // batch_shards(job.mesh)
    parts = [n for n in range(1, rows + 1) if rows % n == 0 and (n & (n - 1) == 0 or n == rows)]
    found: list[dict[str, Any]] = []

    def tried(expert: int, remat: str, batch_size: int, accumulation: int) -> dict[str, Any]:
        setting = f"model.remat={remat} batch_size={batch_size} accumulation={accumulation}"
        tell(f"{name}: {setting}" + (f" mesh.expert={expert}" if expert != own else ""))
        try:
            found.append(plan(with_settings(job, devices, expert, remat, batch_size, accumulation), name))
        except ValueError as e:
            known = {"topology": name, "remat": remat, "batch_size": batch_size, "accumulation": accumulation}
            found.append(known | {"mesh": divided(job, expert), "fits": False, "why": str(e)})
        return found[-1]

    def in_parts(expert: int, remat: str, batch_size: int, first: int = 1) -> Iterator[dict[str, Any]]:
        for accumulation in parts[parts.index(first) :]:
            yield tried(expert, remat, batch_size, accumulation)
            if found[-1]["fits"] or "why" in found[-1]:
                break

    for remat in REMAT:
        yield from in_parts(own, remat, cfg.batch_size)
        if found[-1]["fits"] and found[-1]["accumulation"] == 1:
            for factor in (2, 4):
                yield tried(own, remat, cfg.batch_size * factor, 1)
                if not found[-1]["fits"]:
                    break
    most = 1 if cfg.model.mlp.router == "none" else math.gcd(cfg.model.mlp.experts, divided(job, 1)["fsdp"])
    if timed := [p for p in found if "time" in p]:
        best = max(timed, key=lambda p: p["time"]["tokens_per_s"])
        for expert in range(1, most + 1):
            if most % expert == 0 and expert != own:
                yield from in_parts(expert, best["remat"], best["batch_size"], best["accumulation"])


# ---- progress


def tell(text: str) -> None:
    """Prints progress to stderr; stdout has only results."""
    print(text, file=sys.stderr, flush=True)
