"""Draws configs from the settings' declarations, valid and invalid values alike, and builds each as far as a run is before its data.

python -m tools.fuzz_config --count 10000 --seed 0

A config must have one of two outcomes: its mesh, parameters, optimizer and abstract state are built, or one message names a setting.
Prints the number of each outcome, the slowest time, and each config that ended otherwise or took over 2 s; then the status is 1.
"""

import argparse
import collections
import dataclasses
import math
import random
import sys
import time
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

from tqdm import tqdm

from minitf import checks, command_line, config, job, settings
from minitf.config import Config
from minitf.params import named
from minitf.settings import Field

LONGEST = 2.0  # seconds that a config may take

# A small valid config, so that only the drawn values can break it.
BASE = config.freeze(
    {
        "steps": 3,
        "seq_len": 16,
        "model": {"num_layers": 2, "dim": 16, "vocab_size": 64, "attention": {"num_heads": 4}, "mlp": {"hidden": 32}},
        "data": {"kind": "synthetic"},
    }
)


def bounds(field: Field) -> tuple[list[Any], list[Any]]:
    """(numbers within the declared limits, the limits included; numbers outside)."""
    s = checks.with_type_limits(field.setting, field.kind)
    whole = int in (typing.get_args(field.kind) or (field.kind,))
    if whole:
        step = s.multiple_of or 1
        low = s.at_least if s.at_least is not None else 0
        high = s.at_most // step * step
        inside = [low, low + step, min(low + 7 * step, high), high]
        outside = [low - 1, s.at_most + 1, 2**63, -(2**63)] + ([low + 1] if step > 1 else [])
        return inside, [x for x in outside if x not in s.also]
    low, high = s.at_least if s.at_least is not None else s.above, s.at_most if s.at_most is not None else s.below
    tiny, huge = 1.2e-38, 3.4e38  # the ends of float32's normal numbers
    above = low if s.at_least is not None else max(tiny, low * (1 + 1e-6))
    below = huge if high is None else high if s.at_most is not None else high * (1 - 1e-6)
    inside = [above, below, above + (min(below, above + 1.0) - above) / 3]
    outside = [-1.0, math.inf, -math.inf, math.nan, 1e39, *([] if high is None else [high * 1.01 + 1e-6])]
    outside += [1e-50] if low == 0 else [low * 0.99]
    outside += [low] if s.at_least is None else []
    outside += [high] if s.below is not None else []
    return inside, outside


def values(field: Field) -> tuple[list[Any], list[Any]]:
    """(values that the declaration allows, invalid values of the right type)."""
    s, kind = field.setting, field.kind
    allowed: list[Any] = [None] if field.optional else []
    allowed += list(s.also)
    if kind is bool:
        return [False, True], []
    if s.one_of is not None:
        names = list(s.one_of())
        if typing.get_origin(kind) is tuple:
            return allowed + [(n,) for n in names] + [tuple(names) * 2], [(), ("nosuch",), (*names, "nosuch")]
        return allowed + names, ["nosuch"]
    if kind in (int, float):
        inside, outside = bounds(field)
        return allowed + inside, outside
    if kind == tuple[int, int]:
        inside, outside = bounds(field)
        return allowed + [(inside[0], inside[1])], [(inside[0], x) for x in outside] + [(x, inside[0]) for x in outside]
    if kind == tuple[tuple[str, float], ...]:
        return allowed + [(("a", 1.0),), (("a", 1.0), ("b", 3.0))], [(), (("a", 0.0),), (("a", 1.0), ("a", 1.0))]
    if kind == tuple[str, ...]:
        texts = [("xla_a=1",)] if s.check is not None else [("a",), ("a", "b")]
        return allowed + texts + ([] if s.nonempty else [()]), [()] if s.nonempty else [("a",), ("xla_a=1", "xla_a=2")]
    assert kind is str, (field.name, kind)
    texts = {
        "max_run_time": (["1h", "90m"], ["x", "0s", "99999d"]),
        "data.tokenizer": (["bytes", "chars"], ["nosuch", "no/such.json"]),
    }
    good, bad = texts.get(field.name, (["some"], []))
    assert s.check is None or bad, f"{field.name}: has a check, and no value here that it refuses"
    return allowed + good, bad


class Drawn(NamedTuple):
    changes: dict[str, Any]  # dotted name -> value
    cfg: Config


def replace(cfg: Any, name: str, value: Any) -> Any:
    """The config with one setting, given by its dotted name, replaced."""
    head, _, rest = name.partition(".")
    return dataclasses.replace(cfg, **{head: replace(getattr(cfg, head), rest, value) if rest else value})


def draw(rng: random.Random) -> Drawn:
    """BASE with random values of some settings from one or two sections; most values are valid."""
    by_section: dict[str, list[Field]] = collections.defaultdict(list)
    for field in settings.fields(Config):
        by_section[field.name.rpartition(".")[0]].append(field)
    pool = [f for section in rng.sample(list(by_section), rng.randint(1, 2)) for f in by_section[section]]
    changes, cfg = {}, BASE
    for field in rng.sample(pool, min(len(pool), rng.randint(1, 5))):
        allowed, others = values(field)
        changes[field.name] = rng.choice(others if others and rng.random() < 0.15 else allowed)
        cfg = replace(cfg, field.name, changes[field.name])
    return Drawn(changes, cfg)


class Outcome(NamedTuple):
    kind: str  # "built", "refused", or what is wrong
    text: str
    seconds: float


def outcome(cfg: Config) -> Outcome:
    """Validates and builds a config, and classifies the result."""
    begun = time.perf_counter()
    taken = lambda: time.perf_counter() - begun
    try:
        config.validate(cfg)
        steps = config.total_steps(cfg, rows=1_000_000)
        config.check_length(cfg, steps)
        state = job.program(job.design(cfg, steps, cfg.model.vocab_size or 256)).state
        assert all(all(size >= 0 for size in leaf.shape) for _, leaf in named(state.params))
    except ValueError as e:
        naming = [f.name for f in settings.fields(Config) if f.name in str(e)]
        return Outcome("refused" if naming else "a message without a setting", str(e), taken())
    except Exception as e:
        return Outcome("a traceback", f"{type(e).__name__}: {e}", taken())
    return Outcome("built", "", taken())


def outcomes(count: int, seed: int) -> Iterator[tuple[Drawn, Outcome]]:
    rng = random.Random(seed)
    for _ in range(count):
        drawn = draw(rng)
        yield drawn, outcome(drawn.cfg)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz_config", description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=300, metavar="N", help="configs (default: 300)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another draws others (default: 0)")
    args = parser.parse_args(argv)
    if args.count < 1:
        command_line.fail(f"--count={args.count}: must be at least 1")
    found: collections.Counter[str] = collections.Counter()
    slowest, bad = 0.0, 0
    for drawn, result in tqdm(outcomes(args.count, args.seed), total=args.count, unit="configs", disable=None):
        kind = "slow" if result.kind in ("built", "refused") and result.seconds > LONGEST else result.kind
        found[kind] += 1
        slowest = max(slowest, result.seconds)
        if kind not in ("built", "refused"):
            bad += 1
            print(f"{kind}: {drawn.changes}: {result.seconds:.2f} s: {result.text}", flush=True)
    print(
        f"{args.count} configs: {', '.join(f'{n} {kind}' for kind, n in found.most_common())}; the slowest {slowest:.2f} s"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
