import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from common import TINY, assert_close, change, fit, jitted_step, make_mesh, random_batch, random_params

from minitf.model.transformer import model_params
from minitf.params import Param, init_params, named
from minitf.sampling import unstacked
from minitf.training.layout import abstract_state, state_shardings
from minitf.training.optimizer import OPTIMIZERS, SCHEDULES, OptimizerConfig, make_optimizer, make_schedule
from minitf.training.state import init_state

PEAK = OptimizerConfig(learning_rate=1.0, schedule="cosine")


def rates(cfg, steps, n):
    schedule = make_schedule(cfg, steps)
    return [float(schedule(i)) for i in range(n)]


def test_warmup_of_zero_starts_at_the_peak_and_decays():
    for kind in SCHEDULES:
        values = rates(change(PEAK, schedule=kind), 10, 10)
        assert values[0] == 1.0
        assert (values[-1] < 1.0) == (kind != "constant")


def test_warmup_as_long_as_the_run_is_a_ramp():
    for kind in SCHEDULES:
        assert rates(change(PEAK, schedule=kind, warmup_steps=10), 10, 10) == pytest.approx([i / 10 for i in range(10)])


def test_schedule_values():
    cfg = change(PEAK, warmup_steps=4, end_learning_rate=0.1)
    expected = [0, 0.25, 0.5, 0.75, 1, 0.939711, 0.775, 0.55, 0.325, 0.160289, 0.1, 0.1, 0.1]
    assert rates(cfg, 10, 13) == pytest.approx(expected, abs=1e-6)


def test_linear_and_stable_schedules_by_hand():
    linear = change(PEAK, schedule="linear", warmup_steps=2, end_learning_rate=0.5)
    assert rates(linear, 6, 8) == pytest.approx([0, 0.5, 1, 0.875, 0.75, 0.625, 0.5, 0.5])
    stable = change(PEAK, schedule="warmup_stable_decay", warmup_steps=2, decay_steps=4, end_learning_rate=0.2)
    assert rates(stable, 10, 12) == pytest.approx([0, 0.5, 1, 1, 1, 1, 0.84, 0.68, 0.52, 0.36, 0.2, 0.2])
    last = rates(change(stable, decay_steps=None), 10, 11)[7:]  # a fifth of ten
    assert last == pytest.approx([1, 1 - 0.8 / 3, 1 - 1.6 / 3, 0.2])


@pytest.mark.parametrize(
    ("warmup", "decay", "steps"), [(0, 1, 1), (0, 1, 10), (3, 1, 4), (3, 7, 10), (0, 10, 10), (2, 4, 10)]
)
def test_the_last_decay_steps_updates_and_no_others_have_rates_below_the_peak(warmup, decay, steps):
    cfg = change(PEAK, schedule="warmup_stable_decay", warmup_steps=warmup, decay_steps=decay)
    found = rates(cfg, steps, steps + 1)
    assert [rate == 1 for rate in found[warmup:]] == [True] * (steps - warmup - decay) + [False] * (decay + 1)
    assert np.diff(found[steps - decay :]) == pytest.approx(-1 / (decay + 1))  # down to the end rate, 0
    assert found[-1] == 0


def test_the_logged_rate_is_the_rate_of_the_update():
    cfg = change(TINY, steps=6, optimizer__kind="sgd", optimizer__schedule="linear", optimizer__warmup_steps=3)
    batches = [random_batch(cfg, i) for i in range(6)]
    history, _ = fit(cfg, batches)
    assert [m["train/learning_rate"] for m in history] == pytest.approx(rates(cfg.optimizer, 6, 6))
    for m in history:  # plain SGD: the update is rate x gradient
        assert m["norm/update/mlp"] == pytest.approx(m["train/learning_rate"] * m["norm/gradient/mlp"], rel=1e-4)


def zero_gradient_step(cfg, specs, params):
    tx = make_optimizer(cfg, specs, make_schedule(cfg, 10))
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    return dict(named(optax.apply_updates(params, updates)))


@pytest.mark.core
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("decay_embeddings", [False, True])
def test_decay_goes_by_kind(kind, decay_embeddings):
    specs = model_params(
        change(TINY, model__positions="learned", model__mlp__bias=True, model__norm="layer_norm").model
    )
    cfg = OptimizerConfig(
        kind=kind,
        learning_rate=0.1,
        schedule="constant",
        weight_decay=0.5,
        decay_embeddings=decay_embeddings,
        clip_norm=None,
    )
    params = jax.tree.map(jnp.ones_like, init_params(specs, jax.random.key(0)))
    after = zero_gradient_step(cfg, specs, params)
    for name, p in named(specs):
        decayed = p.kind in ("matrix", "head") or (p.kind == "embedding" and decay_embeddings)
        np.testing.assert_allclose(after[name], 0.95 if decayed else 1.0, rtol=1e-6 if decayed else 0, err_msg=name)


@pytest.mark.core
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_stack_is_updated_like_its_layers_apart(kind):
    model = change(
        TINY, model__dim=128, model__pattern=("full", "sliding"), model__num_layers=3, model__mlp__hidden=256
    ).model
    stacked = model_params(model)
    apart = {**stacked, "blocks": [unstacked(b) for b in stacked["blocks"]]}
    cfg = OptimizerConfig(kind=kind, learning_rate=0.1, schedule="constant")

    def three_steps(specs, params):
        tx = make_optimizer(cfg, specs, make_schedule(cfg, 10))

        @jax.jit
        def step(params, state, grads):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        state, start = jax.jit(tx.init)(params), params
        for i in range(3):
            params, state = step(params, state, jax.tree.map(lambda a, i=i: jnp.sin(a * (100 + i)), start))
        return params

    params = init_params(stacked, jax.random.key(0))
    # Layers of different size, so that a norm over the stack would not be each layer's.
    params["blocks"] = jax.tree.map(
        lambda a: a * (1 + jnp.arange(a.shape[0])).reshape(-1, *(1,) * (a.ndim - 1)), params["blocks"]
    )
    one = three_steps(stacked, params)
    other = three_steps(apart, {**params, "blocks": [unstacked(b) for b in params["blocks"]]})
    assert_close({**one, "blocks": [unstacked(b) for b in one["blocks"]]}, other, 1e-6, relative_to_largest=True)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_state_lies_like_its_parameters(kind):
    specs = model_params(change(TINY, model__dim=128, model__mlp__hidden=256).model)
    cfg, mesh = OptimizerConfig(kind=kind), make_mesh("2x2x2")
    tx = make_optimizer(cfg, specs, make_schedule(cfg, 10))
    layout = state_shardings(specs, tx, mesh)
    by_shape = {p.full_shape: s.spec for (_, p), (_, s) in zip(named(specs), named(layout.params), strict=True)}
    leaves = zip(named(abstract_state(specs, tx).opt_state), named(layout.opt_state), strict=True)
    spread = 0
    for (name, a), (_, s) in leaves:
        s.shard_shape(a.shape)  # raises where it does not divide
        if a.shape in by_shape and a.ndim > 2:
            assert s.spec == by_shape[a.shape], name
        spread += any(s.spec)
    assert spread > 0 or kind == "sgd"
    with jax.set_mesh(mesh):
        state = jax.jit(lambda key: init_state(key, specs, tx), out_shardings=layout)(jax.random.key(0))
        assert jax.tree.map(lambda a: a.sharding, state) == layout


# In the fast suite the one whose update looks at whole matrices.
MESHED = [pytest.param(kind, "2x2x2", marks=[] if kind == "muon" else pytest.mark.slow) for kind in OPTIMIZERS]
MESHED += [pytest.param(kind, mesh, marks=pytest.mark.slow) for kind in OPTIMIZERS for mesh in ("data8", "fsdp8")]


@pytest.mark.parametrize(("kind", "mesh"), MESHED)
def test_updates_are_the_same_on_every_mesh(kind, mesh):
    cfg = change(TINY, optimizer=OptimizerConfig(kind=kind, learning_rate=0.01, schedule="constant"))
    batches, params = [random_batch(cfg, i) for i in range(2)], random_params(cfg.model)
    one, params_1 = fit(cfg, batches, params=params)
    many, params_n = fit(cfg, batches, params=params, mesh=mesh)
    assert many[1]["train/loss"] == pytest.approx(one[1]["train/loss"], abs=2e-5)
    if kind in ("sgd", "adafactor", "muon"):  # others divide by moments near 0, or take signs: rounding decides there
        assert_close(params_n, params_1, 1e-4)


def test_accumulate_then_measure_then_clip():
    cfg = OptimizerConfig(kind="sgd", learning_rate=1.0, schedule="constant", weight_decay=0.0, clip_norm=1.0)
    spec = {"w": Param((2,), ("norm",), "bias")}
    tx = make_optimizer(cfg, spec, make_schedule(cfg, 1))
    params = {"w": jnp.zeros(2)}
    accumulated = (jnp.asarray([3.0, 0.0]) + jnp.asarray([-3.0, 0.4])) / 2
    updates, _ = tx.update({"w": accumulated}, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], [0, -0.2], atol=1e-7)  # 0.2 is within the norm: not clipped


def test_the_step_clips_the_accumulated_gradient_and_logs_its_norm_before():
    cfg = change(TINY, optimizer=OptimizerConfig(kind="sgd", learning_rate=1.0, schedule="constant", clip_norm=0.05))
    batches, params = [random_batch(cfg)], random_params(cfg.model)
    whole, params_1 = fit(cfg, batches, params=params)
    parts, params_2 = fit(change(cfg, accumulation=2), batches, params=params)
    assert whole[0]["train/grad_norm"] > 0.1
    assert parts[0]["train/grad_norm"] == pytest.approx(whole[0]["train/grad_norm"], rel=1e-5)
    assert_close(params_2, params_1, 1e-6)
    clean = change(cfg, optimizer__weight_decay=0.0)
    history, _ = fit(clean, batches, params=params)
    update = np.sqrt(sum(v**2 for k, v in history[0].items() if k.startswith("norm/update/")))
    assert update == pytest.approx(0.05, rel=1e-4)


@pytest.mark.parametrize("mesh", ["2x2x2", *(pytest.param(m, marks=pytest.mark.slow) for m in ("data8", "fsdp8"))])
def test_replicated_parameters_count_once_in_the_norm(mesh):
    cfg = change(
        TINY, model__mlp__bias=True, optimizer__kind="sgd", optimizer__clip_norm=0.1, optimizer__learning_rate=0.1
    )
    batches, params = [random_batch(cfg)], random_params(cfg.model)
    one, params_1 = fit(cfg, batches, params=params)
    many, params_n = fit(cfg, batches, params=params, mesh=mesh)
    assert many[0]["train/grad_norm"] == pytest.approx(one[0]["train/grad_norm"], rel=1e-5)
    assert_close(params_n, params_1, 1e-5)


def test_bfloat16_first_moment_is_an_option_and_only_that():
    specs = model_params(TINY.model)
    for kind in ("adamw", "lion", "muon"):
        cfg = OptimizerConfig(kind=kind, moment_dtype="bfloat16")
        state = abstract_state(specs, make_optimizer(cfg, specs, make_schedule(cfg, 1)))
        names = {name for name, a in named(state.opt_state) if a.dtype == jnp.bfloat16}
        assert names
        assert all("/mu/" in f"/{n}/" or "mu" in n for n in names), names
        assert {str(a.dtype) for a in jax.tree.leaves(state.params)} == {"float32"}


def test_muon_takes_matrices_and_adamw_the_rest():
    specs = model_params(change(TINY, model__tie_embeddings=False).model)
    cfg = OptimizerConfig(kind="muon", learning_rate=1.0, schedule="constant", weight_decay=0.0, clip_norm=None)
    tx = make_optimizer(cfg, specs, make_schedule(cfg, 1))
    params = init_params(specs, jax.random.key(0))
    grads = random_params(TINY.model, seed=5)
    updates, _ = tx.update(grads, tx.init(params), params)
    q = np.asarray(updates["blocks"][0]["attention"]["q"][0]).reshape(16, 16)
    # Muon's update is a multiple of a nearly orthogonal matrix, 0.2 x sqrt(16) for this one.
    np.testing.assert_allclose(np.linalg.svd(q / 0.8, compute_uv=False), 1, atol=0.4)
    np.testing.assert_allclose(np.abs(updates["head"]), 1, rtol=1e-3)  # Adam's first step: the sign


@pytest.mark.parametrize(
    "settings",
    [
        dict(kind="sgd", momentum=0.9, learning_rate=3e38),  # each update is finite, the parameter that it makes is not
        dict(kind="adamw", eps=1e-50),  # 0 in float32: 0 / 0 where a token does not occur
        dict(kind="muon", learning_rate=3e38),
    ],
    ids=lambda settings: settings["kind"],
)
def test_an_update_that_is_not_finite_leaves_parameters_and_state_as_they_were(settings):
    cfg = change(TINY, optimizer=OptimizerConfig(schedule="constant", **settings))
    mesh, start, step = jitted_step(cfg, "1", 2)
    batch = random_batch(cfg)
    batch["inputs"] = batch["inputs"] % 8
    with jax.set_mesh(mesh):
        before = start(random_params(cfg.model))
        kept = jax.tree.map(np.array, before)
        after, metrics = step(before, batch)
    assert np.isfinite([metrics["train/loss"], metrics["train/grad_norm"]]).all()
    assert not metrics["finite"]
    assert (int(after.step), int(after.skipped)) == (1, 1)
    assert_same = lambda a, b: jax.tree.map(np.testing.assert_array_equal, a, b)
    assert_same(after.params, kept.params)
    assert_same(after.opt_state, kept.opt_state)
    assert all(value == 0 for name, value in metrics.items() if name.startswith("norm/update/"))
