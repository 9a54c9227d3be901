"""Measures decoding: a run's model by minitf, and the same weights by transformers' `generate`, in turns (extra `parity`).

python -m tools.benchmark_generate --workdir runs/smollm2 --against DIR --batch_sizes 1,8

DIR is the Hugging Face folder that the run was imported from; without it, minitf is measured alone. Both sides decode greedily in
float32 from random prompts, always the full number of tokens; tokens/s include the prefill. The time per token after the prefill is
compared with that of one `jnp.sum` over the same weights in the same process, a lower bound, since each token reads each weight.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from minitf import command_line
from minitf.model.transformer import ModelConfig
from minitf.sampling import Sampler, Sampling, prepared
from minitf.sharding.devices import make_mesh
from minitf.sharding.mesh import MeshConfig
from minitf.workdir import load_model
from tools.benchmark import Side, ratios, serve

Measure = Callable[[dict[str, int]], dict[str, float]]  # {batch_size, prompt, new_tokens} -> seconds by name


def prompts_of(request: dict[str, int], vocab_size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocab_size, (request["batch_size"], request["prompt"]))


def decoding(params: Any, cfg: ModelConfig, mesh: jax.sharding.Mesh) -> Measure:
    """A function that times greedy decoding from a model on a mesh."""
    params, cfg = prepared(params, cfg, mesh)
    sampler, total = Sampler(cfg, mesh), jax.jit(lambda params: sum(map(jnp.sum, jax.tree.leaves(params))))

    def measure(request: dict[str, int]) -> dict[str, float]:
        prompts, n = list(prompts_of(request, cfg.vocab_size)), request["new_tokens"]
        began = time.perf_counter()
        pieces = sampler.stream(params, prompts, n, Sampling(temperature=0))
        next(pieces)
        first = time.perf_counter()
        made = sum(piece.ids.shape[1] for piece in pieces)
        ended = time.perf_counter()
        assert made == n - 1
        sums = []
        for _ in range(5):
            start = time.perf_counter()
            jax.block_until_ready(total(params))
            sums.append(time.perf_counter() - start)
        return {"seconds": ended - began, "token": (ended - first) / made, "sum": statistics.median(sums)}

    return measure


def by_minitf(workdir: str) -> tuple[dict[str, Any], Measure]:
    mesh = make_mesh(MeshConfig())
    model = load_model(workdir, mesh=mesh)
    cfg = model.cfg.model
    known = {"vocab_size": cfg.vocab_size, "max_seq_len": cfg.max_seq_len, "dtype": cfg.dtype}
    return known, decoding(model.params, cfg, mesh)


def by_transformers(folder: str) -> tuple[dict[str, Any], Measure]:
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def measure(request: dict[str, int]) -> dict[str, float]:
        prompts, n = torch.from_numpy(prompts_of(request, model.config.vocab_size)), request["new_tokens"]
        with torch.no_grad():
            began = time.perf_counter()
            found = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=n,
                min_new_tokens=n,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
            seconds = time.perf_counter() - began
        assert found.shape == (request["batch_size"], request["prompt"] + n)
        return {"seconds": seconds}

    return {"torch": torch.__version__, "transformers": transformers.__version__}, measure


SIDES = {"minitf": by_minitf, "transformers": by_transformers}


def worker() -> None:
    serve(lambda first: SIDES[first["side"]](first["source"]))


def compare(sources: dict[str, str], batch_sizes: list[int], prompt: int, new: int, rounds: int) -> dict[str, Any]:
    """By batch size, each side's median tokens/s, and the ratios of times."""
    sides: dict[str, Side] = {}
    try:
        for name, source in sources.items():
            first = {"side": name, "source": source}
            sides[name] = Side(name, ["tools.benchmark_generate", "--worker"], first)
        facts, found = {name: side.facts for name, side in sides.items()}, {}
        for B in batch_sizes:
            request = {"batch_size": B, "prompt": prompt, "new_tokens": new}
            for side in sides.values():
                side.ask(request)  # compiles
            each = [{name: side.ask(request) for name, side in sides.items()} for _ in range(rounds)]
            times = {name: statistics.median(r[name]["seconds"] for r in each) for name in sides}
            found[B] = {
                "tokens_per_s": {name: B * new / t for name, t in times.items()},
                "token_s": statistics.median(r["minitf"]["token"] for r in each),
                "token_to_sum": ratios([(r["minitf"]["sum"], r["minitf"]["token"]) for r in each]),
            }
            if len(sides) > 1:
                found[B]["ratio"] = ratios([tuple(r[name]["seconds"] for name in SIDES) for r in each])
    finally:
        for side in sides.values():
            side.close()
    return {"facts": facts, "batch_sizes": found}


def lines(result: dict[str, Any]) -> list[str]:
    out = []
    spread = lambda r: f"{r['median']:.2f} ({r['min']:.2f} to {r['max']:.2f})"
    for B, found in result["batch_sizes"].items():
        rates = ", ".join(f"{name} {rate:.1f} tokens/s" for name, rate in found["tokens_per_s"].items())
        faster = f"; minitf is {spread(found['ratio'])} times as fast" if "ratio" in found else ""
        out.append(f"batch {B}: {rates}{faster}")
        out.append(
            f"  a token takes {1e3 * found['token_s']:.1f} ms, {spread(found['token_to_sum'])} sums over the weights"
        )
    return out


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv == ["--worker"]:
        worker()
        return 0
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmark_generate", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("--workdir", required=True, metavar="DIR", help="the run")
    add("--against", metavar="DIR", help="the same weights as a Hugging Face folder")
    add("--batch_sizes", default="1,8", metavar="N,...", help="rows (default: 1,8)")
    add("--prompt", type=int, default=16, metavar="N", help="tokens of a prompt (default: 16)")
    add("--new_tokens", type=int, default=64, metavar="N", help="tokens behind it (default: 64)")
    add("--rounds", type=int, default=5, metavar="N", help="turns (default: 5)")
    add("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    try:
        words = [word.strip() for word in args.batch_sizes.split(",")]
        ok = all(word.isdigit() and int(word) >= 1 for word in words)
        command_line.require("--batch_sizes", args.batch_sizes, ok, "whole numbers of at least 1")
        sizes = [int(word) for word in words]
        for name, least in (("prompt", 1), ("new_tokens", 2), ("rounds", 1)):
            command_line.require(f"--{name}", getattr(args, name), getattr(args, name) >= least, f"at least {least}")
        sources = {"minitf": args.workdir} | ({"transformers": args.against} if args.against else {})
        result = compare(sources, sizes, args.prompt, args.new_tokens, args.rounds)
    except ValueError as e:
        command_line.fail(str(e))
    print(json.dumps(result) if args.json else "\n".join(lines(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
