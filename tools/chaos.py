"""Kills a training run again and again at random moments, restarts it, and compares it bit for bit with an undisturbed one.

python -m tools.chaos --workdir runs/chaos --kills 100 -- --config configs/tiny.py --config.steps=400 --config.checkpoint.every=5

After `--` stands what `python -m minitf.train` gets. DIR/undisturbed and DIR/disturbed keep the two runs. A moment is a phase
(start-up, restore or initial state, compilation, steps, evaluation, save), drawn at random, and a random time after it began;
SIGKILL then ends the process at once. Restarts are the same command; nobody helps. Exit status: 0 where every batch, every loss
and all final parameters are equal to the last bit, 1 otherwise.
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
NAMES = {"init": "restore"}  # the initial state is made where there is nothing to restore
LONGEST = 2.0  # seconds after the beginning of a phase in which the kill comes


def launch(workdir: epath.Path, args: list[str]) -> subprocess.Popen:
    """The real command, in a session of its own."""
    workdir.mkdir(parents=True, exist_ok=True)
    with open(workdir.parent / f"{workdir.name}.log", "a") as log:
        command = [sys.executable, "-m", "minitf.train", "--workdir", str(workdir), *args]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def begins(event: dict[str, Any]) -> str | None:
    """The phase that an event begins. A record of steps stands for more steps to come."""
    name = NAMES.get(event["event"], event["event"])
    if name == "steps":
        return name
    return name if event.get("state") == "begin" and name in STANDING + MOVING else None


def wait_for(process: subprocess.Popen, workdir: epath.Path, seen: int, phase: str, occurrence: int) -> bool:
    """Until the phase has begun for the n-th time in events after the first `seen`; False where the process ended before."""
    if phase == "start":
        return True
    while process.poll() is None:
        new = json_lines(workdir / "events.jsonl")[seen:]
        if sum(begins(e) == phase for e in new) >= occurrence:
            return True
        time.sleep(0.005)
    return False


def progress(workdir: epath.Path) -> int:
    """The newest saved step."""
    saved = [e["step"] for e in json_lines(workdir / "events.jsonl") if e["event"] == "save" and e["state"] == "end"]
    return max(saved, default=0)


def torment(workdir: epath.Path, args: list[str], kills: int, steps: int, rng: random.Random) -> Counter:
    """Runs the command until it has ended by itself, killing it `kills` times on the way; phases of the kills by number.
    Raises RuntimeError where it fails by itself or ends before all kills."""
    done: Counter = Counter()
    while True:
        process = launch(workdir, args)
        if done.total() < kills:
            # Ahead of its time: kill it where it makes no progress, so that the kills last until the end.
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
