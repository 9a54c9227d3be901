"""Logits of transformers' own models, for what is imported from them and for what is exported to them."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from common import assert_close, launch, make_mesh, random_params, text_config
from hf_models import MODELS, save_run
from safetensors.numpy import load_file
from test_frame import made, tuned  # noqa: F401 (fixtures)

from minitf.data import chat
from minitf.data.tokenizer_files import load_tokenizer
from minitf.huggingface import folder as files
from minitf.huggingface.convert import export_model, import_model
from minitf.huggingface.families import FAMILIES
from minitf.model import ops
from minitf.params import named
from minitf.sampling import Sampler, Sampling
from minitf.workdir import load_model
from tools import benchmark_generate, parity_peers
from tools.parity_peers import IDS, SCALE, THEIRS, TOLERANCE, our_logits, random_model, their_logits

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def transformers(torch):
    pytest.importorskip("transformers", minversion="5")
    return parity_peers.transformers()


def load(transformers, folder):
    """With transformers alone, and with nothing missing: what it does not find it makes up, with a warning."""
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", dtype="float32"
    )
    assert not any(info.values()), info
    return theirs.eval()


def assert_near(a, b, tolerance=TOLERANCE):
    assert np.abs(b).max() > 0.5  # else near 0 would be near
    assert_close({"logits": a}, {"logits": b}, tolerance)


MIXTURES = [name for name, (_, settings) in THEIRS.items() if "num_experts_per_tok" in settings]
FAMILIES_OF_MIXTURES = {THEIRS[name][0] for name in MIXTURES}


def tolerance_of(family):
    return 3e-5 if family in FAMILIES_OF_MIXTURES else TOLERANCE


@pytest.mark.parametrize("name", THEIRS)
def test_imported_models_have_their_logits(name, torch, transformers, tmp_path):
    theirs = random_model(name)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="30KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    import_model(tmp_path / "hf", tmp_path / "w")
    assert_near(our_logits(tmp_path / "w"), their_logits(theirs), tolerance_of(THEIRS[name][0]))
    # And back: the same numbers, under the same names.
    export_model(tmp_path / "w", tmp_path / "again", family=THEIRS[name][0])
    again = load(transformers, tmp_path / "again")
    assert type(again) is type(theirs)
    before, after = theirs.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    for path in before:
        assert torch.equal(before[path], after[path]), path
    np.testing.assert_array_equal(their_logits(again), their_logits(theirs))


def test_every_family_is_compared_both_ways():
    assert {kind for kind, _ in THEIRS.values()} == {kind for kind, _ in MODELS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", MODELS)
def test_exported_models_have_our_logits(name, torch, transformers, tmp_path):
    family, model = MODELS[name]
    params = save_run(tmp_path / "run", model, random_params(model, scale=SCALE))
    export_model(tmp_path / "run", tmp_path / "hf")
    theirs = load(transformers, tmp_path / "hf")
    assert theirs.config.model_type == family
    assert_near(their_logits(theirs), our_logits(tmp_path / "run"), tolerance_of(family))
    import_model(tmp_path / "hf", tmp_path / "back")
    back = dict(named(load_model(tmp_path / "back").params))
    for path, a in named(params):
        np.testing.assert_array_equal(np.asarray(back[path]), a, err_msg=path)


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_are_read_as_transformers_has_them_in_memory(name, torch, transformers, tmp_path):
    theirs = random_model(name)
    theirs.save_pretrained(tmp_path / "hf", save_original_format=False)
    assert any(n.endswith(".experts.gate_up_proj") for n in load_file(tmp_path / "hf/model.safetensors"))
    import_model(tmp_path / "hf", tmp_path / "w")
    assert_near(our_logits(tmp_path / "w"), their_logits(theirs), tolerance_of(THEIRS[name][0]))
    with torch.no_grad():  # no choice of experts that rounding could change
        for scores in theirs(torch.tensor(IDS), output_router_logits=True).router_logits:
            best = np.sort(scores.numpy(), axis=-1)[:, ::-1]
            k = theirs.config.num_experts_per_tok
            assert (best[:, k - 1] - best[:, k]).min() > 1e-4


def test_a_bfloat16_export_in_shards_is_loaded(torch, transformers, tmp_path):
    _, model = MODELS["llama"]
    save_run(tmp_path / "run", model, random_params(model, scale=SCALE))
    export_model(tmp_path / "run", tmp_path / "hf", dtype="bfloat16", max_shard_size=20_000)
    assert (tmp_path / "hf" / files.INDEX).exists()
    theirs = load(transformers, tmp_path / "hf")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").dtype == torch.bfloat16
    import_model(tmp_path / "hf", tmp_path / "back")
    assert_near(their_logits(theirs), our_logits(tmp_path / "back"))


def test_classic_settings_are_read_alike(torch, transformers, tmp_path):
    # As transformers 4 wrote them, and as most folders of the hub have them.
    theirs = random_model("llama_biases_stretched")
    theirs.save_pretrained(tmp_path / "hf")
    tree = json.loads((tmp_path / "hf/config.json").read_text())
    rope = tree.pop("rope_parameters")
    tree |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": tree.pop("dtype")}
    (tmp_path / "hf/config.json").write_text(json.dumps(tree))
    import_model(tmp_path / "hf", tmp_path / "w")
    assert_near(our_logits(tmp_path / "w"), their_logits(theirs))
    assert_near(their_logits(load(transformers, tmp_path / "hf")), their_logits(theirs))
    export_model(tmp_path / "w", tmp_path / "again")
    written = json.loads((tmp_path / "again/config.json").read_text())
    for key in ("rope_theta", "rope_scaling", "torch_dtype"):
        assert written[key] == tree[key]


def test_rotation_is_that_of_llama(torch, transformers):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    angles = torch.tensor([1.0, 0.01]).repeat(2).reshape(1, 1, 4)
    q, _ = apply_rotary_pos_emb(x, x, angles.cos(), angles.sin())
    table = ops.rope_table(jnp.ones((1, 1)), jnp.array([1.0, 0.01]))
    mine = ops.rotate(jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4), table)
    np.testing.assert_allclose(np.ravel(mine), [-1.984111, 1.959901, 2.462378, 4.0198], atol=1e-6)
    np.testing.assert_allclose(np.ravel(mine), q.numpy().ravel(), atol=1e-6)


def test_a_trained_tied_model_is_exported_as_it_is_used(torch, transformers, corpus, tmp_path):
    cfg = text_config(
        corpus, steps=20, model__tie_embeddings=True, checkpoint__last=True, optimizer__learning_rate=1e-2
    )
    status, _ = launch(cfg, tmp_path / "run")
    assert status == 0
    export_model(tmp_path / "run", tmp_path / "hf")
    theirs = load(transformers, tmp_path / "hf")
    assert theirs.config.tie_word_embeddings
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight
    assert_near(their_logits(theirs, IDS[:, :16]), our_logits(tmp_path / "run", IDS[:, :16]))
    import_model(tmp_path / "hf", tmp_path / "back")
    assert "head" not in load_model(tmp_path / "back").params
    np.testing.assert_array_equal(our_logits(tmp_path / "back", IDS[:, :16]), our_logits(tmp_path / "run", IDS[:, :16]))


def test_decoding_is_that_of_transformers_and_is_measured_beside_it(torch, transformers, corpus, tmp_path):
    launch(text_config(corpus, steps=20, checkpoint__last=True, optimizer__learning_rate=1e-2), tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "hf")
    model = load_model(tmp_path / "run")
    sampler = Sampler(model.cfg.model, make_mesh("1"))
    pieces = sampler.stream(model.params, list(np.asarray(IDS[:, :8])), 8, Sampling(temperature=0))
    found = np.concatenate([piece.ids for piece in pieces], axis=1)
    with torch.no_grad():
        prompts = torch.from_numpy(np.asarray(IDS[:, :8], np.int64))
        theirs = load(transformers, tmp_path / "hf").generate(
            prompts,
            attention_mask=torch.ones_like(prompts),  # else an id that is that of padding is not seen
            max_new_tokens=8,
            min_new_tokens=8,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    np.testing.assert_array_equal(found, theirs[:, 8:].numpy())
    sources = {"minitf": str(tmp_path / "run"), "transformers": str(tmp_path / "hf")}
    figures = benchmark_generate.compare(sources, [2], prompt=4, new=5, rounds=2)["batch_sizes"][2]
    assert all(rate > 0 for rate in figures["tokens_per_s"].values())
    assert len(figures["ratio"]["rounds"]) == 2


def test_transformers_reads_our_tokenizers(transformers, corpus, tmp_path):
    for kind in ("bytes", "chars"):
        cfg = text_config(corpus, steps=1, model__vocab_size=None, checkpoint__last=True, data__tokenizer=kind)
        launch(cfg, tmp_path / kind)
        export_model(tmp_path / kind, tmp_path / kind / "hf")
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / kind / "hf")
        mine = load_tokenizer(tmp_path / kind / "tokenizer.json")
        text = "abc xyz" if kind == "bytes" else "abcxyz"
        assert theirs(text)["input_ids"] == mine.encode(text.encode()).tolist()
        assert theirs.decode(theirs(text)["input_ids"]) == text
        assert theirs.eos_token_id == mine.specials.get("eos")
        assert theirs.pad_token_id == mine.specials.get("pad")


PAIRS = [("ab ba", " abc"), ("c", "ba"), ("", "abc"), ("ab" * 30, "c" * 10)]


@pytest.mark.parametrize("name", ["gemma2", "llama", "gpt2"])
def test_figures_of_tasks_are_those_of_the_harness_adapter_for_transformers(name, torch, transformers, tmp_path):
    pytest.importorskip("accelerate")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from test_frame import VOCAB, make_tokenizer

    from minitf import harness

    theirs = random_model(name, vocab_size=VOCAB, bos_token_id=0, eos_token_id=1)
    theirs.save_pretrained(tmp_path / "hf")
    tokenizer = make_tokenizer(tmp_path / "hf", start=True)
    import_model(tmp_path / "hf", tmp_path / "w")
    adapter = HFLM(pretrained=str(tmp_path / "hf"), device="cpu", dtype="float32", batch_size=1)
    ours = harness.HarnessModel(load_model(tmp_path / "w"), tokenizer, make_mesh("1"))
    scored = [Instance("loglikelihood", {}, pair, 0) for pair in PAIRS]
    for (mine, greedy), (expected, their_greedy) in zip(
        ours.loglikelihood(scored), adapter.loglikelihood(scored), strict=True
    ):
        assert mine == pytest.approx(expected, abs=1e-4)
        assert greedy == their_greedy
    rolled = [Instance("loglikelihood_rolling", {}, ("".join(pair) * 3,), 0) for pair in PAIRS]
    np.testing.assert_allclose(ours.loglikelihood_rolling(rolled), adapter.loglikelihood_rolling(rolled), atol=1e-4)
    for stop in ([], ["a"], ["<|im_end|>"]):
        asked = [
            Instance("generate_until", {}, (context, {"until": stop, "max_gen_toks": 8}), 0) for context, _ in PAIRS[:2]
        ]
        assert ours.generate_until(asked) == adapter.generate_until(asked)


def test_a_model_tuned_on_conversations_answers_in_transformers_by_its_template(transformers, tuned, tmp_path):  # noqa: F811
    from test_frame import CHATS

    export_model(tuned, tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    theirs = load(transformers, tmp_path / "hf")
    for question, answer in CHATS:
        ids = tokenizer.apply_chat_template(
            [question], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        found = theirs.generate(**ids, max_new_tokens=40, do_sample=False, pad_token_id=0)[
            0, ids["input_ids"].shape[1] :
        ]
        assert tokenizer.decode(found) == f"{answer['content']}<|im_end|>"


TEMPLATES = {  # in the ways in which templates of models are written
    "header": (
        "{{- bos_token }}\n{%- if messages[0].role == 'system' %}\n  {%- set said = messages[0].content | trim %}\n"
        "  {%- set messages = messages[1:] %}\n{%- else %}\n  {%- set said = 'today' %}\n{%- endif %}\n"
        "{{- '<|im_start|>system\\n' + said + '<|im_end|>' }}\n{%- for m in messages %}\n"
        "    {%- if tools is not none and loop.first %}{{- tools | tojson }}{% endif %}\n"
        "{{- '<|im_start|>' + m['role'] + '\\n\\n' + m['content'] | trim + '<|im_end|>' }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n\\n' }}{%- endif %}"
    ),
    "macro": (
        "{% macro turn(m) -%}\n[{{ m.role | upper }}] {{ m.content }}\n{%- endmacro %}\n"
        "{% set state = namespace(n=0) %}\n{% for m in messages %}\n    {% set state.n = state.n + 1 %}\n"
        "    {% if m.role == 'system' %}\n        {% continue %}\n    {% endif %}\n    {{ turn(m) }} {{ state.n }}\n"
        "    {% generation %}{{ eos_token }}{% endgeneration %}\n{% endfor %}\n{{ [1, 'é'] | tojson }}"
    ),
}
CONVERSATION = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "What is 2+2?\n"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And <b>3+3</b>?"},
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_rendered_as_by_transformers(name, transformers, tmp_path):
    from test_frame import make_tokenizer

    ours = make_tokenizer(tmp_path, start=True, template=TEMPLATES[name])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for messages in (CONVERSATION, CONVERSATION[1:2]):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert chat.chat_prompt_ids(ours, TEMPLATES[name], 0, messages) == expected
