"""A plan as text."""

import math
from typing import Any

from minitf.runtime.devices import GiB
from minitf.runtime.terminal import columns, human


def gib(n: float) -> str:
    """Bytes of memory as text, in binary units."""
    return f"{n / GiB:.3f} GiB" if n >= GiB / 100 else f"{n / 2**20:.3f} MiB"


def gb(n: float) -> str:
    """Bytes sent as text, in decimal units."""
    return f"{human(n)}B"


def fits(p: dict[str, Any]) -> str:
    if p["fits"]:
        return f"fits: {gib(p['memory']['total'])} of {gib(p['has_bytes'])} on a device"
    return p.get("why") or f"does not fit: needs {gib(p['needs_bytes'])} of {gib(p['has_bytes'])} on a device"


def place(c: dict[str, Any]) -> str:
    if c["across_slices"]:
        return "across slices"
    return "along no axes" if c["axes"] is None else f"along {', '.join(c['axes'])}"


def describe_plan(p: dict[str, Any]) -> str:
    """One plan as lines of text."""
    mesh = ", ".join(f"{axis}={n}" for axis, n in p["mesh"].items())
    across = f" in {p['slices']} slices" if p["slices"] > 1 else ""
    active = f" ({p['active_parameters']:,} for a token)" if p["active_parameters"] < p["parameters"] else ""
    lines = [
        f"{p['topology']}: {p['devices']} x {p['device']}{across}, mesh {mesh}; attention {p['attention']}, remat {p['remat']}",
        f"{p['parameters']:,} parameters{active}, {p['batch_size']} x {p['seq_len']} tokens a step in {p['accumulation']} parts",
        fits(p),
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
            ("kernels", f"{t['kernels_s']:.4g} s", ""),
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


def comparison(plans: list[dict[str, Any]], first: dict[str, Any]) -> str:
    """A table with one line per plan. first: the columns that distinguish the plans."""

    def cell(show: Any, p: dict[str, Any]) -> str:
        try:
            return show(p)
        except KeyError:  # unknown if the step does not fit, or for this device
            return "-"

    shown = {**first, **COLUMNS}
    return "\n".join(columns([tuple(shown), *(tuple(cell(show, p) for show in shown.values()) for p in plans)]))


SEARCHED = {
    "model.remat": lambda p: p["remat"],
    "batch_size": lambda p: str(p["batch_size"]),
    "accumulation": lambda p: str(p["accumulation"]),
}
DIVIDED = {
    "mesh.fsdp": lambda p: str(p["mesh"]["fsdp"] * p["mesh"].get("fsdp_inner", 1)),
    "mesh.expert": lambda p: str(p["mesh"]["expert"]),
}


def searched(plans: list[dict[str, Any]]) -> str:
    """The table of a search, and the settings with the most tokens per second."""
    divided = len({p["mesh"]["expert"] for p in plans}) > 1
    settings = SEARCHED | (DIVIDED if divided else {})
    text = comparison(plans, settings)
    why = {p["why"] for p in plans if "why" in p}
    timed = [p for p in plans if "time" in p]
    if timed:
        best = max(timed, key=lambda p: p["time"]["tokens_per_s"])
        text += "\nmost tokens/s: " + " ".join(f"--config.{name}={of(best)}" for name, of in settings.items())
    return "\n".join([text, *(f"refused: {w}" for w in sorted(why))])
