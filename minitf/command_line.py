"""The command line of a config: file, overrides, help, and the exit on a user's mistake."""

import argparse
import dataclasses
import math
import sys
import typing
from typing import Any, NoReturn

from minitf import checks, settings
from minitf.config import Config, freeze, known_steps, load_file, type_name, validate
from minitf.settings import Field, hints, split_optional
from minitf.tables import did_you_mean

# ---- overrides. Not ml_collections' config_flags: its messages name neither the nearest setting nor its type.


def parse_value(name: str, text: str, annotation: Any) -> Any:
    """Text from the command line as a value of the setting's type. Raises ValueError naming the setting, the text and the type."""
    kind, can_be_none = split_optional(annotation)
    if can_be_none and text == "None":
        return None
    try:
        if typing.get_origin(kind) is tuple:
            item, *rest = typing.get_args(kind)
            if rest == [...]:
                words = [t.strip() for t in text.strip("()[] ").split(",")]
                return tuple(parse_value(name, t.strip("'\""), item) for t in words if t)
            # A pair: PATH:WEIGHT as an item of a list, START,STEPS as a value.
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
    """Type annotation of the setting with this dotted name. Raises ValueError naming the nearest known name."""
    cls, done = Config, []
    parts = name.split(".")
    for i, part in enumerate(parts):
        fields = hints(cls)
        if part not in fields:
            where = ".".join(done) or "the config"
            raise ValueError(
                f"--config.{name}: no setting {part!r} in {where}{did_you_mean(part, fields)}; --help_settings describes all settings"
            )
        done.append(part)
        kind, _ = split_optional(fields[part])
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
    """(other arguments, dotted name -> value). Overrides are `--config.NAME=VALUE`, `--config.NAME VALUE`, and for booleans
    `--config.NAME`, `--noconfig.NAME`, at any position."""
    others, overrides = [], {}
    words = iter(argv)
    for word in words:
        head, has_value, text = word.partition("=")
        head = "--" + head.lstrip("-") if head.startswith("-") else head
        if head.startswith("--noconfig."):
            name = head.removeprefix("--noconfig.")
            if split_optional(find(name))[0] is not bool or has_value:
                raise ValueError(f"{word}: only a setting that is true or false can be written so")
            overrides[name] = False
        elif head.startswith("--config."):
            name = head.removeprefix("--config.")
            annotation = find(name)
            if not has_value and split_optional(annotation)[0] is bool:
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


def parse_args(argv: list[str], parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Config]:
    """(the parser's own arguments, `--config` among them; the validated config after overrides)."""
    parser.add_argument(
        "--help_settings",
        nargs="?",
        action=HelpSettings,
        metavar="NAME",
        help="describe a setting, a section, or all, and exit",
    )
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
    """The config, with the file's warm-up and decay scaled in proportion if the command line makes the run too short for them; prints
    what changed. Values given on the command line itself are left, and refused later if they do not fit."""
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


def fail(message: str) -> NoReturn:
    """Prints the message and exits with status 2, a user's mistake."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def require(name: str, value: Any, ok: bool, constraint: str) -> None:
    """Raises ValueError unless ok; for command-line arguments that are not settings."""
    if not ok:
        raise ValueError(f"{name}={value}: must be {constraint}")


# ---- help


def limits(field: Field) -> str:
    return checks.constraint(checks.with_type_limits(field.setting, field.kind))


def readers(name: str) -> list[str]:
    """The kinds that read a setting, as SETTING=KIND; [] if all do."""
    found = []
    for choice in checks.choices(Config):
        for kind, entry in choice.table.items():
            if name in [choice.full(n) for n in getattr(entry, "reads", ())]:
                found += [f"{setting}={kind}" for setting in choice.settings]
    return found


def selected(name: str | None) -> list[Field]:
    """The setting of this name, or the settings of this section; None: all. Raises ValueError for an unknown name."""
    known = settings.fields(Config)
    found = [f for f in known if name is None or f.name == name or f.name.startswith(name + ".")]
    if not found:
        names = [f.name for f in known]
        sections = {n.rpartition(".")[0] for n in names} - {""}
        raise ValueError(f"--help_settings {name}: no such setting or section{did_you_mean(name, [*names, *sections])}")
    return found


def help_settings(name: str | None) -> str:
    """Name, type, default, meaning, limits and known values of settings, as text for a terminal."""
    lines = []
    for f in selected(name):
        lines.append(f"--config.{f.name}: {type_name(f.kind)}{' or None' * f.optional} = {f.default!r}")
        lines.append(f"    {f.setting.meaning}")
        if bounds := limits(f):
            lines.append(f"    limits: {bounds}")
        if kinds := readers(f.name):
            lines.append(f"    read by: {', '.join(kinds)}")
        lines += [f"    {kind}: {meaning}" for kind, meaning in checks.kinds(f.setting).items()]
        if not f.setting.may_change:
            lines.append("    stays as it is when a run resumes")
    return "\n".join(lines)


class HelpSettings(argparse.Action):
    """Like --help: needs no other argument, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> NoReturn:
        _, name, _ = args
        try:
            print(help_settings(name))
        except ValueError as e:
            fail(str(e))
        sys.exit(0)
