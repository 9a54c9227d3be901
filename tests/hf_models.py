"""Models of every Hugging Face family that is known, small and with every setting away from its default, and runs of them."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from common import change, random_params
from etils import epath

from minitf import config
from minitf.config import Config
from minitf.data.datasets import DataConfig
from minitf.data.frame import of_tokenizer
from minitf.data.tokenizer import Tokenizer
from minitf.data.tokenizer_files import save_tokenizer
from minitf.huggingface.families import canonical
from minitf.model.attention import AttentionConfig
from minitf.model.mlp import MlpConfig
from minitf.model.transformer import ModelConfig
from minitf.runtime.checkpoint import Checkpoints
from minitf.workdir import store_frame

# 6 query and 2 key/value heads, and heads that together are wider than the model where the family can.
BASE = ModelConfig(
    num_layers=3,
    dim=48,
    vocab_size=64,
    max_seq_len=40,
    attention=AttentionConfig(num_heads=6, num_kv_heads=2, head_dim=10, rope_base=100.0),
    mlp=MlpConfig(kind="swiglu", hidden=40),
)
STRETCHED = dict(
    positions="rope_llama3",
    attention__rope_factor=4.0,
    attention__rope_low_freq_factor=1.5,
    attention__rope_high_freq_factor=3.0,
    attention__rope_original_len=12,
)
GEMMA = dict(
    norm="rms_norm_offset",
    post_norms=True,
    tie_embeddings=True,
    embedding_scale=48**0.5,
    logit_softcap=3.0,
    attention__softcap=2.0,
    attention__scale=17**-0.5,
    mlp__kind="geglu",
)
GPT2 = change(
    BASE,
    positions="learned",
    norm="layer_norm",
    norm_eps=1e-5,
    tie_embeddings=True,
    attention=AttentionConfig(num_heads=6, bias="qkvo"),
    mlp=MlpConfig(kind="gelu", hidden=40, bias=True),
)
MIXTURE = change(BASE, dim=44, mlp__router="softmax", mlp__experts=5)
MODELS = {  # name -> (family, model)
    "llama": ("llama", BASE),
    "llama_tied": ("llama", change(BASE, tie_embeddings=True, norm_eps=1e-5, attention__head_dim=None)),
    "llama_biases_stretched": ("llama", change(BASE, attention__bias="qkvo", mlp__bias=True, **STRETCHED)),
    "mistral": ("mistral", change(BASE, dim=44, attention__kind="sliding", attention__window=5)),
    "mistral_geglu": ("mistral", change(BASE, dim=44, mlp__kind="geglu")),
    "qwen2": ("qwen2", change(BASE, dim=44, attention__bias="qkv")),
    "qwen2_windows": (
        "qwen2",
        change(BASE, attention__bias="qkv", pattern=("full", "sliding", "sliding"), attention__window=5),
    ),
    "qwen3": ("qwen3", change(BASE, dim=44, attention__qk_norm=True)),
    "qwen3_windows": (
        "qwen3",
        change(
            BASE,
            tie_embeddings=True,
            norm_eps=1e-5,
            pattern=("sliding", "full"),
            attention__window=5,
            attention__bias="qkvo",
            attention__qk_norm=True,
            attention__qk_norm_eps=1e-5,
        ),
    ),
    "gemma2": ("gemma2", change(BASE, pattern=("sliding", "full"), attention__window=5, **GEMMA)),
    "gemma2_full": ("gemma2", change(BASE, **{**GEMMA, "logit_softcap": None, "attention__softcap": None})),
    "gpt2": ("gpt2", GPT2),
    "gpt2_untied": ("gpt2", change(GPT2, tie_embeddings=False, attention__scale=1.0, mlp__kind="gelu_erf")),
    "mixtral": ("mixtral", change(MIXTURE, attention__kind="sliding", attention__window=5)),
    "mixtral_of_chosen": ("mixtral", change(MIXTURE, mlp__router="softmax_of_chosen", mlp__experts_per_token=3)),
    "qwen3_moe": ("qwen3_moe", change(MIXTURE, attention__qk_norm=True, mlp__normalise_weights=False)),
    "qwen3_moe_dense_first": (
        "qwen3_moe",
        change(
            MIXTURE,
            norm_eps=1e-5,
            attention__kind="sliding",
            attention__window=5,
            attention__bias="qkvo",
            attention__qk_norm=True,
            attention__qk_norm_eps=1e-5,
            mlp__dense_first=1,
            mlp__dense_hidden=56,
        ),
    ),
    "qwen3_moe_every": (
        "qwen3_moe",
        change(MIXTURE, num_layers=5, attention__qk_norm=True, mlp__every=2, tie_embeddings=True),
    ),
    "olmoe": (
        "olmoe",
        change(
            MIXTURE,
            dim=48,
            attention__head_dim=None,
            attention__bias="qkvo",
            attention__qk_norm=True,
            attention__qk_norm_over="heads",
            mlp__normalise_weights=False,
        ),
    ),
}

# As the hub has them: https://huggingface.co/{meta-llama/Llama-3.2-1B, mistralai/Mistral-7B-v0.1, Qwen/Qwen2.5-0.5B,
# Qwen/Qwen3-0.6B, google/gemma-2-2b, openai-community/gpt2, HuggingFaceTB/SmolLM2-135M, mistralai/Mixtral-8x7B-v0.1,
# Qwen/Qwen3-30B-A3B, Qwen/Qwen3-235B-A22B, allenai/OLMoE-1B-7B-0924}/blob/main/config.json
QWEN3_30B = dict(
    architectures=["Qwen3MoeForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=151643,
    decoder_sparse_step=1, eos_token_id=151645, head_dim=128, hidden_act="silu", hidden_size=2048,
    initializer_range=0.02, intermediate_size=6144, max_position_embeddings=40960, max_window_layers=48,
    mlp_only_layers=[], model_type="qwen3_moe", moe_intermediate_size=768, norm_topk_prob=True, num_attention_heads=32,
    num_experts=128, num_experts_per_tok=8, num_hidden_layers=48, num_key_value_heads=4, output_router_logits=False,
    rms_norm_eps=1e-06, rope_scaling=None, rope_theta=1000000.0, router_aux_loss_coef=0.001, sliding_window=None,
    tie_word_embeddings=False, torch_dtype="bfloat16", transformers_version="4.51.0", use_cache=True,
    use_sliding_window=False, vocab_size=151936,
)  # fmt: skip
HUB = {
    "Llama-3.2-1B": (
        dict(
            architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=128000,
            eos_token_id=128001, head_dim=64, hidden_act="silu", hidden_size=2048, initializer_range=0.02,
            intermediate_size=8192, max_position_embeddings=131072, mlp_bias=False, model_type="llama",
            num_attention_heads=32, num_hidden_layers=16, num_key_value_heads=8, pretraining_tp=1, rms_norm_eps=1e-05,
            rope_scaling=dict(
                factor=32.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=8192,
                rope_type="llama3",
            ),
            rope_theta=500000.0, tie_word_embeddings=True, torch_dtype="bfloat16", transformers_version="4.45.0.dev0",
            use_cache=True, vocab_size=128256,
        ),
        dict(positions="rope_llama3", attention__rope_factor=32.0, attention__rope_base=5e5, tie_embeddings=True),
    ),
    "Mistral-7B-v0.1": (
        dict(
            architectures=["MistralForCausalLM"], bos_token_id=1, eos_token_id=2, hidden_act="silu", hidden_size=4096,
            initializer_range=0.02, intermediate_size=14336, max_position_embeddings=32768, model_type="mistral",
            num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8, rms_norm_eps=1e-05, rope_theta=10000.0,
            sliding_window=4096, tie_word_embeddings=False, torch_dtype="bfloat16", transformers_version="4.34.0.dev0",
            use_cache=True, vocab_size=32000,
        ),
        dict(attention__kind="sliding", attention__window=4096, attention__head_dim=128),
    ),
    "Qwen2.5-0.5B": (
        dict(
            architectures=["Qwen2ForCausalLM"], attention_dropout=0.0, bos_token_id=151643, eos_token_id=151643,
            hidden_act="silu", hidden_size=896, initializer_range=0.02, intermediate_size=4864,
            max_position_embeddings=32768, max_window_layers=24, model_type="qwen2", num_attention_heads=14,
            num_hidden_layers=24, num_key_value_heads=2, rms_norm_eps=1e-06, rope_theta=1000000.0, sliding_window=32768,
            tie_word_embeddings=True, torch_dtype="bfloat16", transformers_version="4.40.1", use_cache=True,
            use_mrope=False, use_sliding_window=False, vocab_size=151936,
        ),
        dict(attention__bias="qkv", attention__kind="full", attention__head_dim=64, attention__rope_base=1e6),
    ),
    "Qwen3-0.6B": (
        dict(
            architectures=["Qwen3ForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=151643,
            eos_token_id=151645, head_dim=128, hidden_act="silu", hidden_size=1024, initializer_range=0.02,
            intermediate_size=3072, max_position_embeddings=40960, max_window_layers=28, model_type="qwen3",
            num_attention_heads=16, num_hidden_layers=28, num_key_value_heads=8, rms_norm_eps=1e-06, rope_scaling=None,
            rope_theta=1000000, sliding_window=None, tie_word_embeddings=True, torch_dtype="bfloat16",
            transformers_version="4.51.0", use_cache=True, use_sliding_window=False, vocab_size=151936,
        ),
        dict(attention__qk_norm=True, attention__bias="none", attention__head_dim=128, tie_embeddings=True),
    ),
    "gemma-2-2b": (
        dict(
            architectures=["Gemma2ForCausalLM"], attention_bias=False, attention_dropout=0.0,
            attn_logit_softcapping=50.0, bos_token_id=2, cache_implementation="hybrid", eos_token_id=1,
            final_logit_softcapping=30.0, head_dim=256, hidden_act="gelu_pytorch_tanh",
            hidden_activation="gelu_pytorch_tanh", hidden_size=2304, initializer_range=0.02, intermediate_size=9216,
            max_position_embeddings=8192, model_type="gemma2", num_attention_heads=8, num_hidden_layers=26,
            num_key_value_heads=4, pad_token_id=0, query_pre_attn_scalar=256, rms_norm_eps=1e-06, rope_theta=10000.0,
            sliding_window=4096, torch_dtype="float32", transformers_version="4.42.0.dev0", use_cache=True,
            vocab_size=256000,
        ),
        dict(
            pattern=("sliding", "full"), attention__window=4096, embedding_scale=48.0, attention__scale=None,
            attention__softcap=50.0, logit_softcap=30.0, tie_embeddings=True, mlp__kind="geglu",
        ),
    ),
    "gpt2": (
        dict(
            activation_function="gelu_new", architectures=["GPT2LMHeadModel"], attn_pdrop=0.1, bos_token_id=50256,
            embd_pdrop=0.1, eos_token_id=50256, initializer_range=0.02, layer_norm_epsilon=1e-05, model_type="gpt2",
            n_ctx=1024, n_embd=768, n_head=12, n_layer=12, n_positions=1024, resid_pdrop=0.1, summary_activation=None,
            summary_first_dropout=0.1, summary_proj_to_labels=True, summary_type="cls_index", summary_use_proj=True,
            task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}}, vocab_size=50257,
        ),
        dict(positions="learned", mlp__hidden=3072, mlp__kind="gelu", tie_embeddings=True, attention__num_kv_heads=12),
    ),
    "SmolLM2-135M": (
        dict(
            architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=0,
            eos_token_id=0, hidden_act="silu", hidden_size=576, initializer_range=0.041666666666666664,
            intermediate_size=1536, is_llama_config=True, max_position_embeddings=8192, model_type="llama",
            num_attention_heads=9, num_hidden_layers=30, num_key_value_heads=3, pretraining_tp=1, rms_norm_eps=1e-05,
            rope_interleaved=False, rope_scaling=None, rope_theta=100000, tie_word_embeddings=True,
            torch_dtype="bfloat16", transformers_version="4.40.1", use_cache=True, vocab_size=49152,
        ),
        dict(attention__head_dim=64, attention__rope_base=1e5, tie_embeddings=True),
    ),
    "Mixtral-8x7B-v0.1": (
        dict(
            architectures=["MixtralForCausalLM"], attention_dropout=0.0, bos_token_id=1, eos_token_id=2,
            hidden_act="silu", hidden_size=4096, initializer_range=0.02, intermediate_size=14336,
            max_position_embeddings=32768, model_type="mixtral", num_attention_heads=32, num_experts_per_tok=2,
            num_hidden_layers=32, num_key_value_heads=8, num_local_experts=8, output_router_logits=False,
            rms_norm_eps=1e-05, rope_theta=1000000.0, router_aux_loss_coef=0.02, sliding_window=None,
            tie_word_embeddings=False, torch_dtype="bfloat16", transformers_version="4.36.0.dev0", use_cache=True,
            vocab_size=32000,
        ),
        dict(mlp__router="softmax", mlp__experts=8, mlp__experts_per_token=2, mlp__normalise_weights=True),
    ),
    "Qwen3-30B-A3B": (QWEN3_30B, dict(mlp__hidden=768, mlp__dense_hidden=None, mlp__normalise_weights=True)),
    "Qwen3-235B-A22B": (
        QWEN3_30B
        | dict(
            hidden_size=4096, intermediate_size=12288, max_window_layers=94, moe_intermediate_size=1536,
            num_attention_heads=64, num_hidden_layers=94,
        ),
        dict(mlp__hidden=1536, mlp__experts=128, mlp__experts_per_token=8, attention__kind="full"),
    ),
    "OLMoE-1B-7B-0924": (
        dict(
            architectures=["OlmoeForCausalLM"], attention_bias=False, attention_dropout=0.0, clip_qkv=None,
            eos_token_id=50279, hidden_act="silu", hidden_size=2048, initializer_range=0.02, intermediate_size=1024,
            max_position_embeddings=4096, model_type="olmoe", norm_topk_prob=False, num_attention_heads=16,
            num_experts=64, num_experts_per_tok=8, num_hidden_layers=16, num_key_value_heads=16,
            output_router_logits=False, pad_token_id=1, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=10000.0,
            router_aux_loss_coef=0.01, tie_word_embeddings=False, torch_dtype="bfloat16",
            transformers_version="4.43.0.dev0", use_cache=True, vocab_size=50304,
        ),
        dict(mlp__normalise_weights=False, attention__qk_norm_over="heads", attention__qk_norm_eps=1e-5),
    ),
}  # fmt: skip


def save_run(
    workdir: Path, model: ModelConfig, params: Any = None, *, step: int = 7, tokenizer: Tokenizer | None = None
) -> Any:
    """A work directory as a training leaves it, with these parameters (random ones if None), which are returned."""
    cfg = Config(steps=step, seq_len=16, model=model, data=DataConfig(kind="synthetic"))
    config.validate(cfg)
    params = random_params(model) if params is None else params
    workdir.mkdir(parents=True)
    with Checkpoints(epath.Path(workdir) / "checkpoints") as checkpoints:
        checkpoints.save(step, {"params": params}, {"config": dataclasses.asdict(cfg)})
    if tokenizer is not None:
        save_tokenizer(tokenizer, workdir)
        store_frame(epath.Path(workdir), of_tokenizer(tokenizer))
    (workdir / "config.json").write_text(config.to_json(cfg))
    return jax.device_get(params)


def expected(model: ModelConfig) -> ModelConfig:
    """What an import of an exported model has for it."""
    return canonical(model)
