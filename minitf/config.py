"""The whole config, from the *Config dataclasses that are each declared beside their use; its stored form; and constraints between
settings."""

import dataclasses
import json
import math
import os
import re
import runpy
import traceback
import typing
from typing import Any

import ml_collections
from ml_collections import config_dict

from minitf.data.datasets import DataConfig
from minitf.model.loss import LossConfig
from minitf.model.transformer import ModelConfig
from minitf.paths import given
from minitf.relations import check_length, validate  # noqa: F401  beside Config, where callers look for it
from minitf.runtime.checkpoint import CheckpointConfig
from minitf.runtime.processes import DistributedConfig
from minitf.runtime.watch import WatchdogConfig
from minitf.settings import LONGEST, hints, setting, split_optional
from minitf.sharding.mesh import MeshConfig
from minitf.tables import did_you_mean
from minitf.text import SampleConfig
from minitf.training.optimizer import OptimizerConfig


def seconds(name: str, text: str) -> float:
    """Seconds of a duration such as 11h30m, 90m or 1d12h. Raises ValueError naming the setting."""
    parts = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text.strip())
    if not parts or not any(parts.groups()):
        raise ValueError(f"{name}={text}: must be a time such as 11h30m, 90m or 45s")
    found = sum(int(n or 0) * unit for n, unit in zip(parts.groups(), (86400, 3600, 60, 1), strict=True))
    if not 0 < found <= LONGEST:
        raise ValueError(f"{name}={text}: must be above 0 and at most {LONGEST:g} seconds")
    return found


def compiler_options(name: str, words: tuple[str, ...]) -> dict[str, str]:
    """XLA options, name -> value, for `jax.jit`, from NAME=VALUE words. Raises ValueError naming the setting for a word of another
    form, and for a name given twice."""
    found: dict[str, str] = {}
    for word in words:
        option, equals, value = word.partition("=")
        if not re.fullmatch(r"xla_\w+", option) or not equals or not value:
            raise ValueError(f"{name}: {word!r}: must be NAME=VALUE, as in xla_tpu_scoped_vmem_limit_kib=98304")
        if option in found:
            raise ValueError(f"{name}: {word!r}: is there twice")
        # XLA accepts only these spellings of booleans.
        found[option] = {"true": "True", "false": "False"}.get(value.lower(), value)
    return found


@dataclasses.dataclass(frozen=True)
class CompilerOptions:
    """XLA options, each NAME=VALUE, for the train and eval steps, by platform."""

    cpu: tuple[str, ...] = setting((), "XLA options on CPUs, NAME=VALUE,...", check=compiler_options, may_change=True)
    gpu: tuple[str, ...] = setting((), "XLA options on GPUs, NAME=VALUE,...", check=compiler_options, may_change=True)
    tpu: tuple[str, ...] = setting((), "XLA options on TPUs, NAME=VALUE,...", check=compiler_options, may_change=True)

    def of(self, platform: str) -> dict[str, str]:
        return compiler_options(f"compiler_options.{platform}", getattr(self, platform))


@dataclasses.dataclass(frozen=True)
class Config:
    steps: int | None = setting(None, "optimizer steps; None: by tokens or epochs", at_least=0, may_change=True)
    tokens: int | None = setting(
        None,
        "training tokens, batch_size x seq_len a step; None: by steps or epochs",
        at_least=0,
        at_most=2**63 - 1,
        may_change=True,
    )
    epochs: float | None = setting(
        None, "passes over the training rows; None: by steps or tokens", at_least=0, may_change=True
    )
    batch_size: int = setting(8, "sequences in the global batch, whatever mesh and accumulation", at_least=1)
    seq_len: int = setting(256, "positions in a sequence", at_least=1)
    seed: int = setting(0, "seed of initial values, dropout and data order", at_least=0, at_most=2**32 - 1)
    accumulation: int = setting(1, "microbatches, computed one after another", at_least=1, may_change=True)
    log_every: int = setting(10, "steps between logs", at_least=1, may_change=True)
    eval_every: int | None = setting(
        100, "steps between evaluations; also after the last step; None: never", at_least=1, may_change=True
    )
    eval_batches: int | None = setting(
        20, "batches of an evaluation, spread over the validation split; None: all of it", at_least=1, may_change=True
    )
    sample_every: int | None = setting(
        None, "steps between samples; also after the last step; None: never; see sample", at_least=1, may_change=True
    )
    init_from: str | None = setting(
        None, "work directory whose parameters start a new run (optimizer and step anew); None: random", may_change=True
    )
    max_run_time: str | None = setting(
        None,
        "time of this process, as in 11h30m: then it saves and exits with status 3; None: no limit",
        **dict(check=seconds, may_change=True),
    )
    profile: tuple[int, int] | None = setting(
        None,
        "FIRST,COUNT: steps that process 0 traces for TensorBoard and tools.profile_summary; None: none",
        **dict(at_least=1, may_change=True),
    )
    keep_memory: bool = setting(False, "CPU: freed memory stays with the process, see memory.py", may_change=True)
    compilation_cache: str | None = setting(
        None, "directory of compiled programs; None: beside the work directory; none: off", may_change=True
    )
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


def to_dict(cls: type) -> ml_collections.ConfigDict:
    out = ml_collections.ConfigDict()
    for field in dataclasses.fields(cls):
        kind, _ = split_optional(hints(cls)[field.name])
        if dataclasses.is_dataclass(kind):
            out[field.name] = to_dict(kind)
        elif field.default is None:
            out[field.name] = config_dict.placeholder(typing.get_origin(kind) or kind)
        else:
            out[field.name] = field.default
    return out


def default() -> ml_collections.ConfigDict:
    """All settings at their defaults, locked; config files start from it."""
    return to_dict(Config).lock()


def of_type(name: str, value: Any, annotation: Any) -> Any:
    """The value converted to its field's type. Raises ValueError naming the setting."""
    kind, can_be_none = split_optional(annotation)
    if value is None and can_be_none:
        return None
    if kind is str and value == "":  # as a path it would be the current directory
        raise ValueError(f"{name}='': is empty, must be {type_name(annotation)}")
    if typing.get_origin(kind) is tuple:
        items = typing.get_args(kind)
        if isinstance(value, (tuple, list)) and (items[-1] is ... or len(items) == len(value)):
            items = [items[0]] * len(value) if items[-1] is ... else items
            return tuple(of_type(name, v, item) for v, item in zip(value, items, strict=True))
    elif kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value) if abs(value) < 2**1023 else math.copysign(math.inf, value)
    elif type(value) is kind:
        return value
    raise ValueError(f"{name}={value!r}: is {type(value).__name__}, must be {type_name(annotation)}")


def type_name(annotation: Any) -> str:
    kind, can_be_none = split_optional(annotation)
    name = str(kind) if typing.get_origin(kind) else kind.__name__
    return f"{name} or None" if can_be_none else name


def freeze(tree: Any, cls: type = Config, prefix: str = "") -> Any:
    """A ConfigDict or dict as an instance of cls. Raises ValueError for unknown names and wrong types."""
    annotations = hints(cls)
    values = {}
    for name, value in tree.items():
        full = f"{prefix}{name}"
        if name not in annotations:
            raise ValueError(f"{full}: no such setting{did_you_mean(str(name), annotations)}")
        kind, _ = split_optional(annotations[name])
        if not dataclasses.is_dataclass(kind):
            values[name] = of_type(full, value, annotations[name])
        elif isinstance(value, (dict, ml_collections.ConfigDict)):
            values[name] = freeze(value, kind, full + ".")
        else:
            raise ValueError(f"{full}={value!r}: is a section; set its settings: {', '.join(hints(kind))}")
    return cls(**values)


# ---- config files


def load_file(path: str) -> ml_collections.ConfigDict:
    """The result of a config file's get_config(), or of get_config(ARGUMENT) for `FILE:ARGUMENT`. Raises ValueError with file and
    line for an error in the file."""
    given(path, "--config")
    path = os.path.expanduser(path)  # stays a string, so that messages show it as the user wrote it
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
    except Exception as e:  # any exception in the user's file is the user's to fix
        lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == file]
        if isinstance(e, SyntaxError) and e.filename == file and e.lineno:
            lines.append(e.lineno)
        raise ValueError(
            f"{file}{f', line {lines[-1]}' if lines else ''}: {type(e).__name__}: {message_of(e)}"
        ) from None
    if not isinstance(cfg, ml_collections.ConfigDict):
        raise ValueError(
            f"{file}: get_config() returned {type(cfg).__name__}, not a ConfigDict made by minitf.config.default()"
        )
    return cfg


def message_of(e: Exception) -> str:
    """An exception's message; ml_collections' quote the whole config and are cut to the first sentence and the suggested name."""
    while e.args and isinstance(e.args[0], Exception):  # its AttributeError wraps a KeyError
        e = e.args[0]
    text = e.msg if isinstance(e, SyntaxError) else str(e.args[0] if isinstance(e, KeyError) and e.args else e)
    near = re.search(r'Did you mean "(.+)" instead', text)
    first = re.split(r"\. Other fields present|\nDid you mean", text)[0]
    return f"{first}; did you mean {near[1]!r}?" if near else first


# ---- the stored form, in config.json, checkpoints and TensorBoard

STORED_VERSION = 2  # Version 1 is stored without a number; its model.remat "none" is today's "products".


def stored(cfg: Config) -> dict[str, Any]:
    return {"version": STORED_VERSION, **dataclasses.asdict(cfg)}


def to_json(cfg: Config) -> str:
    return json.dumps(stored(cfg), indent=2) + "\n"


def from_stored(tree: dict[str, Any]) -> tuple[Config, list[str]]:
    """(the config from a result of `stored`, of any version; names of settings that it lacks, which have their defaults).
    Raises ValueError for anything that no version wrote."""
    if not isinstance(tree, dict):
        raise ValueError(f"is {type(tree).__name__}, no config")
    tree = dict(tree)
    version = tree.pop("version", 1)
    if version not in range(1, STORED_VERSION + 1):
        raise ValueError(f"version={version!r}: is unknown; this minitf reads 1 to {STORED_VERSION}")
    if version == 1 and isinstance(model := tree.get("model"), dict) and model.get("remat") == "none":
        tree["model"] = model | {"remat": "products"}
    cfg = freeze(tree)
    return cfg, missing(tree, Config)


def missing(tree: dict, cls: type, prefix: str = "") -> list[str]:
    """Dotted names of the settings that a stored config lacks."""
    out = []
    for name, annotation in hints(cls).items():
        kind, _ = split_optional(annotation)
        if name not in tree:
            out.append(prefix + name)
        elif dataclasses.is_dataclass(kind):
            out += missing(tree[name], kind, f"{prefix}{name}.")
    return out


# ---- the length of the run


def total_steps(cfg: Config, rows: int) -> int:
    """Number of optimizer steps of the run; tokens and epochs are rounded up to whole steps. rows: of the training split."""
    if cfg.steps is not None:
        return cfg.steps
    if cfg.tokens is not None:
        return -(-cfg.tokens // (cfg.batch_size * cfg.seq_len))
    return math.ceil(cfg.epochs * rows / cfg.batch_size)


def known_steps(cfg: Config) -> int | None:
    """Number of optimizer steps of the run; None if it depends on the data or the settings are invalid."""
    given = [v for v in (cfg.steps, cfg.tokens, cfg.epochs) if v is not None]
    if len(given) != 1 or cfg.epochs is not None or min(cfg.batch_size, cfg.seq_len) < 1:
        return None
    return total_steps(cfg, rows=0)
