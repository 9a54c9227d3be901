"""The house: in what order modules stand, and what the core reaches."""

import ast
import re
from pathlib import Path

import pytest
from common import ROOT, run_python

pytestmark = pytest.mark.core

CORE = (
    *("tables", "settings", "checks", "params"),
    *("sharding.mesh", "sharding.devices", "sharding.rules", "sharding.seams", "sharding.exchange"),
    "sharding.manual",
    *("model.ops", "model.kernels", "model.attention", "model.routers", "model.grouped", "model.mlp", "model.experts"),
    *("model.remat", "model.transformer", "model.flops", "model.choose", "model.loss"),
    *(
        "training.optimizer",
        "training.checksum",
        "training.state",
        "training.layout",
        "training.step",
        "training.evaluation",
    ),
)
BELOW = (  # the wall
    *(
        "paths",
        "runtime.hooks",
        "runtime.terminal",
        "runtime.memory",
        "runtime.cluster",
        "runtime.processes",
        "runtime.watch",
    ),
    *("runtime.log", "runtime.lock", "runtime.devices", "runtime.writer", "runtime.profile", "runtime.digests"),
    "runtime.checkpoint",
    *("data.loader", "data.tokenizer", "data.tokenizer_files", "data.long_texts", "data.chat", "data.frame"),
    *("data.store", "data.mixture", "data.packing", "data.texts", "data.datasets", "data.pipeline"),
    *("sampling", "text", "relations", "config", "command_line", "workdir", "job", "startup", "services", "loop"),
    *("train", "harness", "evaluate", "generate"),
    *("plan.topology", "plan.hlo", "plan.report", "plan.program", "plan.figures", "plan.__main__"),
    *("huggingface.settings", "huggingface.families", "huggingface.folder", "huggingface.tokenizer"),
    *("huggingface.convert", "huggingface.__main__"),
)
ORDER = CORE + BELOW
LEAVES = ("train", "evaluate", "generate", "plan.__main__", "huggingface.__main__")  # command lines
REACH = 2950  # lines of step and optimizer, with all that they import


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "minitf").with_suffix("").parts)


FILES = {module(p): p for p in sorted((ROOT / "minitf").rglob("*.py"))}


def imports(path: Path) -> set[str]:
    """Modules of ours that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "minitf":
            base = node.module.removeprefix("minitf").lstrip(".")
            found |= {base} if base in FILES else {f"{base}.{a.name}".lstrip(".") for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("minitf.") for a in node.names if a.name.startswith("minitf.")}
    return found & FILES.keys()


def test_modules_import_only_what_stands_above_them():
    """The oracle is apart: nothing imports it, and it imports nothing."""
    for name, path in FILES.items():
        found = imports(path)
        if name.endswith("__init__") or name == "model.reference":
            assert not found, f"{name} imports {found}"
            continue
        assert name in ORDER, f"{name} has no place in the order"
        for other in found:
            assert other in ORDER, f"{name} imports {other}"
            assert ORDER.index(other) < ORDER.index(name), f"{name} imports {other}, which stands below it"
    assert set(ORDER) <= FILES.keys()


def test_command_lines_are_leaves():
    for path in [*FILES.values(), *(ROOT / "tools").rglob("*.py")]:
        for leaf in imports(path) & set(LEAVES):
            allowed = {"plan"} if path.is_relative_to(ROOT / "tools") else set()
            assert leaf in allowed, f"{path.relative_to(ROOT)} imports {leaf}, a command line"


def test_the_core_is_walled_and_small():
    reached, new = set(), {"training.step", "training.optimizer"}
    while new:
        reached |= new
        new = set().union(*(imports(FILES[name]) for name in new)) - reached
    assert reached <= set(CORE), f"the core imports {sorted(reached - set(CORE))}"
    lines = sum(len(FILES[name].read_text().splitlines()) for name in reached)
    assert lines <= REACH, f"step and optimizer reach {lines} lines"


def top_level(path: Path) -> set[str]:
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    return found


def test_a_top_level_name_means_one_thing():
    """Aside: `main`, and the oracle, whose functions are named as what they mirror."""
    homes: dict[str, list[str]] = {}
    for name, path in FILES.items():
        if name != "model.reference":
            for top in top_level(path):
                homes.setdefault(top, []).append(name)
    assert {top: where for top, where in homes.items() if len(where) > 1 and top != "main"} == {}


def test_no_file_is_long():
    """The HLO reader aside, which is one grammar."""
    lengths = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    assert {name for name, n in lengths.items() if n > 400} == {"plan.hlo"}


def rows_of_the_reading_path() -> list[tuple[list[str], int]]:
    """(files and folders of `minitf/`, lines) of each row of the README's tables of core and wings."""
    section = (ROOT / "README.md").read_text().split("## Reading path")[1].split("\n## ")[0]
    rows = []
    for cells in re.findall(r"^\| (`.*?) \| ([\d,]+) \|", section, re.MULTILINE):
        names = re.findall(r"`([^`]+)`", cells[0])
        inside = cells[0].startswith("`") and re.match(r"`(\w+/)` `", cells[0])  # the files of one folder
        names = [inside[1] + name for name in names[1:]] if inside else names
        rows.append((names, int(cells[1].replace(",", ""))))
    return rows


def test_the_readme_names_every_file_and_its_length():
    named, rows = [], rows_of_the_reading_path()
    for names, lines in rows:
        files = [f for name in names for f in FILES.items() if str(f[1].relative_to(ROOT / "minitf")).startswith(name)]
        named += [name for name, _ in files]
        true = sum(len(path.read_text().splitlines()) for _, path in files)
        assert abs(lines - true) <= 0.05 * true, f"{', '.join(names)}: {true} lines, the README says {lines}"
    assert {n for n in FILES if not n.endswith("__init__")} <= set(named)
    assert len(named) == len(set(named))


OPTIONAL = (
    "lm_eval",
    "safetensors",
    "tokenizers",
    "jinja2",
    "pyarrow",
    "zstandard",
    "datasketch",
    "tensorboard",
    "libtpu",
)


def test_commands_start_without_the_packages_of_extras():
    """Each is imported by the function that needs it."""
    commands = ", ".join(f"minitf.{name}" for name in LEAVES)
    code = f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL!r})); import {commands}"
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
