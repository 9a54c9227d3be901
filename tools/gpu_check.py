"""What an accelerator does, in one go of at most ten minutes: is attention right, how fast are training and decoding, what fits.

python -m tools.gpu_check --output gpu_check.json
python -m tools.gpu_check --tiny

Uses one device. First compares each attention kernel that runs on it, in bfloat16, with the float32 reference, forward and backward.
Then a mixture's grouped products, beside one dense product of as much work, with ways that are not in the model's table.
Then measures the real train step, in bfloat16 with 2,048 tokens per row of synthetic data, for each shape and each policy of
model.remat: tokens/s, MFU, peak memory of the device. Then decoding. Each measurement has its own process, so that one that does
not fit fails alone and peaks are separate; after --minutes the running measurement is stopped and the others are left out. Exit
status: 1 if attention is wrong.
--tiny: toy shapes, to test all parts on a CPU, where cuDNN's kernel is reported as skipped.
"""

import argparse
import dataclasses
import datetime
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from minitf import config as config_lib
from minitf.config import Config
from minitf.data.datasets import DataConfig
from minitf.job import prepare
from minitf.model import kernels
from minitf.model.attention import AttentionConfig
from minitf.model.grouped import GROUPED
from minitf.model.kernels import IMPLEMENTATIONS, Mask, Needs, Scores
from minitf.model.mlp import MlpConfig
from minitf.model.remat import REMAT
from minitf.model.transformer import ModelConfig, model_params
from minitf.params import init_params
from minitf.runtime.checkpoint import CheckpointConfig
from minitf.runtime.terminal import human
from minitf.sharding.devices import compute_capability, make_mesh
from minitf.sharding.mesh import MeshConfig
from minitf.training.optimizer import OptimizerConfig
from tools.benchmark import WARM_UP, Side, facts, run, serve, start, summary
from tools.benchmark_generate import decoding

# ---- shapes and settings


def shape(layers: int, dim: int, heads: int, kv_heads: int, hidden: int, vocab_size: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        num_layers=layers,
        dim=dim,
        vocab_size=vocab_size,
        dtype="bfloat16",
        tie_embeddings=tied,
        attention=AttentionConfig(num_heads=heads, num_kv_heads=kv_heads),
        mlp=MlpConfig(kind="swiglu", hidden=hidden),
    )


SHAPES = {  # name -> (model, batch size): widths of GPT-2 small and medium, and of TinyLlama
    "124M": (shape(12, 768, 12, 12, 2048, 50304, True), 16),
    "350M": (shape(24, 1024, 16, 16, 2816, 50304, True), 16),
    "1B": (shape(22, 2048, 32, 4, 5632, 32000, False), 8),
}
TINY = {"tiny": (shape(2, 32, 4, 2, 64, 64, False), 2)}
GROUPED_SHAPE, GROUPED_TINY = (16384, 2048, 1024, 32), (256, 32, 64, 4)  # rows, width, hidden width, experts
SEQ_LEN, TINY_SEQ_LEN = 2048, 128
# The most informative first, should time run out.
POLICIES = sorted(REMAT, key=lambda name: name not in ("products", "qkv_context", "full"))
MIXES = {  # name -> (window, query heads, key/value heads)
    "causal": (None, 8, 8),
    "shared key/value heads": (None, 8, 2),
    "window": (100, 8, 2),
}


def train_config(model: ModelConfig, batch_size: int, seq_len: int, remat: str) -> Config:
    return Config(
        steps=1000,
        batch_size=batch_size,
        seq_len=seq_len,
        eval_every=None,
        data=DataConfig(kind="synthetic"),
        checkpoint=CheckpointConfig(every_minutes=None, last=False),
        model=dataclasses.replace(model, max_seq_len=seq_len, remat=remat),
        optimizer=OptimizerConfig(),
    )


# ---- in a separate process: one request, one answer


def errors_of(name: str, request: dict[str, Any]) -> dict[str, list[float]]:
    """Case -> relative errors of the output and of the gradients of q, k and v, against the float32 reference."""
    found = {}
    for case, (window, H, G) in MIXES.items():
        keys = jax.random.split(jax.random.key(0), 4)
        shapes = [(2, request["seq_len"], n, request["head_dim"]) for n in (H, G, G, H)]
        arrays = [jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes, strict=True)]

        def mixed(
            implementation: str, q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, window=window
        ) -> tuple:
            y, vjp = jax.vjp(lambda q, k, v: kernels.mix(q, k, v, Mask(window), Scores(), implementation), q, k, v)
            return y, *vjp(out)

        with jax.default_matmul_precision("highest"):
            exact = jax.jit(mixed, static_argnums=0)("reference", *(a.astype(jnp.float32) for a in arrays))
        approximate = jax.jit(mixed, static_argnums=0)(name, *arrays)
        pairs = [
            (np.asarray(a, np.float64), np.asarray(e, np.float64)) for a, e in zip(approximate, exact, strict=True)
        ]
        found[case] = [float(np.linalg.norm(a - e) / np.linalg.norm(e)) for a, e in pairs]
    return found


def correctness(request: dict[str, Any]) -> dict[str, Any]:
    """By kernel, why it was skipped, or its errors and whether it is right: all at most twice those of the bfloat16 reference."""
    device = jax.devices()[0]
    needs = Needs("bfloat16", request["seq_len"], request["head_dim"], capability=compute_capability(device))
    why = {name: kernels.refusal(name, device.platform, needs) for name in IMPLEMENTATIONS}
    errors = {name: errors_of(name, request) for name, reason in why.items() if reason is None}
    own = errors["reference"]
    right = {
        name: all(e <= 2 * r for case in own for e, r in zip(found[case], own[case], strict=True))
        for name, found in errors.items()
    }
    skipped = {name: reason for name, reason in why.items() if reason is not None}
    return {"skipped": skipped, "errors": errors, "right": right}


def mosaic_product(x_ND: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """JAX's kernel for Hopper GPUs and later, which has no gradient."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    tiles = dict(block_m=128, block_n=128, block_k=64, max_concurrent_steps=4, grid_block_n=16)
    return ragged_dot(x_ND, w_EDF, group_sizes=sizes_E, **tiles)


CANDIDATES = {name: (kind.apply, kind.platforms, True) for name, kind in GROUPED.items()}
CANDIDATES |= {"mosaic": (mosaic_product, ("gpu",), False)}  # name -> (product, platforms, whether it has a gradient)


def seconds_of(f: Callable, *args: jax.Array) -> float:
    """Median of the times of compiled calls."""
    f = jax.jit(f)
    jax.block_until_ready(f(*args))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(f(*args))
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def grouped(request: dict[str, Any]) -> dict[str, Any]:
    """Time of a grouped product, alone and with its gradients, over that of one dense product of as much work; and relative errors of
    the same results against float32."""
    product, platforms, has_gradient = CANDIDATES[request["product"]]
    if (platform := jax.devices()[0].platform) not in platforms:
        return {"skipped": f"it runs on {' and '.join(platforms)}, this is {platform}"}
    N, D, F, E = (request[n] for n in ("rows", "dim", "hidden", "experts"))
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (N, D), (E, D, F), (N, F)
    x, w, g = (jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys[:3], shapes, strict=True))
    sizes = jnp.bincount(jax.random.randint(keys[3], (N,), 0, E), length=E).astype(jnp.int32)

    def with_gradients(f: Callable) -> Callable:
        def both(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
            y, vjp = jax.vjp(f, x, w)
            return y, *vjp(g)

        return both

    mine, dense = (lambda x, w: product(x, w, sizes)), (lambda x, w: x @ w)
    found = {"forward": seconds_of(mine, x, w) / seconds_of(dense, x, w[0])}
    if has_gradient:
        seconds = seconds_of(with_gradients(mine), x, w, g)
        found["with_gradients"] = seconds / seconds_of(with_gradients(dense), x, w[0], g)
    exact = with_gradients(lambda x, w: GROUPED["blocks"].apply(x, w, sizes))
    expected = jax.jit(exact)(*(a.astype(jnp.float32) for a in (x, w, g)))
    results = jax.jit(with_gradients(mine))(x, w, g) if has_gradient else [jax.jit(mine)(x, w)]
    norm = lambda a: float(np.linalg.norm(np.asarray(a, np.float64)))
    found["errors"] = [norm(a.astype(jnp.float32) - e) / norm(e) for a, e in zip(results, expected, strict=False)]
    return found


def training(request: dict[str, Any]) -> dict[str, Any]:
    bench = start(prepare(config_lib.freeze(request["config"]), jax.devices()[:1]))
    known = facts(bench)
    run(bench, WARM_UP)
    found = summary(known, [run(bench, request["steps"])])
    memory = jax.devices()[0].memory_stats() or {}  # None on a CPU
    return found | {"peak_bytes": memory.get("peak_bytes_in_use")}


def decode(request: dict[str, Any]) -> dict[str, Any]:
    cfg = config_lib.freeze(request["config"]).model
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    specs = model_params(cfg)
    with jax.set_mesh(mesh):
        params = jax.jit(lambda key: init_params(specs, key))(jax.random.key(0))
    measure = decoding(params, cfg, mesh)
    measure(request)  # compiles
    found = measure(request)
    return found | {"tokens_per_s": request["batch_size"] * request["new_tokens"] / found["seconds"]}


PARTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "correctness": correctness,
    "grouped": grouped,
    "training": training,
    "decode": decode,
}


def worker() -> None:
    def begin(part: str) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
        jax.config.update("jax_enable_compilation_cache", False)  # as in tools.benchmark
        device = jax.devices()[0]

        def answer(request: dict[str, Any]) -> dict[str, Any]:
            try:
                return PARTS[part](request)
            # Out of memory; unsupported on this device, or by this JAX.
            except (jax.errors.JaxRuntimeError, NotImplementedError, ImportError) as e:
                return {"failed": str(e).splitlines()[0]}

        return {"device": device.device_kind}, answer

    serve(begin)


# ---- all measurements, until time runs out


def requests(tiny: bool) -> list[tuple[str, str, dict[str, Any]]]:
    """(name, part, request) of all measurements, the most informative first."""
    shapes, seq_len = (TINY, TINY_SEQ_LEN) if tiny else (SHAPES, SEQ_LEN)
    configs = {
        (name, remat): dataclasses.asdict(train_config(model, batch_size, seq_len, remat))
        for remat in POLICIES
        for name, (model, batch_size) in shapes.items()
    }
    steps, new_tokens = (2, 8) if tiny else (10, 256)
    found = [("attention", "correctness", {"seq_len": 256 if tiny else 1024, "head_dim": 64})]
    trained = [
        (f"train {name} {remat}", "training", {"config": config, "steps": steps})
        for (name, remat), config in configs.items()
    ]
    decoded = [
        (
            f"decode {name} batch {n}",
            "decode",
            {"config": configs[name, "none"], "batch_size": n, "prompt": 16, "new_tokens": new_tokens},
        )
        for name in list(shapes)[:1]
        for n in (1, 8)
    ]
    sizes = dict(zip(("rows", "dim", "hidden", "experts"), GROUPED_TINY if tiny else GROUPED_SHAPE, strict=True))
    found += [(f"experts {name}", "grouped", {"product": name, **sizes}) for name in CANDIDATES if name != "reference"]
    telling = 3 * len(shapes)
    return found + trained[:telling] + decoded + trained[telling:]


def measured_until(until: float, name: str, part: str, request: dict[str, Any]) -> dict[str, Any]:
    """The answer of a new process; {"failed": why} if it fails or does not answer before `until` (time.monotonic())."""
    side = Side(name, ["tools.gpu_check", "--worker"], part)
    timer = threading.Timer(until - time.monotonic(), side.kill)
    timer.start()
    try:
        return side.facts | side.ask(request)
    except (RuntimeError, ValueError) as e:
        return side.facts | {"failed": str(e) if timer.is_alive() else "stopped: the time was up"}
    finally:
        timer.cancel()
        side.close()


PRODUCTS = {"forward": "forward", "with gradients": "with_gradients"}  # name -> figure


def line(name: str, found: dict[str, Any]) -> str:
    if "failed" in found or ("skipped" in found and "right" not in found):
        return f"{name:28} {found.get('failed') or 'skipped: ' + found['skipped']}"
    if "forward" in found:
        times = [f"{what} {found[key]:.2f}" for what, key in PRODUCTS.items() if key in found]
        return f"{name:28} times a dense product: {', '.join(times)}; errors " + " ".join(
            f"{what} {e:.1e}" for what, e in zip(("y", "dx", "dw"), found["errors"], strict=False)
        )
    if "errors" in found:
        rows = [
            f"  {n:10} {case:24} {'right' if found['right'][n] else 'WRONG':6} "
            + " ".join(f"{what} {e:.1e}" for what, e in zip(("y", "dq", "dk", "dv"), errors, strict=True))
            for n, cases in found["errors"].items()
            for case, errors in cases.items()
        ]
        rows += [f"  {n:10} skipped: {why}" for n, why in found["skipped"].items()]
        return "\n".join([f"{name}: relative errors against the float32 reference", *rows])
    if "mfu" in found:
        peak = "" if found["peak_bytes"] is None else f", peak {human(found['peak_bytes'])}B"
        return (
            f"{name:28} {found['tokens_per_s']:12,.0f} tokens/s  MFU {found['mfu']:6.1%}{peak}, "
            f"attention {found['attention']}, compiled in {found['compile_s']:.0f} s"
        )
    return f"{name:28} {found['tokens_per_s']:12,.0f} tokens/s, {1e3 * found['token']:.2f} ms a token"


def check(minutes: float, tiny: bool, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Runs the measurements for at most `minutes`; returns the results by name, and the names left out."""
    until = time.monotonic() + 60 * minutes
    result: dict[str, Any] = {"date": datetime.date.today().isoformat(), "jax": jax.__version__, "tiny": tiny}
    result |= {"results": {}, "left_out": []}
    for name, part, request in requests(tiny):
        if time.monotonic() >= until:
            result["left_out"].append(name)
            continue
        found = measured_until(until, name, part, request)
        if "device" not in result:
            result["device"] = found["device"]
            say(f"{result['date']}, {result['device']}, JAX {result['jax']}")
        result["results"][name] = found
        say(line(name, found))
    if result["left_out"]:
        say(f"after {minutes:g} minutes left out: {', '.join(result['left_out'])}")
    return result


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv == ["--worker"]:
        worker()
        return 0
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="in all (default: 10)")
    parser.add_argument("--output", metavar="FILE", help="write all figures as JSON")
    parser.add_argument("--tiny", action="store_true", help="toy shapes")
    args = parser.parse_args(argv)
    if not args.minutes > 0:
        parser.error(f"--minutes={args.minutes}: must be positive")
    result = check(args.minutes, args.tiny)
    if args.output:
        epath.Path(args.output).write_text(json.dumps(result, indent=1) + "\n")
    attended = result["results"].get("attention", {})
    wrong = [name for name, right in attended.get("right", {}).items() if not right]
    if wrong or "failed" in attended:
        print(f"error: attention: {', '.join(wrong) or attended['failed']}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
