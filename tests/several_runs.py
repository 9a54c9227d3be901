"""Trains several times, one run after the other, in the same processes: starting them anew would take most of the time.

python -m several_runs '[[ARGUMENT, ...], ...]' [CHANGE]    # each list is what minitf.train gets

Prints the statuses last. CHANGE is `record`, one that process 1 alone cannot read; `save`, an error that nothing expects, on
process 1 alone; `hosts`: each process counts as a host, as on machines apart.
"""

import functools
import json
import sys

import jax
from watched_rows import Watched

from minitf import startup, train
from minitf.data import pipeline
from minitf.runtime import checkpoint
from minitf.sharding import devices


def unreadable(rows, seq_len, cfg, seed, real=pipeline.training_rows):
    def check(i):
        if i >= 7 * 16 and jax.process_index() == 1:
            raise RuntimeError("this record cannot be read")

    return Watched(real(rows, seq_len, cfg, seed), check)


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
    commands, *change = sys.argv[1:]
    if change == ["record"]:
        pipeline.training_rows = unreadable
    elif change == ["save"]:
        checkpoint.Checkpoints.save = unsaved
    elif change == ["hosts"]:
        for module in (devices, startup):
            module.host_count = lambda found: len({d.process_index for d in found})
        grid = devices.mesh_utils.create_hybrid_device_mesh
        devices.mesh_utils.create_hybrid_device_mesh = functools.partial(grid, process_is_granule=True)
    statuses = [status(arguments) for arguments in json.loads(commands)]
    print(statuses)
    sys.exit(max(statuses))
