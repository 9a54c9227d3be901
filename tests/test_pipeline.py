import dataclasses
import functools
import itertools
import json
import sysconfig
from pathlib import Path

import jax
import numpy as np
import pytest
from common import MESHES, TINY, change, fit, make_mesh, make_store, random_params, some_texts

from minitf import checks, startup, train
from minitf import job as job_lib
from minitf.data import pipeline
from minitf.data import texts as texts_lib
from minitf.data.datasets import DATASETS, DataConfig, load
from minitf.data.pipeline import HostBatches, evaluation_rows, host_rows, training_rows
from minitf.data.store import DataError, Rows, Store
from minitf.data.tokenizer_files import TOKENIZERS
from minitf.model.transformer import model
from minitf.sharding.mesh import batch_sharding
from minitf.training import evaluation
from minitf.training.evaluation import eval_step

TEXT = "Ein Text mit Umlauten: äöü, € und 😀.\r\n" * 20


def counting(rows, seq_len=4):
    """A store of so many rows; row i begins with id i * seq_len."""
    return Store("counting", np.arange(rows * seq_len + 1, dtype=np.uint16), 2**16)


def batches_of(rows, batch_size, n, *, mesh="1", start=0, cfg=TINY.data):
    """The first n global batches from `start` on, as NumPy arrays."""
    layout = batch_sharding(make_mesh(mesh))
    out = list(itertools.islice(pipeline.batches(rows, batch_size, layout, cfg, start), n))
    assert all(a.sharding == layout for batch in out for a in batch.values())
    return [{k: np.asarray(a) for k, a in batch.items()} for batch in out]


def row_numbers(batches, seq_len=4):
    return np.concatenate([b["inputs"][:, 0] for b in batches]) // seq_len


def assert_same(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.keys() == y.keys()
        for name in x:
            np.testing.assert_array_equal(x[name], y[name], err_msg=name)


def write_text(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def write_ids(path, ids, dtype="uint16"):
    np.asarray(ids).astype(dtype).tofile(path)
    return path


def text_of(corpus, split):
    return corpus.tokenizer.decode(getattr(corpus, split).ids)


# ---- the order of rows


def test_each_epoch_is_another_permutation_of_all_rows_decided_by_the_seed():
    def epochs(seed):
        rows = training_rows(counting(40), 4, DataConfig(), seed)
        return row_numbers(batches_of(rows, 8, 15)).reshape(3, 40)

    first = epochs(1)
    for epoch in first:
        assert sorted(epoch) == list(range(40))
    for a, b in itertools.combinations([*first, *epochs(2)], 2):
        assert not np.array_equal(a, b)
    np.testing.assert_array_equal(first, epochs(1))


def test_data_seed_alone_decides_the_order_where_it_is_set():
    def order(run_seed, data_seed=None):
        return row_numbers(
            batches_of(training_rows(counting(40), 4, DataConfig(seed=data_seed), run_seed), 8, 5)
        ).tolist()

    assert order(1, 7) == order(2, 7) == order(7)
    assert order(1, 7) != order(1)
    assert order(1, 0) == order(0)


def test_without_shuffle_rows_come_in_order_epoch_after_epoch():
    rows = training_rows(counting(12), 4, DataConfig(shuffle=False), 0)
    assert row_numbers(batches_of(rows, 8, 3)).tolist() == [*range(12), *range(12)]


@pytest.mark.parametrize("shuffle", [False, True])
def test_fewer_rows_than_a_batch_wrap_around(shuffle):
    rows = training_rows(counting(5), 4, DataConfig(shuffle=shuffle), 1)
    found = row_numbers(batches_of(rows, 8, 5))
    assert found.shape == (40,)
    for epoch in found.reshape(8, 5):
        assert sorted(epoch) == list(range(5))


def test_a_run_says_that_a_batch_repeats_rows(tmp_path):
    write_ids(tmp_path / "train.bin", np.arange(5 * 16 + 1) % 64)
    write_ids(tmp_path / "val.bin", np.arange(17) % 64)
    cfg = change(TINY, data__kind="tokens", data__path=str(tmp_path))
    assert "5 training rows are fewer than batch_size=8" in startup.describe(job_lib.prepare(cfg))
    assert "fewer" not in startup.describe(job_lib.prepare(change(cfg, batch_size=5), jax.devices()[:1]))


def contiguous(hosts, batch_size):
    return [list(range(h * batch_size // hosts, (h + 1) * batch_size // hosts)) for h in range(hosts)]


def strided(hosts, batch_size):
    return [list(range(h, batch_size, hosts)) for h in range(hosts)]


@pytest.mark.parametrize("shares", [contiguous, strided])
@pytest.mark.parametrize(("items", "hosts"), [(2, 3), (1, 4), (5, 3), (5, 1), (24, 4)])
def test_every_host_reads_its_share_and_no_row_twice_in_an_epoch(items, hosts, shares):
    batch_size = 2 * hosts
    rows = training_rows(counting(items), 4, DataConfig(), 0)
    by_host = [HostBatches(rows, batch_size, share) for share in shares(hosts, batch_size)]
    assert {len(h) for h in by_host} == {len(by_host[0])}
    found = np.full((items, batch_size), -1)  # of `items` batches: batch_size epochs
    for host, share in zip(by_host, shares(hosts, batch_size), strict=True):
        for k in range(items):
            found[k, share] = host[k]["inputs"][:, 0] // 4
    for epoch in found.reshape(batch_size, items):
        assert sorted(epoch) == list(range(items))


@pytest.mark.parametrize("shares", [contiguous, strided])
@pytest.mark.parametrize(("items", "hosts"), [(2, 3), (1, 4), (5, 3), (24, 4)])
def test_every_host_evaluates_as_many_batches_and_no_row_twice(items, hosts, shares):
    batch_size = 2 * hosts
    rows = evaluation_rows(counting(items), 4, DataConfig(), batch_size, None)
    by_host = [list(HostBatches(rows, batch_size, share)) for share in shares(hosts, batch_size)]
    assert {len(h) for h in by_host} == {-(-items // batch_size)}
    found = np.concatenate([b["inputs"][b["weights"].any(axis=1), 0] for host in by_host for b in host]) // 4
    assert sorted(found) == list(range(items))


def test_no_rows_are_an_error_on_every_host():
    with pytest.raises(ValueError, match="counting: needs at least 5 tokens, found 1"):
        training_rows(counting(0), 4, DataConfig(), seed=0)
    with pytest.raises(ValueError, match="counting: needs at least 2 tokens, found 1"):
        evaluation_rows(counting(0), 4, DataConfig(), batch_size=2, batches=None)


@pytest.mark.parametrize("shares", [contiguous, strided])
@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_a_global_batch_is_the_same_from_any_number_of_hosts(hosts, shares):
    rows = training_rows(counting(40), 4, DataConfig(), 3)
    expected = batches_of(rows, 8, 12)
    for k in (0, 1, 4, 5, 11):
        joined = {name: np.zeros_like(a) for name, a in expected[k].items()}
        for share in shares(hosts, 8):
            mine = HostBatches(rows, 8, share)[k]
            for name, values in mine.items():
                joined[name][share] = values
        assert_same([joined], [expected[k]])


@pytest.mark.parametrize("mesh", [m for m in MESHES if m != "1"])
def test_a_global_batch_is_the_same_on_any_mesh(mesh):
    rows = training_rows(counting(40), 4, DataConfig(), 3)
    assert_same(batches_of(rows, 8, 12, mesh=mesh), batches_of(rows, 8, 12))


@pytest.mark.parametrize(("threads", "prefetch"), [(1, 1), (4, 16)])
def test_reading_ahead_changes_nothing(threads, prefetch):
    rows = training_rows(counting(40), 4, DataConfig(), 3)
    cfg = DataConfig(threads=threads, prefetch=prefetch)
    assert_same(batches_of(rows, 8, 12, cfg=cfg), [rows[8 * k : 8 * k + 8].batch(8)[0] for k in range(12)])


@pytest.mark.parametrize("start", [1, 4, 5, 11, 100])
def test_starting_at_a_batch_equals_skipping_those_before(start):
    rows = training_rows(counting(40), 4, DataConfig(), 3)
    assert_same(batches_of(rows, 8, 3, start=start), batches_of(rows, 8, start + 3)[start:])


@dataclasses.dataclass
class Layout:
    """A stand-in for a sharding of which this process holds some slices."""

    slices: list

    def addressable_devices_indices_map(self, shape):
        return {i: (s,) for i, s in enumerate(self.slices)}


@pytest.mark.parametrize(
    ("slices", "rows"),
    [
        ([slice(None)], [*range(8)]),
        ([slice(4, 6), slice(6, 8)], [4, 5, 6, 7]),
        ([slice(6, 8), slice(2, 4)], [2, 3, 6, 7]),
        ([slice(2, 4), slice(2, 4)], [2, 3]),  # a tensor axis: two devices hold the same rows
    ],
)
def test_a_process_reads_the_rows_of_its_devices_once_and_in_order(slices, rows):
    assert host_rows(Layout(slices), 8) == rows


class Indices:
    """Three thousand million ids in no memory: the id of token t is t // 256."""

    def __len__(self):
        return 3_000_000_000

    def __getitem__(self, s):
        return np.arange(s.start, min(s.stop, len(self)), dtype=np.int64) // 256


def test_shuffled_rows_reach_beyond_2_31_and_are_whole():
    store = Store("large", Indices(), 3_000_000_000 // 256)
    seq_len = 1024
    rows = Rows(store, seq_len)
    shuffled = training_rows(store, seq_len, DataConfig(), 0)
    found = [shuffled[k]["inputs"] for k in range(400)] + [shuffled[len(rows) - 1 - k]["inputs"] for k in range(400)]
    starts = np.array([f[0] for f in found], np.int64) * 256
    assert (starts % seq_len == 0).all()
    for start, inputs in zip(starts, found, strict=True):
        np.testing.assert_array_equal(inputs, np.arange(start, start + seq_len) // 256)
    assert len(set(starts.tolist())) == len(starts)
    assert (starts > 2**31).mean() > 0.1
    assert (starts < 2**31).mean() > 0.1


def test_a_token_file_beyond_2_31_splits_counts_and_reads_exactly(tmp_path):
    path, tokens = tmp_path / "ids.bin", 3_000_000_000
    with open(path, "wb") as f:
        f.truncate(tokens)
        f.seek(tokens - 1000)
        f.write(bytes(range(50)) * 20)
    corpus = load(DataConfig(kind="tokens", path=str(path), token_dtype="uint8"), 64)
    assert (len(corpus.train), len(corpus.val)) == (2_700_000_000, 300_000_000)
    rows = Rows(corpus.val, 1000, tail=True)
    last = evaluation_rows(corpus.val, 1000, DataConfig(), 1, None)[len(rows) - 1]
    np.testing.assert_array_equal(last["targets"][:999], np.arange(1, 1000) % 50)
    assert last["weights"].sum() == 999
    shuffled = training_rows(corpus.train, 1000, DataConfig(), 0)
    for batch in batches_of(shuffled, 8, 3):
        assert not batch["targets"].any()


# ---- evaluation


@pytest.mark.parametrize("batch_size", [2, 3, 4, 5, 8])
def test_each_row_is_evaluated_once_whatever_the_batch_size(batch_size):
    ids = np.arange(35)
    rows = evaluation_rows(Store("ids", ids, 64), 8, DataConfig(), batch_size, None)
    batches = batches_of(rows, batch_size, None)
    assert len(batches) == -(-5 // batch_size)
    assert {b["inputs"].shape for b in batches} == {(batch_size, 8)}
    weights, targets = (np.concatenate([b[name] for b in batches]) for name in ("weights", "targets"))
    assert sorted(weights.sum(axis=1), reverse=True)[:5] == [8, 8, 8, 8, 2]
    assert weights.sum() == 34
    np.testing.assert_array_equal(targets[weights > 0], ids[1:])


def test_evaluation_loss_is_the_same_for_every_batch_size():
    cfg = change(TINY, seq_len=8, model__num_layers=1)
    params = random_params(cfg.model)
    ids = np.random.default_rng(0).integers(0, 64, 35)
    with jax.set_mesh(make_mesh("1")):
        logits = jax.jit(functools.partial(model, cfg=cfg.model))
        total = 0.0
        for i in range(0, 34, 8):  # row by row, without a batch
            inputs, targets = ids[i : min(i + 8, 34)], ids[i + 1 : i + 9]
            logp = np.asarray(jax.nn.log_softmax(logits(params, inputs[None])[0]), np.float64)
            total -= sum(logp[t, target] for t, target in enumerate(targets))
        step = jax.jit(functools.partial(eval_step, byte_lengths=None, cfg=cfg))
        for batch_size in (2, 3, 4, 5, 8):
            rows = evaluation_rows(Store("ids", ids, 64), 8, cfg.data, batch_size, None)
            layout = batch_sharding(make_mesh("1"))
            values = evaluation.evaluate(step, params, {"": pipeline.batches(rows, batch_size, layout, cfg.data)})
            assert values["eval/loss"] == pytest.approx(total / 34, abs=1e-6), batch_size


@pytest.mark.parametrize(("batches", "chosen"), [(1, [0, 2, 5, 7]), (2, [0, 1, 2, 3, 5, 6, 7, 8]), (9, [*range(10)])])
def test_a_part_of_the_evaluation_rows_is_spread_over_the_split(batches, chosen):
    rows = evaluation_rows(counting(10), 4, DataConfig(), 4, batches)
    found = [row["inputs"][0] // 4 for row in rows if row["weights"].any()]
    assert found == chosen


# ---- wrong ids


def test_nine_tokens_train_one_step_at_length_eight():
    cfg = change(TINY, batch_size=1, seq_len=8, steps=1, model__num_layers=1)
    rows = training_rows(Store("ids", np.arange(9), 64), 8, cfg.data, 0)
    (batch,) = batches_of(rows, 1, 1)
    assert (batch["inputs"].tolist(), batch["targets"].tolist()) == ([[*range(8)]], [[*range(1, 9)]])
    history, _ = fit(cfg, [batch])
    assert np.isfinite(history[0]["train/loss"])


def test_eight_tokens_at_length_eight_are_refused_before_training(tmp_path):
    write_ids(tmp_path / "train.bin", range(8))
    write_ids(tmp_path / "val.bin", range(9))
    cfg = change(TINY, batch_size=1, seq_len=8, data__kind="tokens", data__path=str(tmp_path))
    with pytest.raises(ValueError, match=r"train.bin: needs at least 9 tokens, found 8"):
        job_lib.prepare(cfg)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_a_tokenizer_larger_than_the_vocabulary_is_refused_with_both_sizes(tokenizer, tmp_path):
    path = write_text(tmp_path / "a.txt", "".join(map(chr, range(32, 97))))
    size = load(DataConfig(kind="text", path=str(path), tokenizer=tokenizer), None).tokenizer.vocab_size
    cfg = DataConfig(kind="text", path=str(path), tokenizer=tokenizer)
    with pytest.raises(ValueError, match=f"model.vocab_size=64 is smaller than the {size} ids of .*{tokenizer}"):
        load(cfg, 64)
    for vocab_size in (size, size + 1, 1000):
        assert load(cfg, vocab_size).train.vocab_size == size


@pytest.mark.parametrize(
    ("bad", "dtype"), [(-1, "int32"), (-100, "int32"), (64, "int32"), (70, "uint8"), (65535, "uint16")]
)
def test_a_bad_id_stops_the_batch_that_would_use_it(bad, dtype, tmp_path):
    ids = np.arange(40 * 16 + 1) % 64
    ids[330] = bad  # row 20, in batch 2
    path = write_ids(tmp_path / "ids.bin", ids, dtype)
    cfg = DataConfig(kind="tokens", path=str(path), token_dtype=dtype, shuffle=False)
    rows = training_rows(load(cfg, 64).train, 16, cfg, 0)
    batches = pipeline.batches(rows, 8, batch_sharding(make_mesh("1")), cfg)
    next(batches), next(batches)
    with pytest.raises(DataError) as e:
        next(batches)
    assert str(e.value) == f"{path} (train): id {bad} at token 330 is not below the vocabulary size 64"


def test_a_bad_id_in_the_end_of_a_file_is_found_in_validation_and_can_be_located(tmp_path):
    ids = np.arange(1000) % 64
    ids[905] = 64
    cfg = DataConfig(kind="tokens", path=str(write_ids(tmp_path / "ids.bin", ids)))
    with pytest.raises(DataError, match=r"ids.bin \(val, from token 900 on\): id 64 at token 5 "):
        evaluation_rows(load(cfg, 64).val, 16, cfg, 8, None)[0]


CONFIG = """
from minitf import config

def get_config():
    c = config.default()
    c.steps, c.batch_size, c.seq_len, c.log_every, c.eval_every = 3, 8, 16, 1, None
    c.data.kind, c.data.shuffle = "tokens", False
    c.model.num_layers, c.model.dim, c.model.vocab_size, c.model.max_seq_len = 1, 16, 64, 16
    c.model.attention.num_heads, c.model.mlp.hidden = 2, 32
    return c
"""


@pytest.fixture
def run_main(tmp_path, capsys, monkeypatch):
    """Runs train.main and returns (status, lines of stderr)."""

    monkeypatch.setattr(
        "minitf.runtime.devices.peak_flops", lambda devices, dtype: 1e12
    )  # not measured: nobody reads it here

    def run(*overrides):
        args = ["--config", str(write_text(tmp_path / "config.py", CONFIG)), "--workdir", str(tmp_path / "run")]
        try:
            status = train.main([*args, *overrides])
        except SystemExit as e:
            status = e.code
        return status, capsys.readouterr().err.splitlines()

    return run


def test_a_run_ends_at_a_stray_id_with_status_2_and_one_message(tmp_path, run_main):
    ids = np.arange(40 * 16 + 1) % 64
    ids[330] = 65535  # in the third batch
    path = write_ids(tmp_path / "ids.bin", ids)
    status, errors = run_main(f"--config.data.path={path}")
    message = f"error: {path} (train): id 65535 at token 330 is not below the vocabulary size 64"
    assert (status, errors) == (2, [message])
    logged = [json.loads(line) for line in open(tmp_path / "run" / "metrics.jsonl")]
    steps = [line["step"] for line in logged if "train/loss" in line]
    assert steps in ([1], [1, 2])


def test_a_run_with_a_tokenizer_too_large_ends_with_status_2_and_one_message(tmp_path, run_main):
    path = write_text(tmp_path / "a.txt", TEXT)
    status, errors = run_main("--config.data.kind=text", f"--config.data.path={path}")
    assert status == 2
    assert errors == ["error: model.vocab_size=64 is smaller than the 259 ids of data.tokenizer=bytes"]
    assert not (tmp_path / "run").exists()


# ---- text


@pytest.mark.parametrize("seq_len", [1, 5, 1000])
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_a_file_comes_back_from_its_rows_byte_for_byte(tokenizer, seq_len, tmp_path):
    text = b"\xef\xbb\xbfa\r\nb\n\n\tc" * 5
    corpus = load(DataConfig(kind="text", path=str(write_text(tmp_path / "a.txt", text)), tokenizer=tokenizer), None)
    back = b""
    for store in (corpus.train, corpus.val):
        rows = list(Rows(store, seq_len, tail=True))
        ids = np.concatenate([rows[0]["inputs"][:1], *(r["targets"][r["weights"] > 0] for r in rows)])
        back += corpus.tokenizer.decode(ids)
    assert back == text
    assert corpus.size == len(text)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_empty_files_leave_nothing_and_later_ones_are_read(tokenizer, tmp_path):
    for name, text in {"a.txt": "", "b.txt": "\n\n\n", "c/d.txt": "later", "e.txt": ""}.items():
        write_text(tmp_path / "in" / name, text)
    cfg = DataConfig(kind="text", path=str(tmp_path / "in"), tokenizer=tokenizer, val_fraction=1e-9)
    corpus = load(cfg, None)
    assert text_of(corpus, "train") == b"\n\n\nlater"
    assert len(corpus.train.offsets) == 3  # two documents
    assert (np.diff(corpus.train.offsets) > 0).all()


@pytest.mark.parametrize("files", [[], ["a.txt"], ["a.txt", "b/c.txt"], [".hidden"]])
def test_a_corpus_without_text_is_an_error(files, tmp_path):
    (tmp_path / "in").mkdir()
    for name in files:
        write_text(tmp_path / "in" / name, "")
    with pytest.raises(ValueError, match=f"data.path={tmp_path / 'in'}: no "):
        load(DataConfig(kind="text", path=str(tmp_path / "in")), None)


@pytest.fixture
def library(tmp_path):
    """A folder of 40 files, some deeper, one hidden; and the texts by name."""
    texts = {f"{'deep/er/' if i % 3 else ''}{i:02}.txt": f"file {i}\n" for i in range(40)}
    for name, text in {**texts, ".git/config": "hidden", "deep/.secret.txt": "hidden"}.items():
        write_text(tmp_path / "library" / name, text)
    return tmp_path / "library", texts


@pytest.mark.parametrize("pattern", ["{}", "{}/", "{}/**/*.txt", "{}/**"])
def test_a_directory_or_a_glob_gives_all_files_below_it_in_order(pattern, library):
    path, texts = library
    documents, single = texts_lib.read_text(pattern.format(path), "data.path")
    assert not single
    assert sorted(documents) == sorted((name, text.encode()) for name, text in texts.items())
    assert documents == texts_lib.read_text(pattern.format(path), "data.path")[0]


def test_a_glob_takes_only_what_matches(library):
    path, texts = library
    documents, _ = texts_lib.read_text(f"{path}/deep/*/1*.txt", "data.path")
    assert [text for _, text in documents] == [texts[n].encode() for n in sorted(texts) if n.startswith("deep/er/1")]


@pytest.mark.parametrize("path", ["~/a.txt", "~", "~/*.txt"])
def test_a_tilde_is_the_home_directory(path, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_text(tmp_path / "a.txt", TEXT)
    assert texts_lib.read_text(path, "data.path")[0] == [("a.txt", TEXT.encode())]


@pytest.mark.parametrize("pattern", ["a.txt", "", "*.txt"])
def test_split_and_checksum_are_the_same_wherever_the_files_lie(pattern, tmp_path, monkeypatch):
    for place in ("here", "elsewhere/below"):
        for i, name in enumerate(("a.txt", "b.txt", "c.txt", "d.txt")):
            write_text(tmp_path / place / name, TEXT + str(i))
    monkeypatch.chdir(tmp_path / "here")
    paths = [tmp_path / "here" / pattern, tmp_path / "elsewhere/below" / pattern, Path("../here", pattern)]
    corpora = [load(DataConfig(kind="text", path=str(p), val_fraction=0.5), None) for p in paths]
    assert len({c.sha256 for c in corpora}) == 1
    assert len({c.train.ids.tobytes() for c in corpora}) == 1


def test_the_checksum_tells_texts_apart(tmp_path):
    def sha(text):
        return load(DataConfig(kind="text", path=str(write_text(tmp_path / "a.txt", text))), None).sha256

    assert sha(TEXT) == sha(TEXT)
    assert len({sha(TEXT), sha(TEXT + "\n"), sha(TEXT.replace("\r\n", "\n"))}) == 3


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.01])
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_one_file_is_cut_by_characters_and_no_character_is_cut(tokenizer, fraction, tmp_path):
    text = "a" * 500 + "😀" * 500
    path = str(write_text(tmp_path / "a.txt", text))
    corpus = load(DataConfig(kind="text", path=path, tokenizer=tokenizer, val_fraction=fraction), None)
    train_text, val_text = text_of(corpus, "train").decode(), text_of(corpus, "val").decode()
    assert train_text + val_text == text
    assert len(train_text) == round(1000 * (1 - fraction))


def test_many_files_are_split_by_their_names_and_stay_where_they_are_when_others_come(library):
    path, texts = library
    cfg = DataConfig(kind="text", path=str(path), val_fraction=0.3)

    def split():
        corpus = load(cfg, None)
        return [set(text_of(corpus, s).decode().splitlines()) for s in ("train", "val")]

    before = split()
    assert before[0] | before[1] == {t.strip() for t in texts.values()}
    assert not before[0] & before[1]
    assert before[1]
    write_text(path / "00a.txt", "new\n")
    after = split()
    assert [s - {"new"} for s in after] == before


def test_val_path_is_the_validation_split_and_leaves_all_of_path_to_training(tmp_path):
    a, b = write_text(tmp_path / "a.txt", "abc" * 9), write_text(tmp_path / "b.txt", "xyz" * 9)
    corpus = load(DataConfig(kind="text", path=str(a), val_path=str(b), tokenizer="chars"), None)
    assert (text_of(corpus, "train"), text_of(corpus, "val")) == (a.read_bytes(), b.read_bytes())
    assert corpus.tokenizer.alphabet == "abcxyz"


def test_text_that_is_not_utf8_is_for_bytes_only(tmp_path):
    text = b"caf\xe9 " * 50
    cfg = DataConfig(kind="text", path=str(write_text(tmp_path / "latin1.txt", text)))
    corpus = load(cfg, None)
    assert text_of(corpus, "train") + text_of(corpus, "val") == text
    with pytest.raises(ValueError, match=r"latin1.txt: not UTF-8 at byte 3 \(0xe9\); data.tokenizer=bytes"):
        load(dataclasses.replace(cfg, tokenizer="chars"), None)


@pytest.mark.parametrize("cfg", [DataConfig(kind="text"), DataConfig(kind="tokens")])
def test_a_missing_path_is_named(cfg):
    with pytest.raises(ValueError, match=r"data\.path=None"):
        load(cfg, 64)
    for setting in ("path", "val_path"):
        with pytest.raises(ValueError, match=f"data.{setting}=no/such: no such file"):
            load(dataclasses.replace(cfg, **{"path": __file__, setting: "no/such"}), 2**16)


def test_documents_of_a_text_corpus_can_be_isolated(library):
    path, texts = library
    corpus = load(DataConfig(kind="text", path=str(path), val_fraction=1e-9), None)
    rows = list(Rows(corpus.train, 64, isolate=True, tail=True))
    counted = sum(row["weights"].sum() for row in rows)
    assert counted == len(corpus.train) - len(texts)  # all but the first token of each document


# ---- token files


@pytest.mark.parametrize("suffix", ["bin", "npy"])
def test_a_directory_holds_both_splits(suffix, tmp_path):
    for split, n in (("train", 90), ("val", 30)):
        ids = np.arange(n, dtype=np.uint16)
        ids.tofile(tmp_path / f"{split}.bin") if suffix == "bin" else np.save(tmp_path / f"{split}.npy", ids)
    corpus = load(DataConfig(kind="tokens", path=str(tmp_path)), 100)
    assert (corpus.train.ids[:].tolist(), corpus.val.ids[:].tolist()) == ([*range(90)], [*range(30)])


def test_one_token_file_gives_its_end_to_validation(tmp_path):
    path = write_ids(tmp_path / "ids.bin", range(100))
    corpus = load(DataConfig(kind="tokens", path=str(path), val_fraction=0.2), 100)
    assert (corpus.train.ids[:].tolist(), corpus.val.ids[:].tolist()) == ([*range(80)], [*range(80, 100)])


@pytest.mark.parametrize("path", ["train.bin", "."])
def test_val_path_names_the_validation_tokens_and_no_other_file_is_needed(path, tmp_path):
    write_ids(tmp_path / "train.bin", range(90))
    val = write_ids(tmp_path / "other.bin", range(30))
    corpus = load(DataConfig(kind="tokens", path=str(tmp_path / path), val_path=str(val)), 100)
    assert (len(corpus.train), len(corpus.val)) == (90, 30)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(token_dtype="float32"), "data.token_dtype: .*'float32'; known: uint8, uint16"),
        (dict(token_dtype="unit16"), "data.token_dtype: .*'unit16'; known: uint8, uint16"),
        (dict(token_dtype=">u2"), "data.token_dtype: .*'>u2'; known: uint8, uint16"),
        (dict(token_dtype="uint64"), "ids.bin: 100 bytes are no whole number of uint64 ids"),
        (dict(eos_id=64), "data.eos_id=64: must be below model.vocab_size=64"),
        (dict(eos_id=-1), "data.eos_id=-1: must be at least 0"),
        (dict(path="{}"), "no train.bin or train.npy in this directory"),
    ],
)
def test_wrong_settings_of_token_files_are_refused_by_name(settings, message, tmp_path):
    path = write_ids(tmp_path / "ids.bin", range(50))
    settings = {"path": str(path)} | settings
    settings["path"] = settings["path"].format(tmp_path)
    cfg = DataConfig(kind="tokens", **settings)

    def begin() -> None:
        checks.check(cfg, "data.")
        load(cfg, 64)

    with pytest.raises(ValueError, match=message):
        begin()


@pytest.mark.parametrize("kind", ["tokens", "synthetic"])
def test_kinds_without_a_tokenizer_need_a_vocabulary_size(kind):
    with pytest.raises(ValueError, match=f"model.vocab_size=None: data.kind={kind}"):
        load(DataConfig(kind=kind, path=__file__), None)


def test_token_checksums_tell_files_apart(tmp_path):
    def sha(ids, dtype="uint16"):
        path = write_ids(tmp_path / "ids.bin", ids, dtype)
        return load(DataConfig(kind="tokens", path=str(path), token_dtype=dtype), 2**16).sha256

    ids = np.arange(50_000)
    assert sha(ids) == sha(ids)
    first, last, shorter = ids.copy(), ids.copy(), ids[:-1]
    first[0], last[-1] = 7, 7
    assert len({sha(ids), sha(first), sha(last), sha(shorter), sha(ids, "uint32")}) == 5


def test_documents_in_token_files_end_with_eos_id(tmp_path):
    path = write_ids(tmp_path / "ids.bin", [5, 6, 0, 7, 0, 8, 9, 9, 9, 9])
    cfg = DataConfig(kind="tokens", path=str(path), eos_id=0, isolate_documents=True, shuffle=False)
    row = training_rows(load(cfg, 64).train, 8, cfg, 0)[0]
    assert row["weights"].tolist() == [1, 1, 0, 1, 0, 1, 1, 1]


# ---- the standard library


@pytest.fixture(scope="module")
def stdlib():
    return load(DataConfig(), 320)


def names_of(documents, val):
    return [n for n, _ in documents if texts_lib.hashed_to_val(n, texts_lib.STDLIB_VAL_FRACTION) == val]


def test_stdlib_is_the_same_text_each_time(stdlib):
    again = load(DataConfig(), None)
    assert again.sha256 == stdlib.sha256
    for split in ("train", "val"):
        np.testing.assert_array_equal(getattr(again, split).ids, getattr(stdlib, split).ids)
    assert stdlib.size > 5_000_000
    assert 0.005 < len(stdlib.val) / len(stdlib.train) < 0.15


def test_stdlib_splits_are_disjoint_and_hold_each_file_once(stdlib):
    documents = list(texts_lib.stdlib_documents(sysconfig.get_path("stdlib")))
    train_names, val_names = names_of(documents, False), names_of(documents, True)
    assert len(set(train_names)) + len(set(val_names)) == len(documents)
    for store, names in ((stdlib.train, train_names), (stdlib.val, val_names)):
        expected = b"".join(text for name, text in documents if name in set(names))
        assert stdlib.tokenizer.decode(store.ids) == expected


def test_stdlib_leaves_out_tests_tables_packages_and_what_describes_the_machine():
    names = [name for name, _ in texts_lib.stdlib_documents(sysconfig.get_path("stdlib"))]
    assert len(names) == len(set(names)) > 300
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"test", "tests", "site-packages", "dist-packages", "encodings", "__pycache__"}
    assert not any(part.startswith(("_sysconfigdata", "config-")) for part in parts)
    assert "argparse.py" in names


def test_stdlib_normalises_line_ends_alone(tmp_path):
    write_text(tmp_path / "a.py", b"x\r\ny\rz\n")
    write_text(tmp_path / "tests" / "b.py", b"no")
    assert list(texts_lib.stdlib_documents(str(tmp_path))) == [("a.py", b"x\ny\rz\n")]


def test_a_standard_library_without_sources_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match=r"no \*.py files in .*; use data.kind=text"):
        load(DataConfig(), None)


# ---- every kind


ROWS = [f"document {i}: äöü 😀\r\n" * (1 + i % 5) for i in range(40)]


def write_parquet(path, rows=ROWS, key="text"):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table({"id": list(range(len(rows))), key: rows}), path, row_group_size=7)
    return path


def write_arrayrecord(path, rows=ROWS):
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")
    for row in rows:
        writer.write(row.encode())
    writer.close()
    return path


def write_huggingface(path, rows=ROWS, splits=()):
    """What `save_to_disk` of datasets writes, as far as it is read."""
    pyarrow = pytest.importorskip("pyarrow")
    for folder in [path / split for split in splits] or [path]:
        folder.mkdir(parents=True)
        table = pyarrow.table({"text": rows})
        for i, part in enumerate((table[:25], table[25:])):
            with pyarrow.ipc.new_stream(folder / f"data-{i}.arrow", table.schema) as f:
                f.write_table(part)
        files = [{"filename": f"data-{i}.arrow"} for i in range(2)]
        (folder / "state.json").write_text(json.dumps({"_data_files": files, "_indices_files": None}))
    if splits:
        (path / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return path


def any_config(kind, tmp_path):
    path = {
        "text": lambda: write_text(tmp_path / "a.txt", TEXT),
        "tokens": lambda: write_ids(tmp_path / "a.bin", np.arange(900) % 64),
        "store": lambda: make_store(tmp_path / "store", some_texts(30), "--val_fraction", 0.2),
        "parquet": lambda: write_parquet(tmp_path / "a.parquet"),
        "arrayrecord": lambda: write_arrayrecord(tmp_path / "a.array_record"),
        "huggingface": lambda: write_huggingface(tmp_path / "saved"),
    }.get(kind, lambda: None)()
    return DataConfig(kind=kind, path=path and str(path))


@pytest.mark.parametrize("kind", ["parquet", "arrayrecord", "huggingface"])
def test_rows_of_other_formats_are_documents_and_each_is_in_one_split(kind, tmp_path):
    corpus = load(any_config(kind, tmp_path), None)
    found = []
    for store in (corpus.train, corpus.val):
        assert len(store.offsets) > 1
        for a, b in itertools.pairwise(store.offsets.tolist()):
            assert store.ids[b - 1] == corpus.tokenizer.specials["eos"]
            found.append(corpus.tokenizer.decode(store.ids[a:b]).decode())
    assert sorted(found) == sorted(ROWS)


def test_splits_of_a_huggingface_folder_are_taken_by_name(tmp_path):
    path = write_huggingface(tmp_path / "saved", splits=("train", "test"))
    for split in ("train", "test"):
        assert load(DataConfig(kind="huggingface", path=str(path / split)), None).size == sum(
            len(r.encode()) for r in ROWS
        )
    corpus = load(DataConfig(kind="huggingface", path=str(path)), None)
    assert text_of(corpus, "train") == text_of(corpus, "val") == "".join(ROWS).encode()
    other = write_huggingface(tmp_path / "other", splits=("test",))
    with pytest.raises(ValueError, match="has the splits test, not train"):
        load(DataConfig(kind="huggingface", path=str(other)), None)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda p: write_parquet(p / "a.parquet", key="content"), "parquet", "data.text_key=text: a.parquet has the columns id, con"),
        (lambda p: write_parquet(p / "a.parquet", ["a", None]), "parquet", "a.parquet, row 1: is NoneType, not a text"),
        (lambda p: write_text(p / "a.parquet", "no parquet"), "parquet", "a.parquet: "),
        (lambda p: write_text(p / "a.array_record", "none"), "arrayrecord", "no ArrayRecord file"),
        (lambda p: write_text(p / "a.txt", "none").parent, "huggingface", "it has no state.json"),
        (lambda p: p / "nothing", "parquet", "no such file"),
    ],
)  # fmt: skip
def test_files_of_another_kind_are_refused_by_name(make, kind, message, tmp_path):
    with pytest.raises(ValueError) as raised:
        load(DataConfig(kind=kind, path=str(make(tmp_path))), None)
    assert message in str(raised.value)


def test_more_text_than_a_start_should_tokenize_names_the_tool(tmp_path, monkeypatch):
    monkeypatch.setattr("minitf.data.texts.LIMIT", 100)
    for kind in ("parquet", "arrayrecord", "huggingface"):
        folder = tmp_path / kind
        folder.mkdir()
        with pytest.raises(ValueError, match=r"too much to tokenize at each start; python -m tools\.prepare_data"):
            load(any_config(kind, folder), None)


@pytest.mark.parametrize("kind", [kind for kind in DATASETS if kind != "none"])
def test_every_kind_loads_the_same_splits_twice_with_ids_below_the_vocabulary(kind, tmp_path):
    cfg = any_config(kind, tmp_path)
    a, b = load(cfg, 320), load(cfg, 320)
    assert a.sha256 == b.sha256
    assert a.size == b.size > 0
    for split in ("train", "val"):
        store = getattr(a, split)
        ids = store.ids[0 : len(store)]
        np.testing.assert_array_equal(ids, getattr(b, split).ids[0 : len(store)])
        assert ids.max() < store.vocab_size <= 320
    assert a.train.vocab_size == a.val.vocab_size


def test_synthetic_counts_modulo_the_vocabulary():
    corpus = load(DataConfig(kind="synthetic"), 64)
    for row in itertools.islice(training_rows(corpus.train, 16, DataConfig(), 0), 20):
        np.testing.assert_array_equal(row["targets"], (row["inputs"] + 1) % 64)
