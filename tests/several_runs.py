"""Trains several times, one run after the other, in the same processes: starting them anew would take most of the time.

python -m several_runs '[[ARGUMENT, ...], ...]' [FAULT]    # each list is what minitf.train gets

Prints the statuses last. FAULT happens on process 1 alone: `record`, one that cannot be read, or `save`, an error nothing expects.
"""

import json
import sys

import jax

from minitf import checkpoint, train
from minitf.data import pipeline


def unreadable(rows, seq_len, cfg, seed, real=pipeline.training_rows):
    def check(i, row):
        if i >= 7 * 16 and jax.process_index() == 1:
            raise RuntimeError("this record cannot be read")
        return row

    return real(rows, seq_len, cfg, seed).map_with_index(check)


def unsaved(self, *args, real=checkpoint.Checkpoints.save):
    if jax.process_index() == 1:
        raise RuntimeError("nobody expects this")
    return real(self, *args)


def status(arguments):
    try:
        return train.main(arguments)
    except SystemExit as e:
        return e.code


if __name__ == "__main__":
    commands, *fault = sys.argv[1:]
    if fault == ["record"]:
        pipeline.training_rows = unreadable
    elif fault == ["save"]:
        checkpoint.Checkpoints.save = unsaved
    statuses = [status(arguments) for arguments in json.loads(commands)]
    print(statuses)
    sys.exit(max(statuses))
