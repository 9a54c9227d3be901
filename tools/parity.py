"""Holds the real model against the plain one, one departure from one recipe at a time: shape, logits, gradient, loss curve.

python -m tools.parity
python -m tools.parity --only sliding gelu mesh_2x2x2

Every kind of model and every way to compute it is a row: `base` is the recipe, each other row changes one thing of it. A row
compares logits, the gradient of every parameter and the losses of 20 steps of plain SGD with those of minitf/model/reference.py,
prints the largest difference beside its tolerance, and names the first parameter, or the step, where the two part. Where PyTorch
and transformers are installed (extra `parity`), small random models of every family of minitf.huggingface are held against
theirs, too. --peer trains beside nanoGPT from its own initial values, by the same optimizer on the same rows, for 100 steps.

Eight devices are simulated on a CPU (JAX_NUM_CPU_DEVICES changes that); what cannot run on these devices is said and not counted.
About three minutes on two cores, mostly compilation. Exit status: 0 all equal, 1 a miss, 2 a mistake. docs/parity.md says more.
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
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from minitf.command_line import fail
from minitf.config import Config
from minitf.data.datasets import DataConfig
from minitf.model import attention, kernels, reference
from minitf.model.attention import AttentionConfig
from minitf.model.grouped import GROUPED
from minitf.model.kernels import IMPLEMENTATIONS
from minitf.model.mlp import MlpConfig
from minitf.model.remat import REMAT
from minitf.model.transformer import ModelConfig, model, model_params
from minitf.params import SCHEMES, UNROUNDED, Param, init_params, named, ones, tree_map
from minitf.sharding.devices import compute_capability, make_mesh, surroundings
from minitf.sharding.mesh import MeshConfig, batch_sharding, mesh_settings
from minitf.sharding.rules import shardings
from minitf.tables import did_you_mean
from minitf.training import step as step_lib
from tools import parity_peers, peers

STEPS, LEARNING_RATE = 20, 0.005  # at 0.02 some of these models amplify rounding errors a hundredfold

# ---- the recipe and its departures


def change(cfg: Any, **values: Any) -> Any:
    """A copy with settings replaced by dotted name, dots written as two underscores: change(cfg, model__dim=32)."""
    for name, value in values.items():
        head, _, rest = name.partition("__")
        cfg = dataclasses.replace(cfg, **{head: change(getattr(cfg, head), **{rest: value}) if rest else value})
    return cfg


# Sizes that every mesh divides; the queries' width (8 x 4) differs from the model's (16). Values whose errors of a few percent show:
# an epsilon near the squares it is added to, wavelengths near the length of a row, a window shorter than a row.
RECIPE = Config(
    steps=STEPS,
    batch_size=8,
    seq_len=16,
    data=DataConfig(kind="synthetic"),
    mesh=MeshConfig(fsdp=1),
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


def mixture(router: str, **settings: Any) -> dict[str, Any]:
    """A mixture of four experts with losses of balance so large that they show."""
    of_mlp = dict(router=router, experts=4) | settings
    return dict(loss__balance=0.1, loss__router_z=0.05) | {f"model__mlp__{n}": v for n, v in of_mlp.items()}


DEPARTURES = {  # changes of the model
    "base": {},
    "sliding": dict(model__attention__kind="sliding", **WINDOW),
    # One period and a remaining layer.
    "alternating": dict(model__pattern=("full", "sliding"), model__num_layers=3, **WINDOW),
    "multi_head": dict(model__attention__num_kv_heads=None),
    "attention_scale": dict(model__attention__scale=0.2),
    "attention_softcap": dict(model__attention__softcap=2.0),
    "qk_norm": dict(model__attention__qk_norm=True, model__attention__qk_norm_eps=1e-2),
    "qk_norm_over_heads": dict(
        model__attention__qk_norm=True, model__attention__qk_norm_over="heads", model__attention__qk_norm_eps=1e-2
    ),
    "qkv_bias": dict(model__attention__bias="qkv"),
    "qkvo_bias": dict(model__attention__bias="qkvo"),
    "rope_base": dict(model__attention__rope_base=10_000.0),
    # The two frequencies turn 5.7 and 0.57 times in 36 positions: one is kept, one scaled; 32 and 3.2 times in 200: interpolated.
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
    "experts": mixture("softmax"),
    "experts_weights": mixture("softmax", normalise_weights=False, router_scale=2.5),
    "experts_of_chosen": mixture("softmax_of_chosen", experts_per_token=3),
    "experts_sigmoid": mixture("sigmoid", groups=2, experts_per_token=1),
    "experts_shared": mixture("sigmoid", shared=2, groups=4, groups_per_token=2),
    "experts_dense_first": mixture("softmax", dense_first=1, dense_hidden=64) | dict(model__num_layers=3),
    # Dense layers before, then two periods of two attention kinds by two layers, and a layer left over.
    "experts_every": mixture("softmax", every=2, dense_first=1, shared=1)
    | dict(model__num_layers=6, model__pattern=("full", "sliding"), **WINDOW),
    "experts_documents": mixture("sigmoid", kind="geglu") | dict(data__isolate_documents=True),
}
# Initial parameters by a scheme, where scales are 1 and biases 0; all other rows start from noise.
INITIAL = {f"init_{name}": dict(model__init=name) for name in SCHEMES}


def long(seq_len: int) -> dict[str, Any]:
    return dict(batch_size=2, seq_len=seq_len, model__max_seq_len=seq_len)


# Further settings that a kernel needs, or that exercise it.
SHAPES = {
    "blocked": long(160),  # two blocks of queries
    "splash": long(kernels.LANES),
    "cudnn": dict(model__dtype="bfloat16", model__attention__head_dim=8),
}
MESHES = {"data8": (8, 1, 1), "fsdp8": (1, 8, 1), "2x2x2": (2, 2, 2), "1x2x4": (1, 2, 4)}  # data, fsdp, tensor
MANUAL = {"data8": (8, 1, 1), "fsdp8": (1, 8, 1), "2x4": (2, 4, 1), "fsdp2": (1, 2, 1)}
EXPERT_MESHES = {
    "expert4": (1, 2, 4, 1),
    "expert2": (2, 1, 2, 2),
    "1x2x2x2": (1, 2, 2, 2),
}  # data, fsdp, expert, tensor


def on(sizes: tuple[int, ...], **settings: Any) -> dict[str, Any]:
    """A mesh of (data, fsdp, tensor) or (data, fsdp, expert, tensor)."""
    return dict(mesh=MeshConfig(**sizes_of_axes(sizes), **settings))


def sizes_of_axes(sizes: tuple[int, ...]) -> dict[str, int]:
    axes = [a for a in mesh_settings() if a != "expert" or len(sizes) == len(mesh_settings())]
    return dict.fromkeys(mesh_settings(), 1) | dict(zip(axes, sizes, strict=True))


WAYS = {  # other ways to compute the same model
    "unroll": dict(model__unroll=2),
    **{f"remat_{name}": dict(model__remat=name) for name in REMAT if name != RECIPE.model.remat},
    **{f"kernel_{n}": dict(model__attention__implementation=n, **SHAPES.get(n, {})) for n in IMPLEMENTATIONS},
    "kernel_blocked_window": dict(  # the window begins before the block of queries
        model__attention__implementation="blocked", model__attention__kind="sliding", **WINDOW, **long(160)
    ),
    "accumulation": dict(accumulation=2),
    "loss_chunk": dict(loss__chunk=6),  # does not divide seq_len
    "loss_passes": dict(loss__chunk=6, loss__passes=2),
    **{f"mesh_{name}": on(sizes) for name, sizes in MESHES.items()},
    **{f"manual_{name}": on(sizes, collectives="manual") for name, sizes in MANUAL.items()},
    **{f"mesh_{name}": on(sizes) | mixture("sigmoid") for name, sizes in EXPERT_MESHES.items()},
    "manual_expert": on((1, 2, 4, 1), collectives="manual") | mixture("softmax"),
    "accumulation_experts": dict(accumulation=2) | mixture("softmax"),
    **{f"grouped_{n}": mixture("softmax", grouped=n) for n in GROUPED if n != "megablox"},
    "manual_fsdp_inner": on((1, 8, 1), collectives="manual", fsdp_inner=2),
    **{name: dict(model__dtype=name) for name in ("bfloat16", "float16")},
}
ROWS = DEPARTURES | INITIAL | WAYS
# Settings that WAYS change; the plain model does not read them.
HOW = (
    "mesh",
    "accumulation",
    "loss__chunk",
    "loss__passes",
    "model__dtype",
    "model__remat",
    "model__unroll",
    "model__init",
    "model__attention__implementation",
    "model__attention__block_q",
    "model__attention__block_kv",
    "model__mlp__grouped",
)
OTHER_LOSSES = {"z_loss": "z_loss", "balance": "balance_loss", "router_z": "router_z_loss"}  # setting -> metric


def setting(cfg: Any, name: str) -> Any:
    return functools.reduce(getattr, name.split("__"), cfg)


def departure(name: str) -> Config:
    return change(RECIPE, **ROWS[name])


# ---- values


def random_batch(cfg: Config, seed: int = 0, weights: Any = None) -> dict[str, jax.Array]:
    """Random ids and random targets; weights None: 1."""
    rng = np.random.default_rng(seed)
    shape = (cfg.batch_size, cfg.seq_len)
    ids = rng.integers(0, cfg.model.vocab_size, (2, *shape), dtype=np.int32)
    weights = np.ones(shape, np.float32) if weights is None else np.asarray(weights, np.float32)
    return {"inputs": jnp.asarray(ids[0]), "targets": jnp.asarray(ids[1]), "weights": jnp.asarray(weights)}


def batch_for(cfg: Config) -> dict[str, jax.Array]:
    """Random ids, a quarter of the targets with weight 0; if isolated, three documents per row and padding at its end."""
    weights = np.random.default_rng(1).integers(0, 4, (cfg.batch_size, cfg.seq_len)) > 0
    batch = random_batch(cfg, weights=weights)
    if cfg.data.isolate_documents:
        segments = np.repeat([1, 2, 3, 0], [5, 3, 6, 2])[None].repeat(cfg.batch_size, 0)
        positions = np.r_[np.arange(5), np.arange(3), np.arange(6), 0, 0][None].repeat(cfg.batch_size, 0)
        batch |= {"segments": jnp.asarray(segments), "positions": jnp.asarray(positions)}
    return batch


def random_params(cfg: ModelConfig, seed: int = 0, scale: float = 0.3) -> Any:
    """Parameters of noise around 1 for scales (init `ones`), around 0 for all others: a scale of 1 or a bias of 0 would hide errors in
    its use."""
    rng = np.random.default_rng(seed)

    def one(p: Param) -> jax.Array:
        noise = scale * rng.standard_normal(p.full_shape)
        return jnp.asarray(noise + (p.init is ones), p.dtype)

    return tree_map(one, model_params(cfg))


class Values(NamedTuple):
    """The results that a row compares, as NumPy arrays."""

    logits: Any
    gradient: Any  # of the first step
    losses: Any  # of each step


def start(cfg: Config, initial: bool = False) -> Any:
    """Parameters before the first step: noise, or if `initial` those of the config's scheme."""
    return init_params(model_params(cfg.model), jax.random.key(0)) if initial else random_params(cfg.model)


def curve(step: Any, params: Any, batch: dict[str, jax.Array], steps: int) -> tuple[jax.Array, Any]:
    """(losses of all steps of plain SGD, gradient of the first), traced as one program."""

    def body(params: Any, _: None) -> tuple[Any, Any]:
        loss, grads = step(params, batch)
        return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads), (loss, grads)

    _, (losses, grads) = jax.lax.scan(body, params, None, length=steps)
    return losses, jax.tree.map(lambda g: g[0], grads)


# Halves XLA's compile time on CPU: each program runs only for a moment.
QUICKLY = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": True}


@functools.cache
def plain(cfg: Config, initial: bool, steps: int, rounded: str) -> Values:
    """Values of the plain model, with weights rounded to dtype `rounded` before each use; scales and biases are not rounded."""
    specs = model_params(cfg.model)

    def weights(params: Any) -> Any:
        keep = lambda spec, w: w if spec.kind in UNROUNDED else w.astype(rounded).astype(w.dtype)
        return tree_map(keep, specs, params)

    def step(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        others = {name: getattr(cfg.loss, name) for name in OTHER_LOSSES}
        return jax.value_and_grad(functools.partial(reference.loss_fn, **others))(weights(params), batch, cfg.model)

    def run(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        rows = batch["inputs"], cfg.model, batch.get("positions"), batch.get("segments")
        return reference.model(weights(params), *rows), curve(step, params, batch, steps)

    options = QUICKLY if jax.default_backend() == "cpu" else None
    with jax.default_matmul_precision("highest"):
        logits, (losses, grads) = jax.jit(run, compiler_options=options)(start(cfg, initial), batch_for(cfg))
    return jax.tree.map(np.asarray, Values(logits, grads, losses))


def expected(cfg: Config, initial: bool = False, steps: int = STEPS, rounded: str = "float32") -> Values:
    """Values of the plain model; all ways to compute the same model share one cached run."""
    same = {name: setting(RECIPE, name) for name in HOW}
    if initial:
        same["model__init"] = cfg.model.init
    return plain(change(cfg, **same), initial, steps, rounded)


def actual(cfg: Config, initial: bool = False, steps: int = STEPS) -> Values:
    """Values of the real model, computed as the config says."""
    mesh = make_mesh(cfg.mesh, jax.devices()[: devices_of(cfg)])

    def step(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        (losses, _), grads = step_lib.gradients(params, batch, jnp.int32(0), cfg)
        others = [(getattr(cfg.loss, name) or 0) * losses.get(metric, 0) for name, metric in OTHER_LOSSES.items()]
        return losses["loss"] + sum(others), grads

    def run(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        documents = dict(positions=batch.get("positions"), segments=batch.get("segments"))
        return model(params, batch["inputs"], cfg.model, **documents), curve(step, params, batch, steps)

    with surroundings(mesh, cfg.model.dtype):
        params = jax.device_put(start(cfg, initial), shardings(model_params(cfg.model), mesh))
        logits, (losses, grads) = jax.jit(run)(params, jax.device_put(batch_for(cfg), batch_sharding(mesh)))
    return jax.tree.map(np.asarray, Values(logits, grads, losses))


def devices_of(cfg: Config) -> int:
    return math.prod(getattr(cfg.mesh, axis) for axis in mesh_settings())


# ---- the comparison

COLUMNS = ("logits", "gradient", "curve")
TOLERANCE = 1e-5  # for float32
# A 16-bit model rounds the 7 weights of a block, and about 17 results in the forward pass and as many in the backward pass.
# Independent rounding errors add in squares: sqrt((7 + 17 + 17) / 7) = 2.4 times the error from rounding weights alone, which the
# plain model measures. The rest is a margin for chance.
ROUNDING = 4


class Part(NamedTuple):
    """One column of a row."""

    difference: float  # the largest
    tolerance: float
    miss: str | None  # description of the first difference above tolerance


def difference(a: Any, e: Any) -> float:
    """Largest absolute difference divided by max(1, largest expected value); infinite if shapes differ or a value is not finite."""
    a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
    if a.shape != e.shape or not np.isfinite(a).all():
        return math.inf
    return float(np.abs(a - e).max(initial=0) / max(1.0, np.abs(e).max(initial=0)))


Differences = dict[str, dict[str, float]]  # column -> name of the compared array or step -> difference


def differences(found: Values, truth: Values) -> Differences:
    gradient, largest = dict(named(truth.gradient)), max(1.0, np.abs(truth.losses).max())
    relative = lambda x: np.asarray(x, np.float64) / largest
    return {
        "logits": {"logits": difference(found.logits, truth.logits)},
        "gradient": {f"gradient of {name}": difference(g, gradient[name]) for name, g in named(found.gradient)},
        "curve": {
            f"loss curve from step {i}": difference(a, e)
            for i, (a, e) in enumerate(zip(relative(found.losses), relative(truth.losses), strict=True), 1)
        },
    }


def compare(found: Differences, tolerances: dict[str, float]) -> dict[str, Part]:
    """Column -> its largest difference, tolerance and miss."""
    parts = {}
    for column, values in found.items():
        tolerance, miss = tolerances[column], None
        beyond = [name for name, value in values.items() if value > tolerance]
        if beyond:
            more = f"; {len(beyond) - 1} more" if column == "gradient" and len(beyond) > 1 else ""
            miss = f"{beyond[0]}: differs by {values[beyond[0]]:.1e}, tolerance {tolerance:.0e}{more}"
        parts[column] = Part(max(values.values()), tolerance, miss)
    return parts


def tolerances(cfg: Config, initial: bool = False, steps: int = STEPS) -> dict[str, float]:
    """Column -> tolerance, which depends on model.dtype."""
    if cfg.model.dtype == "float32":
        return dict.fromkeys(COLUMNS, TOLERANCE)
    rounded, exact = (expected(cfg, initial, steps, dtype) for dtype in (cfg.model.dtype, "float32"))
    return {column: ROUNDING * max(values.values()) for column, values in differences(rounded, exact).items()}


def check(cfg: Config, initial: bool = False, steps: int = STEPS) -> dict[str, Part]:
    """Compares the real model of a config with the plain one."""
    found, truth = actual(cfg, initial, steps), expected(cfg, initial, steps)
    return compare(differences(found, truth), tolerances(cfg, initial, steps))


# ---- the command


class Row(NamedTuple):
    name: str
    changes: dict[str, Any]  # departures from the recipe
    shape: tuple[int, ...] | None = None  # of the logits
    parts: dict[str, Part] | None = None  # by column
    misses: tuple[str, ...] = ()
    skipped: str | None = None  # the reason; None: not skipped


def refusal(cfg: Config) -> str | None:
    """Why a config cannot run here, or None."""
    if devices_of(cfg) > len(jax.devices()):
        return f"needs {devices_of(cfg)} devices, there are {len(jax.devices())}"
    a, device = cfg.model.attention, jax.devices()[0]
    if a.implementation == "auto":
        return None
    head_dim = attention.sizes(a, cfg.model.dim)[2]
    needs = kernels.Needs(cfg.model.dtype, cfg.seq_len, head_dim, capability=compute_capability(device))
    return kernels.refusal(a.implementation, device.platform, needs)


def missed(parts: dict[str, Part]) -> tuple[str, ...]:
    return tuple(part.miss for part in parts.values() if part.miss is not None)


def own_row(name: str) -> Row:
    """Compares the real model with the plain one."""
    cfg, changes = departure(name), ROWS[name]
    why = refusal(cfg)
    if why is not None:
        return Row(name, changes, skipped=why)
    parts = check(cfg, name in INITIAL)
    return Row(name, changes, (cfg.batch_size, cfg.seq_len, cfg.model.vocab_size), parts, missed(parts))


def imported_row(name: str) -> Row:
    """Compares a model of transformers with its import."""
    kind, settings = parity_peers.THEIRS[name.removeprefix(TRANSFORMERS)]
    changes = {"model_type": kind, **settings}
    if not parity_peers.installed():
        return Row(name, changes, skipped="needs PyTorch and transformers: pip install '.[parity]'")
    ours, theirs = parity_peers.imported(name.removeprefix(TRANSFORMERS))
    parts = compare({"logits": {"logits": difference(ours, theirs)}}, {"logits": parity_peers.TOLERANCE})
    return Row(name, changes, theirs.shape, parts, missed(parts))


def peer_row(name: str, where: str) -> Row:
    """Compares our training with nanoGPT's, from nanoGPT's initial parameters."""
    cfg = parity_peers.peer_config(parity_peers.PEERS[name])
    batches = parity_peers.learnable(cfg, cfg.steps)
    params, theirs = parity_peers.nanogpt(where, cfg, batches)
    ours = parity_peers.trained(params, cfg, batches)
    parts = compare(differences(Values(*ours), Values(*theirs)), dict.fromkeys(COLUMNS, TOLERANCE))
    return Row(name, {"checkout": where}, theirs[0].shape, parts, missed(parts))


TRANSFORMERS = "transformers_"


def line(r: Row, width: int) -> str:
    if r.skipped is not None:
        return f"{r.name:{width}}  not here: {r.skipped}"
    numbers = [f"{p.difference:.1e} / {p.tolerance:.0e}" if (p := (r.parts or {}).get(c)) else "-" for c in COLUMNS]
    shape = "x".join(map(str, r.shape)) if r.shape else "-"
    return f"{r.name:{width}}  {shape:>9}  " + "  ".join(f"{n:>15}" for n in numbers) + f"  {verdict(r)}"


def verdict(r: Row) -> str | None:
    return None if r.skipped is not None else "MISS" if r.misses else "equal"


def select(patterns: list[str], known: Iterable[str]) -> list[str]:
    """The known rows that match any of the names or patterns (mesh_*), in order. Raises ValueError for a pattern without a match."""
    known = list(known)
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise ValueError(f"--only {pattern}: no such row{did_you_mean(pattern, known)}; known: {', '.join(known)}")
    return [name for name in known if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def rows_of(peer: str | None) -> dict[str, Callable[[], Row]]:
    """Name -> function that computes the row."""
    rows: dict[str, Callable[[], Row]] = {name: functools.partial(own_row, name) for name in ROWS}
    for name in parity_peers.THEIRS:
        rows[TRANSFORMERS + name] = functools.partial(imported_row, TRANSFORMERS + name)
    for name in parity_peers.PEERS if peer is not None else ():
        rows[name] = functools.partial(peer_row, name, peer)
    return rows


def computed(name: str, make: Callable[[], Row]) -> Row:
    try:
        return make()
    except Exception as e:  # a row that cannot be computed is named, and the others are still compared
        return Row(name, ROWS.get(name, {}), misses=(f"{type(e).__name__}: {e}",))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.parity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows, or patterns such as 'mesh_*'")
    parser.add_argument(
        "--peer", metavar="NANOGPT", help="a checkout of nanoGPT: its curve from its own initial values"
    )
    parser.add_argument("--json", action="store_true", help="print one object in place of the table")
    args = parser.parse_args(argv)
    try:
        if args.peer is not None:
            peers.check_checkout(args.peer)
        rows = rows_of(args.peer)
        names = select(args.only or ["*"], rows)
    except ValueError as e:
        fail(str(e))
    if args.only is None and not parity_peers.installed():
        names = [name for name in names if not name.startswith(TRANSFORMERS)]
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", max(devices_of(departure(name)) for name in ROWS))

    began, done = time.perf_counter(), []
    width = max(map(len, names))
    show = (lambda text: None) if args.json else functools.partial(print, flush=True)
    show(f"{'':{width}}  {'shape':>9}  " + "  ".join(f"{c:>15}" for c in COLUMNS))
    for name in names:
        done.append(r := computed(name, rows[name]))
        show("\n".join([line(r, width), *(f"  {name}: {miss}" for miss in r.misses)]))
    seconds = time.perf_counter() - began
    misses = [r.name for r in done if r.misses]
    compared = sum(r.skipped is None for r in done)
    show(f"{compared} of {len(done)} rows compared in {seconds:.0f} s; " + "missed: " + (", ".join(misses) or "none"))
    if args.json:
        print(json.dumps(as_json(done, seconds), default=dataclasses.asdict, allow_nan=False))
    return 1 if misses else 0


def as_json(rows: list[Row], seconds: float) -> dict[str, Any]:
    def one(r: Row) -> dict[str, Any]:
        # JSON has no infinity: null if shapes differ or a value is not finite.
        parts = {c: p._asdict() | {"difference": finite(p.difference)} for c, p in (r.parts or {}).items()}
        return r._asdict() | {"parts": parts, "verdict": verdict(r)}

    about = {
        "platform": jax.devices()[0].platform,
        "jax": jax.__version__,
        "steps": STEPS,
        "seconds": round(seconds, 1),
    }
    return about | {"rows": list(map(one, rows))}


def finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


if __name__ == "__main__":
    sys.exit(main())
