"""The work directory of a run."""

import os
import shutil
from pathlib import Path

OURS = ("config.json", "metrics.jsonl", "events.jsonl", "checkpoints")  # and TensorBoard's event files


def resolve(workdir: str) -> Path:
    """The absolute path of a work directory given in any form: relative, with a tilde, through a link."""
    try:
        return Path(workdir).expanduser().resolve()
    except RuntimeError as e:  # no such user, a loop of links
        raise ValueError(f"--workdir {workdir}: {e}") from None


def written_by_us(workdir: Path) -> list[Path]:
    names = sorted(os.listdir(workdir)) if os.path.isdir(workdir) else []
    return [workdir / name for name in names if name in OURS or name.startswith("events.out.tfevents.")]


def check_free(workdir: Path, overwrite: bool) -> None:
    """Raises ValueError where the directory holds a run that would be mixed with this one, or cannot be a directory."""
    if os.path.exists(workdir) and not workdir.is_dir():
        raise ValueError(f"--workdir {workdir}: is a file")
    try:
        found = written_by_us(workdir)
    except OSError as e:
        raise ValueError(f"--workdir {workdir}: {e.strerror}") from None
    if found and not overwrite:
        raise ValueError(
            f"--workdir {workdir}: already holds a run ({', '.join(p.name for p in found)}); give another directory, or "
            "--overwrite to start anew in this one"
        )


def create(workdir: Path, config_json: str) -> None:
    """Makes the directory, takes away an older run's files (nothing else), and writes the resolved config."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        for path in written_by_us(workdir):
            # Of a link the link alone: what it points to is not ours.
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        (workdir / "config.json").write_text(config_json, encoding="utf-8")
    except OSError as e:
        raise ValueError(f"--workdir {workdir}: {e.strerror}") from None
