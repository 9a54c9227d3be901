"""tools.parity names what is wrong, and every setting of its recipe is seen."""

import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from minitf import settings
from minitf.model import attention, kernels, ops, transformer
from minitf.model.loss import LossConfig
from minitf.model.transformer import ModelConfig
from tools import parity, parity_peers
from tools.parity import HOW, change, departure, setting

PEER = Path(__file__).parent / "peer"

# ---- every setting that changes what is computed is seen: another value in the real model alone is a miss

MORE = 1.03
SEEN = {  # setting -> (row, value in its place: a factor, or what stands there)
    "model__norm_eps": ("base", MORE),
    "model__embedding_scale": ("embedding_scale", MORE),
    "model__logit_softcap": ("logit_softcap", MORE),
    "model__attention__rope_base": ("base", MORE),
    "model__attention__rope_factor": ("rope_llama3", MORE),
    "model__attention__rope_low_freq_factor": ("rope_llama3_between", MORE),
    "model__attention__rope_high_freq_factor": ("rope_llama3_between", MORE),
    "model__attention__rope_original_len": ("rope_llama3_between", 206),
    "model__attention__scale": ("attention_scale", MORE),
    "model__attention__softcap": ("attention_softcap", MORE),
    "model__attention__qk_norm_eps": ("qk_norm", MORE),
    "model__attention__window": ("sliding", 6),
    "model__attention__kind": ("sliding", "full"),
    "model__pattern": ("alternating", ("sliding", "full")),
    "model__positions": ("base", "none"),
    "model__norm": ("base", "rms_norm_offset"),
    "model__mlp__kind": ("gelu", "gelu_erf"),
    "model__mlp__router": ("experts_weights", "softmax_of_chosen"),
    "model__mlp__experts_per_token": ("experts", 3),
    "model__mlp__normalise_weights": ("experts", False),
    "model__mlp__router_scale": ("experts_weights", MORE),
    "model__mlp__groups": ("experts_sigmoid", 4),
    "model__mlp__groups_per_token": ("experts_sigmoid", 2),
    # slow: the whole step
    "loss__z_loss": ("z_loss", MORE),
    "loss__balance": ("experts", MORE),
    "loss__router_z": ("experts", MORE),
}
AGAIN = [  # with other rows
    ("model__norm_eps", "layer_norm", MORE),
    ("model__norm_eps", "layer_norm_no_bias", MORE),
    ("model__norm_eps", "post_norms", MORE),
    ("model__attention__rope_base", "rope_llama3", MORE),
    ("model__attention__window", "kernel_blocked_window", 6),
    ("model__norm", "layer_norm_no_bias", "rms_norm"),
    ("model__mlp__kind", "base", "geglu"),
    ("model__mlp__kind", "gelu", "relu_squared"),
]
# They make another tree of parameters, or other shapes: a model that did not heed them could not run, or would have no gradient.
SHAPES = {f"model__{n}" for n in ("num_layers", "dim", "vocab_size", "max_seq_len", "post_norms", "tie_embeddings")}
SHAPES |= {
    f"model__attention__{n}" for n in ("num_heads", "num_kv_heads", "head_dim", "bias", "qk_norm", "qk_norm_over")
}
SHAPES |= {f"model__mlp__{n}" for n in ("hidden", "bias", "experts", "shared", "dense_first", "every", "dense_hidden")}
UPDATE = {"loss__bias_rate"}  # in no gradient: test_experts.py
DROPOUT = {"model__dropout", "model__attention__dropout"}  # random, and off in the recipe


def test_every_setting_of_the_model_is_seen_or_named_here():
    names = {f"model.{n}" for n in settings.flat(ModelConfig())} | {f"loss.{n}" for n in settings.flat(LossConfig())}
    assert {n.replace(".", "__") for n in names} == set(SEEN) | SHAPES | UPDATE | DROPOUT | (
        set(HOW) - {"mesh", "accumulation"}
    )


@functools.cache
def plain_values(row, losses):
    """Losses of one step, or logits."""
    cfg = departure(row)
    if losses:
        return parity.expected(cfg, steps=1).losses
    rows = parity.start(cfg), parity.batch_for(cfg)["inputs"]
    return np.asarray(jax.jit(lambda p, x: parity.reference.model(p, x, cfg.model))(*rows))


def real_values(cfg, losses, params):
    if losses:
        return parity.actual(cfg, steps=1).losses
    return np.asarray(jax.jit(lambda p, x: transformer.model(p, x, cfg.model))(params, parity.batch_for(cfg)["inputs"]))


CASES = [(name, *case) for name, case in SEEN.items()] + AGAIN


@pytest.mark.parametrize(
    ("name", "row", "value"),
    [pytest.param(*case, marks=pytest.mark.slow) if case[0].startswith("loss__") else case for case in CASES],
)
def test_another_value_of_a_setting_is_seen(name, row, value):
    cfg = departure(row)
    before = setting(cfg, name)
    assert before is not None
    changed = change(cfg, **{name: before * value if value is MORE else value})
    losses = name.startswith("loss__")
    found = parity.difference(real_values(changed, losses, parity.start(cfg)), plain_values(row, losses))
    assert 3 * parity.TOLERANCE < found < np.inf
    if row == "base":
        assert (
            parity.difference(real_values(cfg, losses, parity.start(cfg)), plain_values(row, losses)) < parity.TOLERANCE
        )


# ---- the command


def run(capsys, *arguments):
    """(exit status, rows by name)"""
    status = parity.main([*arguments, "--json"])
    return status, {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}


def misses(capsys, monkeypatch, names, owner, attribute, broken):
    """The rows that miss with something broken."""
    monkeypatch.setattr(owner, attribute, broken)
    status, rows = run(capsys, "--only", *names)
    assert list(rows) == names
    found = {name for name, row in rows.items() if row["misses"]}
    assert status == (1 if found else 0)
    return found


def turned_back(x, table):
    cos, sin = table
    return ops.rotate(x, (cos, -sin))


def one_more(self, S, T, allowed=kernels.Mask.allowed):
    return allowed(self if self.window is None else self._replace(window=self.window + 1), S, T)


def without_epsilon(scale, x, eps=0.0):
    return ops.rms_norm(scale, x, 1e-6)


BROKEN = {  # what is broken: (where, what, how, rows that must miss)
    "rope_sign": (attention, "rotate", turned_back, {"base", "sliding", "layer_norm"}),
    "mask_off_by_one": (kernels.Mask, "allowed", one_more, {"sliding"}),
    "norm_epsilon": (transformer, "rms_norm", without_epsilon, {"base", "sliding", "learned"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("broken", BROKEN)
def test_what_is_broken_is_named_by_the_rows_that_read_it_and_no_other(broken, capsys, monkeypatch):
    owner, attribute, f, rows = BROKEN[broken]
    assert misses(capsys, monkeypatch, ["base", "sliding", "learned", "layer_norm"], owner, attribute, f) == rows


def values(**changes):
    zeros = np.zeros((2, 3))
    return parity.Values(zeros, {"a": zeros, "b": zeros}, np.ones(4))._replace(**changes)


def test_a_miss_names_row_parameter_and_step(capsys, monkeypatch):
    wrong = values(gradient={"a": np.zeros((2, 3)), "b": np.ones((2, 3))}, losses=np.array([1, 1, 1.1, 1]))
    tolerances = dict.fromkeys(parity.COLUMNS, parity.TOLERANCE)
    found = {"base": wrong, "sliding": values()}
    by_row = {departure(name): parity.compare(parity.differences(v, values()), tolerances) for name, v in found.items()}
    monkeypatch.setattr(parity, "check", lambda cfg, initial: by_row[cfg])
    assert parity.main(["--only", *found]) == 1
    _, base, *why, sliding, last = capsys.readouterr().out.splitlines()
    assert base.split()[1:] == "8x16x64 0.0e+00 / 1e-05 1.0e+00 / 1e-05 1.0e-01 / 1e-05 MISS".split()
    assert why == [
        "  base: gradient of b: differs by 1.0e+00, tolerance 1e-05",
        "  base: loss curve from step 3: differs by 1.0e-01, tolerance 1e-05",
    ]
    assert sliding.endswith("equal")
    assert last.endswith("; missed: base")


def test_what_cannot_run_here_is_said_and_is_no_miss(capsys):
    status, rows = run(capsys, "--only", "kernel_[cs]*")
    assert status == 0
    assert {name: row["skipped"] for name, row in rows.items()} == {
        "kernel_splash": "it runs on tpu, this is cpu",
        "kernel_cudnn": "it runs on gpu, this is cpu",
    }


def test_every_row_can_be_written_as_json(capsys, monkeypatch):
    monkeypatch.setattr(parity, "check", lambda cfg, initial: {"logits": parity.Part(np.inf, 1e-5, "logits: differs")})
    monkeypatch.setattr(parity_peers, "installed", lambda: False)
    status, rows = run(capsys)
    assert (status, set(rows)) == (1, set(parity.ROWS))
    assert rows["mesh_2x2x2"]["changes"]["mesh"]["tensor"] == 2
    assert rows["base"]["parts"]["logits"]["difference"] is None
    assert {row["verdict"] for row in rows.values()} == {"MISS", None}


def test_a_row_that_raises_is_a_miss(capsys, monkeypatch):
    monkeypatch.setattr(parity, "check", lambda *_: [][0])
    assert parity.main(["--only", "base"]) == 1
    assert "base: IndexError: list index out of range" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "slidng"], "--only slidng: no such row; did you mean 'sliding'?; known: base, "),
        (["--peer", "nowhere"], "--peer nowhere: no checkout of nanoGPT: it has no model.py"),
    ],
)
def test_a_mistake_is_one_message(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        parity.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("found", "missed"),
    [
        (values(), []),
        (values(logits=np.full((2, 3), 2e-5)), ["logits: differs by 2.0e-05, tolerance 1e-05"]),
        (values(logits=np.full((2, 3), np.nan)), ["logits: differs by inf, tolerance 1e-05"]),
        (values(logits=np.zeros((3, 2))), ["logits: differs by inf, tolerance 1e-05"]),
        (
            values(gradient={"a": np.zeros((2, 3)), "b": np.ones((2, 3))}),
            ["gradient of b: differs by 1.0e+00, tolerance 1e-05"],
        ),
        (values(losses=np.array([1, 1, 1.1, np.nan])), ["loss curve from step 3: differs by 1.0e-01, tolerance 1e-05"]),
    ],
)
def test_the_first_difference_beyond_the_tolerance_is_named(found, missed):
    tolerances = dict.fromkeys(parity.COLUMNS, parity.TOLERANCE)
    assert list(parity.missed(parity.compare(parity.differences(found, values()), tolerances))) == missed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_a_16_bit_model_stays_within_its_rounding_and_an_error_does_not(name, monkeypatch):
    assert not parity.missed(parity.check(departure(name)))
    monkeypatch.setattr("minitf.model.attention.rotate", turned_back)
    assert len(parity.missed(parity.check(departure(name)))) == 3


@pytest.mark.slow
def test_nanogpts_curve_is_ours_and_another_optimizer_is_a_miss(capsys, monkeypatch):
    pytest.importorskip("torch")
    sizes = dict(steps=12, batch_size=4, seq_len=16, model__max_seq_len=16, model__dim=32, model__num_layers=2)
    recipe, make = parity_peers.peer_config, parity_peers.make_optimizer
    monkeypatch.setattr(parity_peers, "peer_config", lambda bias: change(recipe(bias), **sizes))
    assert recipe(False).steps == 100
    status, rows = run(capsys, "--peer", str(PEER), "--only", "nanogpt*")
    assert status == 0
    assert list(rows) == ["nanogpt", "nanogpt_bias"]
    monkeypatch.setattr(parity_peers, "make_optimizer", lambda o, *rest: make(change(o, b2=0.9), *rest))
    status, rows = run(capsys, "--peer", str(PEER), "--only", "nanogpt")
    assert status == 1
    (miss,) = rows["nanogpt"]["misses"]  # logits and gradient of the first step are right
    assert miss.startswith("loss curve from step ")
