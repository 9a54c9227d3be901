import json
import math

import jax
import numpy as np
import pytest
from common import change, launch, make_mesh, random_params, run_module, slow, text_config

from minitf import evaluate
from minitf.data.frame import of_ids, of_tokenizer
from minitf.data.store import Store
from minitf.data.texts import tokenized
from minitf.data.tokenizer import ByteTokenizer
from minitf.model import reference
from minitf.model.transformer import model as forward
from minitf.training.evaluation import scores
from minitf.workdir import Model, load_model

BYTES = ByteTokenizer()
FRAME = of_tokenizer(BYTES)
TEXTS = [b"first document", b"", b"the second one is longer than a row, " * 3, "ünï¢ode 😀".encode(), b"x"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model over bytes with random parameters, and its config."""
    cfg = change(text_config(tmp_path_factory.mktemp("none")), model__vocab_size=259, model__max_seq_len=48)
    return Model(cfg, random_params(cfg.model), 0)


def text_store(texts):

    return tokenized("texts", [(str(i), t) for i, t in enumerate(texts)], BYTES, FRAME)


def by_hand(model, texts, context):
    """Nats of each token after the one that ends a document, in pieces of `context`, through the plain forward."""
    nats, eos = [], BYTES.specials["eos"]
    for text in texts:
        ids = [eos, *text]
        for at in range(0, len(ids) - 1, context):
            piece = np.array(ids[at : at + context + 1])
            logits = reference.model(model.params, piece[None, :-1], model.cfg.model)
            logp = np.asarray(jax.nn.log_softmax(logits[0]), np.float64)
            nats += [-logp[t, target] for t, target in enumerate(piece[1:])]
    return np.array(nats)


@pytest.mark.parametrize("context", slow([16, 48], but=[16]))
def test_bits_per_byte_are_those_by_hand_for_any_row_length_and_batch(context, model):
    data = evaluate.documents_of("texts", text_store(TEXTS), FRAME, FRAME, BYTES.byte_lengths)
    nats = by_hand(model, TEXTS, context)
    size = sum(map(len, TEXTS))
    assert len(nats) == size
    ways = [(77, 2, "1"), (None, 1, "1"), (200, 8, "2x2x2")] if context == 16 else [(None, 3, "1")]
    for row_length, batch_size, mesh in ways:
        found = evaluate.score(
            model, data, make_mesh(mesh), context=context, row_length=row_length, batch_size=batch_size
        )
        assert found["bits_per_byte"] == pytest.approx(nats.sum() / math.log(2) / size, abs=1e-6)
        assert found["loss"] == pytest.approx(nats.mean(), abs=1e-6)
        assert found["perplexity"] == pytest.approx(math.exp(nats.mean()), rel=1e-5)
        assert (found["tokens"], found["bytes"], found["documents"]) == (size, size, 4)


def test_a_document_does_not_see_the_others(model):
    alone = [
        evaluate.score(
            model,
            evaluate.documents_of("t", text_store([t]), FRAME, FRAME, None),
            make_mesh("1"),
            context=32,
            batch_size=2,
        )
        for t in TEXTS
        if t
    ]
    data = evaluate.documents_of("t", text_store(TEXTS), FRAME, FRAME, None)
    together = evaluate.score(model, data, make_mesh("1"), context=32, batch_size=2)
    assert together["loss"] * together["tokens"] == pytest.approx(sum(a["loss"] * a["tokens"] for a in alone), rel=1e-6)


def test_the_standard_error_is_that_of_a_ratio_over_rows(model):
    data = evaluate.documents_of("texts", text_store(TEXTS), FRAME, FRAME, None)
    found = evaluate.score(model, data, make_mesh("1"), context=16, batch_size=4)
    sums = evaluate.dataset_sums(model, data, make_mesh("1"), context=16, row_length=16, batch_size=4)
    loss, n = sums["nats"].sum() / sums["tokens"].sum(), len(sums["nats"])
    residuals = sums["nats"] - loss * sums["tokens"]
    assert found["standard_error"] == pytest.approx(
        math.sqrt(n / (n - 1) * (residuals**2).sum()) / sums["tokens"].sum(), rel=1e-9
    )
    # Rows of equal length: the textbook's standard error of a mean.

    rows = np.random.default_rng(0).random(50)
    equal = scores({"nats": rows * 16, "tokens": np.full(50, 16.0)})
    assert equal["standard_error"] == pytest.approx(rows.std(ddof=1) / math.sqrt(50), rel=1e-9)


@pytest.mark.parametrize("known", ["offsets", "eos"])
def test_documents_are_found_by_offsets_or_by_their_end(known):
    ids = np.array([1, 2, 9, 9, 3, 9, 4, 5], np.uint16)
    where = {"offsets": np.array([0, 3, 4, 6, 8])} if known == "offsets" else {"eos": 9}
    data = evaluate.documents_of("d", Store("d", ids, 10, **where), of_ids(9), of_ids(9), None)
    found = [
        (data.store.ids[a : a + n].tolist(), data.store.ids[a + 1 : a + n + 1].tolist()) for a, n in data.spans.tolist()
    ]
    assert found == [([9, 1], [1, 2]), ([], []), ([9], [3]), ([9, 4], [4, 5])]


def test_without_an_end_token_the_first_token_of_a_document_is_not_scored():
    ids = np.array([0, 1, 2, 0, 1], np.uint16)
    store = Store("d", ids, 3, np.array([0, 3, 5]), text_bytes=9)
    data = evaluate.documents_of("d", store, of_ids(None), of_ids(None), np.array([1, 3, 1]))
    assert data.spans.tolist() == [[0, 2], [3, 1]]
    assert data.text_bytes == 9 - 1 - 1
    assert evaluate.documents_of("d", store, of_ids(None), of_ids(None), None).text_bytes is None


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory, rate_known):
    """A run over characters, and one over bytes of the same text."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("chars", "bytes"):
        size = {} if name == "chars" else dict(model__vocab_size=264)
        cfg = text_config(corpus, data__tokenizer=name, checkpoint__last=True, eval_every=3, eval_batches=None, **size)
        assert launch(cfg, folder / name)[0] == 0
    return folder


def test_the_command_scores_a_run_on_its_own_data_and_on_others(trained, corpus, capsys, tmp_path):
    (tmp_path / "other.txt").write_text("abcabc")

    def scored(name, *args):
        assert evaluate.main(["--workdir", str(trained / name), *args, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["data"]

    own = scored("bytes")["text (val)"]
    assert own["bytes"] == own["tokens"] == 300
    chars = scored("chars")["text (val)"]
    assert chars["tokens"] == chars["bytes"] == 299
    # One document of one text: the rows are those of the training's evaluation.
    lines = [json.loads(line) for line in (trained / "chars/metrics.jsonl").read_text().splitlines()]
    (logged,) = [line for line in lines if "eval/loss" in line]
    assert chars["loss"] == pytest.approx(logged["eval/loss"], abs=1e-6)
    assert chars["bits_per_byte"] == pytest.approx(logged["eval/bits_per_byte"], abs=1e-6)
    several = scored("bytes", "--data", str(tmp_path / "other.txt"), str(corpus / "val.txt"), "--context", "8")
    assert [d["bytes"] for d in several.values()] == [6, 300]
    assert scored("bytes", "--split", "train")["text (train)"]["bytes"] == 641
    assert evaluate.main(["--workdir", str(trained / "bytes")]) == 0
    table = capsys.readouterr().out
    assert f"{own['loss']:.4f}" in table
    assert f"{own['bits_per_byte']:.4f}" in table


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--context 17", "--context 17: longer than model.max_seq_len=16"),
        ("--context 16 --row_length 8", "--row_length 8: shorter than the context of 16"),
        ("--batch_size 3", "--batch_size 3: not divisible by the 8 devices"),
        ("--context 0", "--context=0: must be at least 1"),
        ("--data nowhere", "--data=nowhere: no such file"),
        ("--step 99", "no checkpoint of step 99"),
    ],
)
def test_a_wrong_argument_is_one_message(args, message, trained, capsys):
    with pytest.raises(SystemExit) as stopped:
        evaluate.main(["--workdir", str(trained / "bytes"), *args.split()])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_text_that_the_tokenizer_does_not_know_is_refused(trained, tmp_path, capsys):
    (tmp_path / "other.txt").write_text("ABC")
    with pytest.raises(SystemExit):
        evaluate.main(["--workdir", str(trained / "chars"), "--data", str(tmp_path / "other.txt")])
    assert "other.txt: character 'A' at 0 is not one of" in capsys.readouterr().err


# ---- lm-evaluation-harness


def test_log_likelihoods_are_those_of_the_plain_forward(model):
    pytest.importorskip("lm_eval")
    from minitf import harness

    lm = harness.HarnessModel(model, BYTES, make_mesh("1"), batch_size=3)
    rng = np.random.default_rng(0)
    requests = [
        (None, rng.integers(0, 256, n).tolist(), rng.integers(0, 256, m).tolist())
        for n, m in ((1, 1), (5, 3), (20, 2), (3, 30), (60, 4))
    ]
    found = lm._loglikelihood_tokens(requests)
    for (_, context, continuation), (likelihood, greedy) in zip(requests, found, strict=True):
        ids = np.array(context + continuation)[-49:]
        logits = forward(model.params, ids[None, :-1], model.cfg.model)[0]
        logp = np.asarray(jax.nn.log_softmax(logits))[-len(continuation) :]
        assert likelihood == pytest.approx(logp[np.arange(len(continuation)), continuation].sum(), abs=1e-3)
        assert not greedy
    likeliest = int(forward(model.params, np.array([[7, 8, 9]]), model.cfg.model)[0, -1, : BYTES.vocab_size].argmax())
    assert [greedy for _, greedy in lm._loglikelihood_tokens([(None, [7, 8, 9], [likeliest])])] == [True]


def test_rolling_log_likelihood_agrees_with_bits_per_byte(model):
    pytest.importorskip("lm_eval")
    from types import SimpleNamespace

    from minitf import harness

    lm = harness.HarnessModel(model, BYTES, make_mesh("1"))
    # Of a longer text the harness gives the last piece more context than one token.
    texts = [t for t in TEXTS if 0 < len(t) <= 48]
    found = lm.loglikelihood_rolling([SimpleNamespace(args=(t.decode(),)) for t in texts])
    data = evaluate.documents_of("t", text_store(texts), FRAME, FRAME, None)
    ours = evaluate.score(model, data, make_mesh("1"), context=48, batch_size=2)
    assert -sum(found) / math.log(2) / sum(map(len, texts)) == pytest.approx(ours["bits_per_byte"], abs=1e-5)


def test_greedy_text_is_that_of_the_plain_forward_and_ends_at_a_stop_string(model):
    pytest.importorskip("lm_eval")
    from types import SimpleNamespace

    from minitf import harness

    lm = harness.HarnessModel(model, BYTES, make_mesh("1"))
    ids = list(b"some context")
    step = jax.jit(lambda ids: forward(model.params, ids, model.cfg.model)[0, -1, : BYTES.vocab_size].argmax())
    for _ in range(4):
        ids.append(int(step(np.array([ids]))))
    expected = BYTES.decode(np.array(ids[12:])).decode(errors="replace")
    ask = lambda **settings: lm.generate_until([SimpleNamespace(args=("some context", settings))])
    assert ask(until=[], max_gen_toks=4) == [expected]
    assert ask(until=["\0\0", expected[2:]], max_gen_toks=36) == [expected[:2]]


TASK = """\
task: letters
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.mark.slow
def test_a_local_task_runs_offline_on_a_trained_model(trained, tmp_path):
    pytest.importorskip("lm_eval")
    questions = [dict(context="ab", choices=["c", "z"], label=0), dict(context="bc", choices=["y", "d"], label=1)]
    (tmp_path / "letters.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    (tmp_path / "letters.yaml").write_text(TASK.format(file=tmp_path / "letters.jsonl"))
    offline = dict(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=str(tmp_path / "cache"))
    args = ("--workdir", trained / "bytes", "--tasks", tmp_path / "letters.yaml", "--json")
    done = run_module("minitf.evaluate", *args, **offline)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    lm_accuracy = results["letters"]["acc,none"]
    # By hand: the choice with the higher likelihood.
    loaded = load_model(trained / "bytes")
    right = 0
    for q in questions:
        scores = []
        for choice in q["choices"]:
            ids = np.frombuffer((q["context"] + choice).encode(), np.uint8).astype(int)
            logits = forward(loaded.params, ids[None, :-1], loaded.cfg.model)[0]
            scores.append(float(jax.nn.log_softmax(logits[-1])[ids[-1]]))
        right += int(np.argmax(scores) == q["label"])
    assert lm_accuracy == right / 2
    missing = run_module("minitf.evaluate", "--workdir", trained / "bytes", "--tasks", "no_such_task", **offline)
    assert missing.returncode == 2
    assert "no_such_task" in missing.stderr
