"""The house: in what order modules stand, and what the core reaches."""

import ast
from pathlib import Path

from common import ROOT

CORE = (
    *("tables", "settings", "params", "checksum", "sharding"),
    *("model.ops", "model.kernels", "model.attention", "model.mlp", "model.transformer", "model.loss"),
    *("optimizer", "state", "step"),
)
BELOW = (  # the wall
    *("paths", "terminal", "hlo", "memory", "cluster", "distributed"),
    *("data.loader", "data.tokenizer", "data.long_texts", "data.chat", "data.frame", "data.store", "data.mixture"),
    *("data.packing", "data.datasets", "data.pipeline"),
    *("metrics", "profile", "checkpoint", "sampling", "config", "command_line", "run", "job"),
    *("train", "harness", "evaluate", "generate", "topology", "plan"),
    *("huggingface.settings", "huggingface.families", "huggingface.folder", "huggingface.tokenizer"),
    *("huggingface.convert", "huggingface.__main__"),
)
ORDER = CORE + BELOW
LEAVES = ("train", "evaluate", "generate", "plan", "huggingface.__main__")  # command lines
REACH = 2900  # lines of step and optimizer, with all that they import


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
    reached, new = set(), {"step", "optimizer"}
    while new:
        reached |= new
        new = set().union(*(imports(FILES[name]) for name in new)) - reached
    assert reached <= set(CORE), f"the core imports {sorted(reached - set(CORE))}"
    lines = sum(len(FILES[name].read_text().splitlines()) for name in reached)
    assert lines <= REACH, f"step and optimizer reach {lines} lines"
