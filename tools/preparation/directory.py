"""The directory of a store: its lock, its files, and the record of settings and inputs it is made from."""

import fcntl
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, BinaryIO

from minitf.data import store
from minitf.data.tokenizer_files import TOKENIZER_CONFIG, TOKENIZER_FILE
from minitf.paths import write_whole
from tools.preparation.documents import STDIN

INPUTS = "inputs.json"  # lists every input file of the store
UNFINISHED = "unfinished"  # subdirectory of temporary files, removed when the store is complete
BEGUN = "begun.json"  # in UNFINISHED: settings and inputs of the store in preparation
OURS = re.compile(
    rf"({'|'.join(store.SPLITS)})-(\d{{5,}}\.(bin|idx|mask)|.+\.plan)(\.part)?|({store.MANIFEST}|{INPUTS})(\.part)?|{UNFINISHED}"
)


def write_json(path: Path, tree: Any) -> str:
    """Writes a file atomically and durably; returns its sha256."""
    contents = (json.dumps(tree, indent=2) + "\n").encode()
    write_whole(path, contents)
    return hashlib.sha256(contents).hexdigest()


def read_json(path: Path) -> Any:
    """The contents of a JSON file; None if it does not exist."""
    return json.loads(path.read_text()) if path.exists() else None


# ---- settings and inputs of a store


def describe_inputs(paths: list[str]) -> list[dict[str, Any]]:
    """Path, size and mtime of each input, so that a changed file is noticed; None for standard input."""
    stats = {path: None if path == STDIN else os.stat(path) for path in paths}
    return [{"path": path, "size": s and s.st_size, "mtime_ns": s and s.st_mtime_ns} for path, s in stats.items()]


def size_of(inputs: list[dict[str, Any]]) -> int:
    return sum(i["size"] or 0 for i in inputs)  # the size of standard input is unknown


def made_of(directory: Path, manifest: dict[str, Any]) -> dict[str, Any] | None:
    """{settings, inputs} of a finished store; None if its list of inputs is missing or has changed."""
    path, prepared = directory / INPUTS, manifest["prepared"]
    if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != prepared["inputs"]["sha256"]:
        return None
    return {"settings": prepared["settings"], "inputs": read_json(path)}


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Lines `name: old -> new` for the differences of two {settings, inputs}."""
    lines = [
        f"--{k}: {old['settings'].get(k)} -> {v}" for k, v in new["settings"].items() if old["settings"].get(k) != v
    ]
    before, now = ({i["path"]: i for i in x["inputs"]} for x in (old, new))

    def state(inputs: dict[str, Any], path: str) -> str:
        if path not in inputs:
            return "not an input"
        return f"{inputs[path]['size']} bytes of mtime_ns {inputs[path]['mtime_ns']}"

    for path in {**before, **now}:
        if before.get(path) != now.get(path):
            lines.append(f"--input {path}: {state(before, path)} -> {state(now, path)}")
    if not lines and list(before) != list(now):
        lines.append("--input: the same files in another order")
    return lines


# ---- the directory


def foreign(directory: Path, of_a_store: bool) -> list[str]:
    """Names in a directory that this tool did not write."""
    if not directory.exists():
        return []
    known = OURS.fullmatch if of_a_store else lambda name: name == UNFINISHED
    return sorted(
        p.name for p in directory.iterdir() if not known(p.name) and p.name not in (TOKENIZER_FILE, TOKENIZER_CONFIG)
    )


def claim(directory: Path) -> BinaryIO:
    """The lock file of a store, locked until it is closed. Raises ValueError if another process holds it."""
    (directory / UNFINISHED).mkdir(parents=True, exist_ok=True)
    lock = open(directory / UNFINISHED / "lock", "ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"--output {directory}: another process is preparing it") from None
    return lock


def clear(directory: Path) -> None:
    """Removes a store, finished or not. Keeps its tokenizer, which may be the one in use. Manifest and progress records go first: if
    killed on the way, no remaining record claims files that are gone."""
    (directory / store.MANIFEST).unlink(missing_ok=True)
    unfinished = [p for p in (directory / UNFINISHED).iterdir() if p.name not in (BEGUN, "lock")]
    records = [p for p in unfinished if p.suffix == ".json"]
    ours = [p for p in directory.iterdir() if OURS.fullmatch(p.name) and p.name != UNFINISHED]
    for path in (*records, *unfinished, *ours, directory / UNFINISHED / BEGUN):
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flushes a file or directory to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
