"""The work directory of a run."""

import shutil
from pathlib import Path

OURS = ("config.json", "metrics.jsonl", "events.jsonl", "checkpoints")  # and TensorBoard's event files


def resolve(workdir: str) -> Path:
    """The absolute path of a work directory given in any form: relative, with a tilde, through a link."""
    return Path(workdir).expanduser().resolve()


def written_by_us(workdir: Path) -> list[Path]:
    return [p for name in OURS if (p := workdir / name).exists()] + sorted(workdir.glob("events.out.tfevents.*"))


def check_free(workdir: Path, overwrite: bool) -> None:
    """Raises ValueError where the directory holds a run that would be mixed with this one, or cannot be a directory."""
    if workdir.exists() and not workdir.is_dir():
        raise ValueError(f"--workdir {workdir}: is a file")
    if not overwrite and (workdir / "config.json").exists():
        raise ValueError(
            f"--workdir {workdir}: already holds a run; give another directory, or --overwrite to start anew in this one"
        )


def create(workdir: Path, config_json: str) -> None:
    """Makes the directory, takes away an older run's files (nothing else), and writes the resolved config."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ValueError(f"--workdir {workdir}: {e.strerror}") from None
    for path in written_by_us(workdir):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (workdir / "config.json").write_text(config_json, encoding="utf-8")
