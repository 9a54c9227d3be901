"""Measures a config's real train step on its real data: alone, in turns with a second config, or its compilation by depth.

python -m tools.benchmark --config configs/tiny.py
python -m tools.benchmark --config configs/tiny.py --against configs/tutorial.py
python -m tools.benchmark --config configs/tiny.py --against.model.remat=full --rounds 9
python -m tools.benchmark --config configs/char_cpu.py --config.data.path=FILE --peer NANOGPT
python -m tools.benchmark --config configs/gpt2_124m.py:original ... --peer transformers
python -m tools.benchmark --config configs/tiny.py --depths 4,48
python -m tools.benchmark --config configs/tiny.py --saves runs/saves --steps 50

`--config.NAME=VALUE` changes a setting of both sides, `--against.NAME=VALUE` of the second alone; --json prints one object.
The sides of a comparison alternate, A B A B, each in its own long-lived process: both meet the same disturbances, but not each
other's compilations, caches and freed memory. Compare them by the ratio of each round, whose spread over rounds should be small: if
other processes use the machine, raise --rounds before --steps. Both processes must be able to share the device (CPU, GPU).
configs/tiny.py takes half a minute on two CPU cores, compared with itself a minute and a half.
Only --saves writes files, and it removes them.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from etils import epath

from minitf import command_line
from minitf import config as config_lib
from minitf.config import Config
from minitf.job import Job, Program, about, implementation, prepare, program, training_batches
from minitf.model.flops import flops_per_token
from minitf.model.transformer import model_params
from minitf.params import count_params
from minitf.runtime import memory as memory_lib
from minitf.runtime.checkpoint import CheckpointConfig, Checkpoints
from minitf.runtime.devices import listed_flops, peak_flops
from minitf.runtime.terminal import columns, human
from minitf.sharding.devices import surroundings
from minitf.training.state import TrainState
from minitf.training.step import Batch
from minitf.workdir import resolve

TRANSFORMERS = "transformers"  # value of --peer
WARM_UP = 2  # steps before the measured ones
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes in one unit of ru_maxrss


# ---- one process: compile, run, measure


@dataclasses.dataclass
class Bench:
    """A job with its compiled step, batches and state; each step donates `state` and replaces it."""

    job: Job
    step: jax.stages.Compiled
    compile_s: float  # trace, lowering and compilation of the step
    batches: Iterator[Batch]
    state: TrainState


def compile_step(functions: Program, job: Job, batch: Batch) -> tuple[jax.stages.Compiled, float]:
    """(the step that training runs, seconds to trace, lower and compile it); needs no state."""
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), batch)
    with surroundings(job.mesh, job.cfg.model.dtype):
        began = time.perf_counter()
        compiled = functions.step.lower(functions.state, batch).compile()
        return compiled, time.perf_counter() - began


def start(job: Job) -> Bench:
    functions, batches = program(job), training_batches(job)
    first = next(batches)
    step, seconds = compile_step(functions, job, first)
    with surroundings(job.mesh, job.cfg.model.dtype):
        state = functions.init(jax.random.key(job.cfg.seed))
    return Bench(job, step, seconds, itertools.chain([first], batches), state)


def begun(cfg: Config) -> Bench:
    """A job set up as in `minitf.train`."""
    if cfg.keep_memory:
        memory_lib.keep_freed()
    return start(prepare(cfg))


def facts(bench: Bench) -> dict[str, Any]:
    """Figures that are the same in every step: sizes, FLOPs, peak rate and the compiler's memory analysis."""
    cfg, mesh, specs = bench.job.cfg, bench.job.mesh, bench.job.specs
    devices = list(mesh.devices.flat)
    memory = bench.step.memory_analysis()
    return {
        "device": devices[0].device_kind,
        "devices": len(devices),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "attention": implementation(cfg, mesh),
        "parameters": count_params(specs)["total"],
        "vocab_size": cfg.model.vocab_size,
        "tokens_per_step": cfg.batch_size * cfg.seq_len,
        "flops_per_token": flops_per_token(cfg.model, specs, cfg.seq_len),
        "flops_per_token_causal": flops_per_token(cfg.model, specs, cfg.seq_len, causal=True),
        "peak_flops": peak_flops(devices, cfg.model.dtype),
        "peak_source": f"measured, {cfg.model.dtype}"
        if listed_flops(devices, cfg.model.dtype) is None
        else "data sheet, bfloat16",
        "compile_s": bench.compile_s,
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
    }


def measured(step: Callable[[], None], steps: int) -> dict[str, Any]:
    """Wall time of each step; the process's CPU time (all threads) and minor page faults; its peak memory so far."""
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    cpu = time.process_time()
    times, last = [], time.perf_counter()
    for _ in range(steps):
        step()
        now = time.perf_counter()
        times.append(now - last)
        last = now
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "times": times,
        "cpu_s": time.process_time() - cpu,
        "minor_faults": usage.ru_minflt - faults,
        "peak_rss_bytes": usage.ru_maxrss * RSS_UNIT,
    }


def run(bench: Bench, steps: int) -> dict[str, Any]:
    """`measured` of the job's next steps, with the number of skipped steps so far and of targets with loss."""
    batch, targets = next(bench.batches), 0

    def step() -> None:
        nonlocal batch, targets
        bench.state, metrics = bench.step(bench.state, batch)
        batch = next(bench.batches)  # while the step runs, as in the training loop
        # Blocks now, not one step later: a CPU may run a step inside its dispatch, which would shift times between steps.
        targets += int(jax.block_until_ready(metrics)["tokens"])

    return measured(step, steps) | {"skipped_steps": int(bench.state.skipped), "targets": targets}


def summary(facts: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any]:
    times = [t for r in runs for t in r["times"]]
    median, best, tokens = statistics.median(times), min(times), facts["tokens_per_step"]
    return facts | {
        "steps": len(times),
        "step_time_s": median,
        "step_time_s_best": best,
        "cpu_time_per_step_s": sum(r["cpu_s"] for r in runs) / len(times),
        "tokens_per_s": tokens / median,
        "tokens_per_s_best": tokens / best,
        "mfu": facts["flops_per_token"] * tokens / median / facts["peak_flops"],
        "mfu_causal": facts["flops_per_token_causal"] * tokens / median / facts["peak_flops"],
        "minor_faults_per_step": sum(r["minor_faults"] for r in runs) / len(times),
        "peak_rss_bytes": max(r["peak_rss_bytes"] for r in runs),
        "skipped_steps": runs[-1]["skipped_steps"],
        "targets_share": sum(r["targets"] for r in runs) / (tokens * len(times)),
    }


# ---- two alternating processes


def worker() -> None:
    """Serves a config: answers it with its facts, then each number N with the measurements of N steps."""

    def begin(config: dict[str, Any]) -> tuple[dict[str, Any], Callable[[int], dict[str, Any]]]:
        bench = begun(config_lib.freeze(config))
        return facts(bench), functools.partial(run, bench)

    serve(begin)


def serve(begin: Callable[[Any], tuple[Any, Callable[[Any], Any]]]) -> None:
    """Main loop of the process behind a `Side`. `begin(first request)` returns (first answer, function that answers later requests).
    Requests are lines of JSON on stdin, answers lines of JSON on the original stdout; all other output goes to stderr. A ValueError
    becomes the answer {"error": message}."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    try:
        known, more = begin(json.loads(sys.stdin.readline()))
        answer(known)
        for line in sys.stdin:
            answer(more(json.loads(line)))
    except ValueError as e:
        answer({"error": str(e)})


class Side:
    """A measuring process, controlled from the process that compares several; the other end is `serve`."""

    def __init__(self, name: str, arguments: list[str], first: Any):
        self._name = name
        # The processes share a GPU's memory; by default the first would preallocate most of it.
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self.facts = self.ask(first)

    def ask(self, value: Any) -> dict[str, Any]:
        print(json.dumps(value), file=self._process.stdin, flush=True)
        text = self._process.stdout.readline()
        if not text:
            raise RuntimeError(f"the process of {self._name} ended with status {self._process.wait()}")
        answer = json.loads(text)
        if "error" in answer:
            raise ValueError(f"{self._name}: {answer['error']}")
        return answer

    def kill(self) -> None:
        """Kills the process; a pending `ask` raises RuntimeError."""
        self._process.kill()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def ratios(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Ratio of second to first in each round, with median, minimum and maximum."""
    each = [b / a for a, b in pairs]
    return {"median": statistics.median(each), "min": min(each), "max": max(each), "rounds": each}


Start = Callable[[str, dict[str, Any]], Side]  # (name, the first side's facts; {} for the first)


def ours(cfg: Config) -> Start:
    return lambda name, _: Side(name, ["tools.benchmark", "--worker"], dataclasses.asdict(cfg))


def peer(where: str, cfg: Config) -> Start:
    """Another trainer's step of the same shape; sizes, FLOPs and peak rate are taken from the first side."""

    def start(name: str, first: dict[str, Any]) -> Side:
        request = {"peer": where, "config": dataclasses.asdict(cfg), "vocab_size": first["vocab_size"]}
        side = Side(name, ["tools.peers"], request)
        shared = "tokens_per_step flops_per_token flops_per_token_causal peak_flops peak_source cores".split()
        side.facts |= {key: first[key] for key in shared}
        return side

    return start


def compare(starts: dict[str, Start], steps: int, rounds: int) -> dict[str, Any]:
    """Both sides' summaries, and the ratios B/A of their step times and CPU times."""
    sides: dict[str, Side] = {}
    try:
        for name, start_side in starts.items():
            sides[name] = start_side(name, next((side.facts for side in sides.values()), {}))
            sides[name].ask(WARM_UP)
        runs = [{name: side.ask(steps) for name, side in sides.items()} for _ in range(rounds)]
    finally:
        for side in sides.values():
            side.close()
    a, b = (summary(side.facts, [r[name] for r in runs]) for name, side in sides.items())
    wall = [tuple(statistics.median(r["times"]) for r in round.values()) for round in runs]
    cpu = [tuple(r["cpu_s"] for r in round.values()) for round in runs]
    return {"a": a, "b": b, "ratio": ratios(wall), "cpu_ratio": ratios(cpu)}


# ---- compile time by depth


def with_layers(job: Job, layers: int) -> Job:
    model = dataclasses.replace(job.cfg.model, num_layers=layers)
    cfg = dataclasses.replace(job.cfg, model=model)
    config_lib.validate(cfg)
    return job._replace(cfg=cfg, specs=model_params(model))


def compile_times(job: Job, depths: list[int], rounds: int) -> dict[str, Any]:
    """Seconds from trace to executable at each number of layers, alternating, and the ratio of the last to the first."""
    jobs = {n: with_layers(job, n) for n in depths}
    batch = next(training_batches(job))

    def compiled_in(job: Job) -> float:
        return compile_step(program(job), job, batch)[1]

    compiled_in(jobs[depths[0]])  # warm-up: the first compilation of a process takes longer
    wall: dict[int, list[float]] = {n: [] for n in depths}
    cpu: dict[int, list[float]] = {n: [] for n in depths}
    for _ in range(rounds):
        for n, each in jobs.items():
            jax.clear_caches()
            began = time.process_time()
            wall[n].append(compiled_in(each))
            cpu[n].append(time.process_time() - began)
    first, last = depths[0], depths[-1]
    return {
        "compile_s": {str(n): statistics.median(s) for n, s in wall.items()},
        "ratio": ratios(list(zip(wall[first], wall[last], strict=True))),
        "cpu_ratio": ratios(list(zip(cpu[first], cpu[last], strict=True))),
    }


# ---- saving


def plain_copy(state: TrainState, file: epath.Path) -> float:
    """Seconds to write and fsync the bytes of the state as one file: the disk's limit."""
    arrays = [np.asarray(a) for a in jax.tree.leaves(state)]
    began = time.perf_counter()
    with open(file, "wb") as f:
        for a in arrays:
            f.write(a.tobytes())
        f.flush()
        os.fsync(f.fileno())
    took = time.perf_counter() - began
    file.unlink()
    return took


def saving(bench: Bench, directory: epath.Path, steps: int, rounds: int) -> dict[str, Any]:
    """How long a save blocks the loop, with `steps` steps between saves; the slowdown of steps while it is written in the background;
    and the write rate without concurrent steps, next to that of a plain copy. The first round is a warm-up."""
    directory.mkdir(parents=True)
    job = bench.job
    rows: dict[str, list[float]] = {name: [] for name in ("alone", "blocked", "behind", "written", "copied")}
    number = itertools.count(1)
    try:
        with (
            surroundings(job.mesh, job.cfg.model.dtype),
            Checkpoints(directory / "checkpoints", CheckpointConfig(keep=1)) as checkpoints,
        ):
            for _ in range(rounds + 1):
                alone = statistics.median(run(bench, steps)["times"])
                began = time.perf_counter()
                checkpoints.save(next(number), bench.state, about(job, int(bench.state.step), [], 0))
                blocked = time.perf_counter() - began
                behind = statistics.median(run(bench, steps)["times"])
                checkpoints.wait()
                began = time.perf_counter()
                checkpoints.save(next(number), bench.state, about(job, int(bench.state.step), [], 0))
                checkpoints.wait()
                written = time.perf_counter() - began
                copied = plain_copy(bench.state, directory / "copy")
                for name, value in zip(rows, (alone, blocked, behind, written, copied), strict=True):
                    rows[name].append(value)
    finally:
        directory.rmtree()
    first = rows["blocked"][0]
    alone, blocked, behind, written, copied = (statistics.median(values[1:]) for values in rows.values())
    size = sum(a.nbytes for a in jax.tree.leaves(bench.state))
    return {
        "bytes": size,
        "steps_between": steps,
        "step_time_s": alone,
        "blocked_s_first": first,
        "blocked_s": blocked,
        "blocked_share": blocked / (blocked + steps * alone),
        "step_time_ratio_while_writing": behind / alone,
        "bytes_per_s": size / written,
        "bytes_per_s_plain_copy": size / copied,
    }


# ---- output

SAVING_ROWS = {
    "state": lambda s: f"{human(s['bytes'])}B",
    "loop held up by a save": lambda s: f"{s['blocked_s'] * 1e3:.3g} ms (first: {s['blocked_s_first'] * 1e3:.3g} ms)",
    "share of the loop": lambda s: (
        f"{s['blocked_share']:.2%}, a save every {s['steps_between']} steps of {s['step_time_s']:.3g} s"
    ),
    "step time while writing": lambda s: f"{s['step_time_ratio_while_writing']:.3f} of that alone",
    "write rate": lambda s: f"{human(s['bytes_per_s'])}B/s, a plain copy {human(s['bytes_per_s_plain_copy'])}B/s",
}

ROWS = {
    "parameters": lambda s: f"{s['parameters']:,}",
    "tokens per step": lambda s: f"{s['tokens_per_step']:,}",
    "attention": lambda s: s["attention"],
    "compile time": lambda s: f"{s['compile_s']:.2f} s",
    "steps measured": lambda s: f"{s['steps']}",
    "step time, median": lambda s: f"{s['step_time_s'] * 1e3:.4g} ms",
    "step time, best": lambda s: f"{s['step_time_s_best'] * 1e3:.4g} ms",
    "CPU time per step": lambda s: f"{s['cpu_time_per_step_s'] * 1e3:.4g} ms in all threads",
    "tokens/s, median": lambda s: f"{s['tokens_per_s']:,.0f}",
    "tokens/s, best": lambda s: f"{s['tokens_per_s_best']:,.0f}",
    "peak FLOP/s": lambda s: f"{human(s['peak_flops'])} ({s['peak_source']})",
    "MFU, full square": lambda s: f"{s['mfu']:.1%}",
    "MFU, causal": lambda s: f"{s['mfu_causal']:.1%}",
    "step's buffers": lambda s: f"{human(s['temp_bytes'])}B temporary + {human(s['argument_bytes'])}B arguments",
    "process, peak size": lambda s: f"{human(s['peak_rss_bytes'])}B",
    "page faults per step": lambda s: f"{s['minor_faults_per_step']:,.0f} minor",
}


def table(sides: dict[str, dict[str, Any]], rows: dict[str, Any] = ROWS) -> str:
    def cell(show: Callable[[dict[str, Any]], str], s: dict[str, Any]) -> str:
        try:
            return show(s)
        except KeyError:  # a peer has no such figure
            return "-"

    lines = [("", *sides)] + [(label, *(cell(show, s) for s in sides.values())) for label, show in rows.items()]
    text = columns(lines, left=len(lines[0]))
    for name, s in sides.items():
        if s.get("skipped_steps"):
            text.append(f"warning: {name}: {s['skipped_steps']} steps were not finite, and skipped their update")
        if s.get("targets_share", 1) < 1:
            share = f"{s['targets_share']:.1%}"
            text.append(f"{name}: tokens/s are positions, of which {share} are targets that count (padding, masks)")
    return "\n".join(text)


def spread(ratio: dict[str, Any]) -> str:
    return f"{ratio['median']:.3f} (median of {len(ratio['rounds'])} rounds, {ratio['min']:.3f} to {ratio['max']:.3f})"


# ---- the command line


def whole(text: str) -> int:
    n = int(text)
    if n < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return n


def depths(text: str) -> list[int]:
    numbers = [whole(n) for n in text.split(",")]
    if len(set(numbers)) != len(numbers) or len(numbers) < 2:
        raise argparse.ArgumentTypeError(f"{text}: must be two or more different numbers of layers, as in 4,48")
    return numbers


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmark",
        description="Measures a config's real train step on its real data.",
        epilog="--config.NAME=VALUE changes a setting of both sides, --against.NAME=VALUE of the second alone.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="a Python file with get_config()")
    parser.add_argument(
        "--against", metavar="FILE", help="a second one, in turns (default where --against.NAME is given: the first)"
    )
    parser.add_argument(
        "--peer",
        metavar="DIR",
        help="a checkout of nanoGPT, or transformers: its step of the same shape, in turns (extra parity)",
    )
    parser.add_argument(
        "--depths", type=depths, metavar="N,N", help="compile at these numbers of layers, and run nothing"
    )
    parser.add_argument(
        "--saves",
        metavar="DIR",
        help="measure saving, --rounds times with --steps steps between, in a new directory DIR",
    )
    parser.add_argument("--steps", type=whole, default=10, metavar="N", help="steps of a side in a round (default: 10)")
    parser.add_argument("--rounds", type=whole, default=5, metavar="N", help="of --against and --depths (default: 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, Config]]:
    """(arguments, configs of one or two sides by their name in the table)."""
    own = [word for word in argv if word.startswith("--against.")]
    for word in own:
        if "=" not in word:
            raise ValueError(f"{word}: write --against.NAME=VALUE")
    shared = [word for word in argv if word not in own]
    args, cfg = command_line.parse_args(shared, make_parser())
    if args.against is None and not own:
        return args, {args.config: cfg}
    file = args.against or args.config
    overrides = [word.replace("--against.", "--config.", 1) for word in own]
    try:
        _, other = command_line.parse_args([*shared, *overrides, f"--config={file}"], make_parser())
    except ValueError as e:
        raise ValueError(f"second side ({file}): {e}") from None
    changes = " ".join(word.removeprefix("--against.") for word in own)
    return args, {f"A: {args.config}": cfg, f"B: {file} {changes}".rstrip(): other}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    jax.config.update("jax_enable_compilation_cache", False)  # a cached compilation would take no time
    if argv == ["--worker"]:
        worker()
        return 0
    try:
        args, configs = parse(argv)
        kinds = {"against": len(configs) > 1, "peer": args.peer, "depths": args.depths, "saves": args.saves}
        chosen = [name for name, asked in kinds.items() if asked]
        if len(chosen) > 1:
            raise ValueError(f"--{chosen[1]}: leave out --{chosen[0]}; each is a measurement of its own")
        starts = {name: ours(cfg) for name, cfg in configs.items()}
        if args.peer:
            ((_, cfg),) = configs.items()
            starts[f"B: {TRANSFORMERS if args.peer == TRANSFORMERS else 'nanoGPT'}"] = peer(args.peer, cfg)
        if len(starts) == 2:
            result = compare(starts, args.steps, args.rounds)
            text = f"{table(dict(zip(starts, (result['a'], result['b']), strict=True)))}\n\n"
            text += f"step time B/A: {spread(result['ratio'])}\nCPU time B/A:  {spread(result['cpu_ratio'])}"
        elif args.depths:
            (cfg,) = configs.values()
            result = compile_times(prepare(cfg), args.depths, args.rounds)
            first, last = args.depths[0], args.depths[-1]
            text = "\n".join(f"{n:>6} layers: compiled in {s:.2f} s" for n, s in result["compile_s"].items())
            text += f"\nwall time {last}/{first} layers: {spread(result['ratio'])}"
            text += f"\nCPU time {last}/{first} layers:  {spread(result['cpu_ratio'])}"
        elif args.saves:
            ((name, cfg),) = configs.items()
            directory = resolve(args.saves, "--saves")
            if directory.exists():
                raise ValueError(f"--saves {directory}: exists already")
            result = saving(begun(cfg), directory, args.steps, args.rounds)
            text = table({name: result}, SAVING_ROWS)
        else:
            ((name, cfg),) = configs.items()
            bench = begun(cfg)
            fixed = facts(bench)
            run(bench, WARM_UP)
            result = summary(fixed, [run(bench, args.steps)])
            text = table({name: result})
        print(json.dumps(result) if args.json else text)
    except ValueError as e:
        command_line.fail(str(e))
    except RuntimeError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
