"""All settings: the *Config dataclasses, declared beside their use, are the only declaration; here they become a ConfigDict
that a config file and the command line change, and come back checked."""

import argparse
import dataclasses
import json
import math
import os
import re
import runpy
import sys
import traceback
import types
import typing
from typing import Any, NamedTuple, NoReturn

import ml_collections
from ml_collections import config_dict

from minitf.checkpoint import CheckpointConfig
from minitf.data.datasets import DATASETS, DataConfig
from minitf.data.mixture import shares
from minitf.data.pipeline import PACKINGS
from minitf.data.tokenizer import check_name
from minitf.distributed import LONGEST, DistributedConfig, WatchdogConfig
from minitf.model.attention import ATTENTION, sizes
from minitf.model.kernels import AUTO, IMPLEMENTATIONS, LANES
from minitf.model.loss import LossConfig
from minitf.model.mlp import MLP
from minitf.model.transformer import NORMS, POSITIONS, REMAT, ModelConfig, pattern
from minitf.optimizer import OPTIMIZERS, SCHEDULES, OptimizerConfig
from minitf.params import SCHEMES
from minitf.paths import given
from minitf.sampling import SampleConfig
from minitf.sharding import COLLECTIVES, MeshConfig, mesh_settings
from minitf.tables import check_unread, did_you_mean, pick


@dataclasses.dataclass(frozen=True)
class CompilerOptions:
    """Options of XLA, each NAME=VALUE, for the programs of training and evaluation on a platform."""

    cpu: tuple[str, ...] = ()
    gpu: tuple[str, ...] = ()
    tpu: tuple[str, ...] = ()

    def of(self, platform: str) -> dict[str, str]:
        """By name, for `jax.jit`. Raises ValueError naming the setting for what is not of the form, and for a name given twice."""
        found: dict[str, str] = {}
        for word in getattr(self, platform):
            name, equals, value = word.partition("=")
            setting = f"compiler_options.{platform}: {word!r}"
            if not re.fullmatch(r"xla_\w+", name) or not equals or not value:
                raise ValueError(f"{setting}: must be NAME=VALUE, as in xla_tpu_scoped_vmem_limit_kib=98304")
            if name in found:
                raise ValueError(f"{setting}: is there twice")
            # XLA knows truth by these words alone.
            found[name] = {"true": "True", "false": "False"}.get(value.lower(), value)
        return found


@dataclasses.dataclass(frozen=True)
class Config:
    steps: int | None = None  # optimizer steps; exactly one of steps, tokens, epochs sets the length
    tokens: int | None = None  # of training: batch_size x seq_len a step
    epochs: float | None = None  # times that the training rows are seen
    batch_size: int = 8  # sequences in the global batch, whatever the mesh and the accumulation
    seq_len: int = 256  # positions in a sequence
    seed: int = 0  # of initial values, dropout and the order of data: 0 to 2^32 - 1
    accumulation: int = 1  # parts in which a batch is computed one after the other
    log_every: int = 10  # steps
    eval_every: int | None = 100  # steps; also after the last; None: never
    eval_batches: int | None = 20  # batches of an evaluation, spread over the validation split; None: all of it
    sample_every: int | None = None  # steps; also after the last; None: never: see sample
    init_from: str | None = None  # work directory whose parameters a new run starts from; optimizer and step start anew
    max_run_time: str | None = (
        None  # of this process, as in 11h30m: then it saves and ends with status 3; None: no limit
    )
    profile: tuple[int, int] | None = (
        None  # (first step, steps) that process 0 traces for TensorBoard and tools.profile_summary; None: none
    )
    keep_memory: bool = False  # what a step frees stays with the process, which grows: see memory.py
    compilation_cache: str | None = None  # directory of compiled programs; None: beside the work directory; none: off
    compiler_options: CompilerOptions = CompilerOptions()
    mesh: MeshConfig = MeshConfig()
    model: ModelConfig = ModelConfig()
    loss: LossConfig = LossConfig()
    data: DataConfig = DataConfig()
    sample: SampleConfig = SampleConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    distributed: DistributedConfig = DistributedConfig()


# ---- dataclasses <-> ConfigDict


def optional(annotation: Any) -> tuple[Any, bool]:
    """(int, True) for `int | None`, (int, False) for `int`."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        (inner,) = (a for a in typing.get_args(annotation) if a is not type(None))
        return inner, True
    return annotation, False


def hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def to_dict(cls: type) -> ml_collections.ConfigDict:
    out = ml_collections.ConfigDict()
    for field in dataclasses.fields(cls):
        kind, _ = optional(hints(cls)[field.name])
        if dataclasses.is_dataclass(kind):
            out[field.name] = to_dict(kind)
        elif field.default is None:
            out[field.name] = config_dict.placeholder(typing.get_origin(kind) or kind)
        else:
            out[field.name] = field.default
    return out


def default() -> ml_collections.ConfigDict:
    """Every setting at its default, locked: the start of each config file."""
    return to_dict(Config).lock()


def checked(name: str, value: Any, annotation: Any) -> Any:
    """The value in its field's type. Raises ValueError naming the setting."""
    kind, can_be_none = optional(annotation)
    if value is None and can_be_none:
        return None
    if kind is str and value == "":  # as a path it would be the current directory
        raise ValueError(f"{name}='': is empty, must be {type_name(annotation)}")
    if typing.get_origin(kind) is tuple:
        items = typing.get_args(kind)
        if isinstance(value, (tuple, list)) and (items[-1] is ... or len(items) == len(value)):
            items = [items[0]] * len(value) if items[-1] is ... else items
            return tuple(checked(name, v, item) for v, item in zip(value, items, strict=True))
    elif kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif type(value) is kind:
        return value
    raise ValueError(f"{name}={value!r}: is {type(value).__name__}, must be {type_name(annotation)}")


def type_name(annotation: Any) -> str:
    kind, can_be_none = optional(annotation)
    name = str(kind) if typing.get_origin(kind) else kind.__name__
    return f"{name} or None" if can_be_none else name


def freeze(tree: Any, cls: type = Config, prefix: str = "") -> Any:
    """A ConfigDict (or the dict of a config.json) as dataclasses. Raises ValueError for unknown names and wrong types."""
    fields = hints(cls)
    values = {}
    for name, value in tree.items():
        full = prefix + name
        if name not in fields:
            raise ValueError(f"{full}: no such setting{did_you_mean(name, fields)}")
        kind, _ = optional(fields[name])
        if not dataclasses.is_dataclass(kind):
            values[name] = checked(full, value, fields[name])
        elif isinstance(value, (dict, ml_collections.ConfigDict)):
            values[name] = freeze(value, kind, full + ".")
        else:
            raise ValueError(f"{full}={value!r}: is a section; set its settings: {', '.join(hints(kind))}")
    return cls(**values)


def flat(cfg: Any, prefix: str = "") -> dict[str, Any]:
    """Every setting by its dotted name."""
    values = {}
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        nested = dataclasses.is_dataclass(value)
        values |= flat(value, f"{prefix}{field.name}.") if nested else {prefix + field.name: value}
    return values


def to_json(cfg: Config) -> str:
    return json.dumps(dataclasses.asdict(cfg), indent=2) + "\n"


def missing(tree: dict, cls: type = Config, prefix: str = "") -> list[str]:
    """Settings that a stored config does not name: newer than it, and so at their defaults."""
    out = []
    for name, annotation in hints(cls).items():
        kind, _ = optional(annotation)
        if name not in tree:
            out.append(prefix + name)
        elif dataclasses.is_dataclass(kind):
            out += missing(tree[name], kind, f"{prefix}{name}.")
    return out


# ---- the command line


def parse_value(name: str, text: str, annotation: Any) -> Any:
    """Text from the command line in the setting's type. Raises ValueError naming the setting, its value and its type."""
    kind, can_be_none = optional(annotation)
    if can_be_none and text == "None":
        return None
    try:
        if typing.get_origin(kind) is tuple:
            item, *rest = typing.get_args(kind)
            if rest == [...]:
                words = [t.strip() for t in text.strip("()[] ").split(",")]
                return tuple(parse_value(name, t.strip("'\""), item) for t in words if t)
            # A pair: PATH:WEIGHT in a list of such, START,STEPS alone.
            first, separator, last = text.rpartition(":")
            if not separator:
                first, separator, last = text.strip("()[] ").rpartition(",")
            if not separator:
                raise ValueError
            return parse_value(name, first, item), parse_value(name, last, *rest)
        if kind is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        return kind(text)
    except (ValueError, KeyError):
        hint = "; integers are written in full, without exponent or point" if kind is int else ""
        raise ValueError(f"--config.{name}={text}: must be {type_name(annotation)}{hint}") from None


def find(name: str) -> Any:
    """The annotation of a setting by its dotted name. Raises ValueError naming the nearest known name."""
    cls, done = Config, []
    parts = name.split(".")
    for i, part in enumerate(parts):
        fields = hints(cls)
        if part not in fields:
            where = ".".join(done) or "the config"
            raise ValueError(
                f"--config.{name}: no setting {part!r} in {where}{did_you_mean(part, fields)}; --print_config shows all settings "
                "and their values, README.md (Settings) says where each is described"
            )
        done.append(part)
        kind, _ = optional(fields[part])
        if dataclasses.is_dataclass(kind):
            if i == len(parts) - 1:
                raise ValueError(
                    f"--config.{name}: is a section; set its settings: {', '.join(f'{name}.{f}' for f in hints(kind))}"
                )
            cls = kind
        elif i < len(parts) - 1:
            raise ValueError(f"--config.{name}: {'.'.join(done)} is a setting, not a section")
    return fields[parts[-1]]


def split_overrides(argv: list[str]) -> tuple[list[str], dict[str, Any]]:
    """(the other arguments, values by dotted name) of `--config.NAME=VALUE`, `--config.NAME VALUE`, and for booleans
    `--config.NAME`, `--noconfig.NAME`; they may stand anywhere."""
    others, overrides = [], {}
    words = iter(argv)
    for word in words:
        head, has_value, text = word.partition("=")
        head = "--" + head.lstrip("-") if head.startswith("-") else head
        if head.startswith("--noconfig."):
            name = head.removeprefix("--noconfig.")
            if optional(find(name))[0] is not bool or has_value:
                raise ValueError(f"{word}: only a setting that is true or false can be written so")
            overrides[name] = False
        elif head.startswith("--config."):
            name = head.removeprefix("--config.")
            annotation = find(name)
            if not has_value and optional(annotation)[0] is bool:
                text = "true"
            elif not has_value:
                text = next(words, None)
                if text is None:
                    raise ValueError(f"{word}: needs a value")
            overrides[name] = parse_value(name, text, annotation)
        elif not head.startswith("-") and head.removeprefix("config.").split(".")[0] in hints(Config) and has_value:
            raise ValueError(f"{word}: overrides begin with dashes: --config.{word.removeprefix('config.')}")
        else:
            others.append(word)
    return others, overrides


def load_file(path: str) -> ml_collections.ConfigDict:
    """What get_config() of a config file returns; `FILE:ARGUMENT` calls get_config(ARGUMENT). Raises ValueError with file and
    line for what is wrong in it."""
    given(path, "--config")
    path = os.path.expanduser(path)  # as it is written: messages name it so
    file, _, argument = path.partition(":") if not os.path.exists(path) else (path, "", "")
    if not os.path.isfile(file):
        raise ValueError(f"--config {path}: no such file")
    if file.endswith(".json"):
        raise ValueError(
            f"--config {path}: is no Python file with get_config(); where it is the config.json of a run, the run goes on by the "
            "command that began it, and minitf.evaluate and minitf.generate take its directory by --workdir"
        )
    try:
        get_config = runpy.run_path(file, run_name="minitf_config_file").get("get_config")
        if not callable(get_config):
            raise ValueError("it has no function get_config()")
        cfg = get_config(argument) if argument else get_config()
    except Exception as e:  # whatever the user's file raises is the user's to mend
        lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == file]
        if isinstance(e, SyntaxError) and e.filename == file and e.lineno:
            lines.append(e.lineno)
        raise ValueError(f"{file}{f', line {lines[-1]}' if lines else ''}: {type(e).__name__}: {said(e)}") from None
    if not isinstance(cfg, ml_collections.ConfigDict):
        raise ValueError(
            f"{file}: get_config() returned {type(cfg).__name__}, not a ConfigDict made by minitf.config.default()"
        )
    return cfg


def said(e: Exception) -> str:
    """An exception's message; of ml_collections' long ones, which quote the whole config, the first sentence and the near name."""
    while e.args and isinstance(e.args[0], Exception):  # its AttributeError wraps a KeyError
        e = e.args[0]
    text = e.msg if isinstance(e, SyntaxError) else str(e.args[0] if isinstance(e, KeyError) and e.args else e)
    near = re.search(r'Did you mean "(.+)" instead', text)
    first = re.split(r"\. Other fields present|\nDid you mean", text)[0]
    return f"{first}; did you mean {near[1]!r}?" if near else first


def parse_args(argv: list[str], parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Config]:
    """The parser's own arguments, `--config` among them, and the config after overrides, checked."""
    others, overrides = split_overrides(argv)
    args = parser.parse_args(others)
    tree = load_file(args.config)
    file = freeze(tree)
    for name, value in overrides.items():
        *section, last = name.split(".")
        node = tree
        for part in section:
            node = node[part]
        with node.unlocked():
            node[last] = value
    cfg = shortened(freeze(tree), file, overrides)
    validate(cfg)
    return args, cfg


def shortened(cfg: Config, file: Config, overrides: dict[str, Any]) -> Config:
    """The config where the command line gives the run a length that the config file's warm-up or decay does not fit into: these in
    proportion, said in a line. What the command line gives itself stays, to be refused where it does not fit."""
    lengths = [known_steps(c) for c in (file, cfg)]
    if None in lengths or lengths[0] == lengths[1] or 0 in lengths:
        return cfg
    before, now = lengths
    o, changes = cfg.optimizer, {}
    if "optimizer.warmup_steps" not in overrides and o.warmup_steps > (now if now > 1 else 0):
        changes["warmup_steps"] = min(math.ceil(o.warmup_steps * now / before), now - 1)
    left = now - changes.get("warmup_steps", o.warmup_steps)
    if o.decay_steps is not None and "optimizer.decay_steps" not in overrides and o.decay_steps > left:
        changes["decay_steps"] = min(max(o.decay_steps * now // before, 1), max(left, 1))
    if not changes:
        return cfg
    said = ", ".join(f"optimizer.{name}: {getattr(o, name)} -> {value}" for name, value in changes.items())
    print(f"for {now} steps in the place of the config file's {before}: {said}", file=sys.stderr)
    return dataclasses.replace(cfg, optimizer=dataclasses.replace(o, **changes))


def known_steps(cfg: Config) -> int | None:
    """The steps of the run, where no data are needed to know them."""
    given = [v for v in (cfg.steps, cfg.tokens, cfg.epochs) if v is not None]
    if len(given) != 1 or cfg.epochs is not None or min(cfg.batch_size, cfg.seq_len) < 1:
        return None
    return total_steps(cfg, rows=0)


def fail(message: str) -> NoReturn:
    """One clear message and the status of a user's mistake."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


# ---- checks that need no JAX


def seconds(name: str, text: str) -> float:
    """Seconds of a time such as 11h30m, 90m or 1d12h. Raises ValueError naming the setting."""
    parts = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text.strip())
    if not parts or not any(parts.groups()):
        raise ValueError(f"{name}={text}: must be a time such as 11h30m, 90m or 45s")
    return sum(int(n or 0) * unit for n, unit in zip(parts.groups(), (86400, 3600, 60, 1), strict=True))


def require(name: str, value: Any, ok: bool, constraint: str) -> None:
    if not ok:
        raise ValueError(f"{name}={value}: must be {constraint}")


class Float(NamedTuple):
    """What numbers of a dtype there are."""

    smallest: float  # normal: devices take smaller ones for 0
    largest: float
    digits: int  # binary


FLOATS = {
    "float32": Float(2.0**-126, (2 - 2.0**-23) * 2.0**127, 24),
    "bfloat16": Float(2.0**-126, (2 - 2.0**-7) * 2.0**127, 8),
    "float16": Float(2.0**-14, 65504.0, 11),
}


def require_float(
    name: str, value: float | None, *, dtype: str = "float32", zero: bool = False, below_1: bool = False
) -> None:
    """Raises ValueError for a number that the arithmetic of `dtype` would take for 0, infinity, or with `below_1` for 1. `zero`: 0
    itself is allowed. None is not looked at."""
    held = FLOATS[dtype]
    largest = 1 - 2.0**-held.digits if below_1 else held.largest
    # What lies nearer to 1 than to the largest number below it is rounded to 1.
    fits = value is not None and (value < 1 - 2.0 ** -(held.digits + 1) if below_1 else value <= largest)
    constraint = "at least 0 and below 1" if below_1 else f"a number {'of at least' if zero else 'above'} 0"
    limits = f"{'0, or ' if zero else ''}from {held.smallest:.3g} to {largest:.9g}"
    require(
        name,
        value,
        value is None or (zero and value == 0) or (held.smallest <= value and fits),
        f"{constraint}, and so in {dtype}, which it is used in: {limits}",
    )


def validate(cfg: Config) -> None:
    """Raises ValueError for the first setting that cannot work, before JAX starts."""
    lengths = {n: getattr(cfg, n) for n in ("steps", "tokens", "epochs")}
    given = {n: v for n, v in lengths.items() if v is not None}
    if len(given) != 1:
        text = ", ".join(f"{n}={v}" for n, v in lengths.items())
        raise ValueError(
            f"{text}: exactly one sets the length of the run; set the others to None (--config.steps=None)"
        )
    for n, v in given.items():
        require(n, v, 0 <= v < math.inf, "at least 0")
    if cfg.epochs is not None:
        require("epochs", cfg.epochs, cfg.epochs < 2**63, "below 9223372036854775808 (2^63)")

    m, a, o, d = cfg.model, cfg.model.attention, cfg.optimizer, cfg.data
    whole = dict(batch_size=cfg.batch_size, seq_len=cfg.seq_len, accumulation=cfg.accumulation, log_every=cfg.log_every)
    whole |= dict(eval_every=cfg.eval_every, eval_batches=cfg.eval_batches, sample_every=cfg.sample_every)
    whole |= {"sample.max_new_tokens": cfg.sample.max_new_tokens}
    whole |= {f"model.{n}": getattr(m, n) for n in ("num_layers", "dim", "vocab_size", "max_seq_len", "unroll")}
    whole |= {
        f"model.attention.{n}": getattr(a, n)
        for n in ("num_heads", "num_kv_heads", "head_dim", "window", "rope_original_len")
    }
    whole |= {"loss.chunk": cfg.loss.chunk, "loss.passes": cfg.loss.passes}
    whole |= {"model.mlp.hidden": m.mlp.hidden, "mesh.fsdp_inner": cfg.mesh.fsdp_inner}
    whole |= {f"checkpoint.{n}": getattr(cfg.checkpoint, n) for n in ("every", "keep", "keep_every", "keep_best")}
    for name, value in whole.items():  # many of them meet integers of 32 bits
        require(name, value, value is None or 1 <= value < 2**31, "at least 1 and below 2147483648 (2^31)")
    # Each is a thread, a process or a buffer, and all are there at once.
    for name, value, least, most in (
        ("threads", d.threads, 1, 1024),
        ("workers", d.workers, 0, 1024),
        ("prefetch", d.prefetch, 1, 32767),
    ):
        require(f"data.{name}", value, least <= value <= most, f"at least {least} and at most {most}")
    for name, value in {"seed": cfg.seed, "data.seed": d.seed}.items():
        # JAX folds larger seeds onto smaller ones, and Grain refuses them later.
        require(name, value, value is None or 0 <= value < 2**32, "from 0 to 4294967295 (2^32 - 1)")
    if cfg.batch_size % cfg.accumulation:
        raise ValueError(f"batch_size={cfg.batch_size}: not divisible by accumulation={cfg.accumulation}")
    if m.dim % cfg.loss.passes:
        raise ValueError(f"model.dim={m.dim}: not divisible by loss.passes={cfg.loss.passes}")

    for platform in dataclasses.asdict(cfg.compiler_options):
        cfg.compiler_options.of(platform)
    for prefix, of in {"": "devices", "dcn_": "hosts"}.items():
        for axis in mesh_settings():
            n = getattr(cfg.mesh, prefix + axis)
            constraint = f"at least 1, or -1 for the {of} that the others leave"
            require(f"mesh.{prefix}{axis}", n, n == -1 or n >= 1, constraint)
    mesh = cfg.mesh
    pick("mesh.collectives", COLLECTIVES, mesh.collectives)
    if mesh.collectives == "manual" and (mesh.tensor, mesh.dcn_tensor) != (1, 1):
        raise ValueError(
            f"mesh.collectives=manual: knows the axes data and fsdp, and not mesh.tensor={mesh.tensor}, "
            f"mesh.dcn_tensor={mesh.dcn_tensor}; set both to 1, or mesh.collectives=auto"
        )
    check_unread("mesh", mesh, COLLECTIVES, [mesh.collectives])

    pick("model.attention.kind", ATTENTION, a.kind)
    for kind in m.pattern or ():
        pick("model.pattern", ATTENTION, kind)
    if m.pattern is not None:
        require("model.pattern", m.pattern, len(m.pattern) > 0, "at least one attention kind, or None")
        if a.kind != type(a)().kind:
            raise ValueError(
                f"model.attention.kind={a.kind!r} has no effect where model.pattern={m.pattern} names every layer's kind"
            )
    pick("model.mlp.kind", MLP, m.mlp.kind)
    pick("model.norm", NORMS, m.norm)
    pick("model.positions", POSITIONS, m.positions)
    pick("model.remat", REMAT, m.remat)
    pick("model.init", SCHEMES, m.init)
    pick("optimizer.kind", OPTIMIZERS, o.kind)
    pick("optimizer.schedule", SCHEDULES, o.schedule)
    pick("data.kind", DATASETS, d.kind)
    pick("data.packing", PACKINGS, d.packing)
    check_name(d.tokenizer)
    pick("model.attention.implementation", {"auto": None, **IMPLEMENTATIONS}, a.implementation)
    pick("model.attention.bias", dict.fromkeys(("none", "qkv", "qkvo")), a.bias)
    pick("model.dtype", dict.fromkeys(("float32", "bfloat16", "float16")), m.dtype)
    pick("optimizer.moment_dtype", dict.fromkeys(("float32", "bfloat16")), o.moment_dtype)
    pick("optimizer.nonfinite", dict.fromkeys(("stop", "skip")), o.nonfinite)
    check_unread("model.attention", a, ATTENTION, pattern(m))
    check_unread("model.attention", a, POSITIONS, [m.positions])
    check_unread("model.attention", a, IMPLEMENTATIONS, AUTO if a.implementation == "auto" else [a.implementation])
    check_unread("optimizer", o, OPTIMIZERS, [o.kind])
    check_unread("optimizer", o, SCHEDULES, [o.schedule])
    check_unread("data", d, DATASETS, [d.kind])
    check_unread("data", d, PACKINGS, [d.packing])

    for name in ("block_q", "block_kv"):
        block = getattr(a, name)
        require(
            f"model.attention.{name}",
            block,
            block is None or (LANES <= block < 2**31 and block % LANES == 0),
            f"a multiple of {LANES}, below 2147483648 (2^31)",
        )
    H, G, K = sizes(a, m.dim)
    if a.head_dim is None and m.dim % H:
        raise ValueError(
            f"model.dim={m.dim}: not divisible by model.attention.num_heads={H}; else set model.attention.head_dim"
        )
    if H % G:
        raise ValueError(f"model.attention.num_heads={H}: not divisible by model.attention.num_kv_heads={G}")
    if POSITIONS[m.positions].frequencies is not None and K % 2:
        derived = " (model.dim / model.attention.num_heads)" if a.head_dim is None else ""
        raise ValueError(
            f"model.attention.head_dim={K}{derived}: model.positions={m.positions} turns pairs, so it must be even"
        )
    low, high = a.rope_low_freq_factor, a.rope_high_freq_factor
    if not FLOATS["float32"].smallest <= low < high <= FLOATS["float32"].largest:
        raise ValueError(
            f"model.attention.rope_low_freq_factor={low}, rope_high_freq_factor={high}: must be above 0 in float32, and the "
            "second the larger"
        )
    if m.max_seq_len is not None and cfg.seq_len > m.max_seq_len:
        raise ValueError(f"seq_len={cfg.seq_len}: longer than model.max_seq_len={m.max_seq_len}")
    for name, rate in {"model.dropout": m.dropout, "model.attention.dropout": a.dropout}.items():
        require_float(name, rate, zero=True, below_1=True)
        # A mask keeps a number with the probability 1 - rate.
        require(
            name,
            rate,
            not rate or rate > 2.0**-25,
            "at least 0 and below 1: 0, or above 2.98e-8, as 1 less it is 1 in float32",
        )
    for name in ("rope_base", "rope_factor", "scale", "qk_norm_eps", "softcap"):
        require_float(f"model.attention.{name}", getattr(a, name))
    for name in ("logit_softcap", "norm_eps"):
        require_float(f"model.{name}", getattr(m, name))
    require_float("model.embedding_scale", m.embedding_scale, dtype=m.dtype)
    require_float("loss.z_loss", cfg.loss.z_loss)
    for name in ("eps", "learning_rate", "clip_norm"):
        require_float(f"optimizer.{name}", getattr(o, name))
    for name in ("weight_decay", "end_learning_rate"):
        require_float(f"optimizer.{name}", getattr(o, name), zero=True)
    for name in ("b1", "b2", "momentum", "muon_momentum"):
        # Factors of the first moment, which is rounded to its dtype as they are; of Lion, that is b2.
        rounded = name in ("b1", "muon_momentum") or (name == "b2" and o.kind == "lion")
        dtype = o.moment_dtype if rounded else "float32"
        require_float(f"optimizer.{name}", getattr(o, name), dtype=dtype, zero=True, below_1=True)
    if "end_learning_rate" in SCHEDULES[o.schedule].reads:
        constraint = f"at most optimizer.learning_rate={o.learning_rate}: a rate that decays does not rise"
        require("optimizer.end_learning_rate", o.end_learning_rate, o.end_learning_rate <= o.learning_rate, constraint)
    every = cfg.checkpoint.every_minutes
    require("checkpoint.every_minutes", every, every is None or 0 < every < math.inf, "a number above 0")
    for name, value in dataclasses.asdict(cfg.distributed).items():  # JAX counts both in whole seconds
        require(f"distributed.{name}", value, 1 <= value <= LONGEST, f"at least 1 second and at most {LONGEST:g}")
    times = {"watchdog.factor": cfg.watchdog.factor, "watchdog.at_least": cfg.watchdog.at_least}
    for name, value in {**times, "data.timeout": d.timeout}.items():
        require(name, value, value is None or 0 < value <= LONGEST, f"a number above 0 and at most {LONGEST:g}")
    require(
        "optimizer.warmup_steps", o.warmup_steps, 0 <= o.warmup_steps < 2**31, "at least 0 and below 2147483648 (2^31)"
    )
    if d.mixture is not None:
        require("data.mixture", d.mixture, len(d.mixture) > 0, "at least one (path, weight), or None")
        for _, weight in d.mixture:
            require("data.mixture", d.mixture, 0 < weight < math.inf, "of weights above 0")
        shares(tuple(weight for _, weight in d.mixture))
        if cfg.epochs is not None:
            raise ValueError(f"epochs={cfg.epochs}: each store of data.mixture has its own epochs; set steps or tokens")
    require("data.val_fraction", d.val_fraction, 0 < d.val_fraction < 1, "above 0 and below 1")
    if cfg.profile is not None:
        require(
            "profile", cfg.profile, min(cfg.profile) >= 1, "two numbers of at least 1: the first step, and how many"
        )
    if cfg.max_run_time is not None:
        limit = seconds("max_run_time", cfg.max_run_time)
        require("max_run_time", cfg.max_run_time, 0 < limit <= LONGEST, f"above 0 and at most {LONGEST:g} seconds")
    if cfg.checkpoint.keep_best is not None and cfg.eval_every is None:
        raise ValueError(f"checkpoint.keep_best={cfg.checkpoint.keep_best} has no effect where eval_every=None")
    require("sample.prompts", cfg.sample.prompts, len(cfg.sample.prompts) > 0, "at least one text")
    cfg.sample.sampling().check("sample.")
    if cfg.sample_every is None and cfg.sample != SampleConfig():
        raise ValueError(f"{cfg.sample} has no effect where sample_every=None")
    if cfg.steps is not None:
        check_length(cfg, cfg.steps)


def check_length(cfg: Config, steps: int) -> None:
    """Raises ValueError where the run is too long, or a schedule longer than the run."""
    o = cfg.optimizer
    require("steps", steps, steps < 2**31, "below 2147483648 (2^31), as they are counted in 32 bits")
    if cfg.profile is not None and sum(cfg.profile) - 1 > steps:
        start, n = cfg.profile
        raise ValueError(f"profile={start},{n}: ends with step {start + n - 1}, and the run has {steps}")
    if steps == 0:
        return
    if o.warmup_steps > steps:
        raise ValueError(f"optimizer.warmup_steps={o.warmup_steps}: longer than the run of {steps} steps")
    constraint = "0 in a run of one step, as the first update of a warm-up has rate 0: nothing would be trained"
    require("optimizer.warmup_steps", o.warmup_steps, steps > 1 or o.warmup_steps == 0, constraint)
    if o.decay_steps is not None:
        after = steps - o.warmup_steps
        constraint = (
            f"from 1 to {after}, the steps after warm-up" if after else "None where the warm-up takes all steps"
        )
        require("optimizer.decay_steps", o.decay_steps, 1 <= o.decay_steps <= after, constraint)


def total_steps(cfg: Config, rows: int) -> int:
    """Optimizer steps of the run, over a training split of so many rows. At least the length asked for."""
    if cfg.steps is not None:
        return cfg.steps
    if cfg.tokens is not None:
        return -(-cfg.tokens // (cfg.batch_size * cfg.seq_len))
    return math.ceil(cfg.epochs * rows / cfg.batch_size)
