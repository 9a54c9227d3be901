"""Attention kernels: which one runs where, what each refuses, and splash, interpreted here, against the reference."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import TINY, assert_close, change, make_mesh, random_batch, random_params, slow, topology
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from jax.extend.core import Var
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from minitf import job as job_lib
from minitf.model import kernels
from minitf.model.choose import choose, kernel_for, with_best_kernels
from minitf.model.kernels import Mask, Needs, Scores
from minitf.model.remat import REMAT
from minitf.model.transformer import model_params
from minitf.sharding.devices import make_mesh as mesh_of
from minitf.sharding.devices import surroundings
from minitf.sharding.mesh import AXES, BATCH, MeshConfig, batch_sharding
from minitf.sharding.rules import shardings
from minitf.training import step

B, S, H, G, K = 2, 256, 4, 2, 128
SPLASH = Scores(block_q=128, block_kv=128)


@pytest.fixture
def interpreted(monkeypatch):
    """Splash as a program of this device: the same blocks one after the other."""
    make = functools.partial(splash_attention_kernel.make_splash_mha, interpret=True)
    monkeypatch.setattr(splash_attention_kernel, "make_splash_mha", make)


# ---- which one runs

NEEDS = Needs(dtype="bfloat16", length=256, head_dim=128)


@pytest.mark.parametrize(
    ("platform", "needs", "chosen"),
    [
        ("cpu", {}, "blocked"),
        ("cpu", dict(softcap=True, segments=True), "blocked"),
        ("cpu", dict(cached=True), "xla"),
        ("cpu", dict(cached=True, softcap=True), "reference"),
        ("cpu", dict(dropout=True), "reference"),
        ("gpu", {}, "cudnn"),
        ("gpu", dict(dtype="float32"), "xla"),
        ("gpu", dict(segments=True), "xla"),
        ("gpu", dict(cached=True), "xla"),
        ("gpu", dict(head_dim=36), "xla"),
        ("gpu", dict(head_dim=256, capability=8.0), "xla"),
        ("gpu", dict(head_dim=256, capability=9.0), "cudnn"),
        ("gpu", dict(spread=False), "xla"),
        ("tpu", {}, "splash"),
        ("tpu", dict(dtype="float32", softcap=True, segments=True), "splash"),
        ("tpu", dict(dtype="float16"), "xla"),
        ("tpu", dict(dropout=True), "reference"),
        ("tpu", dict(cached=True), "xla"),
        ("tpu", dict(length=200), "xla"),
        ("tpu", dict(spread=False), "xla"),
    ],
)
def test_auto_takes_the_first_that_can(platform, needs, chosen):
    assert choose("auto", platform, NEEDS._replace(**needs)) == chosen


@pytest.mark.parametrize(
    ("name", "platform", "needs", "why"),
    [
        ("splash", "cpu", {}, "it runs on tpu, this is cpu"),
        ("splash", "tpu", dict(dtype="float16"), "it takes float32 and bfloat16, not float16"),
        ("splash", "tpu", dict(dropout=True), "it has no dropout of attention weights"),
        ("splash", "tpu", dict(cached=True), "it does not read cached keys"),
        ("splash", "tpu", dict(length=200), "it takes rows of a multiple of 128 tokens, not of 200 (seq_len)"),
        ("splash", "tpu", dict(spread=False), "the rows do not divide evenly over the devices"),
        ("cudnn", "tpu", {}, "it runs on gpu, this is tpu"),
        ("cudnn", "gpu", dict(dtype="float32"), "it takes bfloat16 and float16, not float32"),
        ("cudnn", "gpu", dict(softcap=True), "it has no soft-cap"),
        ("cudnn", "gpu", dict(segments=True), "it does not separate documents"),  # P09
        ("cudnn", "gpu", dict(head_dim=12), "it takes heads of a multiple of 8 up to 256, not of 12"),
        (
            "cudnn",
            "gpu",
            dict(capability=7.5),
            "it needs an NVIDIA GPU of compute capability 8.0 (Ampere), this is 7.5",
        ),
        ("xla", "cpu", dict(softcap=True), "it has no soft-cap"),
        ("xla", "cpu", dict(dropout=True), "it has no dropout of attention weights"),
    ],
)
def test_an_explicit_kernel_is_never_replaced(name, platform, needs, why):
    with pytest.raises(ValueError) as e:
        choose(name, platform, NEEDS._replace(**needs))
    assert f"model.attention.implementation={name}: {why}" in str(e.value)
    assert "; these can: auto, reference" in str(e.value)


def test_blocks_are_the_largest_that_divide_a_row():
    block = functools.partial(kernels.splash_block, head_bytes=256)
    assert [block(1024, n) for n in (128, 640, 1024, 1920, 8192)] == [128, 640, 1024, 640, 1024]
    assert block(512, 8192) == 512
    assert [kernels.splash_block(None, 8192, n) for n in (64, 256, 512, 2**13)] == [1024, 1024, 512, 128]


class Tpu:
    """A device that is described only."""

    platform, device_kind, id, process_index = "tpu", "TPU v5 lite", 0, 0


def test_the_kernel_of_a_step_follows_the_devices_of_its_mesh():
    cfg = change(TINY, seq_len=256, model__max_seq_len=256)
    here = make_mesh("1")
    there = jax.sharding.Mesh(np.array([Tpu()]).reshape([1] * len(AXES)), tuple(AXES))
    assert job_lib.implementation(cfg, here) == "blocked"
    assert job_lib.implementation(cfg, there) == "splash"
    dropping = change(cfg, model__dropout=0.1)
    assert job_lib.implementation(dropping, there) == "reference"
    assert job_lib.implementation(dropping, there, training=False) == "splash"


# ---- splash against the reference


def operands(dtype="float32", rows=B):
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (H, G, G, H)
    return [jax.random.normal(key, (rows, S, n, K), dtype) for key, n in zip(keys, heads, strict=True)]


def documents(rows=B):
    """Ends inside a block and between two, and not the same in each row."""
    ends = jnp.asarray([[70, 128], [128, 200]])[jnp.arange(rows) % 2]
    return jnp.sum(jnp.arange(S)[None, :, None] >= ends[:, None], axis=-1, dtype=jnp.int32)


def mixed(implementation, scores, mask, q, k, v, out):
    """The result and what `out` is for q, k and v."""
    y, vjp = jax.vjp(lambda q, k, v: kernels.mix(q, k, v, mask, scores, implementation), q, k, v)
    return {"y": y, "grads": vjp(out)}


def both(scores, mask, arrays):
    run = lambda implementation: jax.jit(functools.partial(mixed, implementation, scores, mask))(*arrays)
    return run("splash"), run("reference")


@pytest.mark.parametrize(
    ("window", "segmented", "cap"),
    [
        (None, False, None),
        (100, True, 5.0),
        *(pytest.param(*c, marks=pytest.mark.slow) for c in ((1, False, None), (None, True, None), (None, False, 5.0))),
    ],
)
def test_splash_equals_the_reference_in_value_and_gradient(window, segmented, cap, interpreted):
    mask = Mask(window, documents() if segmented else None)
    assert_close(*both(SPLASH._replace(softcap=cap), mask, operands()), 2e-5, relative_to_largest=True)


@pytest.mark.parametrize("changes", [dict(scale=0.3), dict(block_q=256), dict(block_kv=256), dict(block_q=None)])
def test_splash_honours_scale_and_block_sizes(changes, interpreted):
    assert_close(*both(SPLASH._replace(**changes), Mask(), operands()), 2e-5, relative_to_largest=True)


def test_splash_in_bfloat16_is_as_near_to_the_truth_as_the_reference(interpreted):
    found, reference = both(SPLASH, Mask(segments_BS=documents()), operands("bfloat16"))
    exact = both(SPLASH, Mask(segments_BS=documents()), [x.astype("float32") for x in operands("bfloat16")])[1]
    far = lambda x, t: np.linalg.norm(np.float32(x) - t) / np.linalg.norm(t)
    for ours, theirs in zip(*(jax.tree.leaves(jax.tree.map(far, a, exact)) for a in (found, reference)), strict=True):
        assert ours < 1.5 * theirs < 0.02


# ---- splash on a mesh, in the model


def test_on_a_mesh_each_device_mixes_its_rows_and_heads(interpreted):
    mesh, mask = make_mesh("2x2x2"), Mask(100, documents(4))
    arrays = operands(rows=4)
    run = jax.jit(lambda segments, *arrays: mixed("splash", SPLASH, Mask(100, segments), *arrays))
    split = [jax.device_put(x, NamedSharding(mesh, P(BATCH, None, "tensor"))) for x in arrays]
    segments = jax.device_put(mask.segments_BS, batch_sharding(mesh))
    with jax.set_mesh(mesh):
        compiled = run.lower(segments, *split).compile()
        found = compiled(segments, *split)
    assert not re.findall(r"all-gather|all-reduce|all-to-all|collective-permute", compiled.as_text())
    expected = jax.jit(functools.partial(mixed, "reference", Scores(), mask))(*arrays)
    assert_close(found, expected, 2e-5, relative_to_largest=True)


def model_config(**changes):
    """A model whose attention splash takes."""
    attention = dict(num_heads=4, num_kv_heads=2, head_dim=128, block_q=128, block_kv=128, implementation="splash")
    attention = {f"model__attention__{name}": value for name, value in attention.items()}
    cfg = change(TINY, batch_size=4, seq_len=256, model__max_seq_len=256, **attention)
    return change(cfg, **changes)


def without_splash(cfg):
    a = "model__attention__"
    return change(cfg, **{a + "implementation": "reference", a + "block_q": None, a + "block_kv": None})


@functools.cache
def reference_gradients():
    cfg = without_splash(model_config())
    return jax.jit(functools.partial(step.gradients, step=0, cfg=cfg))(random_params(cfg.model), random_batch(cfg))


@pytest.mark.parametrize("remat", slow(REMAT, but=("context",)))
def test_training_on_a_mesh_with_each_remat_policy_equals_the_reference(remat, interpreted):
    cfg, mesh = model_config(model__remat=remat), make_mesh("2x2x2")
    params = jax.device_put(random_params(cfg.model), shardings(model_params(cfg.model), mesh))
    batch = jax.device_put(random_batch(cfg), batch_sharding(mesh))
    with jax.set_mesh(mesh):
        found = jax.jit(functools.partial(step.gradients, step=0, cfg=cfg))(params, batch)
    assert_close(found, reference_gradients(), 2e-5, relative_to_largest=True)


def used(jaxpr):
    """The equations of a jaxpr, and those inside them, that its results depend on: the compiler leaves out the others."""
    jaxpr = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]
    needed = {v for v in jaxpr.outvars if isinstance(v, Var)}
    for eqn in reversed(jaxpr.eqns):
        if needed.isdisjoint(eqn.outvars):
            continue
        needed.update(v for v in eqn.invars if isinstance(v, Var))
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns") and eqn.primitive.name != "pallas_call":
                yield from used(getattr(inner, "jaxpr", inner))


def test_cudnn_is_asked_for_each_device_s_rows_and_heads_and_the_window(monkeypatch):
    """Lowered for a GPU that is not here: what it computes is checked by tools/gpu_check.py."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda least: True)
    mesh = make_mesh("2x2x2")
    heads = NamedSharding(mesh, P(BATCH, None, "tensor"))
    arrays = [jax.ShapeDtypeStruct((4, S, n, K), "bfloat16", sharding=heads) for n in (H, G, G, H)]
    with jax.set_mesh(mesh):
        traced = jax.jit(functools.partial(mixed, "cudnn", Scores(), Mask(100))).trace(*arrays)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "@__cudnn$fmha" in line]
    assert len(calls) == 2  # forward and backward
    for line in calls:
        assert "tensor<1x256x2x128xbf16>, tensor<1x256x1x128xbf16>, tensor<1x256x1x128xbf16>" in line
        assert re.search(r"sliding_window_length\\22: 100\b", line)
        assert "CAUSAL" in line


L = 2  # layers of model_config
SAVED = {  # policy -> elements of a layer that it keeps for one row, besides the block's input
    "context": S * (H * K + H),  # what is mixed, and one number for each query and head
    "qkv_context": S * (H * K + H) + S * (H + 2 * G) * K,
    "minimal": S * (H * K + H) + S * (H + 2 * G) * K + S * 2 * 32,
    "offload": S * (H * K + H) + S * (H + 2 * G) * K,
}


@pytest.mark.parametrize("mesh", ["1", "2x2x2"])
@pytest.mark.parametrize("remat", slow(REMAT, but=("products", "context")))
def test_what_splash_gives_is_kept_once_and_its_forward_pass_not_done_again(remat, mesh):
    cfg = model_config(model__remat=remat)
    assert (cfg.model.num_layers, cfg.model.mlp.hidden) == (L, 32)
    with jax.set_mesh(make_mesh(mesh)):
        gradients = functools.partial(step.gradients, step=0, cfg=cfg)
        jaxpr = jax.make_jaxpr(gradients)(random_params(cfg.model), random_batch(cfg)).jaxpr
    traced = list(used(jaxpr))
    passes = sum(e.primitive.name == "pallas_call" for e in traced)
    assert passes == (
        2 if remat in SAVED or remat in ("none", "products") else 3
    )  # forward and backward, and forward again
    if remat in SAVED:
        forward = [e for e in traced if e.primitive.name == "scan" and e.params["length"] == L][-1]
        kept = [v.aval for v in forward.outvars if v.aval.ndim > 3 and v.aval.shape[0] == L]
        assert sum(a.size for a in kept) == L * cfg.batch_size * (SAVED[remat] + S * cfg.model.dim)


# ---- compiled for TPUs that are not there


@pytest.mark.parametrize("name", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
@pytest.mark.parametrize("dtype", slow(("float32", "bfloat16"), but=("bfloat16",)))
def test_splash_compiles_for_every_tpu(name, dtype):
    devices = topology(name)
    mesh = mesh_of(MeshConfig(data=len(devices) // 2, fsdp=1, tensor=2), devices)
    heads, rows = NamedSharding(mesh, P(BATCH, None, "tensor")), batch_sharding(mesh)
    n = len(devices) // 2
    arrays = [jax.ShapeDtypeStruct((n, S, heads_, K), dtype, sharding=heads) for heads_ in (H, G, G, H)]
    segments = jax.ShapeDtypeStruct((n, S), "int32", sharding=rows)
    run = lambda segments, *arrays: mixed("splash", SPLASH._replace(softcap=5.0), Mask(100, segments), *arrays)
    with surroundings(mesh, dtype):
        text = jax.jit(run).lower(segments, *arrays).compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 2  # forward and backward


def test_rows_of_another_kind_than_in_training_have_a_kernel_of_their_own():
    """What was named for training - here for TPUs - is not inherited by scoring, prompts and decoding."""
    cfg, mesh = change(TINY, model__attention__implementation="splash").model, make_mesh("1")
    taken = lambda length, **asked: with_best_kernels(cfg, mesh, length, **asked).attention.implementation
    assert taken(20) == "blocked"
    assert taken(20, rows=3, segments=True) == "blocked"
    assert taken(1, cached=True) == "xla"
    with pytest.raises(ValueError, match="implementation=splash: it runs on tpu, this is cpu"):
        kernel_for(cfg, mesh, 128)


def test_a_model_asks_no_device_for_its_kernel():
    """Undecided, it takes the reference; what is named and cannot do what is asked is refused when it is traced."""
    q, kv = jnp.ones((1, 8, 2, 4)), jnp.ones((1, 8, 2, 4))
    run = lambda name, softcap: kernels.mix(q, kv, kv, Mask(), kernels.Scores(softcap=softcap), name)
    np.testing.assert_array_equal(run("auto", 5.0), run("reference", 5.0))
    with pytest.raises(ValueError, match="implementation=xla: it has no soft-cap"):
        run("xla", 5.0)
