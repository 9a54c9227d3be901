"""Prints, as one process of several, which rows of each batch its devices hold.

python -m several_batches '[{"rows": ..., "tokens": ..., "batch_size": ..., "batches": ..., "mesh": {...}}, ...]'
"""

import argparse
import itertools
import json
import sys

import numpy as np
from watched_rows import Watched

from minitf.data import datasets, pipeline
from minitf.data.store import Store
from minitf.runtime import processes
from minitf.sharding.devices import make_mesh
from minitf.sharding.mesh import MeshConfig, batch_sharding


def held(case):
    """[[{row: its first id} of each batch of training], [{row: its weights' sum} of each batch of evaluation], the rows of a
    batch that were read for training]"""
    store = Store("counted", np.arange(case["rows"] * 4 + 1, dtype=np.uint16)[: case["tokens"]], 65536)
    cfg = datasets.DataConfig()
    layout = batch_sharding(make_mesh(MeshConfig(**case["mesh"])))

    def rows(batches, value):
        return [
            {
                (s.index[0].start or 0) + i: value(row)
                for s in found.addressable_shards
                for i, row in enumerate(np.asarray(s.data))
            }
            for found in batches
        ]

    n, read = case["batch_size"], set()

    watched = Watched(pipeline.training_rows(store, 4, cfg, 1), lambda index: read.add(index % n))
    train = pipeline.batches(watched, n, layout, cfg)
    train = itertools.islice(train, case["batches"])
    evaluation = pipeline.batches(pipeline.evaluation_rows(store, 4, cfg, n, None), n, layout, cfg)
    return [
        rows((b["inputs"] for b in train), lambda row: int(row[0])),
        rows((b["weights"] for b in evaluation), lambda row: int(row.sum())),
        sorted(read),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    processes.add_arguments(parser)
    processes.start(processes.DistributedConfig(), parser.parse_args([]))
    print(json.dumps([held(case) for case in json.loads(sys.argv[1])]))
