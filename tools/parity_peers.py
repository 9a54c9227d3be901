"""Other projects' models for tools.parity: logits of transformers' models, and nanoGPT's training from its own initial parameters.

Both need the extra `parity`: pip install '.[parity]'.
"""

import contextlib
import functools
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from minitf import config as config_lib
from minitf.config import Config
from minitf.huggingface.convert import import_model
from minitf.huggingface.folder import Stored, read_tensor, tensors_of
from minitf.model.transformer import model as logits_of
from minitf.model.transformer import model_params
from minitf.params import named, tree_map
from minitf.sharding.devices import make_mesh, surroundings
from minitf.sharding.mesh import MeshConfig
from minitf.training import step as step_lib
from minitf.training.optimizer import make_optimizer, make_schedule
from minitf.training.state import TrainState
from minitf.workdir import load_model
from tools import peers


def installed() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))


# ---- transformers: small models of every family, with a non-default value of every setting that is read

LLAMA = dict(
    vocab_size=64, hidden_size=48, intermediate_size=40, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
    max_position_embeddings=64, head_dim=10, rms_norm_eps=1e-5, rope_parameters=dict(rope_type="default", rope_theta=100.0),
)  # fmt: skip
STRETCHED = dict(
    rope_type="llama3", rope_theta=100.0, factor=4.0, low_freq_factor=1.5, high_freq_factor=3.0,
    original_max_position_embeddings=12,
)  # fmt: skip
GEMMA2 = LLAMA | dict(
    query_pre_attn_scalar=17, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, sliding_window=5
)
GPT2 = dict(vocab_size=64, n_embd=48, n_inner=40, n_layer=3, n_head=6, n_positions=64)
MIXTRAL = LLAMA | dict(hidden_size=44, num_local_experts=5, num_experts_per_tok=2)
QWEN3_MOE = LLAMA | dict(hidden_size=44, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24)
OLMOE = {n: v for n, v in LLAMA.items() if n != "head_dim"} | dict(num_experts=5, num_experts_per_tok=2)
SLIDING, FULL = "sliding_attention", "full_attention"
THEIRS = {  # name -> (model_type, arguments of transformers' configuration class)
    "llama": ("llama", LLAMA),
    "llama_tied_derived_head_size": ("llama", {**LLAMA, "head_dim": None, "tie_word_embeddings": True}),
    "llama_biases_stretched": ("llama", LLAMA | dict(attention_bias=True, mlp_bias=True, rope_parameters=STRETCHED)),
    "llama_gelu": ("llama", LLAMA | dict(hidden_act="gelu_pytorch_tanh")),
    "mistral": ("mistral", LLAMA | dict(hidden_size=44, sliding_window=5)),
    "mistral_without_window": ("mistral", LLAMA | dict(hidden_size=44, sliding_window=None)),
    "qwen2": ("qwen2", LLAMA | dict(head_dim=8)),
    "qwen2_windows": ("qwen2", LLAMA | dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    "qwen3": ("qwen3", LLAMA | dict(hidden_size=44)),
    "qwen3_windows": (
        "qwen3",
        LLAMA
        | dict(attention_bias=True, use_sliding_window=True, sliding_window=5, layer_types=[SLIDING, FULL, SLIDING]),
    ),
    "gemma2": ("gemma2", GEMMA2),
    "gemma2_layers": ("gemma2", GEMMA2 | dict(layer_types=[FULL, SLIDING, SLIDING], attn_logit_softcapping=None)),
    "gpt2": ("gpt2", GPT2),
    "gpt2_untied_unscaled": (
        "gpt2",
        GPT2 | dict(tie_word_embeddings=False, scale_attn_weights=False, activation_function="gelu", n_inner=None),
    ),
    "mixtral": ("mixtral", MIXTRAL),
    "mixtral_window": ("mixtral", MIXTRAL | dict(sliding_window=5, hidden_act="gelu_pytorch_tanh")),
    "qwen3_moe": ("qwen3_moe", QWEN3_MOE),
    "qwen3_moe_normalised_every_second": (
        "qwen3_moe",
        QWEN3_MOE | dict(norm_topk_prob=True, num_hidden_layers=5, decoder_sparse_step=2, attention_bias=True),
    ),
    "qwen3_moe_dense_first": (
        "qwen3_moe",
        QWEN3_MOE | dict(mlp_only_layers=[0], use_sliding_window=True, sliding_window=5, max_window_layers=0),
    ),
    "olmoe": ("olmoe", OLMOE),
    "olmoe_normalised": ("olmoe", OLMOE | dict(norm_topk_prob=True, attention_bias=True)),
}

TOLERANCE = 1e-4  # of logits: rounding of two frameworks
SCALE = 0.2  # of random parameters: keeps rounding errors well below TOLERANCE
IDS = np.random.default_rng(0).integers(0, 64, (2, 40))  # longer than every window and original RoPE length


def transformers() -> Any:
    """The package transformers, without output and network access."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import transformers as found

    found.logging.set_verbosity_error()
    found.logging.disable_progress_bar()
    return found


def random_model(name: str, **more: Any) -> Any:
    """One of THEIRS, with more settings and all parameters random, norms and biases included."""
    import torch

    kind, settings = THEIRS[name]
    config = transformers().AutoConfig.for_model(kind, **settings | more)
    theirs = transformers().AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, p in theirs.named_parameters():
            middle = 1.0 if "norm" in path or ".ln_" in path else 0.0
            p.copy_(middle + SCALE * torch.randn(p.shape, generator=generator))
    theirs.tie_weights()
    return theirs


def their_logits(theirs: Any, ids: np.ndarray = IDS) -> np.ndarray:
    import torch

    with torch.no_grad():
        return theirs(torch.tensor(ids)).logits.numpy()


def our_logits(workdir: str | os.PathLike, ids: np.ndarray = IDS) -> np.ndarray:
    model = load_model(workdir)
    cfg, params = model.cfg, model.params
    with surroundings(make_mesh(MeshConfig(), jax.devices()[:1]), cfg.model.dtype):
        return np.asarray(jax.jit(lambda p, x: logits_of(p, x, cfg.model))(params, jnp.asarray(ids)))


def imported(name: str) -> tuple[np.ndarray, np.ndarray]:
    """(our logits, transformers' logits) of one of THEIRS, imported from the folder that transformers writes."""
    theirs = random_model(name)
    with tempfile.TemporaryDirectory(prefix="minitf-parity-") as folder:
        theirs.save_pretrained(Path(folder) / "hf")
        import_model(Path(folder) / "hf", Path(folder) / "run")
        return our_logits(Path(folder) / "run"), their_logits(theirs)


# ---- nanoGPT

PEER_STEPS = 100
PEERS = {"nanogpt": False, "nanogpt_bias": True}  # row -> whether norms and products have biases
RECIPE = Path(__file__).resolve().parent.parent / "configs" / "char_cpu.py"  # nanoGPT's own recipe for a CPU
# These are [inputs, outputs] in GPT-2's layout, but [outputs, inputs] (torch.nn.Linear) in nanoGPT.
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def peer_config(bias: bool) -> Config:
    """nanoGPT's CPU recipe with a constant learning rate, for PEER_STEPS, with or without biases."""
    tree = config_lib.load_file(str(RECIPE))
    with tree.unlocked():
        tree.update(steps=PEER_STEPS)
        tree.model.update(vocab_size=65, max_seq_len=tree.seq_len)
        tree.optimizer.update(schedule="constant", end_learning_rate=0.0, warmup_steps=0)
        tree.mesh.update(data=1)
        if bias:
            tree.model.norm, tree.model.attention.bias, tree.model.mlp.bias = "layer_norm", "qkvo", True
    return config_lib.freeze(tree)


def learnable(cfg: Config, steps: int, seed: int = 0) -> np.ndarray:
    """Learnable data: int32 ids [steps, B, S + 1], in which each id is followed by one of four."""
    rng = np.random.default_rng(seed)
    followers = rng.integers(0, cfg.model.vocab_size, (cfg.model.vocab_size, 4))
    ids = [rng.integers(0, cfg.model.vocab_size, (steps, cfg.batch_size))]
    for _ in range(cfg.seq_len):
        ids.append(followers[ids[-1], rng.integers(0, 4, ids[-1].shape)])
    return np.stack(ids, axis=-1).astype(np.int32)


def as_ours(tensors: dict[str, np.ndarray], cfg: Config) -> Any:
    """nanoGPT's tensors by name, weights or gradients, as a tree of our parameters."""
    stacks = tree_map(lambda p: np.empty(p.full_shape, np.float32), model_params(cfg.model))
    by_name = dict(named(stacks))
    for tensor in tensors_of("gpt2", cfg.model):
        values = tensors[tensor.name].T if tensor.name.endswith(TRANSPOSED) else tensors[tensor.name]
        read_tensor(tensor, Stored(values, values.shape, "F32"), by_name)
    return stacks


def nanogpt(where: str, cfg: Config, batches: np.ndarray) -> tuple[Any, tuple[np.ndarray, Any, np.ndarray]]:
    """Trains nanoGPT with its own optimizer: (its initial parameters as ours, (first step's logits and gradient, all losses))."""
    import torch

    torch.set_num_threads(1)  # on busy cores, its threads would mostly wait for each other
    torch.manual_seed(0)
    with contextlib.redirect_stdout(sys.stderr):  # nanoGPT prints its sizes
        peer = peers.nanogpt(where, cfg, cfg.model.vocab_size)
    weights = dict(peer.model.named_parameters())
    params = as_ours({name: p.detach().numpy().copy() for name, p in weights.items()}, cfg)
    losses = []
    for rows in batches.astype(np.int64):
        logits, loss = peer.model(torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy()))
        loss.backward()
        if not losses:
            first = logits.detach().numpy(), as_ours({name: p.grad.numpy() for name, p in weights.items()}, cfg)
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(peer.model.parameters(), cfg.optimizer.clip_norm)
        peer.optimizer.step()
        peer.optimizer.zero_grad(set_to_none=True)
    return params, (*first, np.array(losses))


def trained(params: Any, cfg: Config, batches: np.ndarray) -> tuple[np.ndarray, Any, np.ndarray]:
    """Trains with the real train step: (first step's logits, its gradient, all losses)."""
    specs, schedule = model_params(cfg.model), make_schedule(cfg.optimizer, cfg.steps)
    tx = make_optimizer(cfg.optimizer, specs, schedule)
    weights = np.ones(batches.shape[1:2] + (cfg.seq_len,), np.float32)
    rows = [{"inputs": b[:, :-1], "targets": b[:, 1:], "weights": weights} for b in batches]
    params = jax.tree.map(jnp.asarray, params)
    with surroundings(make_mesh(cfg.mesh, jax.devices()[:1]), cfg.model.dtype):
        logits = jax.jit(lambda p, x: logits_of(p, x, cfg.model))(params, rows[0]["inputs"])
        _, grads = jax.jit(functools.partial(step_lib.gradients, cfg=cfg))(params, rows[0], jnp.int32(0))
        step = jax.jit(functools.partial(step_lib.train_step, cfg=cfg, tx=tx, schedule=schedule))
        state, losses = TrainState(jnp.int32(0), jnp.int32(0), params, tx.init(params)), []
        for batch in rows:
            state, metrics = step(state, batch)
            losses.append(float(metrics["train/loss"]))
    return np.asarray(logits), jax.tree.map(np.asarray, grads), np.array(losses)
