"""Paths from users and files, listing a directory, atomic writes, and detection of files that are not text."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def given(text: str | os.PathLike, setting: str) -> Path:
    """The path given by an argument or a setting, with a leading `~` expanded. Raises ValueError naming the setting if the path is
    empty, which would mean the current directory, or if there is no such home directory."""
    if not os.fspath(text).strip():
        raise ValueError(f"{setting} is empty: give a path; . is the current directory")
    try:
        return Path(text).expanduser()
    except RuntimeError as e:
        raise ValueError(f"{setting} {text}: {e}") from None


def inside(directory: Path, name: str, source: str | os.PathLike) -> Path:
    """Path of a file in the directory, named by its file `source`. Raises ValueError if the name or a link leads out of it."""
    path = directory / name
    if Path(name).is_absolute() or ".." in Path(name).parts or not path.resolve().is_relative_to(directory.resolve()):
        raise ValueError(
            f"{source}: names {name!r}, which leads out of the folder; of a folder of links, such as Hugging Face's cache, make a "
            "copy that holds the files (cp -rL)"
        )
    return path


def is_local(path: str | os.PathLike) -> bool:
    """Whether the path is in the local file system, not in an object store."""
    return "://" not in str(path)


def write_whole(path: Any, contents: str | bytes) -> None:
    """Writes a file atomically: readers never see a partial file, and once this returns the contents survive a loss of power.
    path: a pathlib or epath path."""
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
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems sync no directories
            raise
    finally:
        os.close(directory)


def files_below(directory: str | os.PathLike) -> Iterator[str]:
    """Yields all files below a directory except hidden ones, sorted within each folder. Links are followed; every folder and file is
    yielded once, under its first name."""
    seen: set[str] = set()

    def is_new(path: str) -> bool:
        real = os.path.realpath(path)
        return not (real in seen or seen.add(real))

    is_new(os.fspath(directory))
    for folder, folders, files in os.walk(directory, followlinks=True):
        folders[:] = [f for f in sorted(folders) if not f.startswith(".") and is_new(os.path.join(folder, f))]
        paths = (os.path.join(folder, f) for f in sorted(files) if not f.startswith("."))
        yield from (path for path in paths if os.path.isfile(path) and is_new(path))


# First bytes of archives and binary formats, which are not text whatever their names.
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
FIRST_BYTES = 512  # number of bytes that `container` needs


def container(first: bytes) -> str | None:
    """Name of the binary format with these first bytes; None: none is recognised."""
    if first[TAR[0]] == TAR[1]:
        return "tar"
    return next((name for begin, name in BEGINNINGS.items() if first.startswith(begin)), None)
