"""Train steps of other projects on the CPU (eager PyTorch), as a side of tools.benchmark: see its --peer.

nanoGPT from a local checkout, or the equivalent model of Hugging Face's transformers. Same shape, batch and optimizer; random ids,
since their values do not affect the time.
"""

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from minitf import config as config_lib
from minitf.config import Config
from minitf.huggingface.families import fitting, write_config
from minitf.paths import given
from tools.benchmark import TRANSFORMERS, measured, serve


class Peer(NamedTuple):
    model: Any
    loss_of: Callable[[Any, Any], Any]  # (ids, targets), each int64 [B, S] -> mean loss
    optimizer: Any


def gpt_config(cfg: Config, vocab_size: int) -> dict[str, Any]:
    """Arguments of nanoGPT's GPTConfig for a config. Raises ValueError if nanoGPT cannot express the model."""
    m, a = cfg.model, cfg.model.attention
    wanted = {
        "model.norm": (m.norm, ("layer_norm", "layer_norm_no_bias")),
        "model.positions": (m.positions, ("learned",)),
        "model.tie_embeddings": (m.tie_embeddings, (True,)),
        "model.mlp.kind": (m.mlp.kind, ("gelu_erf",)),
        "model.mlp.hidden": (m.mlp.hidden, (None, 4 * m.dim)),
        "model.attention.num_kv_heads": (a.num_kv_heads, (None, a.num_heads)),
        "model.dtype": (m.dtype, ("float32",)),
        "accumulation": (cfg.accumulation, (1,)),
    }
    for name, (value, known) in wanted.items():
        if value not in known:
            raise ValueError(f"{name}={value}: nanoGPT's is {' or '.join(map(str, known))}")
    return dict(
        block_size=cfg.seq_len,
        vocab_size=vocab_size,
        n_layer=m.num_layers,
        n_head=a.num_heads,
        n_embd=m.dim,
        dropout=m.dropout,
        bias=m.norm == "layer_norm",
    )


def check_checkout(where: str) -> None:
    """Raises ValueError if the directory is no checkout of nanoGPT, or PyTorch is missing."""
    if not (given(where, "--peer") / "model.py").is_file():
        raise ValueError(f"--peer {where}: no checkout of nanoGPT: it has no model.py")
    check_torch()


def check_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise ValueError("--peer needs PyTorch: pip install '.[parity]'")


def nanogpt(where: str, cfg: Config, vocab_size: int) -> Peer:
    sys.path.insert(0, str(given(where, "--peer")))
    from model import GPT, GPTConfig

    model = GPT(GPTConfig(**gpt_config(cfg, vocab_size)))
    o = cfg.optimizer
    optimizer = model.configure_optimizers(o.weight_decay, o.learning_rate, (o.b1, o.b2), "cpu")
    return Peer(model, lambda ids, targets: model(ids, targets)[1], optimizer)


def transformers(where: str, cfg: Config, vocab_size: int) -> Peer:
    """The equivalent model of transformers. Raises ValueError if no family of minitf.huggingface expresses it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if cfg.model.dtype != "float32" or cfg.accumulation != 1:
        raise ValueError("--peer transformers: compares model.dtype=float32 and accumulation=1")
    shape = dataclasses.replace(cfg.model, vocab_size=vocab_size, max_seq_len=cfg.model.max_seq_len or cfg.seq_len)
    theirs = AutoConfig.for_model(**write_config(fitting(shape), shape), use_cache=False)
    model = AutoModelForCausalLM.from_config(theirs)
    model.train()
    o = cfg.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=o.learning_rate, betas=(o.b1, o.b2), eps=o.eps, weight_decay=o.weight_decay
    )
    # transformers shifts the labels itself.
    return Peer(model, lambda ids, targets: model(input_ids=ids, labels=targets).loss, optimizer)


def begin(request: dict[str, Any]) -> tuple[dict[str, Any], Callable[[int], dict[str, Any]]]:
    cfg, where, vocab_size = config_lib.freeze(request["config"]), request["peer"], request["vocab_size"]
    if where == TRANSFORMERS:
        check_torch()
    else:
        check_checkout(where)
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    model, loss_of, optimizer = (transformers if where == TRANSFORMERS else nanogpt)(where, cfg, vocab_size)

    def step() -> None:
        ids = torch.randint(vocab_size, (2, cfg.batch_size, cfg.seq_len))
        loss = loss_of(ids[0], ids[1])
        loss.backward()
        if cfg.optimizer.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()  # waits for the step, as a logging loop does

    def run(steps: int) -> dict[str, Any]:
        return measured(step, steps) | {"skipped_steps": 0, "targets": steps * cfg.batch_size * cfg.seq_len}

    facts = {"attention": "PyTorch", "parameters": sum(p.numel() for p in model.parameters())}
    return facts | {"torch": torch.__version__}, run


if __name__ == "__main__":
    serve(begin)
