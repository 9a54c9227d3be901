"""The whole run: data, steps, evaluation, logs; and what must not change it."""

import json
import math
import os

import jax
import numpy as np
import pytest
from common import MESHES, ROOT, TEXT, change, launch, random_params, run_module, series, text_config

from minitf import config, loop
from minitf import job as job_lib
from minitf.config import CompilerOptions
from minitf.data import pipeline
from minitf.data.store import Rows
from minitf.model.transformer import model_params
from minitf.params import group_of, init_params, named
from minitf.runtime.writer import MetricWriter
from minitf.sharding.mesh import batch_sharding
from minitf.training import evaluation
from minitf.training.evaluation import eval_step
from minitf.workdir import differences


def test_steps_schedule_and_evaluations_count_optimizer_steps(corpus, tmp_path, capsys):
    cfg = text_config(
        corpus,
        steps=12,
        accumulation=4,
        eval_every=6,
        eval_batches=1,
        optimizer__schedule="cosine",
        optimizer__warmup_steps=4,
    )
    status, lines = launch(cfg, tmp_path / "w")
    assert status == 0
    assert list(series(lines, "train/loss")) == list(range(1, 13))
    assert list(series(lines, "eval/loss")) == [6, 12]
    assert series(lines, "eval/tokens") == {6: 8 * 16, 12: 8 * 16}
    assert "  on 128 of 300 validation tokens\n" in capsys.readouterr().out
    rates = series(lines, "train/learning_rate")
    assert rates[5] == pytest.approx(1e-3)  # the update after four others: optimizer step 4
    assert rates[1] == 0
    assert max(rates, key=rates.get) == 5
    assert series(lines, "train/tokens_seen")[12] == 12 * 8 * 16


@pytest.mark.slow
def test_evaluation_does_not_change_training(corpus, tmp_path):
    results = []
    for i, every in enumerate((5, 3, None)):
        cfg = text_config(corpus, steps=20, eval_every=every, model__dropout=0.1)
        _, lines = launch(cfg, tmp_path / str(i))
        final = {k: v for k, v in lines[-1 if every is None else -2].items() if k.startswith("norm/parameter")}
        results.append((series(lines, "train/loss"), final))
        assert len(series(lines, "eval/loss")) == {5: 4, 3: 7, None: 0}[every]
    assert len(results[0][0]) == 20
    assert results[0] == results[1] == results[2]


def test_one_compilation_of_each_step_over_odd_epochs(corpus, tmp_path, caplog):
    (tmp_path / "odd.txt").write_text(TEXT[: 41 * 8 + 1][: 8 * 16 * 5 + 1])  # 41 windows of 8, batch 8
    cfg = text_config(corpus, steps=None, epochs=3.0, seq_len=8, eval_every=5, eval_batches=None)
    cfg = change(cfg, data__path=str(tmp_path / "odd.txt"))
    jax.config.update("jax_log_compiles", True)  # on all threads
    try:
        with caplog.at_level("WARNING"):
            status, lines = launch(cfg, tmp_path / "w")
    finally:
        jax.config.update("jax_log_compiles", False)
    assert status == 0
    assert max(series(lines, "train/loss")) == math.ceil(3 * 41 / 8)
    compiled = [r.getMessage() for r in caplog.records if "Finished XLA compilation" in r.getMessage()]
    for name in ("train_step", "eval_step"):
        assert sum(name in m for m in compiled) == 1, compiled


@pytest.mark.slow
def test_memory_does_not_grow_with_steps(corpus, tmp_path):
    import psutil

    job = job_lib.prepare(text_config(corpus, steps=500, log_every=100), jax.devices()[:1])
    (tmp_path / "w").mkdir()
    used = {}
    write = MetricWriter.write

    def recording(self, step, values):
        used[step] = psutil.Process().memory_info().rss
        write(self, step, values)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(MetricWriter, "write", recording)
        loop.train(job, tmp_path / "w")
    assert used[500] < 1.05 * used[100]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data8", "fsdp8", "2x2x2"])
def test_a_run_on_a_mesh_has_the_losses_of_one_device(corpus, tmp_path, mesh):
    cfg = text_config(corpus, steps=5, model__vocab_size=64, eval_every=5)
    data, fsdp, tensor = MESHES[mesh]
    _, one = launch(cfg, tmp_path / "one")
    _, many = launch(change(cfg, mesh__data=data, mesh__fsdp=fsdp, mesh__tensor=tensor), tmp_path / "many", devices=8)
    for tag in ("train/loss", "eval/loss", "eval/bits_per_byte"):
        assert series(many, tag) == pytest.approx(series(one, tag), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [*(m for m in MESHES if m != "1"), "none given"])
def test_tiny_has_the_same_first_ten_losses_on_every_mesh(tmp_path, mesh):
    cfg = config.freeze(config.load_file(str(ROOT / "configs/tiny.py")))
    cfg = change(cfg, log_every=1, eval_every=None)  # the run's length stays, and with it the schedule
    losses = {}
    for name in ("1", mesh):
        sizes = dict(zip(("mesh__data", "mesh__fsdp", "mesh__tensor"), MESHES.get(name, (1, -1, 1)), strict=True))
        job = job_lib.prepare(change(cfg, **sizes), jax.devices()[:1] if name == "1" else None)
        (tmp_path / name).mkdir()
        with pytest.MonkeyPatch.context() as m:
            m.setattr(MetricWriter, "write", stop_after(10, losses.setdefault(name, [])))
            with pytest.raises(StopIteration):
                loop.train(job, tmp_path / name)
    assert len(losses["1"]) == 10
    assert losses[mesh] == pytest.approx(losses["1"], abs=1e-5)


def entropies(corpus):
    """Cross-entropy in nats of the validation bytes under unigram and bigram counts of the training bytes (add-one)."""
    train_ids, val_ids = (np.asarray(s.ids, np.int64) for s in (corpus.train, corpus.val))
    V = corpus.tokenizer.vocab_size
    one = np.bincount(train_ids, minlength=V) + 1.0
    two = np.bincount(train_ids[:-1] * V + train_ids[1:], minlength=V * V).reshape(V, V) + 1.0
    unigram = -np.log(one / one.sum())[val_ids[1:]].mean()
    bigram = -np.log(two / two.sum(1, keepdims=True))[val_ids[:-1], val_ids[1:]].mean()
    return unigram, bigram


@pytest.mark.slow
def test_tiny_passes_unigram_and_bigram_entropy(tmp_path):
    cfg = config.freeze(config.load_file(str(ROOT / "configs/tiny.py")))
    unigram, bigram = entropies(*job_lib.prepare(cfg, jax.devices()[:1]).corpora)
    assert 2 < bigram < unigram < 4
    done = run_module("minitf.train", "--config", "configs/tiny.py", "--workdir", tmp_path / "w")
    assert done.returncode == 0, done.stderr
    losses = series([json.loads(line) for line in (tmp_path / "w/metrics.jsonl").read_text().splitlines()], "eval/loss")
    assert losses[50] < unigram
    assert losses[300] < bigram


@pytest.mark.slow
@pytest.mark.skipif("MINITF_TINYSHAKESPEARE" not in os.environ, reason="MINITF_TINYSHAKESPEARE names no file")
@pytest.mark.parametrize(
    ("name", "parameters", "bound"),
    [("char_cpu", "804,096", 1.94), ("char_fast", "449,664", 1.75)],  # nanoGPT: 804,096 and 1.921
)
def test_the_characters_of_tinyshakespeare(name, parameters, bound, tmp_path):
    path = f"--config.data.path={os.environ['MINITF_TINYSHAKESPEARE']}"
    done = run_module("minitf.train", "--config", f"configs/{name}.py", "--workdir", tmp_path / "w", path)
    assert done.returncode == 0, done.stderr
    assert f"parameters: {parameters} " in done.stdout
    losses = series([json.loads(line) for line in (tmp_path / "w/metrics.jsonl").read_text().splitlines()], "eval/loss")
    assert losses[max(losses)] <= bound


def test_compiler_options_are_for_training_and_evaluation_and_may_change(corpus, tmp_path):
    dumps = tmp_path / "dumps"
    cfg = text_config(corpus, steps=1, eval_every=1, model__dim=8)
    given = CompilerOptions(cpu=(f"xla_dump_to={dumps}", "xla_dump_hlo_as_text=true"), tpu=("xla_no_such=1",))
    cfg = change(cfg, compiler_options=given)
    launch(cfg, tmp_path / "w")
    programs = {p.name.split(".")[1] for p in dumps.iterdir()}
    assert programs >= {"jit_train_step", "jit_eval_step"}
    assert not programs & {"jit_init_state", "jit_first_state"}
    assert differences(cfg, text_config(corpus, steps=1, eval_every=1, model__dim=8))[0] == []


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("xla_nonsense=1", "No such compile option: 'xla_nonsense'"),
        ("xla_cpu_enable_fast_math=perhaps", "'perhaps' is not a valid bool value"),
    ],
)
def test_an_option_that_the_compiler_does_not_take_is_refused_at_once_in_its_words(corpus, option, message):
    cfg = text_config(corpus, compiler_options=CompilerOptions(cpu=(option,)))
    with pytest.raises(ValueError) as e:
        job_lib.prepare(cfg, jax.devices()[:1])
    assert f"compiler_options.cpu={option}: " in str(e.value)
    assert message in str(e.value)


def stop_after(steps, losses):
    def write(self, step, values):
        if "train/loss" in values:
            losses.append(float(values["train/loss"]))
        if step == steps:
            raise StopIteration

    return write


def test_evaluation_counts_bits_per_byte_of_the_text(corpus):
    # By hand: the reference's loss over the whole validation text, divided by ln 2; one byte a character.
    from minitf.model import reference

    job = job_lib.prepare(text_config(corpus), jax.devices()[:1])
    params = random_params(job.cfg.model)
    rows = Rows(job.corpora[0].val, 16, tail=True)
    nats = 0.0
    for i in range(len(rows)):
        row = {k: v[None] for k, v in rows[i].items()}
        nats += float(reference.loss_fn(params, row, job.cfg.model)) * row["weights"].sum()
    import functools

    lengths = np.asarray(job.corpora[0].tokenizer.byte_lengths)
    with jax.set_mesh(job.mesh):
        step = jax.jit(functools.partial(eval_step, byte_lengths=jax.numpy.asarray(lengths), cfg=job.cfg))
        data = pipeline.evaluation_rows(job.corpora[0].val, 16, job.cfg.data, 8, None)
        batches = pipeline.batches(data, 8, batch_sharding(job.mesh), job.cfg.data)
        values = evaluation.evaluate(step, params, {"": batches})
    assert values["eval/loss"] == pytest.approx(nats / 299, abs=1e-5)
    assert values["eval/perplexity"] == pytest.approx(math.exp(nats / 299), rel=1e-4)
    assert values["eval/bits_per_byte"] == pytest.approx(nats / 299 / math.log(2), abs=1e-5)


def test_norms_are_those_of_the_groups(corpus, tmp_path):
    cfg = text_config(corpus, steps=1, optimizer__kind="sgd", optimizer__learning_rate=1e-9)
    _, lines = launch(cfg, tmp_path / "w")
    params = init_params(model_params(job_lib.prepare(cfg, jax.devices()[:1]).cfg.model), jax.random.key(0))
    squares = {}
    for name, a in named(params):
        squares[group_of(name)] = squares.get(group_of(name), 0) + float((np.asarray(a, np.float64) ** 2).sum())
    for group, s in squares.items():
        assert lines[-1][f"norm/parameter/{group}"] == pytest.approx(math.sqrt(s), rel=1e-5)
    gradient = math.sqrt(sum(v**2 for k, v in lines[-1].items() if k.startswith("norm/gradient/")))
    assert lines[-1]["train/grad_norm"] == pytest.approx(gradient, rel=1e-5)
