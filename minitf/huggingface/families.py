"""Families of Hugging Face models: how their config.json maps to ModelConfig and back, and their tensor names of minitf's
parameters.

Names, defaults and mathematics: github.com/huggingface/transformers, src/transformers/models/*/{configuration,modeling}_*.py.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from minitf import config as config_lib
from minitf.checks import unread
from minitf.huggingface.settings import (
    GEMMA_LAYERS,
    MISTRAL_WINDOW,
    MIXTRAL_WINDOW,
    QWEN3_MOE_LAYERS,
    QWEN_LAYERS,
    QWEN_MIXTURES,
    FolderSetting,
    Keys,
    always,
    as_every,
    as_pattern,
    attention_kinds,
    choice,
    one_of_names,
    rotary,
    same,
)
from minitf.model.attention import sizes
from minitf.model.mlp import width
from minitf.model.transformer import ModelConfig, places
from minitf.settings import fields, flat

# ---- the families' settings

GATED_MLP = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}  # hidden_act -> model.mlp.kind
PLAIN_MLP = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf", "relu2": "relu_squared"}


def llama_like(
    *more: FolderSetting,
    head_dim: int | None = None,
    act: str = "hidden_act",
    tied: bool = False,
    eps: float = 1e-6,
    rope_base: float = 10_000.0,
    hidden: str = "intermediate_size",
) -> tuple[FolderSetting, ...]:
    """Settings that Llama and its successors share, with a family's defaults and its key of the MLP's width."""
    return (
        same("num_layers", "num_hidden_layers"),
        same("dim", "hidden_size"),
        same("vocab_size", "vocab_size"),
        same("max_seq_len", "max_position_embeddings"),
        same("norm_eps", "rms_norm_eps", eps),
        same("tie_embeddings", "tie_word_embeddings", tied),
        same("attention.num_heads", "num_attention_heads"),
        same("attention.num_kv_heads", "num_key_value_heads", None),
        same("attention.head_dim", "head_dim", head_dim),
        choice("mlp.kind", act, GATED_MLP, "silu" if act == "hidden_act" else "gelu_pytorch_tanh"),
        same("mlp.hidden", hidden),
        rotary(rope_base),
        *more,
    )


with_rms_norm = always({"norm": "rms_norm"})
attention_bias = choice("attention.bias", "attention_bias", {False: "none", True: "qkvo"}, False)


def qk_norm(over: str, eps: float) -> FolderSetting:
    """Norms of queries and keys, which have the epsilon of all others."""
    fixed = {"attention.qk_norm": True, "attention.qk_norm_over": over}
    return FolderSetting(lambda keys: fixed | {"attention.qk_norm_eps": keys.get("rms_norm_eps", eps)}, lambda m: {})


def mixture(normalise: FolderSetting, *experts: str, coefficient: float) -> tuple[FolderSetting, ...]:
    """Settings of mixtures; `experts`: keys of their number; `coefficient`: transformers' default weight of its balance loss."""
    training = {"router_aux_loss_coef": coefficient, "output_router_logits": False}
    return (
        always({"mlp.router": "softmax"}),
        one_of_names("mlp.experts", *experts),
        same("mlp.experts_per_token", "num_experts_per_tok"),
        normalise,
        FolderSetting(lambda keys: {}, lambda m: training),
    )


normalise_weights = same("mlp.normalise_weights", "norm_topk_prob", False)
LLAMA = llama_like(with_rms_norm, attention_bias, same("mlp.bias", "mlp_bias", False))
MISTRAL = llama_like(with_rms_norm, MISTRAL_WINDOW)
QWEN2 = llama_like(with_rms_norm, always({"attention.bias": "qkv"}), QWEN_LAYERS)
QWEN3 = llama_like(with_rms_norm, attention_bias, qk_norm("head", 1e-6), QWEN_LAYERS, head_dim=128)
GEMMA2 = llama_like(
    always({"norm": "rms_norm_offset", "post_norms": True}),
    attention_bias,
    FolderSetting(lambda keys: {"embedding_scale": keys.get("hidden_size") ** 0.5}, lambda m: {}),
    # query_pre_attn_scalar is an integer: a scale that no integer gives does not survive the round trip, so `misfits` names it.
    FolderSetting(
        lambda keys: {"attention.scale": keys.get("query_pre_attn_scalar", 256) ** -0.5},
        lambda m: {
            "query_pre_attn_scalar": max(round((m["attention.scale"] or m["attention.head_dim"] ** -0.5) ** -2), 1)
        },
    ),
    same("attention.softcap", "attn_logit_softcapping", 50.0),
    same("logit_softcap", "final_logit_softcapping", 30.0),
    GEMMA_LAYERS,
    head_dim=256,
    act="hidden_activation",
    tied=True,
)
MIXTRAL = llama_like(
    with_rms_norm,
    MIXTRAL_WINDOW,
    *mixture(always({"mlp.normalise_weights": True}), "num_local_experts", coefficient=0.001),
    eps=1e-5,
    rope_base=1e6,
)
QWEN3_MOE = llama_like(
    with_rms_norm,
    attention_bias,
    qk_norm("head", 1e-6),
    QWEN3_MOE_LAYERS,
    *mixture(normalise_weights, "num_experts", "num_local_experts", coefficient=0.001),
    QWEN_MIXTURES,
    hidden="moe_intermediate_size",
)
OLMOE = llama_like(
    with_rms_norm,
    attention_bias,
    qk_norm("heads", 1e-5),
    always({"attention.head_dim": None}),  # the width of its norms, so that only dim / num_heads is possible
    *mixture(normalise_weights, "num_experts", coefficient=0.01),
    eps=1e-5,
)
GPT2 = (
    same("num_layers", "n_layer"),
    same("dim", "n_embd"),
    same("vocab_size", "vocab_size"),
    same("max_seq_len", "n_positions"),
    same("norm_eps", "layer_norm_epsilon", 1e-5),
    same("tie_embeddings", "tie_word_embeddings", True),
    same("attention.num_heads", "n_head"),
    FolderSetting(
        lambda keys: {"attention.scale": None if keys.get("scale_attn_weights", True) else 1.0},
        lambda m: {"scale_attn_weights": m["attention.scale"] is None},
    ),
    choice("mlp.kind", "activation_function", PLAIN_MLP, "gelu_new"),
    same("mlp.hidden", "n_inner", None),
    always({"norm": "layer_norm", "positions": "learned", "attention.bias": "qkvo", "mlp.bias": True}),
)

# ---- minitf's parameter path -> tensor name; paths in a block leave out the prefix blocks/PLACE


def block_names(prefix: str, ours: dict[str, str]) -> dict[str, str]:
    return {path: prefix + name for path, name in ours.items()}


GATED = ("gate", "up", "down")
LLAMA_NAMES = {
    "embedding": "model.embed_tokens.weight",
    **block_names(
        "model.layers.{layer}.",
        {
            "attention_norm/scale": "input_layernorm.weight",
            **{f"attention/{n}": f"self_attn.{n}_proj.weight" for n in "qkvo"},
            **{f"attention/{n}_bias": f"self_attn.{n}_proj.bias" for n in "qkvo"},
            "mlp_norm/scale": "post_attention_layernorm.weight",
            **{f"mlp/{n}": f"mlp.{n}_proj.weight" for n in GATED},
            **{f"mlp/{n}_bias": f"mlp.{n}_proj.bias" for n in GATED},
        },
    ),
    "final_norm/scale": "model.norm.weight",
    "head": "lm_head.weight",
}
QWEN3_NAMES = LLAMA_NAMES | block_names(
    "model.layers.{layer}.self_attn.",
    {"attention/q_norm": "q_norm.weight", "attention/k_norm": "k_norm.weight"},
)
# One tensor per expert, as on the hub; folder.each_expert reads transformers 5's layout in memory, too.
MIXTRAL_NAMES = LLAMA_NAMES | block_names(
    "model.layers.{layer}.block_sparse_moe.",
    {
        "mlp/router": "gate.weight",
        **{
            f"mlp/experts/{n}": f"experts.{{expert}}.{w}.weight" for n, w in zip(GATED, ("w1", "w3", "w2"), strict=True)
        },
    },
)
QWEN3_MOE_NAMES = QWEN3_NAMES | block_names(
    "model.layers.{layer}.mlp.",
    {
        "mlp/router": "gate.weight",
        **{f"mlp/experts/{n}": f"experts.{{expert}}.{n}_proj.weight" for n in GATED},
    },
)
GEMMA2_NAMES = LLAMA_NAMES | block_names(
    "model.layers.{layer}.",
    {
        "attention_post_norm/scale": "post_attention_layernorm.weight",
        "mlp_norm/scale": "pre_feedforward_layernorm.weight",
        "mlp_post_norm/scale": "post_feedforward_layernorm.weight",
    },
)
GPT2_NAMES = {
    "embedding": "transformer.wte.weight",
    "position_embedding": "transformer.wpe.weight",
    **block_names(
        "transformer.h.{layer}.",
        {
            "attention_norm/scale": "ln_1.weight",
            "attention_norm/bias": "ln_1.bias",
            **{f"attention/{n}": "attn.c_attn.weight" for n in "qkv"},
            **{f"attention/{n}_bias": "attn.c_attn.bias" for n in "qkv"},
            "attention/o": "attn.c_proj.weight",
            "attention/o_bias": "attn.c_proj.bias",
            "mlp_norm/scale": "ln_2.weight",
            "mlp_norm/bias": "ln_2.bias",
            "mlp/up": "mlp.c_fc.weight",
            "mlp/up_bias": "mlp.c_fc.bias",
            "mlp/down": "mlp.c_proj.weight",
            "mlp/down_bias": "mlp.c_proj.bias",
        },
    ),
    "final_norm/scale": "transformer.ln_f.weight",
    "final_norm/bias": "transformer.ln_f.bias",
    "head": "lm_head.weight",
}


# ---- the table


class Family(NamedTuple):
    architecture: str
    settings: tuple[FolderSetting, ...]
    # minitf's path -> tensor name; {layer}, {expert}: their numbers. Parameters with the same name are concatenated along outputs.
    names: dict[str, str]
    prefix: str = "model."  # of all names but the head's; absent in the folder of a model without a head
    outputs_first: bool = True  # weights are [outputs, inputs], as in torch.nn.Linear; False: [inputs, outputs]
    # Regular expression of tensors in older folders that are not parameters.
    ignored: str = r".*\.rotary_emb\.inv_freq"
    unread: tuple[str, ...] = ()  # settings of its config.json that do not change the model
    heads_divide_dim: bool = False  # transformers requires dim % num_heads == 0, although head_dim is a setting
    renamed: tuple[str, str] | None = None  # part of transformers 5's names in memory -> that of `names`


FAMILIES = {
    "llama": Family("LlamaForCausalLM", LLAMA, LLAMA_NAMES, heads_divide_dim=True),
    "mistral": Family("MistralForCausalLM", MISTRAL, LLAMA_NAMES),
    "qwen2": Family("Qwen2ForCausalLM", QWEN2, LLAMA_NAMES),
    "qwen3": Family("Qwen3ForCausalLM", QWEN3, QWEN3_NAMES),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        GEMMA2,
        GEMMA2_NAMES,
        unread=("hidden_act", "sliding_window_size"),
        heads_divide_dim=True,
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        GPT2,
        GPT2_NAMES,
        prefix="transformer.",
        outputs_first=False,
        ignored=r".*\.attn\.(bias|masked_bias)",
        unread=(
            *("n_ctx", "attn_pdrop", "embd_pdrop", "resid_pdrop", "reorder_and_upcast_attn", "gradient_checkpointing"),
            *(f"summary_{n}" for n in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")),
        ),
    ),
    "mixtral": Family("MixtralForCausalLM", MIXTRAL, MIXTRAL_NAMES, renamed=(".mlp.", ".block_sparse_moe.")),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", QWEN3_MOE, QWEN3_MOE_NAMES),
    "olmoe": Family("OlmoeForCausalLM", OLMOE, QWEN3_MOE_NAMES, heads_divide_dim=True),
}


# ---- config.json <-> ModelConfig


def canonical(cfg: ModelConfig) -> ModelConfig:
    """An equivalent config in canonical form: derived settings filled in, unused ones at their defaults."""
    _, G, K = sizes(cfg.attention, cfg.dim)
    before, fresh, found = flat(cfg), flat(ModelConfig()), places(cfg)
    mixed = sorted(i for place in found if place.mlp.router != "none" for i in place.layers)
    dense = next((width(place.mlp, cfg.dim) for place in found if place.mlp.router == "none"), None)
    idle = {setting.name for setting in unread(cfg)}
    idle |= set() if cfg.attention.qk_norm else {"attention.qk_norm_eps", "attention.qk_norm_over"}
    idle |= {n for n, one in {"attention.scale": K**-0.5, "embedding_scale": 1.0}.items() if equal(before[n], one)}
    settings = before | {"attention.kind": fresh["attention.kind"]} | as_pattern(attention_kinds(before))
    settings |= {"attention.num_kv_heads": G, "attention.head_dim": K, "mlp.hidden": width(cfg.mlp, cfg.dim)}
    settings |= {"mlp.dense_hidden": dense} | (as_every(mixed, cfg.num_layers) or {})
    if cfg.mlp.router == "softmax_of_chosen":  # the same function
        settings |= {"mlp.router": "softmax", "mlp.normalise_weights": True}
    return from_flat(settings | {n: fresh[n] for n in idle})


def from_flat(settings: dict[str, Any]) -> ModelConfig:
    tree: dict[str, Any] = {}
    for name, value in settings.items():
        *section, last = name.split(".")
        node = tree
        for part in section:
            node = node.setdefault(part, {})
        node[last] = value
    return config_lib.freeze(tree, ModelConfig, "model.")


def equal(a: Any, b: Any) -> bool:
    both = isinstance(a, float) and isinstance(b, float)
    return math.isclose(a, b, rel_tol=1e-9) if both else a == b


def read_config(tree: Mapping[str, Any], where: str = "config.json", ignore: tuple[str, ...] = ()) -> ModelConfig:
    """The ModelConfig of a config.json. Raises ValueError for settings that are missing or invalid, and for unknown ones, which may
    change what the model computes; `ignore`: unknown settings that do not."""
    keys = Keys(tree, where)
    family = keys.pick("model_type", FAMILIES)
    settings: dict[str, Any] = {}
    try:
        for setting in family.settings:
            settings |= setting.read(keys)
    except (TypeError, AttributeError, ArithmeticError) as e:
        raise keys.error(f"a setting of a wrong type: {e}") from None
    unread = {n: v for n, v in keys.unread().items() if n not in family.unread + tuple(ignore)}
    if unread:
        listed = "\n  ".join(f"{n}={v!r}" for n, v in unread.items())
        raise keys.error(
            f"settings of {family.architecture} that are not known here, and may change what the model computes\n  {listed}\n"
            "where one does not, --ignore NAME leaves it out"
        )
    try:
        cfg = from_flat(settings)
    except ValueError as e:
        raise keys.error(str(e)) from None
    for setting in ("num_layers", "dim", "attention.num_heads"):
        if settings[setting] < 1:
            raise keys.error(f"model.{setting}={settings[setting]}: must be at least 1")
    return canonical(cfg)


def write_config(name: str, cfg: ModelConfig) -> dict[str, Any]:
    """The keys of config.json that define the model, without dtype and token ids. The model must fit the family (`misfits`)."""
    family = FAMILIES[name]
    out: dict[str, Any] = {"architectures": [family.architecture], "model_type": name}
    settings = flat(canonical(cfg))
    for setting in family.settings:
        out |= setting.write(settings)
    return out


# Settings that do not define the model: how a step is computed, and the initial weights.
FREE = {f.name for f in fields(ModelConfig) if f.setting.may_change} | {"init"}


def misfits(name: str, cfg: ModelConfig) -> list[str]:
    """Reasons why a family cannot express a model: settings that change in a round trip through its config.json."""
    ours = flat(canonical(cfg))
    theirs = flat(read_config(write_config(name, cfg)))
    found = [f"model.{n}={v}, not {theirs[n]}" for n, v in ours.items() if n not in FREE and not equal(v, theirs[n])]
    if FAMILIES[name].heads_divide_dim and cfg.dim % cfg.attention.num_heads:
        found.append(f"model.dim={cfg.dim}, not a multiple of model.attention.num_heads={cfg.attention.num_heads}")
    return found


def fitting(cfg: ModelConfig) -> str:
    """The first family that expresses a model. Raises ValueError with each family's reasons if none does."""
    reasons = {name: misfits(name, cfg) for name in FAMILIES}
    for name, why in reasons.items():
        if not why:
            return name
    listed = "\n".join(f"  {name}: {'; '.join(why)}" for name, why in reasons.items())
    raise ValueError(f"no family of Hugging Face models that is known here expresses this model\n{listed}")
