"""Paths that a user or a file gives, the files below a directory, writing a whole file, and files that are no text."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def given(text: str | os.PathLike, setting: str) -> Path:
    """The path that an argument or a setting names, a leading `~` expanded. Raises ValueError naming it where it is empty, which
    would be the current directory, or where there is no such home."""
    if not os.fspath(text).strip():
        raise ValueError(f"{setting} is empty: give a path; . is the current directory")
    try:
        return Path(text).expanduser()
    except RuntimeError as e:
        raise ValueError(f"{setting} {text}: {e}") from None


def inside(directory: Path, name: str, source: str | os.PathLike) -> Path:
    """The file of a directory that `source`, a file of it, names. Raises ValueError where the name or a link leads elsewhere."""
    path = directory / name
    if Path(name).is_absolute() or ".." in Path(name).parts or not path.resolve().is_relative_to(directory.resolve()):
        raise ValueError(
            f"{source}: names {name!r}, which leads out of the folder; of a folder of links, such as Hugging Face's cache, make a "
            "copy that holds the files (cp -rL)"
        )
    return path


def is_local(path: str | os.PathLike) -> bool:
    """Whether the path is a file's of this machine, not of an object store."""
    return "://" not in str(path)


def write_whole(path: Any, contents: str | bytes) -> None:
    """Replaces a file, or makes it: under its name there is at no time a part of it, and after the return it stays, also through a
    loss of power. `path`: pathlib's or epath's."""
    contents = contents.encode() if isinstance(contents, str) else contents
    part = path.parent / f"{path.name}.part"
    if not is_local(path):
        part.write_bytes(contents)
        part.replace(path)
        return
    with open(part, "wb") as f:
        f.write(contents)
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def files_below(directory: str | os.PathLike) -> Iterator[str]:
    """All files below a directory but hidden ones, sorted folder by folder. Links are followed: each folder and each file comes
    once, under the first of its names."""
    seen: set[str] = set()

    def is_new(path: str) -> bool:
        real = os.path.realpath(path)
        return not (real in seen or seen.add(real))

    is_new(os.fspath(directory))
    for folder, folders, files in os.walk(directory, followlinks=True):
        folders[:] = [f for f in sorted(folders) if not f.startswith(".") and is_new(os.path.join(folder, f))]
        paths = (os.path.join(folder, f) for f in sorted(files) if not f.startswith("."))
        yield from (path for path in paths if os.path.isfile(path) and is_new(path))


# How files begin that hold other files, or numbers, and are no text whatever their name.
BEGINNINGS = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "zip",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"Rar!\x1a\x07": "rar",
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
    b"\x93NUMPY": "NumPy",
    b"\x89HDF": "HDF5",
    b"SQLite format 3\0": "SQLite",
    b"%PDF-": "PDF",
}
TAR = slice(257, 262), b"ustar"
FIRST_BYTES = 512  # bytes that tell


def container(first: bytes) -> str | None:
    """What a file is by its first bytes, where that is no text."""
    if first[TAR[0]] == TAR[1]:
        return "tar"
    return next((name for begin, name in BEGINNINGS.items() if first.startswith(begin)), None)
