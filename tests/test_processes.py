"""Training on several real processes on this machine, which talk over loopback, is training on one."""

import json
import signal
from pathlib import Path

import pytest
from common import Processes, arguments, change, launch, steps_of, text_config

from minitf.workdir import resolve
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
    status, _ = launch(configured(corpus), workdir)
    assert status == 0
    return workdir


def read(workdir):
    return compare_runs.read(resolve(str(workdir)))


def assert_equal_runs(a, b, tolerance=1e-5):
    """The same batches to the last bit, losses within the tolerance, in the same steps."""
    a, b = read(a), read(b)
    assert a.batches == b.batches
    assert len(set(a.batches.values())) > 1
    for tag in ("train/loss", "eval/loss"):
        x, y = a.series(tag), b.series(tag)
        assert x.keys() == y.keys()
        worst = max((abs(x[step] - y[step]) for step in x), default=0)
        assert worst <= tolerance, f"{tag}: {worst:.3g}"


@pytest.mark.parametrize(
    ("n", "devices", "meshes"),
    [
        pytest.param(2, 2, ("fsdp", "tp across"), marks=pytest.mark.slow),
        pytest.param(2, 4, ("dp", "tp inside"), marks=pytest.mark.slow),
        pytest.param(4, 2, ("dp", "tp across"), marks=pytest.mark.slow),
        pytest.param(4, 2, ("hybrid",), marks=pytest.mark.slow),
    ],
)
def test_several_processes_train_as_one(n, devices, meshes, corpus, alone, tmp_path):
    commands = [arguments(on_mesh(configured(corpus), mesh), tmp_path / mesh) for mesh in meshes]
    change = ["hosts"] if "hybrid" in meshes else []
    with Processes(n, "several_runs", json.dumps(commands), *change, devices=devices, logs=tmp_path) as processes:
        assert processes.wait() == [0] * n, processes.err(0)
        told = [processes.out(i) for i in range(n)]
    for mesh in meshes:
        assert_equal_runs(alone, tmp_path / mesh)
    # The first writes; the others say how they started, and nothing else.
    assert f"devices: {n * devices} x cpu in {n} processes" in told[0]
    assert told[0].count("step 10/10  loss") == len(meshes)
    for i in range(1, n):
        assert f"process {i} of {n}: by MINITF_COORDINATOR" in told[i]
        assert told[i].splitlines()[-1] == str([0] * len(meshes))
        assert "parameters" not in told[i]
        assert "loss" not in told[i]
    if "hybrid" in meshes:
        assert "mesh data=4, fsdp=2, expert=1, tensor=1; across 4 hosts: data=4" in told[0]


# ---- stopped, killed, resumed


def saved(workdir):
    return sorted(int(p.name) for p in (workdir / "checkpoints").iterdir())


def test_a_signal_to_one_process_stops_all_after_the_same_step_with_one_checkpoint(corpus, tmp_path):
    command = arguments(configured(corpus, steps=100_000, eval_every=None, checkpoint__last=True), tmp_path / "w")
    with Processes(2, "minitf.train", *command, devices=1, logs=tmp_path) as processes:
        processes.wait_for_step(tmp_path / "w", 3)
        processes.all[1].send_signal(signal.SIGTERM)
        assert processes.wait(60) == [3, 3], processes.err(0)
        assert "SIGTERM: the run saves and ends within two steps" in processes.err(1)
        last = steps_of(tmp_path / "w")[-1]
        assert f"stopped by SIGTERM after step {last} of 100000; the same command goes on" in processes.out(0)
    assert saved(tmp_path / "w") == [last]


@pytest.mark.slow
def test_one_of_four_killed_ends_all_and_the_same_command_goes_on(corpus, tmp_path):
    cfg = configured(corpus, steps=30, eval_every=None, checkpoint__every=5)
    kinds = {name: arguments(cfg, tmp_path / name) for name in ("whole", "killed")}
    with Processes(4, "minitf.train", *kinds["whole"], devices=1, logs=tmp_path) as processes:
        assert processes.wait() == [0] * 4
    with Processes(4, "minitf.train", *kinds["killed"], devices=1, logs=tmp_path) as processes:
        processes.wait_for_step(tmp_path / "killed", 12)
        processes.all[2].kill()
        statuses = processes.wait(60)  # from now on, as nothing was waited for before
        assert statuses[2] == -signal.SIGKILL
        assert all(statuses)
        for i in (0, 1, 3):
            assert "unhealthy (stopped sending heartbeats):\n2\n" in processes.err(i)
    with Processes(4, "minitf.train", *kinds["killed"], devices=1, logs=tmp_path) as processes:
        assert processes.wait() == [0] * 4
        assert "resuming after step " in processes.out(0)
    lines, equal = compare_runs.compare(read(tmp_path / "whole"), read(tmp_path / "killed"))
    assert equal, lines
    assert steps_of(tmp_path / "killed") == list(range(1, 31))


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(corpus, tmp_path):
    cfg = configured(corpus, steps=40, eval_every=None, checkpoint__last=True)
    status, _ = launch(change(cfg, mesh__fsdp=1), tmp_path / "alone")
    assert status == 0
    for steps, n in ((10, 4), (20, 2), (30, 1), (40, 4)):
        command = arguments(change(cfg, steps=steps), tmp_path / "w")
        with Processes(n, "minitf.train", *command, devices=1, logs=tmp_path) as processes:
            assert processes.wait() == [0] * n, processes.err(0)
    assert steps_of(tmp_path / "w") == list(range(1, 41))
    assert_equal_runs(tmp_path / "alone", tmp_path / "w")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["record", "save"])
def test_an_error_on_one_process_is_told_there_and_ends_all(fault, corpus, tmp_path):
    cfg = configured(corpus, steps=20, eval_every=None, checkpoint__every=5, checkpoint__last=True)
    commands = json.dumps([arguments(cfg, tmp_path / "w")])
    with Processes(2, "several_runs", commands, fault, devices=1, logs=tmp_path) as processes:
        statuses = processes.wait(120)
        if fault == "record":  # known before its step: what was done is saved
            assert statuses == [1, 1]
            assert "error: the batch of step 8: RuntimeError: this record cannot be read" in processes.err(1)
            assert "stopped by an error in process 1 after step 7 of 20; the same command goes on" in processes.out(0)
            assert saved(tmp_path / "w")[-1] == 7
        else:
            assert all(statuses)
            assert "error on process 1 of 2:\nTraceback" in processes.err(1)
            assert "RuntimeError: nobody expects this" in processes.err(1)
            assert "unhealthy (stopped sending heartbeats):\n1\n" in processes.err(0)


@pytest.mark.slow
def test_what_one_process_cannot_read_no_process_restores(corpus, tmp_path):
    # Small values would stand in files that all processes read.
    cfg = configured(corpus, checkpoint__every=5, model__mlp__hidden=512)
    with Processes(2, "minitf.train", *arguments(cfg, tmp_path / "w"), devices=2, logs=tmp_path) as processes:
        assert processes.wait() == [0, 0]
    for file in (tmp_path / "w/checkpoints/10/state/ocdbt.process_1/d").iterdir():  # the second process's shards
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 3])
    longer = arguments(change(cfg, steps=12), tmp_path / "w")
    with Processes(2, "minitf.train", *longer, devices=2, logs=tmp_path) as processes:
        assert processes.wait(120) == [0, 0]
        assert "warning: the checkpoint of step 10 is damaged" in processes.out(0)
        assert "resuming after step 5 of 12" in processes.out(0)
    assert (tmp_path / "w/checkpoints/10.damaged").exists()
    assert steps_of(tmp_path / "w") == list(range(1, 13))


# ---- refused


def test_what_does_not_fit_ends_all_processes_with_one_message(corpus, tmp_path):
    cfg = configured(corpus)
    commands = {
        "mesh.data=3, mesh.fsdp=1, mesh.expert=1, mesh.tensor=1: the product is 3, but there are 4 devices": dict(
            mesh__data=3, mesh__fsdp=1
        ),
        "mesh.data=16, mesh.fsdp=1, mesh.expert=1, mesh.tensor=1: the product is 16, but": dict(
            mesh__data=16, mesh__fsdp=1
        ),
        "batch_size=6: not divisible by accumulation=1 times the 4 devices": dict(batch_size=6, accumulation=1),
        "blocks/0/attention/k: axis 'kv_heads' has size 2, not divisible by mesh axis 'tensor' of size 4": dict(
            mesh__tensor=4, model__attention__num_kv_heads=2
        ),
        "mesh.dcn_data=2, mesh.dcn_fsdp=1, mesh.dcn_expert=1, mesh.dcn_tensor=1: the product is 2, but there are 1 hosts": dict(
            mesh__dcn_data=2
        ),
    }
    lines = [arguments(change(cfg, **changes), tmp_path / "w") for changes in commands.values()]
    with Processes(2, "several_runs", json.dumps(lines), logs=tmp_path) as processes:
        assert processes.wait(60) == [2, 2]
        told = processes.err(0).splitlines()
        assert str([2] * len(commands)) in processes.out(1)
        assert processes.err(1) == ""
    assert len(told) == len(commands)
    for line, words in zip(told, commands, strict=True):
        assert line.startswith(f"error: on process 0: {words}")
    assert not (tmp_path / "w").exists()


def test_processes_with_other_data_are_refused(corpus, tmp_path):
    for i in range(2):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "text.txt").write_text(f"text of process {i} " * 100)
    cfg = change(configured(corpus), data__path="~/text.txt", data__val_path=None)
    home = lambda i: {"HOME": str(tmp_path / str(i))}
    command = arguments(cfg, tmp_path / "w")
    with Processes(2, "minitf.train", *command, logs=tmp_path, of_each=home) as processes:
        assert processes.wait(60) == [2, 2]
        assert processes.err(0) == "error: on process 0: settings or data of process 1 differ from those of process 0\n"


def test_a_process_that_does_not_come_is_named(corpus, tmp_path):
    cfg = configured(corpus, distributed__start_timeout=2)
    with Processes(3, "minitf.train", *arguments(cfg, tmp_path / "w"), logs=tmp_path) as processes:
        processes.all[1].kill()
        statuses = processes.wait(60)
        for i in (0, 2):
            assert statuses[i] != 0
            assert "# of tasks that reached the barrier: 2/3" in processes.err(i)
            assert "Some timed out task names:\n1\n" in processes.err(i)


# ---- rows


def test_every_row_of_a_batch_is_read_once_and_all_processes_see_as_many_batches(tmp_path):
    cases = [
        dict(rows=rows, tokens=rows * 4 + 1 - short, batch_size=8, batches=6, mesh=mesh)
        # Fewer rows than processes, fewer than a batch, many; and a last row that is not full.
        for rows, short in ((2, 0), (1, 0), (5, 0), (40, 0), (5, 2))
        for mesh in (dict(data=-1, fsdp=1), dict(fsdp=-1, tensor=2), dict(fsdp=-1, tensor=4))
    ]
    found = {}
    for n, devices in ((1, 4), (4, 1)):
        with Processes(n, "several_batches", json.dumps(cases), devices=devices, logs=tmp_path) as processes:
            assert processes.wait(120) == [0] * n, processes.err(0)
            found[n] = [json.loads(processes.out(i).splitlines()[-1]) for i in range(n)]
    for number, case in enumerate(cases):
        (one,) = (f[number] for f in found[1])
        four = [f[number] for f in found[4]]
        for kind in (0, 1):  # training, evaluation
            whole = one[kind]
            assert all(len(whole) == len(f[kind]) > 0 for f in four)
            for k, batch in enumerate(whole):
                parts = [f[kind][k] for f in four]
                assert sorted(batch, key=int) == [str(r) for r in range(8)]
                assert {r: v for part in parts for r, v in part.items()} == batch
                shared = case["mesh"].get("tensor", 1)  # processes of a tensor axis read the same rows
                assert sum(len(part) for part in parts) == 8 * shared
        # No process reads what its devices do not hold.
        assert all(f[2] == sorted(int(r) for r in f[0][0]) for f in four)
        # Each token of the evaluation counts once.
        assert sum(sum(batch.values()) for batch in one[1]) == case["tokens"] - 1
