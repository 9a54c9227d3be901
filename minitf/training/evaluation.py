"""The eval step, and metrics computed on the host: from its sums, and from those of `train_step` over routers."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from minitf.training.step import Batch, StepConfig, row_sums


def eval_step(params: Any, batch: Batch, byte_lengths: jax.Array | None, *, cfg: StepConfig) -> dict[str, jax.Array]:
    """Sums over each row of a batch, [B]: nats, tokens, and, unless byte_lengths (bytes per token id) is None, bytes of text."""
    sums = {"nats": row_sums(params, batch, cfg)[1]["loss"], "tokens": jnp.sum(batch["weights"], axis=-1)}
    if byte_lengths is not None:
        sums["bytes"] = jnp.sum(byte_lengths[batch["targets"]] * batch["weights"], axis=-1)
    return sums


def totals(
    step_fn: Callable[[Any, Batch], dict[str, jax.Array]], params: Any, batches: Iterator[Batch]
) -> dict[str, np.ndarray]:
    """Per-row sums of `eval_step` for all rows of all batches that hold tokens, float64 on the host."""
    found = [jax.device_get(step_fn(params, batch)) for batch in batches]
    rows = {name: np.concatenate([f[name] for f in found]).astype(np.float64) for name in found[0]}
    return {name: values[rows["tokens"] > 0] for name, values in rows.items()}


def scores(rows: dict[str, np.ndarray], text_bytes: int | None = None) -> dict[str, float]:
    """Loss (nats per token, all tokens weighted equally), its standard error (rows taken as a random sample), perplexity, and bits per
    byte if bytes are known, from the rows of `totals`. text_bytes: number of bytes of the text; None: counted by the rows."""
    nats, tokens, n = rows["nats"], rows["tokens"], len(rows["tokens"])
    loss = nats.sum() / max(tokens.sum(), 1)
    values = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
    if n > 1:
        # Standard error of a ratio of sums (Cochran, Sampling Techniques, 1977, 2.11): rows may differ in their number of tokens.
        values["standard_error"] = math.sqrt(n / (n - 1) * np.sum((nats - loss * tokens) ** 2)) / tokens.sum()
    text_bytes = rows["bytes"].sum() if text_bytes is None and "bytes" in rows else text_bytes
    if text_bytes:
        values["bits_per_byte"] = nats.sum() / math.log(2) / text_bytes
    return {name: float(value) for name, value in values.items()}


def evaluate(
    step_fn: Callable[[Any, Batch], dict[str, jax.Array]], params: Any, datasets: dict[str, Iterator[Batch]]
) -> dict[str, float]:
    """`scores` over the batches of all datasets together and their number of tokens, as eval/NAME; with several datasets also those
    of each, as eval/DATASET/NAME."""
    each = {name: totals(step_fn, params, batches) for name, batches in datasets.items()}
    every = {key: np.concatenate([rows[key] for rows in each.values()]) for key in next(iter(each.values()))}
    parts = {"": every} | ({f"{name}/": rows for name, rows in each.items()} if len(each) > 1 else {})
    values: dict[str, float] = {}
    for prefix, rows in parts.items():
        found = scores(rows) | {"tokens": int(rows["tokens"].sum())}
        values |= {f"eval/{prefix}{key}": value for key, value in found.items()}
    return values


def router_metrics(routed: list[dict[str, np.ndarray]]) -> dict[str, float]:
    """How a mixture's routers choose: for each measure the mean over layers, and, as NAME_worst, the layer farthest from balance.

    busiest, idlest: tokens of the most and the least used expert, over the mean; unused: share of experts without a token; entropy:
    mean of that of a token's probabilities, in nats; bias_spread: largest less smallest bias of the router's choice.
    routed: of `train_step`.
    """
    layers: dict[str, list[np.ndarray]] = {}
    for sums in filter(None, routed):
        load = sums["uses"] / np.maximum(sums["uses"].mean(axis=-1, keepdims=True), 1e-9)
        found = {
            "busiest": load.max(axis=-1),
            "idlest": load.min(axis=-1),
            "unused": (load == 0).mean(axis=-1),
            "entropy": sums["entropy"],
        }
        if "router_bias" in sums:
            found["bias_spread"] = np.ptp(sums["router_bias"], axis=-1)
        for name, values in found.items():
            layers.setdefault(name, []).append(values)
    metrics = {}
    for name, parts in layers.items():
        values, worst = np.concatenate(parts), np.min if name in ("idlest", "entropy") else np.max
        metrics |= {f"router/{name}": float(values.mean()), f"router/{name}_worst": float(worst(values))}
    return metrics
