"""Model folders of Hugging Face: ours become theirs and come back the same, and what does not fit is told."""

import dataclasses
import json
import os
import re
import shutil
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from common import ROOT, TINY, assert_close, change, launch, run_module, slow, text_config
from hf_models import BASE, GPT2, HUB, MIXTURE, MODELS, save_run
from safetensors.numpy import load_file, save_file

from minitf import evaluate
from minitf.data.tokenizer import ByteTokenizer, CharTokenizer
from minitf.data.tokenizer_files import load_tokenizer
from minitf.huggingface import convert
from minitf.huggingface import folder as files
from minitf.huggingface.__main__ import main
from minitf.huggingface.convert import export_model, import_model
from minitf.huggingface.families import FAMILIES, canonical, fitting, misfits, read_config, write_config
from minitf.huggingface.settings import as_every
from minitf.model import attention as attention_lib
from minitf.model.transformer import model as logits_of
from minitf.model.transformer import model_params, places
from minitf.params import count_params, named
from minitf.workdir import load_model


def exported(tmp_path, name="llama", **options):
    """(run, folder, parameters) of one of MODELS."""
    _, model = MODELS[name]
    params = save_run(tmp_path / "run", model)
    export_model(tmp_path / "run", tmp_path / "hf", **options)
    return tmp_path / "run", tmp_path / "hf", params


def edit(folder, change_tensors=None, **settings):
    """Changes the tensors and the settings of a folder; None takes a setting out."""
    if change_tensors is not None:
        tensors = load_file(folder / "model.safetensors")
        change_tensors(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tree = json.loads((folder / "config.json").read_text()) | settings
    tree = {name: value for name, value in tree.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(tree))


def assert_same(a, b):
    a, b = dict(named(a)), dict(named(b))
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(np.asarray(a[name]), np.asarray(b[name]), err_msg=name)


# ---- there and back


# Of mixtures one, and those of test_fused_experts_are_read.
ROUND = [n for n, (_, model) in MODELS.items() if model.mlp.router == "none" or n == "qwen3_moe_dense_first"]


@pytest.mark.parametrize("name", slow(MODELS, but=ROUND))
def test_round_trip_is_exact(name, tmp_path):
    family, model = MODELS[name]
    _, hf, params = exported(tmp_path, name)
    assert json.loads((hf / "config.json").read_text())["model_type"] == family
    done = import_model(hf, tmp_path / "back")
    cfg, back, step, _ = load_model(tmp_path / "back")
    assert (done.family, step) == (family, 0)
    assert cfg.model == canonical(model)
    assert_same(back, params)


def test_every_family_has_models():
    assert {family for family, _ in MODELS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", ["llama_tied", "gpt2"])
def test_shards_hold_the_same(name, tmp_path):
    _, hf, params = exported(tmp_path, name, max_shard_size=30_000)
    index = json.loads((hf / files.INDEX).read_text())
    shards = sorted(p.name for p in hf.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    assert set(index["weight_map"].values()) == set(shards)
    assert index["metadata"]["total_size"] == 4 * sum(a.size for a in jax.tree.leaves(params))
    sizes = [sum(a.nbytes for a in load_file(hf / s).values()) for s in shards]
    assert sum(sizes) == index["metadata"]["total_size"]
    assert all(size <= 30_000 for size in sizes)
    import_model(hf, tmp_path / "back")
    assert_same(load_model(tmp_path / "back").params, params)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_are_read_exactly(dtype, tmp_path):
    _, hf, params = exported(tmp_path, dtype="bfloat16")
    numbers = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    if dtype == "float16":
        edit(hf, lambda tensors: tensors.update({n: a.astype(numbers) for n, a in tensors.items()}))
    stored = load_file(hf / "model.safetensors")
    assert {a.dtype for a in stored.values()} == {numbers}
    import_model(hf, tmp_path / "back", dtype="bfloat16")
    cfg, back, _, _ = load_model(tmp_path / "back")
    assert cfg.model.dtype == "bfloat16"  # of the computation; the parameters stay float32
    rounded = jax.tree.map(lambda a: a.astype(ml_dtypes.bfloat16).astype(numbers).astype(np.float32), params)
    assert_same(back, rounded)
    assert {str(a.dtype) for a in jax.tree.leaves(back)} == {"float32"}


def test_tensors_are_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("minitf.huggingface.folder.READ_BYTES", 4 * 48 * 3)  # three rows of most
    for name in ("llama_biases_stretched", "gpt2"):
        _, hf, params = exported(tmp_path / name, name)
        import_model(hf, tmp_path / name / "back")
        assert_same(load_model(tmp_path / name / "back").params, params)


def test_layers_go_to_their_places(tmp_path):
    # By their own names: the layers of a pattern of two are not one stack.
    _, hf, params = exported(tmp_path, "qwen3_windows")
    tensors = load_file(hf / "model.safetensors")
    for layer, (place, index) in enumerate([(0, 0), (1, 0), (0, 1)]):
        ours = params["blocks"][place]["attention"]["q"][index]
        theirs = tensors[f"model.layers.{layer}.self_attn.q_proj.weight"]
        np.testing.assert_array_equal(theirs, ours.reshape(48, 60).T)


def test_gpt2_joins_queries_keys_and_values(tmp_path):
    _, hf, params = exported(tmp_path, "gpt2")
    tensors = load_file(hf / "model.safetensors")
    a = params["blocks"][0]["attention"]
    joined = tensors["transformer.h.2.attn.c_attn.weight"]
    np.testing.assert_array_equal(joined, np.concatenate([a[n][2].reshape(48, 48) for n in "qkv"], axis=1))
    joined = tensors["transformer.h.2.attn.c_attn.bias"]
    np.testing.assert_array_equal(joined, np.concatenate([a[f"{n}_bias"][2].reshape(48) for n in "qkv"]))
    np.testing.assert_array_equal(tensors["transformer.wpe.weight"], params["position_embedding"])


def test_consecutive_query_heads_read_one_key_value_head_after_import(tmp_path):
    model = change(BASE, num_layers=1, dim=16, attention__num_heads=4, attention__head_dim=4, attention__bias="qkvo")
    save_run(tmp_path / "run", model)
    export_model(tmp_path / "run", tmp_path / "hf")

    def values_10_and_20(tensors):
        for name in [n for n in tensors if "self_attn" in n]:
            tensors[name] = np.zeros_like(tensors[name])
        tensors["model.layers.0.self_attn.v_proj.bias"] = np.repeat([10.0, 20.0], 4).astype(np.float32)
        tensors["model.layers.0.self_attn.o_proj.weight"] = np.eye(16, dtype=np.float32)

    edit(tmp_path / "hf", values_10_and_20)
    import_model(tmp_path / "hf", tmp_path / "back")
    cfg, params, _, _ = load_model(tmp_path / "back")
    layer = jax.tree.map(lambda a: a[0], params["blocks"][0]["attention"])
    full = attention_lib.ATTENTION["full"]
    y, _ = attention_lib.attention(layer, jnp.ones((1, 3, 16)), cfg.model.attention, attention_lib.Context(), full)
    np.testing.assert_array_equal(np.asarray(y[0, 0]).reshape(4, 4)[:, 0], [10, 10, 20, 20])


def test_tied_embeddings_are_one_tensor_and_one_leaf_with_both_gradients(tmp_path):
    _, hf, _ = exported(tmp_path, "llama_tied")
    assert json.loads((hf / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in load_file(hf / "model.safetensors")
    import_model(hf, tmp_path / "back")
    cfg, params, _, _ = load_model(tmp_path / "back")
    assert "head" not in params
    tokens = jnp.arange(24).reshape(2, 12) % 64
    loss = lambda params, cfg: jnp.mean(jax.nn.log_softmax(logits_of(params, tokens, cfg))[..., 3])
    apart = params | {"head": params["embedding"].T}
    both = jax.grad(loss)(params, cfg.model)["embedding"]
    each = jax.grad(loss)(apart, change(cfg.model, tie_embeddings=False))
    assert np.abs(each["head"]).max() > 1e-3
    assert_close({"e": both}, {"e": each["embedding"] + each["head"].T}, 1e-5)


# ---- mixtures of experts


def test_experts_have_the_names_of_the_hub(tmp_path):
    for name, mixture, names in (
        ("mixtral", "block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}),
        ("olmoe", "mlp", {n: f"{n}_proj" for n in ("gate", "up", "down")}),
    ):
        _, hf, params = exported(tmp_path / name, name)
        tensors, ours = load_file(hf / "model.safetensors"), params["blocks"][0]["mlp"]
        np.testing.assert_array_equal(tensors[f"model.layers.2.{mixture}.gate.weight"], ours["router"][2].T)
        for mine, theirs in names.items():
            found = tensors[f"model.layers.2.{mixture}.experts.3.{theirs}.weight"]
            np.testing.assert_array_equal(found, ours["experts"][mine][2, 3].T)


def fuse(tensors, *names):
    """To one tensor for all experts, under the names that transformers 5 has in memory; names: of gate, up and down on the hub."""
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp"
        for name in [n for n in tensors if f"layers.{layer}.block_sparse_moe" in n]:
            tensors[name.replace("block_sparse_moe", "mlp")] = tensors.pop(name)
        gate, up, down = (
            np.stack([tensors.pop(f"{prefix}.experts.{e}.{name}.weight") for e in range(5)]) for name in names
        )
        tensors[f"{prefix}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        tensors[f"{prefix}.experts.down_proj"] = down


FUSED = {"mixtral": ("w1", "w3", "w2"), "olmoe": ("gate_proj", "up_proj", "down_proj")}


@pytest.mark.parametrize("name", FUSED)
def test_fused_experts_are_read(name, tmp_path, monkeypatch):
    monkeypatch.setattr("minitf.huggingface.folder.READ_BYTES", 4 * 48 * 3)
    _, hf, params = exported(tmp_path, name)
    edit(hf, lambda tensors: fuse(tensors, *FUSED[name]))
    assert len([n for n in load_file(hf / "model.safetensors") if ".mlp." in n]) == 3 * 3
    import_model(hf, tmp_path / "back")
    cfg, back, _, _ = load_model(tmp_path / "back")
    assert cfg.model == canonical(MODELS[name][1])
    assert_same(back, params)


def test_fused_experts_that_do_not_fit_are_listed(tmp_path):
    _, hf, _ = exported(tmp_path, "olmoe")
    edit(hf, lambda tensors: fuse(tensors, *FUSED["olmoe"]), num_experts=4)
    with pytest.raises(
        ValueError, match=r"not in this model: model\.layers\.0\.mlp\.experts\.4\.gate_proj\.weight \[40, 48\]"
    ):
        import_model(hf, tmp_path / "back")
    extra = {"model.layers.1.mlp.experts.2.up_proj.weight": np.zeros((40, 48), np.float32)}
    edit(hf, lambda tensors: tensors.update(extra), num_experts=5)
    with pytest.raises(ValueError, match=r"has model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight twice"):
        import_model(hf, tmp_path / "back")


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, r"may change what the model computes\n  router_jitter_noise=0.1\n"),
        ("mixtral", {"num_local_experts": None}, "has no num_local_experts"),
        ("mixtral", {"num_experts_per_tok": None}, "has no num_experts_per_tok"),
        ("olmoe", {"clip_qkv": 8.0}, r"may change what the model computes\n  clip_qkv=8.0\n"),
        ("olmoe", {"num_experts": "many"}, "experts='many': is str, must be int"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 40}, r"\n  shared_expert_intermediate_size=40\n"),
        ("qwen3_moe", {"n_shared_experts": 1}, r"\n  n_shared_experts=1\n"),
        ("qwen3_moe", {"num_local_experts": 4}, "num_experts=5, num_local_experts=4: differ"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\], .*: mixtures in layers \[0, 2\] of 3; known:"),
        ("qwen3_moe", {"decoder_sparse_step": 4}, r"decoder_sparse_step=4: mixtures in layers \[\] of 3"),
        ("qwen3_moe_dense_first", {"max_window_layers": 2}, r"\n  max_window_layers=2\n"),
        ("mixtral", {"model_type": "qwen2_moe"}, "'qwen2_moe': unknown; known: llama, .*, mixtral, qwen3_moe, olmoe"),
    ],
)  # fmt: skip
def test_settings_of_mixtures_that_are_not_known_are_refused_by_name(name, settings, message):
    with pytest.raises(ValueError, match=message):
        read_config(write_config(*MODELS[name]) | settings)


def test_settings_of_mixtures_have_several_names_or_no_effect():
    for name in ("mixtral", "qwen3_moe", "olmoe"):
        model = canonical(MODELS[name][1])
        tree = write_config(*MODELS[name])
        assert (
            read_config(tree | dict(output_router_logits=True, router_aux_loss_coef=0.5, router_jitter_noise=0.0))
            == model
        )
        for key in {"num_experts", "num_local_experts"} & set(tree):
            others = {n: v for n, v in tree.items() if n == key or n not in ("num_experts", "num_local_experts")}
            assert read_config(others) == model


def mixed_layers(model):
    return sorted(i for place in places(model) if place.mlp.router != "none" for i in place.layers)


def test_layers_with_mixtures_are_read_and_written_the_same():
    tree = write_config(*MODELS["qwen3_moe"])
    for n in range(1, 8):
        for every in range(1, n + 1):
            for first in range(n - n % every):
                model = change(MODELS["qwen3_moe"][1], num_layers=n, mlp__every=every, mlp__dense_first=first)
                mixed = mixed_layers(model)
                assert (
                    mixed_layers(change(model, **{f"mlp__{k[4:]}": v for k, v in as_every(mixed, n).items()})) == mixed
                )
                assert mixed_layers(canonical(model)) == mixed
                assert misfits("qwen3_moe", model) == []
                dense = [i for i in range(n) if i not in mixed]
                read = read_config(tree | dict(num_hidden_layers=n, mlp_only_layers=dense, max_window_layers=n))
                assert read == canonical(change(model, mlp__dense_hidden=40 if dense else None))
    assert as_every([0, 2], 4) is as_every([], 4) is None


# ---- tensors that do not fit


def remove(tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]


def add(tensors):
    tensors["model.layers.0.surprise.weight"] = np.zeros((3, 5), np.float32)


def misshape(tensors):
    tensors["model.layers.2.self_attn.k_proj.weight"] = np.zeros((21, 48), np.float32)


def quantize(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)


LINES = {
    remove: r"missing: model\.layers\.1\.mlp\.up_proj\.weight \[40, 48\]",
    add: r"not in this model: model\.layers\.0\.surprise\.weight \[3, 5\]",
    misshape: r"shape of model\.layers\.2\.self_attn\.k_proj\.weight: \[21, 48\], by config\.json \[20, 48\]",
    quantize: r"numbers of model\.norm\.weight: I8, known: F32, BF16, F16",
}


@pytest.mark.parametrize(
    "faults", [[f] for f in LINES] + [list(LINES)], ids=lambda fs: "+".join(f.__name__ for f in fs)
)
def test_missing_extra_and_misshapen_tensors_are_listed(faults, tmp_path):
    _, hf, _ = exported(tmp_path)
    for fault in faults:
        edit(hf, fault)
    with pytest.raises(ValueError, match=r"its tensors are not those of its config\.json") as e:
        import_model(hf, tmp_path / "back")
    assert len(str(e.value).splitlines()) == 1 + len(faults)
    for fault in faults:
        e.match(LINES[fault])
    assert not (tmp_path / "back").exists()


def test_a_long_list_of_tensors_is_cut(tmp_path):
    _, hf, _ = exported(tmp_path)
    edit(hf, num_hidden_layers=9)
    with pytest.raises(ValueError, match=r"missing: model.layers.3.input_layernorm.weight \[48\]\n(.|\n)*and 14 more$"):
        import_model(hf, tmp_path / "back")


def test_known_extras_are_left_out_by_name(tmp_path):
    for name, extras in {
        "llama": ["model.layers.1.self_attn.rotary_emb.inv_freq"],
        "gpt2": ["transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias"],
    }.items():
        _, hf, params = exported(tmp_path / name, name)
        edit(hf, lambda tensors, extras=extras: tensors.update({n: np.ones((1, 1, 4, 4), np.float32) for n in extras}))
        import_model(hf, tmp_path / name / "back")
        assert_same(load_model(tmp_path / name / "back").params, params)


@pytest.mark.parametrize("name", ["llama_tied", "gpt2"])
def test_a_stored_head_of_a_tied_model_must_be_its_embedding(name, tmp_path):
    _, hf, params = exported(tmp_path, name)
    embedding = FAMILIES[MODELS[name][0]].names["embedding"]
    edit(hf, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding].copy()}))
    import_model(hf, tmp_path / "back")
    assert_same(load_model(tmp_path / "back").params, params)
    edit(hf, lambda tensors: tensors["lm_head.weight"].__setitem__((63, 47), 0.5))
    with pytest.raises(ValueError, match=f"lm_head.weight is not {embedding}.*set tie_word_embeddings to false"):
        import_model(hf, tmp_path / "other")


@pytest.mark.parametrize("name", ["llama_tied", "gpt2"])
def test_a_folder_without_the_prefix_of_a_head_is_read(name, tmp_path):
    # As openai-community/gpt2 and other models that were saved without a head.
    _, hf, params = exported(tmp_path, name)
    prefix = FAMILIES[MODELS[name][0]].prefix

    def strip(tensors):
        for name in list(tensors):
            tensors[name.removeprefix(prefix)] = tensors.pop(name)

    edit(hf, strip)
    import_model(hf, tmp_path / "back")
    assert_same(load_model(tmp_path / "back").params, params)


# ---- files


@pytest.mark.parametrize(
    "name", ["../away.safetensors", "{tmp}/away.safetensors", "link.safetensors", "deep/../../away.safetensors"]
)
def test_an_index_must_stay_inside_its_folder(name, tmp_path):
    _, hf, _ = exported(tmp_path, max_shard_size=20_000)
    index = json.loads((hf / files.INDEX).read_text())
    first = sorted(index["weight_map"].values())[0]
    shutil.move(hf / first, tmp_path / "away.safetensors")
    (hf / "link.safetensors").symlink_to("../away.safetensors")
    name = name.format(tmp=tmp_path)
    index["weight_map"] = {n: name if f == first else f for n, f in index["weight_map"].items()}
    (hf / files.INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"names .*(away|link).*, which leads out of the folder"):
        import_model(hf, tmp_path / "back")


def test_a_link_inside_the_folder_is_read(tmp_path):
    _, hf, params = exported(tmp_path, max_shard_size=20_000)
    first = sorted(p.name for p in hf.glob("*.safetensors"))[0]
    (hf / "blobs").mkdir()
    shutil.move(hf / first, hf / "blobs/0")
    (hf / first).symlink_to("blobs/0")
    import_model(hf, tmp_path / "back")
    assert_same(load_model(tmp_path / "back").params, params)


def test_files_that_are_not_there_or_not_whole_are_named(tmp_path):
    _, hf, _ = exported(tmp_path, max_shard_size=20_000)
    first = sorted(p.name for p in hf.glob("*.safetensors"))[0]
    whole = (hf / first).read_bytes()
    (hf / first).write_bytes(whole[:-8])
    with pytest.raises(ValueError, match=f"{first}: no file of safetensors, or not a whole one"):
        import_model(hf, tmp_path / "back")
    (hf / first).unlink()
    with pytest.raises(ValueError, match=f"names '{first}', which is not there"):
        import_model(hf, tmp_path / "back")
    (hf / first).write_bytes(whole)
    shutil.copy(hf / first, hf / "again.safetensors")
    index = json.loads((hf / files.INDEX).read_text())
    index["weight_map"]["x"] = "again.safetensors"
    (hf / files.INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="which another file of the folder has, too"):
        import_model(hf, tmp_path / "back")
    (hf / files.INDEX).write_text("{}")
    with pytest.raises(ValueError, match="has no weight_map"):
        import_model(hf, tmp_path / "back")
    (hf / files.INDEX).unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors and no model\.safetensors\.index\.json$"):
        import_model(hf, tmp_path / "back")
    (hf / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"pytorch_model\.bin is a pickle.*save_pretrained of transformers writes safetensors"
    ):
        import_model(hf, tmp_path / "back")
    (hf / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: no JSON"):
        import_model(hf, tmp_path / "back")
    with pytest.raises(ValueError, match="nowhere: no such directory"):
        import_model(tmp_path / "nowhere", tmp_path / "back")
    assert not (tmp_path / "back").exists()


# ---- config.json


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("llama", {"model_type": "phi3"}, "model_type='phi3': unknown; known: llama, mistral, qwen2, qwen3, gemma2, gpt2"),
        ("llama", {"model_type": "absent"}, "has no model_type"),
        ("llama", {"hidden_act": "relu"}, "hidden_act='relu': unknown; known: silu, gelu_pytorch_tanh, gelu_new"),
        ("gpt2", {"activation_function": "tanh"}, "activation_function='tanh': unknown; known: gelu_new"),
        ("llama", {"num_experts": 8}, r"not known here, and may change what the model computes\n  num_experts=8\n"),
        ("llama", {"sliding_window": 5}, "sliding_window=5"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config="),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("llama", {"rope_scaling": {"rope_type": "yarn"}, "rope_parameters": None}, "'yarn': unknown; known: default, llama3"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": None}, "rope_type='linear': unknown"),
        ("llama", {"rope_theta": 7.0}, "rope_parameters=.* and rope_theta, rope_scaling=.* differ in rope_theta"),
        ("llama", {"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor: only 1"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 100.0}}}, "unknown settings {'full_attention'"),
        ("llama_biases_stretched", {"rope_scaling": {"rope_type": "llama3"}, "rope_parameters": None}, "has no factor"),
        ("llama", {"hidden_size": "absent"}, "has no hidden_size"),
        ("llama", {"hidden_size": None}, "has no hidden_size"),
        ("llama", {"hidden_size": "48"}, "dim='48': is str, must be int"),
        ("llama", {"num_hidden_layers": 0}, "num_layers=0: must be at least 1"),
        ("gemma2", {"num_hidden_layers": 0, "layer_types": "absent"}, r"layer_types=\[\]"),
        ("gemma2", {"hidden_size": "48"}, "a setting of a wrong type"),
        ("llama", {"num_key_value_heads": 4}, "num_heads=6: not divisible by model.attention.num_kv_heads=4"),
        ("qwen2", {"layer_types": ["full_attention"] * 2}, "for each of num_hidden_layers"),
        ("qwen2", {"layer_types": ["linear_attention"] * 3}, "must be one of full_attention, sliding_attention"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "layer_types names sliding_attention, but use_sliding_window is false"),
    ],
)  # fmt: skip
def test_settings_that_are_not_known_are_refused_by_name(name, settings, message, tmp_path):
    _, hf, _ = exported(tmp_path, name)
    edit(hf, **settings)
    with pytest.raises(ValueError, match=message) as e:
        import_model(hf, tmp_path / "back")
    e.match("config.json")
    assert not (tmp_path / "back").exists()


def test_a_setting_can_be_ignored_by_name(tmp_path):
    _, hf, params = exported(tmp_path)
    edit(hf, num_experts=8)
    import_model(hf, tmp_path / "back", ignore=("num_experts",))
    assert_same(load_model(tmp_path / "back").params, params)


@pytest.mark.parametrize("name", HUB)
def test_configs_of_the_hub_are_read_and_written_the_same(name):
    tree, settings = HUB[name]
    model = read_config(tree)
    assert model == change(model, **settings)
    assert misfits(tree["model_type"], model) == []
    written = write_config(tree["model_type"], model)
    assert read_config(written) == model
    # Classic names stay classic.
    for key in ("rope_theta", "sliding_window", "layer_norm_epsilon", "head_dim", "n_embd", "tie_word_embeddings"):
        if key in tree and (key != "sliding_window" or model.pattern or model.attention.kind == "sliding"):
            assert written[key] == tree[key], key


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("SmolLM2-135M", 134_515_008, 134_515_008),
        ("Mixtral-8x7B-v0.1", 46_702_792_704, 12_879_925_248),
        ("Qwen3-30B-A3B", 30_532_122_624, 3_353_032_704),
        ("Qwen3-235B-A22B", 235_093_634_560, 22_190_763_520),
        ("OLMoE-1B-7B-0924", 6_919_161_856, 1_282_017_280),
    ],
)
def test_parameters_of_the_hub_are_counted(name, total, active):
    count = count_params(model_params(read_config(HUB[name][0])))
    assert (count["total"], count["active"]) == (total, active)


def test_layers_are_the_shortest_pattern():
    tree, _ = HUB["Qwen3-0.6B"]
    for types, pattern in {"ffff": None, "fsfs": ("full", "sliding"), "fss": ("full", "sliding", "sliding")}.items():
        names = {"f": "full_attention", "s": "sliding_attention"}
        layers = [names[types[i % len(types)]] for i in range(28)]
        cfg = read_config(tree | dict(layer_types=layers, use_sliding_window=True, sliding_window=64))
        assert cfg.pattern == pattern
    first = read_config(tree | dict(use_sliding_window=True, sliding_window=64, max_window_layers=26))
    assert first.pattern == ("full",) * 26 + ("sliding",) * 2
    assert read_config(tree | dict(use_sliding_window=True, sliding_window=64, max_window_layers=28)).pattern is None
    every = read_config(tree | dict(use_sliding_window=True, sliding_window=64, max_window_layers=0))
    assert (every.pattern, every.attention.kind) == (None, "sliding")


# ---- which family


@pytest.mark.parametrize("name", MODELS)
def test_each_model_fits_its_family_first(name):
    family, model = MODELS[name]
    assert fitting(model) == family
    # How it is computed or trained is no part of it.
    assert fitting(change(model, dtype="bfloat16", dropout=0.1, init="fan_in", remat="full", unroll=2)) == family


def test_an_equivalent_pattern_is_the_same_model(tmp_path):
    model = change(BASE, pattern=("full", "full"))
    params = save_run(tmp_path / "run", model)
    export_model(tmp_path / "run", tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "back")
    cfg, back, _, _ = load_model(tmp_path / "back")
    assert cfg.model == canonical(BASE)
    (stack,) = back["blocks"]
    for layer, (place, index) in enumerate([(0, 0), (1, 0), (0, 1)]):
        ours = jax.tree.map(lambda a, index=index: a[index], params["blocks"][place])
        assert_same(jax.tree.map(lambda a, layer=layer: a[layer], stack), ours)


@pytest.mark.parametrize(
    ("model", "messages"),
    [
        (
            change(BASE, norm="layer_norm"),
            [r"llama: model\.norm=layer_norm, not rms_norm", r"gpt2: .*model\.positions=rope, not learned"],
        ),
        (change(GPT2, norm="layer_norm_no_bias"), [r"gpt2: model\.norm=layer_norm_no_bias, not layer_norm$"]),
        (
            change(GPT2, attention__bias="none", mlp__bias=False),
            [r"gpt2: model\.attention\.bias=none, not qkvo; model\.mlp\.bias=False, not True"],
        ),
        (change(BASE, mlp__kind="gelu"), [r"llama: model\.mlp\.kind=gelu, not swiglu"]),
        (change(BASE, attention__softcap=3.0), [r"llama: model\.attention\.softcap=3\.0, not None"]),
        (
            change(BASE, dim=44, mlp__bias=True),
            [r"llama: model\.dim=44, not a multiple of model\.attention\.num_heads=6$", r"mistral: model\.mlp\.bias=True, not False"],
        ),
        (change(MODELS["gemma2"][1], embedding_scale=2.0), [r"gemma2: model\.embedding_scale=2\.0, not 6\.9"]),
        (change(MODELS["gemma2"][1], attention__scale=0.3), [r"gemma2: model\.attention\.scale=0\.3, not 0\.30151"]),
        (change(MODELS["qwen3"][1], norm_eps=1e-5), [r"qwen3: model\.attention\.qk_norm_eps=1e-06, not 1e-05"]),
        (change(BASE, positions="none"), [r"llama: model\.positions=none, not rope"]),
        (
            change(MIXTURE, mlp__shared=1),
            [r"mixtral: model\.mlp\.shared=1, not 0$", r"llama: .*model\.mlp\.router=softmax, not none"],
        ),
        (change(MIXTURE, mlp__router="sigmoid"), [r"mixtral: model\.mlp\.router=sigmoid, not softmax$"]),
        (change(MIXTURE, mlp__router_scale=2.0), [r"mixtral: model\.mlp\.router_scale=2\.0, not 1\.0$"]),
        (
            change(MIXTURE, mlp__normalise_weights=False, mlp__dense_first=1),
            [r"mixtral: model\.mlp\.normalise_weights=False, not True; model\.mlp\.dense_first=1, not 0"],
        ),
        (
            change(MODELS["olmoe"][1], attention__head_dim=10),
            [r"olmoe: model\.attention\.head_dim=10, not 8$", r"qwen3_moe: model\.attention\.qk_norm_over=heads, not head"],
        ),
    ],
)  # fmt: skip
def test_a_model_that_no_family_expresses_is_refused_with_the_reasons(model, messages):
    with pytest.raises(ValueError, match="no family of Hugging Face models") as e:
        fitting(model)
    lines = [line.strip() for line in str(e.value).splitlines()[1:]]
    assert [line.partition(":")[0] for line in lines] == list(FAMILIES)
    for message in messages:
        assert any(re.match(message, line) for line in lines), str(e.value)


# ---- the work directory


def test_an_imported_model_is_scored_and_trained_on(tmp_path, capsys, corpus):
    tiny = change(TINY.model, vocab_size=320, max_seq_len=16)
    params = save_run(tmp_path / "run", tiny, tokenizer=ByteTokenizer())
    export_model(tmp_path / "run", tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "w")
    assert (tmp_path / "w/tokenizer.json").read_bytes() == (tmp_path / "hf/tokenizer.json").read_bytes()
    cfg = load_model(tmp_path / "w").cfg
    assert (cfg.seq_len, cfg.model.max_seq_len) == (16, 16)

    results = []
    for workdir in ("run", "w"):
        assert evaluate.main(["--workdir", str(tmp_path / workdir), "--data", str(corpus / "val.txt"), "--json"]) == 0
        results.append(json.loads(capsys.readouterr().out)["data"])
    assert results[0] == results[1]
    with pytest.raises(SystemExit):
        evaluate.main(["--workdir", str(tmp_path / "w")])
    assert "the run's model was imported and has no data; evaluate takes some by --data" in capsys.readouterr().err

    train = text_config(corpus, steps=2, data__tokenizer=str(tmp_path / "w"), model=cfg.model)
    train = dataclasses.replace(train, init_from=str(tmp_path / "w"))
    status, lines = launch(train, tmp_path / "tuned")
    assert status == 0
    _, again = launch(dataclasses.replace(train, init_from=str(tmp_path / "run")), tmp_path / "tuned_from_run")
    assert [x.get("train/loss") for x in lines] == [x.get("train/loss") for x in again]
    assert_same(load_model(tmp_path / "w").params, params)
    with pytest.raises(ValueError, match=r"data\.kind: none -> text"):
        launch(dataclasses.replace(train, init_from=None), tmp_path / "w")


def test_an_imported_model_has_at_most_so_many_positions_in_a_row(tmp_path):
    save_run(tmp_path / "run", change(BASE, max_seq_len=5000))
    export_model(tmp_path / "run", tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "w")
    cfg = load_model(tmp_path / "w").cfg
    assert (cfg.seq_len, cfg.model.max_seq_len, cfg.data.kind, cfg.steps) == (2048, 5000, "none", 0)


def test_a_directory_that_holds_a_run_is_refused(tmp_path):
    _, hf, _ = exported(tmp_path)
    import_model(hf, tmp_path / "w")
    with pytest.raises(
        ValueError, match=r"holds checkpoints, config\.json, frame\.json; give another directory, or --overwrite"
    ):
        import_model(hf, tmp_path / "w")
    (tmp_path / "w/notes.txt").write_text("mine")
    edit(hf, lambda tensors: tensors["model.norm.weight"].fill(0.5))
    import_model(hf, tmp_path / "w", overwrite=True)
    assert np.all(load_model(tmp_path / "w").params["final_norm"]["scale"] == 0.5)
    assert (tmp_path / "w/notes.txt").read_text() == "mine"
    assert not (tmp_path / "w/lock.json").exists()
    with pytest.raises(ValueError, match=r"is there already; give another directory"):
        export_model(tmp_path / "w", hf)
    with pytest.raises(ValueError, match=r"is the folder to import; give another directory"):
        import_model(hf, hf, overwrite=True)
    assert (hf / "config.json").exists()


@pytest.mark.parametrize("at", ["read_tensor", "save", "write_whole"])
def test_an_interrupted_import_is_no_run(at, tmp_path, monkeypatch):
    _, hf, params = exported(tmp_path)

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    where = {"read_tensor": files, "save": convert.Checkpoints, "write_whole": convert}[at]
    with monkeypatch.context() as m:
        m.setattr(where, at, interrupt)
        with pytest.raises(KeyboardInterrupt):
            import_model(hf, tmp_path / "w")
    with pytest.raises(ValueError, match=r"no config\.json, so no run"):
        load_model(tmp_path / "w")
    assert {p.name for p in (tmp_path / "w").iterdir()} <= {"checkpoints", "tokenizer.json", "frame.json"}
    if at == "write_whole":
        with pytest.raises(ValueError, match=r"holds checkpoints, frame\.json; give another directory, or --overwrite"):
            import_model(hf, tmp_path / "w")
    import_model(hf, tmp_path / "w", overwrite=True)
    assert_same(load_model(tmp_path / "w").params, params)


def test_an_interrupted_export_leaves_nothing(tmp_path, monkeypatch):
    save_run(tmp_path / "run", BASE)

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "write_configs", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_model(tmp_path / "run", tmp_path / "hf")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


# ---- tokenizers


def test_our_tokenizers_become_theirs(tmp_path):
    text = "Zwölf Boxkämpfer\r\n\tjagen  Viktor ✓\n"
    for tokenizer in (ByteTokenizer(), CharTokenizer("".join(sorted(set(text + "xyz"))))):
        workdir = tmp_path / tokenizer.name
        save_run(workdir, change(BASE, vocab_size=320), tokenizer=tokenizer)
        export_model(workdir, workdir / "hf")
        theirs = load_tokenizer(workdir / "hf/tokenizer.json")
        np.testing.assert_array_equal(theirs.encode(text.encode()), tokenizer.encode(text.encode()))
        assert theirs.decode(theirs.encode(text.encode())) == text.encode()
        eos = tokenizer.specials.get("eos")
        # Theirs begins texts with the token from which training predicted their first one.
        begins = {} if eos is None else {"bos": eos}
        assert (theirs.vocab_size, theirs.specials) == (tokenizer.vocab_size, tokenizer.specials | begins)
        config = json.loads((workdir / "hf/config.json").read_text())
        assert config["bos_token_id"] == eos
        assert config["eos_token_id"] == eos
        assert (workdir / "hf/generation_config.json").exists() == (eos is not None)
        if eos is not None:
            assert json.loads((workdir / "hf/generation_config.json").read_text())["eos_token_id"] == eos


def test_a_tokenizer_travels_byte_for_byte(tmp_path):
    save_run(tmp_path / "run", change(BASE, vocab_size=320), tokenizer=ByteTokenizer())
    export_model(tmp_path / "run", tmp_path / "hf")
    contents = json.loads((tmp_path / "hf/tokenizer.json").read_text())
    (tmp_path / "hf/tokenizer.json").write_text(json.dumps(contents, indent=5))
    (tmp_path / "hf/tokenizer_config.json").write_text(
        '{ "eos_token":   "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    import_model(tmp_path / "hf", tmp_path / "w")
    export_model(tmp_path / "w", tmp_path / "again")
    (tmp_path / "hf/special_tokens_map.json").write_text('{"bos_token":  "<s>"}')
    import_model(tmp_path / "hf", tmp_path / "w", overwrite=True)
    export_model(tmp_path / "w", tmp_path / "third")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        first = (tmp_path / "hf" / name).read_bytes()
        assert first == (tmp_path / "w" / name).read_bytes() == (tmp_path / "third" / name).read_bytes()
        assert name == "special_tokens_map.json" or first == (tmp_path / "again" / name).read_bytes()


def test_what_a_folder_lacks_is_told(tmp_path, capsys):
    _, hf, _ = exported(tmp_path)
    assert main(["import", str(hf), str(tmp_path / "w")]) == 0
    assert "has no tokenizer.json: text cannot be read with this model" in capsys.readouterr().out
    save_run(tmp_path / "small", BASE, tokenizer=ByteTokenizer())
    export_model(tmp_path / "small", tmp_path / "hf2")
    assert "tokenizer.json has 259 ids, the model 64" in import_model(tmp_path / "hf2", tmp_path / "w2").notes[0]


# ---- the command line


def test_command_line_there_and_back(tmp_path):
    params = save_run(tmp_path / "run", BASE)
    out = run_module("minitf.huggingface", "export", tmp_path / "run", tmp_path / "hf", "--max_shard_size", "50KB")
    assert out.returncode == 0, out.stderr
    n = sum(a.size for a in jax.tree.leaves(params))
    assert f"{tmp_path / 'hf'}: llama, {n:,} parameters in float32, from {tmp_path / 'run'}" in out.stdout
    out = run_module("minitf.huggingface", "import", tmp_path / "hf", tmp_path / "w", "--dtype", "bfloat16")
    assert out.returncode == 0, out.stderr
    assert f"{tmp_path / 'w'}: llama, {n:,} parameters in float32, computed in bfloat16, from" in out.stdout
    assert_same(load_model(tmp_path / "w").params, params)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["import", "{tmp}/nowhere", "{tmp}/w"], "error: {tmp}/nowhere: no such directory"),
        (["export", "{tmp}/nowhere", "{tmp}/hf"], "error: {tmp}/nowhere: no config.json, so no run"),
        (["export", "{tmp}/run", "{tmp}/hf", "--step", "3"], "no checkpoint of step 3; there are those of [7]"),
        (["export", "{tmp}/run", "{tmp}/hf", "--family", "gpt2"], "error: --family gpt2 does not express this model: "),
        (["export", "{tmp}/run", "{tmp}/hf", "--family", "bert"], "invalid choice: 'bert'"),
        (["export", "{tmp}/run", "{tmp}/hf", "--max_shard_size", "0"], "0: must be a size such as 5GB or 300MB"),
        (["export", "{tmp}/run", "{tmp}/run"], "error: {tmp}/run: is there already; give another directory"),
        (["convert"], "invalid choice: 'convert'"),
    ],
)
def test_a_mistake_is_one_message_and_status_2(arguments, message, tmp_path, capsys):
    save_run(tmp_path / "run", BASE)
    with pytest.raises(SystemExit) as e:
        main([a.format(tmp=tmp_path) for a in arguments])
    assert e.value.code == 2
    err = capsys.readouterr().err
    assert message.format(tmp=tmp_path) in err
    assert "Traceback" not in err


def test_a_family_can_be_chosen(tmp_path):
    params = save_run(tmp_path / "run", BASE)
    export_model(tmp_path / "run", tmp_path / "hf", family="mistral")
    assert json.loads((tmp_path / "hf/config.json").read_text())["model_type"] == "mistral"
    import_model(tmp_path / "hf", tmp_path / "w")
    cfg, back, _, _ = load_model(tmp_path / "w")
    assert cfg.model == canonical(BASE)
    assert_same(back, params)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    _, hf, _ = exported(tmp_path)
    for module in [m for m in sys.modules if m.split(".")[0] == "safetensors"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ValueError, match=r"needs the package safetensors: pip install '\.\[hf\]'"):
        import_model(hf, tmp_path / "w")


def test_a_full_disk_is_one_message(tmp_path, monkeypatch, capsys):
    _, hf, _ = exported(tmp_path)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert main(["import", str(hf), str(tmp_path / "w")]) == 1
    assert "No space left on device" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"no config\.json, so no run"):
        load_model(tmp_path / "w")


# ---- memory


LARGE = change(
    BASE, num_layers=24, dim=576, vocab_size=16384, attention__num_heads=9, attention__num_kv_heads=3,
    attention__head_dim=64, mlp__hidden=1536, tie_embeddings=True,
)  # fmt: skip


def fused_shapes(shapes):
    """Those of a folder in which each layer's experts are two tensors."""
    found, experts = {n: s for n, s in shapes.items() if ".experts." not in n}, {}
    for name in shapes.keys() - found.keys():
        experts.setdefault(name.split(".experts.")[0], []).append(shapes[name])
    for prefix, each in experts.items():
        (F, D), E = min(each), len(each) // 3
        found |= {f"{prefix}.experts.gate_up_proj": (E, 2 * F, D), f"{prefix}.experts.down_proj": (E, D, F)}
    return found


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads the memory from /proc")
@pytest.mark.parametrize(
    ("family", "model"),
    [("llama", LARGE), ("mixtral", change(LARGE, mlp__router="softmax", mlp__hidden=384))],
    ids=["llama", "mixtral"],
)
def test_import_needs_memory_of_a_layer_not_of_the_model(family, model, tmp_path):
    model, hf = canonical(model), tmp_path / "hf"
    hf.mkdir()
    (hf / "config.json").write_text(json.dumps(write_config(family, model)))
    shapes = fused_shapes({t.name: t.shape for t in files.tensors_of(family, model)})
    groups = files.shards([SimpleNamespace(name=n, shape=s) for n, s in shapes.items()], 4, 60_000_000)
    assert len(groups) > 5
    for file, group in groups.items():
        save_file({t.name: np.full(t.shape, 0.01, np.float32) for t in group}, hf / file)
    weight_map = {t.name: file for file, group in groups.items() for t in group}
    (hf / files.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    total, largest = (f(4 * np.prod(s) for s in shapes.values()) for f in (sum, max))
    assert total > 370e6
    out = run_module("watched_import", hf, tmp_path / "w", PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    assert out.returncode == 0, out.stderr
    grown = int(out.stdout.splitlines()[-1])
    print(f"{grown / 1e6:.0f} MB more for {total / 1e6:.0f} MB, the largest tensor has {largest / 1e6:.0f} MB")
    assert grown < 3 * largest < total / 3
