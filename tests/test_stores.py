"""Token stores on disk as training data: what is read, packed, mixed, gone on with."""

import itertools
import json
import os
import pickle
import re
import subprocess
import sys
from collections import Counter

import jax
import numpy as np
import psutil
import pytest
from common import (
    ROOT,
    TINY,
    Processes,
    arguments,
    assert_close,
    change,
    launch,
    make_mesh,
    make_store,
    run_module,
    series,
    some_texts,
)

from minitf import checks, loop, services, startup
from minitf import job as job_lib
from minitf.command_line import parse_value
from minitf.data import datasets, pipeline
from minitf.data.datasets import DataConfig
from minitf.data.loader import LoaderError
from minitf.data.mixture import Phase, order
from minitf.data.pipeline import HostBatches, mixed_rows
from minitf.runtime.checkpoint import Checkpoints
from minitf.runtime.log import json_lines
from minitf.sharding.mesh import batch_sharding
from minitf.workdir import resolve
from tools import compare_runs

PACKINGS = [dict(), dict(isolate_documents=True), dict(packing="best_fit"), dict(packing="documents")]
named = pytest.mark.parametrize("packing", PACKINGS, ids=lambda p: "-".join(map(str, p.values())) or "concat")


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Two stores of many little shards, with plans for rows of 16."""
    folder = tmp_path_factory.mktemp("stores")
    for name, n in (("large", 150), ("small", 40)):
        texts = some_texts(n, seed=n)
        make_store(folder / name, texts, "--shard_tokens", 400, "--pack", 16, "--val_fraction", 0.2)
    return folder


def config_of(stores, mixture=None, **changes):
    """TINY on a store, or on a mixture of both."""
    where = dict(path=str(stores / "large")) if mixture is None else dict(path=None)
    if mixture is not None:
        where["mixture"] = tuple((str(stores / name), weight) for name, weight in mixture.items())
    cfg = change(TINY, model__vocab_size=264, mesh__fsdp=1, log_every=1)
    return change(cfg, **{f"data__{k}": v for k, v in {"kind": "store", **where, **changes}.items()})


def documents_in(store):
    return [store.ids[a:b].tolist() for a, b in itertools.pairwise(store.offsets.tolist())]


# ---- what is read


def test_many_shards_read_as_one_array(stores):
    whole = make_store(stores / "whole", some_texts(150, seed=150), "--pack", 16, "--val_fraction", 0.2)
    one, many = (datasets.load(DataConfig(kind="store", path=str(p)), None) for p in (whole, stores / "large"))
    assert len(list((stores / "large").glob("train-*.bin"))) > 3
    for a, b in ((one.train, many.train), (one.val, many.val)):
        assert len(a) == len(b)
        np.testing.assert_array_equal(a.ids[0 : len(a)], b.ids[0 : len(b)])
        np.testing.assert_array_equal(a.offsets, b.offsets)
        for start in range(0, len(a), 97):
            for n in (0, 1, 5, 400, 1300):
                np.testing.assert_array_equal(a.ids[start : start + n], b.ids[start : start + n])
        assert a.text_bytes == b.text_bytes == len(a) - len(documents_in(a))
    assert one.sha256 != many.sha256


@named
def test_each_packing_covers_each_token_as_it_says(packing, stores):
    cfg = DataConfig(kind="store", path=str(stores / "large"), **packing)
    store = datasets.load(cfg, None).train
    rows = pipeline.rows_of(store, 16, cfg, tail=True)
    found, positions = Counter(), 0
    for i in range(len(rows)):
        row = rows[i]
        counted = row["weights"] > 0
        found.update(zip(row["inputs"][counted].tolist(), row["targets"][counted].tolist(), strict=True))
        positions += int(counted.sum())
    documents = documents_in(store)
    pairs = itertools.pairwise
    if packing.get("packing") == "documents":
        expected = Counter(itertools.chain(*(pairs(d[:17]) for d in documents)))
    elif packing:
        expected = Counter(itertools.chain(*(pairs(d) for d in documents)))
    else:
        expected = Counter(pairs(list(itertools.chain(*documents))))
    assert found == expected
    assert positions == sum(expected.values())


def test_a_store_travels_to_another_process_without_its_contents(stores, tmp_path):
    np.arange(100_000, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    cfgs = [
        DataConfig(kind="store", path=str(stores / "large")),
        DataConfig(kind="tokens", path=str(tmp_path / "ids.bin"), val_fraction=0.5),
    ]
    for cfg in cfgs:
        corpus = datasets.load(cfg, 65536)
        for store in (corpus.train, corpus.val):
            packed = pickle.dumps(store)
            assert len(packed) < 6000
            again = pickle.loads(packed)
            np.testing.assert_array_equal(again.ids[0 : len(again)], store.ids[0 : len(store)])


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda d: (d / "manifest.json").unlink(), "no token store (manifest.json is missing)"),
        (lambda d: (d / "manifest.json").write_text("{"), "manifest.json: not readable"),
        (lambda d: (d / "train-00000.bin").unlink(), "train-00000.bin: is missing, must have"),
        (lambda d: os.truncate(d / "val-00000.idx", 8), "val-00000.idx: has 8 bytes, must have"),
        (lambda d: (d / "tokenizer.json").write_text('{"type": "chars", "alphabet": "ab"}'), "has fingerprint"),
        (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json: No such file"),
        (lambda d: edit(d, lambda m: m.update(version=2)), "is 'minitf token store' version 2, not"),
        (
            lambda d: edit(d, lambda m: m["splits"]["train"]["shards"][0].update(name="../x")),
            "names '../x', which leads out",
        ),
    ],
)
def test_a_store_that_is_not_whole_is_refused_by_name(harm, message, tmp_path):
    directory = make_store(tmp_path / "store", some_texts(20), "--val_fraction", 0.2)
    harm(directory)
    with pytest.raises(ValueError) as raised:
        job_lib.prepare(config_of(tmp_path, path=str(directory)), jax.devices()[:1])
    assert message in str(raised.value)


def edit(directory, change_it):
    manifest = json.loads((directory / "manifest.json").read_text())
    change_it(manifest)
    (directory / "manifest.json").write_text(json.dumps(manifest))


def test_a_row_length_without_a_plan_names_the_command_that_makes_it(stores):
    cfg = change(config_of(stores, packing="best_fit"), seq_len=12)
    with pytest.raises(ValueError, match=r"no best-fit plan for seq_len=12 \(there are: 16\); .*--pack 12"):
        job_lib.prepare(cfg, jax.devices()[:1])


def test_another_tokenizer_in_a_mixture_is_refused(stores, tmp_path):
    from tools import train_tokenizer

    (tmp_path / "text.txt").write_text(" ".join(some_texts(50)))
    train_tokenizer.main(
        ["--input", str(tmp_path / "text.txt"), "--output", str(tmp_path / "bpe"), "--vocab_size", "270"]
    )
    other = make_store(tmp_path / "other", some_texts(30), "--val_fraction", 0.2, tokenizer=str(tmp_path / "bpe"))
    cfg = change(config_of(stores), data__path=None, data__mixture=((str(stores / "large"), 1.0), (str(other), 1.0)))
    with pytest.raises(ValueError, match=r"data\.mixture: the stores have different tokenizers"):
        job_lib.prepare(change(cfg, model__vocab_size=None), jax.devices()[:1])
    with pytest.raises(ValueError, match="names a store twice"):
        checks.check(change(cfg, data__mixture=((str(other), 1.0), (str(other), 2.0))))


# ---- figures


def test_tokens_are_targets_that_count_and_positions_are_told_apart(stores, tmp_path, capsys, monkeypatch, rate_known):
    cfg = change(config_of(stores, packing="documents"), steps=3, checkpoint__last=True)
    batches = itertools.islice(job_lib.training_batches(job_lib.prepare(cfg, jax.devices()[:1])), 4)
    counts = [int((np.asarray(batch["weights"]) > 0).sum()) for batch in batches]
    assert sum(counts) < 4 * 8 * 16
    about = loop.about  # a checkpoint as it was before tokens were counted
    monkeypatch.setattr(loop, "about", lambda *rest: {k: v for k, v in about(*rest).items() if k != "tokens_seen"})
    _, (_, *lines) = launch(cfg, tmp_path / "w")
    assert [line["train/tokens_seen"] for line in lines] == np.cumsum(counts[:3]).tolist()
    assert [line["train/positions_seen"] for line in lines] == [128, 256, 384]
    for line, count in zip(lines, counts, strict=False):
        assert line["perf/tokens_per_s"] == pytest.approx(count / line["perf/step_time_s"])
        assert line["perf/positions_per_s"] == pytest.approx(128 / line["perf/step_time_s"])
    assert re.search(r"step 3/3 .* tokens/s \(.* positions/s\)  MFU", capsys.readouterr().out)
    _, lines = launch(change(cfg, steps=4), tmp_path / "w")
    assert "no count of tokens: train/tokens_seen goes on from all 384 positions" in capsys.readouterr().out
    assert lines[-1]["train/tokens_seen"] == 384 + counts[3]


# ---- order, hosts, processes


@named
@pytest.mark.parametrize(
    "mixture",
    [pytest.param(None, marks=pytest.mark.slow), {"large": 0.7, "small": 0.3}],
    ids=["alone", "mixture"],
)
def test_each_epoch_is_another_permutation_decided_by_the_seed(mixture, packing, stores):
    cfg = config_of(stores, mixture, **packing).data
    corpora = datasets.load_all(cfg, None)
    sizes = [len(pipeline.rows_of(c.train, 16, cfg)) for c in corpora]
    phases = [] if mixture is None else [Phase(0, tuple(mixture.values()), (0, 0))]

    def epochs(seed):
        rows = mixed_rows([c.train for c in corpora], phases, 16, cfg, seed)
        chosen = np.zeros(2 * sizes[0], int) if mixture is None else order(phases[0].weights)[0][: 8 * sum(sizes)]
        by_store = [[] for _ in corpora]
        for i, s in enumerate(chosen):
            by_store[s].append(tuple(rows[i]["inputs"].tolist() + rows[i]["targets"].tolist()))
        return [[mine[j : j + n] for j in range(0, 2 * n, n)] for mine, n in zip(by_store, sizes, strict=True)]

    first, other = epochs(1), epochs(2)
    for (a, b), (c, _), corpus in zip(first, other, corpora, strict=True):
        rows = pipeline.rows_of(corpus.train, 16, cfg)
        everything = Counter(tuple(rows[i]["inputs"].tolist() + rows[i]["targets"].tolist()) for i in range(len(rows)))
        assert Counter(a) == Counter(b) == Counter(c) == everything
        assert a != b
        assert a != c
    assert first == epochs(1)


@named
@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_together_read_the_global_batches_and_each_only_its_rows(hosts, packing, stores):
    cfg = config_of(stores, {"large": 3.0, "small": 1.0}, **packing).data
    rows = mixed_rows([c.train for c in datasets.load_all(cfg, None)], [Phase(0, (3.0, 1.0), (0, 0))], 16, cfg, 5)
    whole = [rows[i]["inputs"].tolist() for i in range(5 * 8)]
    share = 8 // hosts
    each = [HostBatches(rows, 8, list(range(h * share, (h + 1) * share))) for h in range(hosts)]
    found = [each[h][k]["inputs"][r].tolist() for k in range(5) for h in range(hosts) for r in range(share)]
    assert found == whole


LOADERS = [
    {**packing, **more} for packing in PACKINGS for more in (dict(), dict(shuffle=False), dict(mixture=True))
] + [dict(workers=1), dict(workers=2, mixture=True)]
CONTINUE = """
import json, sys
from pathlib import Path
from tests.test_stores import batches_of
if __name__ == "__main__":
    folder, positions, n = json.load(sys.stdin)
    json.dump(batches_of(Path(folder), positions, n), sys.stdout)
"""


def batches_of(folder, positions, n):
    """For every way to load and every position the ids of the next n batches."""
    out = []
    layout = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for loader in LOADERS:
        mixture = {"large": 0.7, "small": 0.3} if loader.get("mixture") else None
        cfg = config_of(folder, mixture, **{k: v for k, v in loader.items() if k != "mixture"}).data
        phases = [] if mixture is None else [Phase(0, (1.0, 1.0), (0, 0)), Phase(24, (0.7, 0.3), (12, 12))]
        rows = mixed_rows([c.train for c in datasets.load_all(cfg, None)], phases, 16, cfg, seed=3)
        for start in positions:
            found = pipeline.batches(rows, 8, layout, cfg, start)
            out.append([np.asarray(next(found)["inputs"]).tolist() for _ in range(n)])
            found.close()
    return out


@pytest.mark.slow
def test_a_new_process_goes_on_at_any_position(stores, tmp_path):
    positions = (0, 1, 7)
    whole = batches_of(stores, (0,), 27)
    script = tmp_path / "go_on.py"
    script.write_text(CONTINUE)
    done = subprocess.run(
        [sys.executable, script],
        input=json.dumps([str(stores), positions, 20]),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
    )
    found = json.loads(done.stdout)
    assert found == [w[start : start + 20] for w in whole for start in positions]
    # Worker processes change nothing.
    assert whole[-2] == whole[0]
    assert whole[-1] == whole[2]


@pytest.mark.slow
def test_a_worker_that_dies_is_an_error_and_none_stays_behind(stores):
    cfg = config_of(stores, workers=2).data
    rows = mixed_rows([datasets.load(cfg, None).train], [], 16, cfg, seed=3)
    found = pipeline.batches(rows, 8, batch_sharding(make_mesh("1")), cfg)
    assert len(list(itertools.islice(found, 4))) == 4  # from both
    workers = [p for p in psutil.Process().children(recursive=True) if "resource_tracker" not in " ".join(p.cmdline())]
    assert len(workers) == 2
    workers[1].kill()
    with pytest.raises(LoaderError, match=f"^worker process {workers[1].pid} was killed by SIGKILL"):
        list(itertools.islice(found, 10_000))
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive


# ---- runs


def last_position(workdir):
    with Checkpoints(resolve(str(workdir)) / "checkpoints", read_only=True) as checkpoints:
        return checkpoints.newest_about()[1]["data"]


@pytest.mark.parametrize(
    "packing",
    [dict(packing="best_fit"), *(pytest.param(p, marks=pytest.mark.slow) for p in PACKINGS if "packing" not in p)],
    ids=lambda p: "-".join(map(str, p.values())) or "concat",
)
def test_a_run_on_a_mixture_goes_on_as_if_never_stopped(packing, stores, tmp_path, rate_known):
    cfg = config_of(stores, {"large": 0.7, "small": 0.3}, **packing)
    cfg = change(cfg, steps=8, checkpoint__last=True, optimizer__schedule="constant", eval_every=4, eval_batches=2)
    _, whole = launch(cfg, tmp_path / "whole")
    for steps in (3, 8):
        status, lines = launch(change(cfg, steps=steps), tmp_path / "parts")
        assert status == 0
    assert series(lines, "train/tokens_seen") == series(whole, "train/tokens_seen")
    assert ("train/positions_seen" in lines[-2]) == ("packing" in packing or packing.get("isolate_documents", False))
    read = [compare_runs.read(resolve(str(tmp_path / name))) for name in ("whole", "parts")]
    assert read[0].batches == read[1].batches
    assert last_position(tmp_path / "parts")["mixture"] == [[0, [0.7, 0.3], [0, 0]]]
    # Evaluation is of each store and of both.
    both = [series(lines, f"eval/{name}loss")[8] for name in ("large/", "small/", "")]
    assert min(both[:2]) <= both[2] <= max(both[:2])


def test_new_weights_are_a_new_phase_and_other_stores_another_run(stores, tmp_path, rate_known):
    cfg = change(config_of(stores, {"large": 0.7, "small": 0.3}), steps=8, checkpoint__last=True)
    launch(change(cfg, steps=3), tmp_path / "w")
    new = config_of(stores, {"large": 0.2, "small": 0.8}).data
    launch(change(cfg, steps=5, data=new), tmp_path / "w")
    launch(cfg, tmp_path / "w")
    phases = last_position(tmp_path / "w")["mixture"]
    assert [(row, weights) for row, weights, _ in phases] == [(0, [0.7, 0.3]), (24, [0.2, 0.8]), (40, [0.7, 0.3])]
    assert [sum(taken) for _, _, taken in phases] == [0, 24, 40]
    swapped = config_of(stores, {"small": 0.3, "large": 0.7}).data
    with pytest.raises(services.Refused, match="data sha256"):
        launch(change(cfg, steps=9, data=swapped), tmp_path / "w")


@pytest.mark.slow
@pytest.mark.parametrize("mixture", [None, {"large": 0.7, "small": 0.3}], ids=["alone", "mixture"])
def test_a_run_goes_on_with_another_number_of_processes(mixture, stores, tmp_path, rate_known):
    cfg = change(config_of(stores, mixture, packing="best_fit"), steps=30, batch_size=16, checkpoint__last=True)
    cfg = change(cfg, mesh__fsdp=-1)
    launch(change(cfg, mesh__fsdp=1), tmp_path / "alone")
    for steps, n in ((10, 4), (20, 1), (30, 2)):
        command = arguments(change(cfg, steps=steps), tmp_path / "w")
        if mixture is not None:
            written = ",".join(f"{path}:{weight}" for path, weight in cfg.data.mixture)
            command = [f"--config.data.mixture={written}" if "data.mixture" in c else c for c in command]
        with Processes(n, "minitf.train", *command, devices=1, logs=tmp_path) as processes:
            assert processes.wait() == [0] * n, processes.err(0)
    read = [compare_runs.read(resolve(str(tmp_path / name))) for name in ("alone", "w")]
    assert read[0].batches == read[1].batches
    losses = [series(json_lines(resolve(str(tmp_path / n)) / "metrics.jsonl"), "train/loss") for n in ("alone", "w")]
    assert_close(losses[1], losses[0], 1e-5)


def test_a_mixture_is_written_as_paths_and_weights():
    kind = tuple[tuple[str, float], ...]
    assert parse_value("data.mixture", "a/b:0.5,gs://c/d:2", kind) == (("a/b", 0.5), ("gs://c/d", 2.0))
    for text in ("a", "a:b", "a:1,b"):
        with pytest.raises(ValueError, match=f"--config.data.mixture={text}: must be tuple"):
            parse_value("data.mixture", text, kind)


@named
def test_fewer_rows_than_a_batch_wrap_around_and_are_said(packing, tmp_path):
    make_store(tmp_path / "one", ["abcdefgh" * 6] * 2, "--val_fraction", 0, "--pack", 16)
    cfg = config_of(tmp_path, path=str(tmp_path / "one"), **packing)
    job = job_lib.prepare(cfg, jax.devices()[:1])
    assert 0 < job.rows < 8
    assert f"{job.rows} training rows are fewer than batch_size=8" in startup.describe(job)
    found = [np.asarray(b["inputs"]) for b in itertools.islice(job_lib.training_batches(job), 3)]
    assert len({row.tobytes() for batch in found for row in batch}) <= job.rows


def test_a_tokenizer_larger_than_the_model_is_refused_with_both_sizes(stores):
    with pytest.raises(ValueError, match=r"model\.vocab_size=200 is smaller than the 259 ids"):
        job_lib.prepare(change(config_of(stores), model__vocab_size=200), jax.devices()[:1])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stray_id_ends_the_run_by_its_file_from_a_worker_too(workers, tmp_path):
    directory = make_store(tmp_path / "store", some_texts(60), "--val_fraction", 0.2)
    ids = np.fromfile(directory / "train-00000.bin", np.uint16)
    ids[-20:] = 300
    ids.tofile(directory / "train-00000.bin")
    cfg = config_of(tmp_path, path=str(directory), workers=workers, shuffle=False)
    done = run_module("minitf.train", *arguments(change(cfg, steps=40), tmp_path / "w"))
    assert done.returncode == 2, done.stderr
    assert f"error: {directory} (train): id 300 at token" in done.stderr
    assert "is not below the vocabulary size 259" in done.stderr
