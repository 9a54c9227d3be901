"""Holds the real model against the plain one, one departure from one recipe at a time: shape, logits, gradient, loss curve.

python -m tools.parity
python -m tools.parity --only sliding gelu mesh_2x2x2

Every kind of model and every way to compute it is a row: `base` is the recipe, each other row changes one thing of it. A row
compares logits, the gradient of every parameter and the losses of 20 steps of plain SGD with those of minitf/model/reference.py,
prints the largest difference beside its tolerance, and names the first parameter, or the step, where the two part.
"""

import argparse
import dataclasses
import fnmatch
import functools
import json
import math
import os
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from minitf import params as P
from minitf import sharding
from minitf import step as step_lib
from minitf.config import Config, fail
from minitf.data.datasets import DataConfig
from minitf.model import attention, reference
from minitf.model.attention import IMPLEMENTATIONS, AttentionConfig
from minitf.model.mlp import MlpConfig
from minitf.model.transformer import REMAT, ModelConfig, model, model_params
from minitf.params import SCHEMES
from minitf.sharding import MeshConfig
from minitf.tables import did_you_mean

STEPS, LEARNING_RATE = 20, 0.02

# ---- the recipe and its departures


def change(cfg: Any, **values: Any) -> Any:
    """A copy with settings replaced by dotted name, dots written as two underscores: change(cfg, model__dim=32)."""
    for name, value in values.items():
        head, _, rest = name.partition("__")
        cfg = dataclasses.replace(cfg, **{head: change(getattr(cfg, head), **{rest: value}) if rest else value})
    return cfg


# Sizes that every mesh divides; a query width (8 x 4) that is not the model's (16). Numbers whose change by a few percent is seen:
# an epsilon near the squares to which it is added, wavelengths near the row's length, a window inside it.
RECIPE = Config(
    steps=STEPS,
    batch_size=8,
    seq_len=16,
    data=DataConfig(kind="synthetic"),
    mesh=MeshConfig(data=1, fsdp=1, tensor=1),
    model=ModelConfig(
        num_layers=2,
        dim=16,
        vocab_size=64,
        max_seq_len=16,
        norm_eps=1e-2,
        attention=AttentionConfig(num_heads=8, num_kv_heads=4, head_dim=4, rope_base=100.0),
        mlp=MlpConfig(kind="swiglu", hidden=32),
    ),
)
WINDOW = dict(model__attention__window=5)
DEPARTURES = {  # other models
    "base": {},
    "sliding": dict(model__attention__kind="sliding", **WINDOW),
    "alternating": dict(
        model__pattern=("full", "sliding"), model__num_layers=3, **WINDOW
    ),  # one period, and a layer left over
    "multi_head": dict(model__attention__num_kv_heads=None),
    "attention_scale": dict(model__attention__scale=0.2),
    "attention_softcap": dict(model__attention__softcap=2.0),
    "qk_norm": dict(model__attention__qk_norm=True, model__attention__qk_norm_eps=1e-2),
    "qkv_bias": dict(model__attention__bias="qkv"),
    "qkvo_bias": dict(model__attention__bias="qkvo"),
    "rope_base": dict(model__attention__rope_base=10_000.0),
    # The two frequencies turn 5.7 and 0.57 times in 36 positions: one stays, one is stretched. 32 and 3.2 of 40 are in between.
    "rope_llama3": dict(model__positions="rope_llama3", model__attention__rope_original_len=36),
    "rope_llama3_between": dict(
        model__positions="rope_llama3",
        model__attention__rope_original_len=200,
        model__attention__rope_factor=2.0,
        model__attention__rope_high_freq_factor=40.0,
    ),
    "learned": dict(model__positions="learned"),
    "none": dict(model__positions="none"),
    "layer_norm": dict(model__norm="layer_norm"),
    "layer_norm_no_bias": dict(model__norm="layer_norm_no_bias"),
    "post_norms": dict(model__post_norms=True, model__norm="rms_norm_offset"),
    "gelu": dict(model__mlp__kind="gelu"),
    "gelu_erf": dict(model__mlp__kind="gelu_erf"),
    "relu_squared": dict(model__mlp__kind="relu_squared"),
    "geglu": dict(model__mlp__kind="geglu"),
    "mlp_bias": dict(model__mlp__bias=True),
    "tied": dict(model__tie_embeddings=True),
    "embedding_scale": dict(model__embedding_scale=4.0, model__tie_embeddings=True),
    "logit_softcap": dict(model__logit_softcap=3.0),
    "z_loss": dict(loss__z_loss=0.1),
    "documents": dict(data__isolate_documents=True),
}
# From the initial values of a scheme, where scales are 1 and biases 0; all else starts from noise.
INITIAL = {f"init_{name}": dict(model__init=name) for name in SCHEMES}


def long(seq_len: int) -> dict[str, Any]:
    return dict(batch_size=2, seq_len=seq_len, model__max_seq_len=seq_len)


# What an implementation needs besides, or does otherwise.
SHAPES = {
    "blocked": long(160),  # two blocks of queries
    "splash": long(attention.LANES),
    "cudnn": dict(model__dtype="bfloat16", model__attention__head_dim=8),
}
MESHES = {"data8": (8, 1, 1), "fsdp8": (1, 8, 1), "2x2x2": (2, 2, 2), "1x2x4": (1, 2, 4)}  # data, fsdp, tensor
MANUAL = {"data8": (8, 1, 1), "fsdp8": (1, 8, 1), "2x4": (2, 4, 1), "fsdp2": (1, 2, 1)}


def on(sizes: tuple[int, int, int], **settings: Any) -> dict[str, Any]:
    return dict(mesh=MeshConfig(*sizes, **settings))


WAYS = {  # to compute the same
    "unroll": dict(model__unroll=2),
    **{f"remat_{name}": dict(model__remat=name) for name in REMAT if name != RECIPE.model.remat},
    **{f"kernel_{n}": dict(model__attention__implementation=n, **SHAPES.get(n, {})) for n in IMPLEMENTATIONS},
    "kernel_blocked_window": dict(  # of the keys, some before the block
        model__attention__implementation="blocked", model__attention__kind="sliding", **WINDOW, **long(160)
    ),
    "accumulation": dict(accumulation=2),
    "loss_chunk": dict(loss__chunk=6),  # with a rest
    **{f"mesh_{name}": on(sizes) for name, sizes in MESHES.items()},
    **{f"manual_{name}": on(sizes, collectives="manual") for name, sizes in MANUAL.items()},
    "manual_fsdp_inner": on((1, 8, 1), collectives="manual", fsdp_inner=2),
    **{name: dict(model__dtype=name) for name in ("bfloat16", "float16")},
}
ROWS = DEPARTURES | INITIAL | WAYS
# Settings of WAYS, which the plain model does not read.
HOW = (
    "mesh",
    "accumulation",
    "loss__chunk",
    "model__dtype",
    "model__remat",
    "model__unroll",
    "model__init",
    "model__attention__implementation",
    "model__attention__block_q",
    "model__attention__block_kv",
)


def setting(cfg: Any, name: str) -> Any:
    return functools.reduce(getattr, name.split("__"), cfg)


def departure(name: str) -> Config:
    return change(RECIPE, **ROWS[name])


# ---- values


def random_batch(cfg: Config, seed: int = 0, weights: Any = None) -> dict[str, jax.Array]:
    """Random ids; targets are random too."""
    rng = np.random.default_rng(seed)
    shape = (cfg.batch_size, cfg.seq_len)
    ids = rng.integers(0, cfg.model.vocab_size, (2, *shape), dtype=np.int32)
    weights = np.ones(shape, np.float32) if weights is None else np.asarray(weights, np.float32)
    return {"inputs": jnp.asarray(ids[0]), "targets": jnp.asarray(ids[1]), "weights": jnp.asarray(weights)}


def batch_for(cfg: Config) -> dict[str, jax.Array]:
    """Random ids with some targets that do not count; with isolation, three documents a row and padding at its end."""
    weights = np.random.default_rng(1).integers(0, 4, (cfg.batch_size, cfg.seq_len)) > 0
    batch = random_batch(cfg, weights=weights)
    if cfg.data.isolate_documents:
        segments = np.repeat([1, 2, 3, 0], [5, 3, 6, 2])[None].repeat(cfg.batch_size, 0)
        positions = np.r_[np.arange(5), np.arange(3), np.arange(6), 0, 0][None].repeat(cfg.batch_size, 0)
        batch |= {"segments": jnp.asarray(segments), "positions": jnp.asarray(positions)}
    return batch


def random_params(cfg: ModelConfig, seed: int = 0, scale: float = 0.3) -> Any:
    """Noise around 1 for what begins as 1 (scales), around 0 for all else: no scale is 1 and no bias 0, where a wrong use of one
    would not show."""
    rng = np.random.default_rng(seed)

    def one(p: P.Param) -> jax.Array:
        noise = scale * rng.standard_normal(p.full_shape)
        return jnp.asarray(noise + (p.init is P.ones), p.dtype)

    return P.tree_map(one, model_params(cfg))


class Values(NamedTuple):
    """What a row compares, as arrays of NumPy."""

    logits: Any
    gradient: Any  # of the first step
    losses: Any  # of each step


def start(cfg: Config, initial: bool = False) -> Any:
    """Parameters of the first step: noise, or the initial values of the config's scheme."""
    return P.init(model_params(cfg.model), jax.random.key(0)) if initial else random_params(cfg.model)


def curve(step: Any, params: Any, batch: dict[str, jax.Array], steps: int) -> tuple[jax.Array, Any]:
    """(losses of steps of plain SGD, gradient of the first), compiled as one program."""

    def body(params: Any, _: None) -> tuple[Any, Any]:
        loss, grads = step(params, batch)
        return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads), (loss, grads)

    _, (losses, grads) = jax.lax.scan(body, params, None, length=steps)
    return losses, jax.tree.map(lambda g: g[0], grads)


# Compiled once for each model and used for a moment: XLA's CPU compiler takes half the time so.
QUICKLY = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": True}


@functools.cache
def plain(cfg: Config, initial: bool, steps: int, rounded: str) -> Values:
    """The plain model's, its weights rounded to a type before each use."""
    specs = model_params(cfg.model)

    def weights(params: Any) -> Any:
        keep = lambda spec, w: w if spec.kind in ("scale", "bias") else w.astype(rounded).astype(w.dtype)
        return P.tree_map(keep, specs, params)

    def step(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        return jax.value_and_grad(reference.loss_fn)(weights(params), batch, cfg.model, cfg.loss.z_loss)

    def run(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        rows = batch["inputs"], cfg.model, batch.get("positions"), batch.get("segments")
        return reference.model(weights(params), *rows), curve(step, params, batch, steps)

    options = QUICKLY if jax.default_backend() == "cpu" else None
    with jax.default_matmul_precision("highest"):
        logits, (losses, grads) = jax.jit(run, compiler_options=options)(start(cfg, initial), batch_for(cfg))
    return jax.tree.map(np.asarray, Values(logits, grads, losses))


def expected(cfg: Config, initial: bool = False, steps: int = STEPS, rounded: str = "float32") -> Values:
    """The plain model's, run once for all ways to compute the same."""
    same = {name: setting(RECIPE, name) for name in HOW}
    if initial:
        same["model__init"] = cfg.model.init
    return plain(change(cfg, **same), initial, steps, rounded)


def actual(cfg: Config, initial: bool = False, steps: int = STEPS) -> Values:
    """The real model's, computed as the config says."""
    mesh = sharding.make_mesh(cfg.mesh, jax.devices()[: devices_of(cfg)])

    def step(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        losses, grads = step_lib.gradients(params, batch, jnp.int32(0), cfg)
        return losses["loss"] + (cfg.loss.z_loss or 0) * losses.get("z_loss", 0), grads

    def run(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        documents = dict(positions=batch.get("positions"), segments=batch.get("segments"))
        return model(params, batch["inputs"], cfg.model, **documents), curve(step, params, batch, steps)

    with sharding.surroundings(mesh, cfg.model.dtype):
        params = jax.device_put(start(cfg, initial), sharding.shardings(model_params(cfg.model), mesh))
        logits, (losses, grads) = jax.jit(run)(params, jax.device_put(batch_for(cfg), sharding.batch_sharding(mesh)))
    return jax.tree.map(np.asarray, Values(logits, grads, losses))


def devices_of(cfg: Config) -> int:
    return math.prod(getattr(cfg.mesh, axis) for axis in sharding.AXES)


# ---- the comparison

TOLERANCE = 1e-5  # of float32
# A 16-bit model rounds its weights, and beside each of the 7 of a block about 17 results in the forward pass and as many in the
# backward pass. Roundings that know nothing of each other add up as squares do: sqrt((7 + 17 + 17) / 7) = 2.4 times what those of
# the weights do, which the plain model tells. The rest is for chance.
ROUNDING = 4


class Part(NamedTuple):
    """A column of a row. Differences are relative to the array's largest expected value, but at least to 1."""

    difference: float  # the largest
    tolerance: float
    miss: str | None  # where the first one beyond the tolerance is


def difference(a: Any, e: Any) -> float:
    """The largest, relative to max(1, largest expected value); infinite where shapes differ, and where a value is no number."""
    a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
    if a.shape != e.shape or not np.isfinite(a).all():
        return math.inf
    return np.abs(a - e).max(initial=0) / max(1.0, np.abs(e).max(initial=0))


def differences(found: Values, truth: Values) -> dict[str, dict[str, float]]:
    """Column -> name of an array, or number of a step -> difference."""
    gradient = dict(P.named(truth.gradient))
    largest = max(1.0, np.abs(truth.losses).max())
    return {
        "logits": {"logits": difference(found.logits, truth.logits)},
        "gradient": {name: difference(g, gradient[name]) for name, g in P.named(found.gradient)},
        "curve": {
            f"step {i}": abs(float(a) - float(e)) / largest if math.isfinite(a) else math.inf
            for i, (a, e) in enumerate(zip(found.losses, truth.losses, strict=True), 1)
        },
    }


def compare(found: Values, truth: Values, tolerances: dict[str, float]) -> dict[str, Part]:
    """Column -> part."""
    parts = {}
    for column, values in differences(found, truth).items():
        tolerance = tolerances[column]
        beyond = [name for name, value in values.items() if not value <= tolerance]
        miss = None
        if beyond:
            more = f" (and of {len(beyond) - 1} more)" if column == "gradient" and len(beyond) > 1 else ""
            what = {"logits": "", "gradient": "gradient of ", "curve": "the loss curve departs at "}[column] + beyond[0]
            miss = f"{what} differs" if column != "curve" else what
            miss += f" by {values[beyond[0]]:.1e}, tolerance {tolerance:.0e}{more}"
        parts[column] = Part(max(values.values()), tolerance, miss)
    return parts


def tolerances(cfg: Config, initial: bool = False, steps: int = STEPS) -> dict[str, float]:
    """Column -> tolerance, by the type of products."""
    if cfg.model.dtype == "float32":
        return dict.fromkeys(("logits", "gradient", "curve"), TOLERANCE)
    rounded, exact = (expected(cfg, initial, steps, dtype) for dtype in (cfg.model.dtype, "float32"))
    return {column: ROUNDING * max(values.values()) for column, values in differences(rounded, exact).items()}


def check(cfg: Config, initial: bool = False, steps: int = STEPS) -> dict[str, Part]:
    """The real model of a config beside the plain one."""
    found, truth = actual(cfg, initial, steps), expected(cfg, initial, steps)
    return compare(found, truth, tolerances(cfg, initial, steps))


# ---- the command


class Row(NamedTuple):
    name: str
    changes: dict[str, Any]  # of the recipe
    shape: tuple[int, ...] | None = None  # of the logits
    parts: dict[str, Part] | None = None  # by column
    misses: tuple[str, ...] = ()
    skipped: str | None = None  # why


def refusal(cfg: Config) -> str | None:
    """Why a config cannot run here, or None."""
    if devices_of(cfg) > len(jax.devices()):
        return f"needs {devices_of(cfg)} devices, there are {len(jax.devices())}"
    a, device = cfg.model.attention, jax.devices()[0]
    if a.implementation == "auto":
        return None
    head_dim = attention.sizes(a, cfg.model.dim)[2]
    needs = attention.Needs(cfg.model.dtype, cfg.seq_len, head_dim, capability=sharding.capability(device))
    return attention.refusal(a.implementation, device.platform, needs)


def row(name: str) -> Row:
    cfg, changes = departure(name), ROWS[name]
    why = refusal(cfg)
    if why is not None:
        return Row(name, changes, skipped=why)
    try:
        parts = check(cfg, name in INITIAL)
    except Exception as e:  # what a change broke is named, and the other rows are still compared
        return Row(name, changes, misses=(f"{type(e).__name__}: {e}",))
    return Row(name, changes, (cfg.batch_size, cfg.seq_len, cfg.model.vocab_size), parts, missed(parts))


def missed(parts: dict[str, Part]) -> tuple[str, ...]:
    return tuple(part.miss for part in parts.values() if part.miss is not None)


COLUMNS = ("logits", "gradient", "curve")


def cells(r: Row) -> list[str]:
    if r.skipped is not None:
        return [r.name, *"----", f"not here: {r.skipped}"]
    shape = "x".join(map(str, r.shape)) if r.shape else "-"
    numbers = [f"{p.difference:.1e} / {p.tolerance:.0e}" if (p := (r.parts or {}).get(c)) else "-" for c in COLUMNS]
    return [r.name, shape, *numbers, "MISS" if r.misses else "equal"]


def line(r: Row, width: int) -> str:
    name, shape, *numbers, verdict = cells(r)
    return f"{name:{width}}  {shape:>9}  " + "  ".join(f"{n:>15}" for n in numbers) + f"  {verdict}"


def select(names: list[str] | None, known: dict[str, Any]) -> list[str]:
    """The rows that these names or patterns (mesh_*) name; all if None. Raises ValueError for one that names none."""
    found: list[str] = []
    for pattern in ["*"] if names is None else names:
        some = fnmatch.filter(known, pattern)
        if not some:
            raise ValueError(f"--only {pattern}: no such row{did_you_mean(pattern, known)}; known: {', '.join(known)}")
        found += [name for name in some if name not in found]
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.parity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows, or patterns such as 'mesh_*'")
    parser.add_argument("--json", action="store_true", help="print one object in place of the table")
    args = parser.parse_args(argv)
    try:
        names = select(args.only, ROWS)
    except ValueError as e:
        fail(str(e))
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", max(map(devices_of, map(departure, ROWS))))

    began, rows = time.perf_counter(), []
    width = max(map(len, names))
    show = (lambda text: None) if args.json else functools.partial(print, flush=True)
    show(f"{'':{width}}  {'shape':>9}  " + "  ".join(f"{c:>15}" for c in COLUMNS))
    for name in names:
        rows.append(r := row(name))
        show(line(r, width))
        for miss in r.misses:
            show(f"  {name}: {miss}")
    seconds = time.perf_counter() - began
    wrong = [r.name for r in rows if r.misses]
    if args.json:
        print(json.dumps(as_json(rows, seconds)))
    show(
        f"{len(rows)} rows in {seconds:.0f} s, {sum(r.skipped is not None for r in rows)} not here; "
        + (f"MISS: {', '.join(wrong)}" if wrong else "all equal")
    )
    return 1 if wrong else 0


def as_json(rows: list[Row], seconds: float) -> dict[str, Any]:
    about = {
        "platform": jax.devices()[0].platform,
        "jax": jax.__version__,
        "steps": STEPS,
        "seconds": round(seconds, 1),
    }
    return about | {
        "rows": [r._asdict() | {"parts": {c: p._asdict() for c, p in (r.parts or {}).items()}} for r in rows]
    }


if __name__ == "__main__":
    sys.exit(main())
