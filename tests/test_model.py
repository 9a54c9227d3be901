import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import MESHES, TINY, assert_close, change, fit, make_mesh, random_batch, random_params, slow

from minitf.model import kernels, ops
from minitf.model.flops import flops_per_token
from minitf.model.kernels import Mask, Scores
from minitf.model.remat import REMAT
from minitf.model.transformer import hidden, model, model_params
from minitf.params import init_params
from minitf.sharding.mesh import batch_sharding
from minitf.sharding.rules import shardings
from minitf.training import step as step_lib
from minitf.training.optimizer import make_optimizer, make_schedule

# Those that run here, and with segments.
KERNELS = ("reference", "blocked", "xla")


def tokens(cfg, rows=2, seed=0):
    return random_batch(change(cfg, batch_size=rows), seed)["inputs"]


# ---- attention


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("pattern", [("full",), ("sliding",), ("full", "sliding")])
def test_future_tokens_have_zero_gradient(kernel, pattern):
    cfg = change(
        TINY, model__attention__implementation=kernel, model__attention__window=3, model__pattern=pattern
    ).model
    params, ids = random_params(cfg), tokens(TINY, 1)

    def logit_at_6(x):  # of the embedded inputs
        table = {**params, "embedding": jnp.concatenate([x, params["embedding"][: 64 - 16]])}
        return model(table, jnp.arange(16)[None], cfg)[0, 6].sum()

    influence = np.abs(jax.grad(logit_at_6)(params["embedding"][ids[0]])).sum(-1)
    assert np.all(influence[7:] == 0)
    seen = 16 if pattern == ("full",) else 1 + 2 * (3 - 1) if pattern == ("sliding",) else 16
    assert np.all((influence[:7] > 0) == (np.arange(7) > 6 - seen))


@pytest.mark.parametrize("kernel", KERNELS)
def test_packed_documents_do_not_see_each_other(kernel):
    cfg = change(TINY, model__attention__implementation=kernel).model
    params = random_params(cfg)
    segments = jnp.asarray([[1] * 5 + [2] * 6 + [0] * 5])
    positions = jnp.asarray([[*range(5), *range(6), *range(5)]])
    run = jax.jit(functools.partial(model, cfg=cfg, positions=positions, segments=segments))
    ids = tokens(TINY, 1)
    changed = ids.at[:, :5].set((ids[:, :5] + 1) % 64)
    np.testing.assert_array_equal(run(params, ids)[:, 5:11], run(params, changed)[:, 5:11])
    # And B alone gives what B in a packed row gives.
    alone = model(params, ids[:, 5:11], cfg)
    np.testing.assert_allclose(run(params, ids)[:, 5:11], alone, atol=1e-5)


@pytest.mark.parametrize("kernel", slow(KERNELS, but=["blocked"]))
def test_a_row_of_padding_disturbs_nothing(kernel):
    cfg = change(TINY, batch_size=2, model__attention__implementation=kernel, data__isolate_documents=True)
    params, batch = random_params(cfg.model), random_batch(cfg)
    batch["weights"] = batch["weights"].at[1].set(0)
    batch["segments"] = jnp.ones((2, 16), jnp.int32).at[1].set(0)
    batch["positions"] = jnp.zeros((2, 16), jnp.int32).at[0].set(jnp.arange(16))
    one = {k: v[:1] for k, v in batch.items()}
    gradients = jax.jit(functools.partial(step_lib.gradients, step=0, cfg=cfg))
    (losses, _), grads = gradients(params, batch)
    (losses_1, _), grads_1 = gradients(params, one)
    assert_close({"loss": losses["loss"], **grads}, {"loss": losses_1["loss"], **grads_1}, 1e-6)
    logits = model(params, batch["inputs"], cfg.model, segments=batch["segments"], positions=batch["positions"])
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_consecutive_query_heads_share_a_key_value_head(kernel):
    q = jnp.ones((1, 3, 4, 2))
    k = jnp.ones((1, 3, 2, 2))
    v = jnp.broadcast_to(jnp.asarray([10.0, 20.0])[:, None], (1, 3, 2, 2))
    y = kernels.mix(q, k, v, Mask(), Scores(), kernel)
    np.testing.assert_allclose(y[0, -1, :, 0], [10, 10, 20, 20], rtol=1e-6)


# 300 positions are three blocks of queries for blocked, the last one shorter.
@pytest.mark.parametrize(
    ("kernel", "length"), slow([("xla", 16), ("blocked", 16), ("blocked", 300)], but=[("xla", 16), ("blocked", 300)])
)
@pytest.mark.parametrize("window", slow([None, 1, 5, 150], but=[None, 1, 150]))
@pytest.mark.parametrize("segmented", [False, True])
def test_kernels_agree_in_value_and_gradient(kernel, length, window, segmented):
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, out = (
        jax.random.normal(key, (2, length, heads, 8)) for key, heads in zip(keys, (4, 2, 2, 4), strict=True)
    )
    segments = jnp.stack([jnp.arange(length) // 7, jnp.arange(length) // 140]) if segmented else None

    def run():
        scores = Scores(scale=0.3, softcap=None if kernel == "xla" else 2.0)
        mixed = lambda name: lambda q, k, v: kernels.mix(q, k, v, Mask(window, segments), scores, name)
        y, vjp = jax.vjp(jax.jit(mixed(kernel)), q, k, v)
        expected, vjp_expected = jax.vjp(jax.jit(mixed("reference")), q, k, v)
        return {"y": y, "grads": vjp(out)}, {"y": expected, "grads": vjp_expected(out)}

    assert_close(*run(), 1e-5)


def test_blocked_forms_near_half_of_the_square():
    q = jax.ShapeDtypeStruct((1, 1024, 1, 64), jnp.float32)

    def flops(kernel):
        f = lambda q, k, v: kernels.mix(q, k, v, Mask(), Scores(), kernel)
        return jax.jit(f).lower(q, q, q).compile().cost_analysis()["flops"]

    assert flops("blocked") < 0.6 * flops("reference")


# ---- positions


def test_rotary_angles_are_float32_whatever_the_compute_type():
    cos, sin = ops.rope_table(jnp.arange(1024)[None], ops.rope_frequencies(64, 10_000.0))
    exact = np.arange(1024)[:, None] * 10_000.0 ** (-np.arange(0, 64, 2) / 64)
    assert cos.dtype == sin.dtype == jnp.float32
    for at in (255, 257, 1023):
        assert np.abs(cos[0, at, 0] - np.cos(exact[at])).max() < 1e-4
        assert np.abs(cos.astype(jnp.bfloat16)[0, at, 0] - np.cos(exact[at])).max() < 0.005
    assert len({tuple(row) for row in np.asarray(cos[0, :, 0])}) == 1024
    # In the model too: neighbours beyond 256 differ in bfloat16.
    x = jnp.ones((1, 1024, 1, 64), jnp.bfloat16)
    turned = np.asarray(ops.rotate(x, (cos, sin)).astype(jnp.float32))[0, :, 0]
    assert turned.dtype == np.float32
    assert not np.array_equal(turned[256], turned[257])


def test_rotation_is_half_split():
    table = tuple(f(jnp.asarray([1.0, 0.01]))[None, None, None] for f in (jnp.cos, jnp.sin))
    y = ops.rotate(jnp.asarray([1.0, 2.0, 3.0, 4.0])[None, None, None], table)
    np.testing.assert_allclose(y.ravel(), [-1.984111, 1.959901, 2.462378, 4.0198], atol=1e-6)
    np.testing.assert_allclose(
        ops.rope_table(jnp.asarray([[1]]), ops.rope_frequencies(4, 10_000.0))[0].ravel(), np.cos([1, 0.01]), atol=1e-7
    )


# ---- precision


def equations(jaxpr):
    """All equations of a jaxpr and those inside them."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_softmax_norms_logits_and_loss_are_float32_in_bfloat16_compute(kernel, norm):
    cfg = change(TINY, model__dtype="bfloat16", model__norm=norm, model__attention__implementation=kernel)
    batch, params = random_batch(cfg), random_params(cfg.model)
    jaxpr = jax.make_jaxpr(lambda p: step_lib.row_sums(p, batch, cfg)[0])(params)
    by_name: dict[str, list] = {}
    for eqn in equations(jaxpr.jaxpr):
        by_name.setdefault(eqn.primitive.name, []).append(eqn)
    dtypes = lambda name: {str(v.aval.dtype) for eqn in by_name[name] for v in eqn.invars[:1]}
    assert dtypes("exp") == {"float32"}  # softmax and log-partition
    assert dtypes("rsqrt") == {"float32"}  # norms' statistics
    assert dtypes("reduce_sum") <= {"float32", "bool"}
    assert dtypes("log") == {"float32"}
    assert {str(v.aval.dtype) for v in jaxpr.jaxpr.outvars} == {"float32"}
    # Products take bfloat16; those of scores and logits give float32.
    products = [(str(e.invars[0].aval.dtype), e.outvars[0].aval) for e in by_name["dot_general"]]
    assert {dtype for dtype, _ in products if dtype != "float32"} == {"bfloat16"}
    wide = [out for dtype, out in products if dtype == "bfloat16" and str(out.dtype) == "float32"]
    assert any(out.shape[-1] == cfg.model.vocab_size for out in wide)  # logits
    assert any(out.size == 8 * 4 * 16 * 16 and 64 not in out.shape for out in wide)  # scores
    assert {str(e.outvars[0].aval.dtype) for e in by_name["scan"] if e.outvars} == {"bfloat16"}  # the residual stream


def test_small_updates_are_not_lost_in_bfloat16_compute():
    cfg = change(TINY, model__dtype="bfloat16", optimizer__learning_rate=3e-4)
    metrics, _ = fit(cfg, [random_batch(cfg)])
    assert np.isfinite(metrics[0]["train/loss"])
    # A scale of 1 with a gradient of constant sign through the real update function, 100 steps.
    moved = {}
    for dtype in ("float32", "bfloat16"):
        specs = model_params(change(cfg, model__dtype=dtype).model)
        tx = make_optimizer(cfg.optimizer, specs, make_schedule(cfg.optimizer, 100))
        params = init_params(specs, jax.random.key(0))
        state = tx.init(params)
        assert {str(a.dtype) for a in jax.tree.leaves((params, state)) if jnp.issubdtype(a.dtype, jnp.floating)} == {
            "float32"
        }
        ones = jax.tree.map(jnp.ones_like, params)
        update = jax.jit(tx.update)
        for _ in range(100):
            updates, state = update(ones, state, params)
            params = jax.tree.map(jnp.add, params, updates)
        moved[dtype] = 1 - float(params["final_norm"]["scale"][0])
    assert moved["bfloat16"] == pytest.approx(0.03, rel=0.05)
    assert moved["bfloat16"] == pytest.approx(moved["float32"], rel=0.05)


# ---- dropout

DROPPED = change(TINY, model__dropout=0.5, model__attention__num_kv_heads=4)


def test_masks_differ_by_step_row_and_seed_and_repeat():
    same = jnp.stack([tokens(DROPPED)[0]] * 2)  # equal rows: a difference is the mask's
    run = lambda step, rows, seed=0: np.asarray(
        hidden(
            random_params(DROPPED.model),
            same,
            DROPPED.model,
            dropout_keys=step_lib.dropout_keys(change(DROPPED, seed=seed), jnp.int32(step), jnp.asarray(rows)),
        ).x_BSD
    )
    first = run(0, (0, 1))
    np.testing.assert_array_equal(first, run(0, (0, 1)))
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first[0], run(1, (0, 1))[0])
    assert not np.array_equal(first[0], run(0, (0, 1), seed=1)[0])
    np.testing.assert_array_equal(first[0], run(0, (5, 0))[1])  # the row's number decides, not its place


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_step_draws_a_mask_for_each_row_layer_and_site(accumulation, monkeypatch):
    used = []

    def record(keys, x, rate):
        jax.debug.callback(lambda data: used.extend(map(bytes, data)), jax.random.key_data(keys))
        return x

    monkeypatch.setattr("minitf.model.transformer.dropout", record)
    monkeypatch.setattr("minitf.model.kernels.dropout", record)
    cfg = change(DROPPED, model__num_layers=3, accumulation=accumulation)
    step_lib.gradients(random_params(cfg.model), random_batch(cfg), jnp.int32(0), cfg)
    jax.effects_barrier()
    assert len(set(used)) == 8 * (1 + 3 * 3)  # rows x (the embedding; three sites in each of three layers)


@pytest.mark.parametrize(
    ("mesh", "accumulation"), slow([("1", 4), ("2x2x2", 2), ("data8", 1), ("1x2x4", 4)], but=[("2x2x2", 2)])
)
def test_neither_accumulation_nor_mesh_changes_masks(mesh, accumulation):
    cfg = change(DROPPED, optimizer__kind="sgd", optimizer__learning_rate=0.1)
    batches = [random_batch(cfg, i) for i in range(2)]
    one, params_1 = fit(cfg, batches)
    other, params_n = fit(change(cfg, accumulation=accumulation), batches, mesh=mesh)
    assert [m["train/loss"] for m in other] == pytest.approx([m["train/loss"] for m in one], abs=1e-5)
    assert_close(params_n, params_1, 1e-5)


def test_dropout_keeps_the_mean_and_its_rate():
    keys = jax.random.split(jax.random.key(0), 8)
    y = ops.dropout(keys, jnp.ones((8, 4096)), 0.25)
    assert float((y == 0).mean()) == pytest.approx(0.25, abs=0.02)
    assert float(y.mean()) == pytest.approx(1, abs=0.03)


# ---- rematerialisation, depth


@functools.cache
def temporary_bytes(remat: str) -> int:
    cfg = change(TINY, model__remat=remat, model__num_layers=8, model__mlp__hidden=128)
    step = jax.jit(functools.partial(step_lib.gradients, step=0, cfg=cfg))
    return step.lower(random_params(cfg.model), random_batch(cfg)).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("remat", slow([r for r in REMAT if r != "none"], but=["products", "full", "qkv_context"]))
def test_rematerialisation_keeps_less(remat):
    """`products` less than all, every other policy less than `products`."""

    assert temporary_bytes(remat) < temporary_bytes("none" if remat == "products" else "products")


def test_the_program_does_not_grow_with_depth():
    def lines(layers):
        cfg = change(TINY, model__num_layers=layers)
        step = jax.jit(functools.partial(step_lib.gradients, step=0, cfg=cfg))
        return len(step.lower(random_params(cfg.model), random_batch(cfg)).as_text().splitlines())

    assert lines(48) == lines(4)


@pytest.mark.parametrize("mesh", slow([m for m in MESHES if m not in ("1", "1x2x4")], but=["2x2x2"]))
def test_no_involuntary_rematerialisation(mesh, capfd):
    batch, params = random_batch(TINY), random_params(TINY.model)
    mesh = make_mesh(mesh)
    with jax.set_mesh(mesh):
        placed = jax.device_put(batch, batch_sharding(mesh))
        params = jax.device_put(params, shardings(model_params(TINY.model), mesh))
        jax.jit(functools.partial(step_lib.gradients, step=0, cfg=TINY)).lower(params, placed).compile()
    assert "rematerialization" not in capfd.readouterr().err


def test_flops_of_a_token_by_hand():
    cfg = TINY.model
    weights = 2 * (16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 32) + 16 * 64
    full = 6 * weights + 2 * 12 * 4 * 4 * 16
    assert flops_per_token(cfg, model_params(cfg), 16) == full
    tied = change(cfg, tie_embeddings=True)
    assert flops_per_token(tied, model_params(tied), 16) == full
    sliding = change(cfg, pattern=("full", "sliding"), attention__window=4)
    assert flops_per_token(sliding, model_params(sliding), 16) == full - 12 * 4 * 4 * (16 - 4)
    assert flops_per_token(cfg, model_params(cfg), 16, causal=True) == 6 * weights + 2 * 12 * 4 * 4 * 17 / 2
