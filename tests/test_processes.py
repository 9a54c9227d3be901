"""Training on several real processes on this machine, which talk over loopback, is training on one."""

import json
from pathlib import Path

import pytest
from common import Processes, arguments, change, launch, text_config

from minitf import run
from tools import compare_runs

pytestmark = pytest.mark.usefixtures("rate_known")

HEADS = dict(model__attention__num_kv_heads=4)  # so that tensor=4 divides them
MESHES = {
    "dp": dict(data=-1, fsdp=1),
    "fsdp": dict(fsdp=-1),
    "tp inside": dict(fsdp=-1, tensor=2),
    "tp across": dict(fsdp=-1, tensor=4),
    "hybrid": dict(fsdp=-1, dcn_data=-1),
}


def configured(corpus: Path, **changes):
    """Ten steps of TINY on text with all that draws numbers: shuffling, dropout; and accumulation."""
    cfg = text_config(
        corpus, steps=10, batch_size=16, accumulation=2, model__dropout=0.1, eval_every=5, eval_batches=None
    )
    return change(cfg, **HEADS, mesh__fsdp=-1, **changes)


def on_mesh(cfg, name):
    return change(cfg, **{f"mesh__{axis}": n for axis, n in MESHES[name].items()})


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    """The same on one device of this process."""
    workdir = tmp_path_factory.mktemp("alone") / "w"
    status, lines = launch(configured(corpus), workdir)
    assert status == 0
    return workdir, lines


def read(workdir):
    return compare_runs.read(run.resolve(str(workdir)))


def assert_equal_runs(a, b, tolerance=1e-5):
    """The same batches to the last bit, losses within the tolerance, in the same steps."""
    a, b = read(a), read(b)
    assert a.batches == b.batches
    for tag in ("train/loss", "eval/loss"):
        x, y = a.series(tag), b.series(tag)
        assert x.keys() == y.keys()
        assert len(x) > 1
        worst = max(abs(x[step] - y[step]) for step in x)
        assert worst <= tolerance, f"{tag}: {worst:.3g}"


@pytest.mark.parametrize(
    ("n", "devices", "hosts", "meshes"),
    [
        (2, 2, 1, ("dp", "fsdp", "tp inside", "tp across")),
        pytest.param(2, 4, 1, ("dp", "fsdp", "tp inside"), marks=pytest.mark.slow),
        pytest.param(4, 2, 1, ("dp", "fsdp", "tp inside", "tp across"), marks=pytest.mark.slow),
        # Processes with the same number count as one host.
        pytest.param(4, 2, 2, ("dp", "fsdp", "tp across", "hybrid"), marks=pytest.mark.slow),
    ],
)
def test_several_processes_train_as_one(n, devices, hosts, meshes, corpus, alone, tmp_path):
    commands = [arguments(on_mesh(configured(corpus), mesh), tmp_path / mesh) for mesh in meshes]
    host = lambda i: {"JAX_PARTITION_INDEX": str(i * hosts // n)} if hosts > 1 else {}
    with Processes(n, "several_runs", json.dumps(commands), devices=devices, logs=tmp_path, of_each=host) as processes:
        assert processes.wait() == [0] * n, processes.err(0)
        told = [processes.out(i) for i in range(n)]
    for mesh in meshes:
        assert_equal_runs(alone[0], tmp_path / mesh)
    # The first writes; the others say how they started, and nothing else.
    assert f"devices: {n * devices} x cpu in {n} processes" in told[0]
    assert told[0].count("step 10/10  loss") == len(meshes)
    for i in range(1, n):
        mine = [line for line in told[i].splitlines() if not line.startswith("[Gloo]")]
        assert mine[0].startswith(f"process {i} of {n}: by MINITF_COORDINATOR")
        assert len(mine) == 1
    if "hybrid" in meshes:
        assert "mesh data=2, fsdp=4, tensor=1; across 2 hosts: data=2" in told[0]
