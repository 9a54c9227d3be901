"""Kills a training run again and again at random moments, restarts it, and compares it bit for bit with an undisturbed one.

python -m tools.chaos --workdir runs/chaos --kills 100 -- --config configs/tiny.py --config.steps=400 --config.checkpoint.every=5

Arguments after `--` are passed to `python -m minitf.train`. The two runs are in DIR/undisturbed and DIR/disturbed. A kill is a
SIGKILL at a random time after the start of a random phase (start-up, restore or initial state, compilation, steps, evaluation,
save). Restarts use the same command, without intervention. Exit status: 0 if every batch, every loss and all final parameters are
equal to the last bit, 1 otherwise.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from typing import Any

from etils import epath

from minitf.runtime.log import json_lines
from minitf.workdir import resolve
from tools import compare_runs

STANDING = ("start", "restore", "compile")  # phases in which a run makes no progress
MOVING = ("steps", "evaluation", "save")
NAMES = {"init": "restore"}  # event -> phase: initialisation takes the place of a restore
LONGEST = 2.0  # seconds after the start of a phase within which a kill comes


def launch(workdir: epath.Path, args: list[str]) -> subprocess.Popen:
    """Starts `minitf.train` in its own session; appends its output to a log beside the work directory."""
    workdir.mkdir(parents=True, exist_ok=True)
    with open(workdir.parent / f"{workdir.name}.log", "a") as log:
        command = [sys.executable, "-m", "minitf.train", "--workdir", str(workdir), *args]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def begins(event: dict[str, Any]) -> str | None:
    """The phase that an event begins, or None. A record of steps counts as the start of further steps."""
    name = NAMES.get(event["event"], event["event"])
    if name == "steps":
        return name
    return name if event.get("state") == "begin" and name in STANDING + MOVING else None


def wait_for(process: subprocess.Popen, workdir: epath.Path, seen: int, phase: str, occurrence: int) -> bool:
    """Waits for the `occurrence`-th start of the phase in events after the first `seen`; False if the process ended before."""
    if phase == "start":
        return True
    while process.poll() is None:
        new = json_lines(workdir / "events.jsonl")[seen:]
        if sum(begins(e) == phase for e in new) >= occurrence:
            return True
        time.sleep(0.005)
    return False


def progress(workdir: epath.Path) -> int:
    """The newest saved step; 0 if there is none."""
    saved = [e["step"] for e in json_lines(workdir / "events.jsonl") if e["event"] == "save" and e["state"] == "end"]
    return max(saved, default=0)


def torment(workdir: epath.Path, args: list[str], kills: int, steps: int, rng: random.Random) -> Counter:
    """Runs and restarts the command until it ends by itself, killing it `kills` times; returns the number of kills per phase. Raises
    RuntimeError if it fails by itself or ends before all kills."""
    done: Counter = Counter()
    while True:
        process = launch(workdir, args)
        if done.total() < kills:
            # If it is ahead of schedule, kill it in a phase without progress, so that the kills are spread over the run.
            ahead = progress(workdir) >= steps * (done.total() + 1) / (kills + 2)
            phase = rng.choice(STANDING if ahead else MOVING)
            seen = len(json_lines(workdir / "events.jsonl"))
            if wait_for(process, workdir, seen, phase, rng.randint(1, 3) if phase == "steps" else 1):
                try:
                    process.wait(
                        rng.uniform(0, LONGEST) if phase in ("start", "compile") else rng.uniform(0, LONGEST / 10)
                    )
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    done[phase] += 1
                    print(f"kill {done.total()} of {kills}: {phase}, newest saved step {progress(workdir)}", flush=True)
                    continue
        if process.wait() != 0:
            raise RuntimeError(f"the run ended by itself with status {process.returncode}; see {workdir}.log")
        if done.total() < kills:
            raise RuntimeError(f"the run has ended after {done.total()} of {kills} kills: give it more steps")
        return done


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    ours = [*argv, "--"].index("--")
    args_of_training = argv[ours + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m tools.chaos", description=__doc__.splitlines()[0], epilog="-- ARGUMENTS of minitf.train"
    )
    parser.add_argument("--workdir", required=True, metavar="DIR", help="for both runs; must not hold earlier ones")
    parser.add_argument("--kills", type=int, default=20, metavar="N")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args(argv[:ours])
    root = resolve(args.workdir)
    if root.exists() and any(root.iterdir()):
        parser.error(f"--workdir {root}: is not empty")

    undisturbed, disturbed = root / "undisturbed", root / "disturbed"
    if launch(undisturbed, args_of_training).wait() != 0:
        print(f"error: the undisturbed run failed; see {undisturbed}.log", file=sys.stderr)
        return 1
    steps = progress(undisturbed)
    try:
        done = torment(disturbed, args_of_training, args.kills, steps, random.Random(args.seed))
    except RuntimeError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    a, b = compare_runs.read(undisturbed), compare_runs.read(disturbed)
    lines, equal = compare_runs.compare(a, b)
    equal = equal and a.batches.keys() == b.batches.keys() and {steps} <= a.parameters.keys() & b.parameters.keys()
    print("kills: " + ", ".join(f"{n} in {phase}" for phase, n in sorted(done.items())))
    print("\n".join(lines))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
