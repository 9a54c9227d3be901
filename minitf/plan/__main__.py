"""Estimates a run on devices that are not attached: python -m minitf.plan --config FILE --topology v5e:16x16

Compiles the real train step ahead of time for the topology, on this host's CPU, and analyses the compiled program. Runs nothing,
reads no data and touches no device. Needs the package libtpu: pip install '.[plan]'.
"""

import argparse
import importlib.metadata
import json
import os
import sys

import minitf
from minitf import command_line
from minitf.plan import topology
from minitf.plan.figures import DOES_NOT_FIT, plan, search, tell
from minitf.plan.program import job_of
from minitf.plan.report import comparison, describe_plan, searched
from minitf.runtime import hooks

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
    hooks.use_cpu()
    hooks.keep_nothing_compiled()
    try:
        args, cfg = command_line.parse_args(sys.argv[1:] if argv is None else argv, parser)
        jobs = {name: job_of(cfg, topology.find_devices(name)) for name in args.topology}
        plans, tries = [], {}
        for name, job in jobs.items():
            tell(f"{name}: compiling the train step, which takes minutes for a large model")
            plans.append(plan(job, name))
            if not args.json:
                print(("" if len(plans) == 1 else "\n") + describe_plan(plans[-1]), flush=True)
            if args.search:
                tries[name] = list(search(job, name))
                if not args.json:
                    print("\n" + searched(tries[name]), flush=True)
        if args.json:
            versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}
            print(json.dumps({"plans": plans, "search": tries, "versions": {"minitf": minitf.__version__, **versions}}))
        elif len(plans) > 1:
            print(
                "\n" + comparison(plans, {"topology": lambda p: p["topology"], "devices": lambda p: str(p["devices"])})
            )
    except ValueError as e:
        command_line.fail(str(e))
    return 0 if all(p["fits"] for p in plans) else DOES_NOT_FIT


if __name__ == "__main__":
    sys.exit(main())
