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
