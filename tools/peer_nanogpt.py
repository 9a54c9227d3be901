"""nanoGPT's own training step (a local checkout, eager PyTorch on the CPU) as a side of tools.benchmark: see its --peer.

Same shape, batch and optimizer as a config of ours that nanoGPT can express; random ids, as the numbers do not change the time.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.benchmark import measured, serve


def gpt_config(config: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """nanoGPT's GPTConfig of a config of ours. Raises ValueError where it has no such model."""
    m, a = config["model"], config["model"]["attention"]
    wanted = {
        "model.norm": (m["norm"], ("layer_norm", "layer_norm_no_bias")),
        "model.positions": (m["positions"], ("learned",)),
        "model.tie_embeddings": (m["tie_embeddings"], (True,)),
        "model.mlp.kind": (m["mlp"]["kind"], ("gelu_erf",)),
        "model.mlp.hidden": (m["mlp"]["hidden"], (None, 4 * m["dim"])),
        "model.attention.num_kv_heads": (a["num_kv_heads"], (None, a["num_heads"])),
        "model.dtype": (m["dtype"], ("float32",)),
        "accumulation": (config["accumulation"], (1,)),
    }
    for name, (value, known) in wanted.items():
        if value not in known:
            raise ValueError(f"{name}={value}: nanoGPT's is {' or '.join(map(str, known))}")
    return dict(
        block_size=config["seq_len"],
        vocab_size=vocab_size,
        n_layer=m["num_layers"],
        n_head=a["num_heads"],
        n_embd=m["dim"],
        dropout=m["dropout"],
        bias=m["norm"] == "layer_norm",
    )


def begin(request: dict[str, Any]) -> tuple[dict[str, Any], Callable[[int], dict[str, Any]]]:
    directory = Path(request["directory"]).expanduser()
    if not (directory / "model.py").is_file():
        raise ValueError(f"--peer {directory}: no checkout of nanoGPT: it has no model.py")
    try:
        import torch
    except ImportError:
        raise ValueError("--peer needs PyTorch: pip install '.[parity]'") from None
    sys.path.insert(0, str(directory))
    from model import GPT, GPTConfig

    config, o = request["config"], request["config"]["optimizer"]
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    model = GPT(GPTConfig(**gpt_config(config, request["vocab_size"])))
    optimizer = model.configure_optimizers(o["weight_decay"], o["learning_rate"], (o["b1"], o["b2"]), "cpu")
    shape = config["batch_size"], config["seq_len"]

    def step() -> None:
        ids = torch.randint(request["vocab_size"], (2, *shape))
        _, loss = model(ids[0], ids[1])
        loss.backward()
        if o["clip_norm"] is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), o["clip_norm"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()  # as its loop logs it

    def run(steps: int) -> dict[str, Any]:
        return measured(step, steps) | {"skipped_steps": 0}

    facts = {"attention": "PyTorch", "parameters": sum(p.numel() for p in model.parameters())}
    return facts | {"torch": torch.__version__}, run


if __name__ == "__main__":
    serve(begin)
