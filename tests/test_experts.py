"""Mixtures of experts: who is chosen, what the losses of balance and the router's bias see, on any mesh and after a restart."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from common import (
    TINY,
    assert_close,
    change,
    jitted_step,
    launch,
    make_mesh,
    random_batch,
    random_params,
    series,
    slow,
    text_config,
)

from minitf.model import reference
from minitf.model.experts import Tokens, balance_sums, balanced, mlp, mlp_params
from minitf.model.mlp import MLP, MlpConfig
from minitf.model.routers import ROUTERS, Routing, best
from minitf.model.transformer import hidden, model_params, places
from minitf.params import Param, named, weights_of
from minitf.sharding.devices import surroundings
from minitf.sharding.mesh import batch_sharding
from minitf.sharding.rules import shardings
from minitf.training import step as step_lib
from minitf.training.evaluation import router_metrics
from minitf.training.optimizer import OptimizerConfig, make_optimizer, make_schedule
from minitf.workdir import load_model

MIXTURE = MlpConfig(kind="swiglu", hidden=8, router="softmax", experts=4)
# A dense layer first, a shared expert, every loss, in a model that every mesh below divides.
EVERYTHING = change(
    TINY,
    loss__z_loss=1e-2,
    loss__balance=0.1,
    loss__router_z=0.05,
    loss__bias_rate=0.01,
    model__num_layers=3,
    model__tie_embeddings=True,
    model__mlp__router="sigmoid",
    model__mlp__experts=8,
    model__mlp__hidden=8,
    model__mlp__shared=1,
    model__mlp__dense_first=1,
    model__mlp__dense_hidden=32,
    optimizer__clip_norm=1.0,
    optimizer__weight_decay=0.1,
)


def noise(specs, seed=0):
    rng = np.random.default_rng(seed)
    one = lambda p: jnp.asarray(0.3 * rng.standard_normal(p.full_shape), p.dtype)
    return jax.tree.map(one, specs, is_leaf=lambda x: isinstance(x, Param))


def layer(cfg, dim=16, tokens=32, seed=0):
    """(parameters, x [2, tokens, dim]) of one mixture."""
    x = np.random.default_rng(seed + 1).standard_normal((2, tokens, dim))
    return noise(mlp_params(cfg, dim), seed), jnp.asarray(x, jnp.float32)


def of_expert(params, e):
    return jax.tree.map(lambda a: a[e], params["experts"])


# ---- the choice

SCORES = {  # router, settings besides
    "softmax": dict(normalise_weights=False, router_scale=2.0),
    "softmax_of_chosen": {},
    "sigmoid": dict(groups=4, groups_per_token=2),
}


@pytest.mark.core
@pytest.mark.parametrize("router", SCORES)
def test_choices_and_weights_are_those_of_the_plain_router(router):
    cfg = MlpConfig(kind="swiglu", router=router, experts=16, experts_per_token=3, **SCORES[router])
    rng = np.random.default_rng(0)
    logits, bias = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((500, 16), (16,)))
    found = ROUTERS[router].apply(logits, bias, cfg)
    weights, probabilities = reference.shares(logits[None], bias, cfg)
    # Compared where no rounding decides: scores of a choice, and of groups, differ by more than 1e-4.
    scores = jax.nn.sigmoid(logits) + bias if router == "sigmoid" else logits
    gap = lambda x: np.diff(np.sort(np.asarray(x), axis=-1), axis=-1).min(axis=-1)
    clear = gap(scores) > 1e-4
    if router == "sigmoid":
        clear &= gap(jnp.sort(scores.reshape(500, 4, 4), axis=-1)[..., -2:].sum(-1)) > 1e-4
    assert clear.mean() > 0.9
    chosen = np.zeros((500, 16))
    np.put_along_axis(chosen, np.asarray(found.experts), np.asarray(found.weights), axis=1)
    np.testing.assert_array_equal(chosen[clear] > 0, np.asarray(weights[0] > 0)[clear])
    np.testing.assert_allclose(chosen[clear], weights[0][clear], rtol=2e-6)
    np.testing.assert_allclose(found.probabilities, probabilities[0], rtol=2e-6)
    assert all(np.diff(np.take_along_axis(np.asarray(scores), np.asarray(found.experts), 1)).max(axis=1) <= 0)


@pytest.mark.core
def test_of_equal_scores_the_first_are_chosen():
    scores = jnp.asarray(np.random.default_rng(0).integers(0, 3, (200, 16)), jnp.float32)
    np.testing.assert_array_equal(best(scores, 5), jax.lax.top_k(scores, 5)[1])
    np.testing.assert_array_equal(best(scores, 5), jnp.argsort(-scores, stable=True)[:, :5])


# ---- the layer


def test_all_experts_together_are_the_dense_mixture():
    cfg = change(MIXTURE, experts_per_token=4)
    params, x = layer(cfg)
    weights = jax.nn.softmax(x @ params["router"], axis=-1)
    expected = sum(weights[..., e : e + 1] * MLP["swiglu"].apply(of_expert(params, e), x, cfg) for e in range(4))
    np.testing.assert_allclose(mlp(params, x, cfg, None)[0], expected, atol=1e-5)


def test_one_expert_is_the_plain_mlp():
    cfg = change(MIXTURE, experts=1, experts_per_token=1)
    params, x = layer(cfg)
    loss = lambda f: lambda experts, x: jnp.sum(jnp.sin(f(experts, x)))
    mixture = loss(lambda experts, x: mlp({**params, "experts": experts}, x, cfg, None)[0])
    plain = loss(lambda experts, x: MLP["swiglu"].apply(jax.tree.map(lambda a: a[0], experts), x, cfg))
    found, expected = (jax.grad(f, argnums=(0, 1))(params["experts"], x) for f in (mixture, plain))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), found, expected)


@pytest.mark.parametrize("grouped", ["blocks", "reference", "ragged"])
def test_experts_without_tokens_have_gradient_0_and_one_with_all_is_the_plain_mlp(grouped):
    cfg = change(MIXTURE, router="sigmoid", experts_per_token=1, grouped=grouped)
    params, x = layer(cfg)
    params["router_bias"] = jnp.array([0.0, 9.0, 0.0, 0.0])

    def loss(params, f):
        return jnp.sum(jnp.sin(f(params)))

    found = jax.grad(loss)(params, lambda p: mlp(p, x, cfg, None)[0])
    expected = jax.grad(loss)(of_expert(params, 1), lambda p: MLP["swiglu"].apply(p, x, cfg))
    for name, g in found["experts"].items():
        assert (np.delete(g, 1, axis=0) == 0).all()
        np.testing.assert_allclose(g[1], expected[name], atol=1e-5)


def test_experts_that_no_token_uses_are_not_read():
    """Few tokens, as of a step of decoding: weights that are not numbers change nothing in experts that are not chosen."""
    params, x = layer(change(MIXTURE, experts=64), tokens=2)
    cfg = change(MIXTURE, experts=64, grouped="blocks")
    used = np.unique(ROUTERS["softmax"].apply((x @ params["router"]).reshape(4, 64), None, cfg).experts)
    assert len(used) <= 8
    others = ~np.isin(np.arange(64), used)[:, None, None]
    poisoned = {**params, "experts": jax.tree.map(lambda a: jnp.where(others, jnp.nan, a), params["experts"])}
    np.testing.assert_array_equal(mlp(poisoned, x, cfg, None)[0], mlp(params, x, cfg, None)[0])


def test_a_router_chooses_once():
    """The backward pass takes the choice of the forward pass, under every policy of rematerialisation."""
    for remat in ("full", "products", "dots", "offload"):
        cfg = change(TINY, model__mlp__router="softmax", model__remat=remat)
        batch = random_batch(cfg)
        text = str(jax.make_jaxpr(lambda p, c=cfg, b=batch: step_lib.gradients(p, b, 0, c))(random_params(cfg.model)))
        assert text.count(" argmax[") == cfg.model.mlp.experts_per_token, remat


# ---- meshes and accumulation


def trained(cfg, batches, mesh):
    """(uses of each step, metrics of each step, parameters at the end)"""
    mesh, start, step = jitted_step(cfg, mesh, len(batches))
    with jax.set_mesh(mesh):
        state, uses, history = start(jax.tree.map(np.array, random_params(cfg.model))), [], []
        for batch in batches:
            state, metrics = step(state, jax.device_put(batch, batch_sharding(mesh)))
            metrics.pop("batch")
            uses.append([np.asarray(place["uses"]) for place in metrics["routed"] if place])
            history.append(jax.tree.map(np.asarray, metrics))
    return uses, history, jax.tree.map(np.asarray, state.params)


def batches_of(cfg, steps=2):
    """Batches whose rows have padding and masked targets."""
    rng = np.random.default_rng(0)
    masks = (rng.integers(0, 4, (steps, cfg.batch_size, cfg.seq_len)) > 0) & (np.arange(cfg.seq_len) < 14)
    return [random_batch(cfg, seed=i, weights=mask) for i, mask in enumerate(masks)]


@functools.cache
def on_one_device():
    return trained(EVERYTHING, batches_of(EVERYTHING), "1")


def test_the_choices_of_the_tests_of_meshes_are_clear():
    """Scores of the last expert that is chosen and of the next differ by more than 1e-4."""
    routed, params = [], random_params(EVERYTHING.model)
    reference.model(params, batches_of(EVERYTHING)[0]["inputs"], EVERYTHING.model, routed=routed)
    stacks = zip(places(EVERYTHING.model), params["blocks"], strict=True)
    of_layer = {
        n: b for place, block in stacks for n, b in zip(place.layers, block["mlp"].get("router_bias", ()), strict=False)
    }
    for (logits, _, _), (_, bias) in zip(routed, sorted(of_layer.items()), strict=True):
        scores = np.sort(np.asarray(jax.nn.sigmoid(logits) + bias), axis=-1)
        k = EVERYTHING.model.mlp.experts_per_token
        assert (scores[..., -k] - scores[..., -k - 1]).min() > 1e-4


WAYS = [  # mesh of (data, fsdp, expert, tensor), accumulation, collectives
    ("1x2x2x2", 2, "auto"),
    ("1x2x4x1", 1, "manual"),
    ("1x1x8x1", 1, "auto"),
    ("2x1x2x2", 2, "auto"),
    ("1x2x4x1", 1, "auto"),
    ("1x1x1x1", 4, "auto"),
    ("2x1x4x1", 1, "manual"),
]


@pytest.mark.parametrize(("mesh", "accumulation", "collectives"), slow(WAYS, but=WAYS[:1]))
def test_neither_mesh_nor_accumulation_changes_a_step(mesh, accumulation, collectives):
    """Choices first, which no rounding decides; then losses, norms, parameters and biases after two steps."""
    batches = batches_of(EVERYTHING)
    cfg = change(EVERYTHING, accumulation=accumulation, mesh__collectives=collectives)
    uses, history, after = trained(cfg, batches, mesh)
    expected_uses, expected_history, expected_after = on_one_device()
    jax.tree.map(np.testing.assert_array_equal, uses, expected_uses)
    for found, expected in zip(history, expected_history, strict=True):
        assert_close(found, expected, 1e-5, relative_to_largest=True)
    assert_close(after, expected_after, 1e-5, relative_to_largest=True)


# ---- balance


@pytest.mark.core
def test_equal_use_has_balance_loss_1_and_one_expert_for_all_has_the_number_of_experts():
    E, S = 4, 16
    ids = jnp.arange(S)[None, :, None] % E
    equal = Routing(ids, jnp.ones(ids.shape), jnp.full((1, S, E), 1 / E))
    one = Routing(0 * ids, jnp.ones(ids.shape), jnp.broadcast_to(jnp.eye(E)[0], (1, S, E)))
    tokens = Tokens(jnp.ones((1, S)))
    sums = [balance_sums(jnp.zeros((1, S, E)), routing, tokens) for routing in (equal, one)]
    assert [float(s["balance"][0]) / S for s in sums] == pytest.approx([1, E])
    assert [float(s["entropy"][0]) / S for s in sums] == pytest.approx([np.log(E), 0])
    assert float(sums[0]["router_z"][0]) / S == pytest.approx(np.log(E) ** 2)
    np.testing.assert_array_equal([s["uses"][0] for s in sums], [[S / E] * E, [S, 0, 0, 0]])


@functools.cache
def losses_of_everything():
    return jax.jit(lambda params, batch: step_lib.gradients(params, batch, 0, EVERYTHING)[0])


def router_losses(batch):
    losses, routed = losses_of_everything()(random_params(EVERYTHING.model), batch)
    uses = np.concatenate([place["uses"] for place in routed if place])
    return {name: float(losses[name]) for name in step_lib.ROUTER_LOSSES.values()}, uses


def test_packing_and_padding_and_the_order_of_rows_change_no_balance():
    """Documents alone in their rows, packed, and packed in another order; the rest of six rows is padding."""
    rng = np.random.default_rng(0)
    lengths = (5, 3, 6, 9, 4, 7)
    documents = [rng.integers(0, 64, (2, n), dtype=np.int32) for n in lengths]

    def rows(groups):
        batch = {n: np.zeros((6, 16), np.int32) for n in ("inputs", "targets", "segments", "positions")}
        batch["weights"] = np.zeros((6, 16), np.float32)
        for row, group in enumerate(groups):
            at = 0
            for number, d in enumerate(group, 1):
                inputs, targets = documents[d]
                where = (row, slice(at, at + len(inputs)))
                batch["inputs"][where], batch["targets"][where] = inputs, targets
                batch["segments"][where], batch["positions"][where] = number, np.arange(len(inputs))
                batch["weights"][where], at = 1, at + len(inputs)
        return batch

    alone, uses = router_losses(rows([[d] for d in range(6)]))
    for groups in ([[0, 1, 2], [3, 4], [5]], [[4, 3], [], [2, 5], [1, 0]]):
        packed, packed_uses = router_losses(rows(groups))
        np.testing.assert_array_equal(packed_uses, uses)
        assert packed == pytest.approx(alone, rel=1e-5)


# ---- the router's bias


@pytest.mark.core
def test_the_bias_moves_as_worked_by_hand():
    """Three steps of three experts and nine uses: towards the mean of three; one that is used as the mean stays."""
    bias = jnp.zeros(3)
    for uses, expected in (((6, 3, 0), (-1, 0, 1)), ((4, 4, 1), (-2, -1, 2)), ((3, 3, 3), (-2, -1, 2))):
        bias = balanced(bias, jnp.array(uses), 0.5)
        np.testing.assert_allclose(bias, 0.5 * np.array(expected))


def biases(params):
    return np.concatenate([np.asarray(b["mlp"]["router_bias"]) for b in params["blocks"] if "router_bias" in b["mlp"]])


def test_a_bias_is_moved_by_its_rate_alone():
    """Not decayed, not clipped, in no norm, with no moments; a step that is not finite leaves it as it was."""
    cfg, batch = EVERYTHING, batches_of(EVERYTHING)[0]
    specs = model_params(cfg.model)
    mesh, start, step = jitted_step(cfg, "1", 2)
    with jax.set_mesh(mesh):
        before = random_params(cfg.model)
        state = start(jax.tree.map(np.array, before))
        shapes = {a.shape for _, a in named(state.opt_state)}
        after, metrics = step(state, batch)
        uses = np.concatenate([place["uses"] for place in metrics["routed"] if place])
        moved = 0.01 * np.sign(uses.mean(-1, keepdims=True) - uses)
        np.testing.assert_allclose(biases(after.params), biases(before) + moved, atol=1e-6)
        assert not shapes & {p.full_shape for _, p in named(specs) if p.kind == "state"}
        of_mlps = [a for n, a in named(weights_of(specs, after.params)) if "/mlp/" in n]
        norm = np.sqrt(sum(np.sum(np.square(np.asarray(a, np.float64))) for a in of_mlps))
        assert float(metrics["norm/parameter/mlp"]) == pytest.approx(norm, rel=1e-5)
        bad = {**batch, "weights": batch["weights"] * np.inf}
        skipped, metrics = step(jax.tree.map(jnp.array, after), bad)
        assert not metrics["finite"]
        np.testing.assert_array_equal(biases(skipped.params), biases(after.params))


@pytest.mark.slow
def test_the_bias_drives_a_skewed_router_to_balance():
    cfg = change(EVERYTHING, loss__balance=None, loss__bias_rate=0.02, optimizer__learning_rate=1e-4, steps=150)
    params = random_params(cfg.model)
    for block in params["blocks"]:
        if "router_bias" in block["mlp"]:
            block["mlp"]["router_bias"] = jnp.zeros_like(block["mlp"]["router_bias"]).at[:, :2].set(1.0)
    batch = random_batch(change(cfg, batch_size=32))
    mesh, start, step = jitted_step(cfg, "1", 150)
    with jax.set_mesh(mesh):
        state, seen = start(jax.tree.map(np.array, params)), []
        for _ in range(150):
            state, metrics = step(state, batch)
            seen.append(router_metrics(jax.device_get(metrics["routed"])))
    assert seen[0]["router/busiest"] > 3
    assert seen[-1]["router/busiest_worst"] < 1.2
    assert seen[-1]["router/bias_spread"] < seen[0]["router/bias_spread"]


@pytest.mark.core
def test_metrics_of_routers_are_those_by_hand():
    routed = [
        {},
        {
            "uses": np.array([[4, 2, 0, 2], [2, 2, 2, 2]]),
            "entropy": np.array([0.5, 1.0]),
            "router_bias": np.array([[0.1, 0.0, -0.2, 0.0]] * 2),
        },
        {"uses": np.array([[8, 0, 0, 0]]), "entropy": np.array([0.3])},
    ]
    expected = {"busiest": (7 / 3, 4), "idlest": (1 / 3, 0), "unused": (1 / 3, 0.75), "entropy": (0.6, 0.3)}
    found = router_metrics(routed)
    for name, (mean, worst) in (expected | {"bias_spread": (0.3, 0.3)}).items():
        assert (found[f"router/{name}"], found[f"router/{name}_worst"]) == pytest.approx((mean, worst)), name
    assert router_metrics([{}]) == {}


# ---- optimizers


@pytest.mark.parametrize("kind", slow(["muon", "adafactor", "adamw"], but=["muon"]))
def test_a_stack_of_experts_is_updated_like_the_experts_apart(kind):
    """Also where the number of experts is that of inputs, so that no rule can tell dimensions by their sizes."""
    stack = (("layers", 2), ("experts", 128))
    spec = Param((128, 130), ("embed", "mlp"), "matrix", inputs=1, stack=stack)
    cfg = OptimizerConfig(kind=kind, learning_rate=0.1, schedule="constant", clip_norm=None)
    rng = np.random.default_rng(0)
    w, g = (jnp.asarray(rng.standard_normal(spec.full_shape), jnp.float32) for _ in "wg")

    def update(spec, w, g):
        tx = make_optimizer(cfg, {"w": spec}, make_schedule(cfg, 10))
        updates, _ = jax.jit(lambda w, g: tx.update({"w": g}, tx.init({"w": w}), {"w": w}))(w, g)
        return optax.apply_updates({"w": w}, updates)["w"]

    whole = update(spec, w, g)
    one = Param(spec.shape, spec.axes, spec.kind, spec.inputs)
    for index in ((0, 0), (1, 127)):
        np.testing.assert_allclose(whole[index], update(one, w[index], g[index]), atol=1e-5)


# ---- runs


def mixture_config(corpus, **changes):
    cfg = change(text_config(corpus), model__mlp=EVERYTHING.model.mlp, model__num_layers=2, loss=EVERYTHING.loss)
    return change(cfg, checkpoint__every=2, steps=4, **changes)


@pytest.mark.slow
def test_a_mixture_goes_on_to_the_last_bit(corpus, tmp_path):
    cfg = mixture_config(corpus)
    _, whole = launch(cfg, tmp_path / "whole")
    launch(change(cfg, steps=3), tmp_path / "parts")
    _, parts = launch(cfg, tmp_path / "parts")
    for tag in ("train/loss", "train/balance_loss", "router/busiest", "router/bias_spread", "norm/parameter/mlp"):
        assert series(parts, tag) == series(whole, tag)
        assert len(series(whole, tag)) == 4
    a, b = (load_model(str(tmp_path / name)).params for name in ("whole", "parts"))
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert series(parts, "router/bias_spread")[3] > 0  # so that the fourth step depends on it


@pytest.mark.slow
def test_saved_on_an_expert_axis_restored_on_another(corpus, tmp_path):
    cfg = change(mixture_config(corpus), mesh__expert=4)
    launch(change(cfg, steps=2), tmp_path / "run", devices=4)
    saved = load_model(str(tmp_path / "run")).params
    assert (
        np.ptp(np.asarray(saved["blocks"][1]["mlp"]["experts"]["gate"]), axis=1).min() > 0
    )  # no expert is another's copy
    _, lines = launch(change(cfg, mesh__expert=1, mesh__tensor=2), tmp_path / "run", devices=2)
    assert list(series(lines, "train/loss")) == [1, 2, 3, 4]
    _, expected = launch(change(cfg), tmp_path / "other", devices=4)
    np.testing.assert_allclose(
        list(series(lines, "train/loss").values()), list(series(expected, "train/loss").values()), rtol=1e-5
    )


def test_router_decides_the_same_for_equal_scores_on_every_mesh():
    cfg = change(EVERYTHING, model__num_layers=2, loss__bias_rate=0.0)
    params = random_params(cfg.model)
    for block in params["blocks"]:
        for name in {"router", "router_bias"} & block["mlp"].keys():
            block["mlp"][name] = jnp.zeros_like(block["mlp"][name])
    for name in ("1", "1x1x8x1"):
        mesh = make_mesh(name)
        with surroundings(mesh, "float32"):
            placed = jax.device_put(params, shardings(model_params(cfg.model), mesh))
            batch = jax.device_put(random_batch(cfg), batch_sharding(mesh))
            found = jax.jit(lambda p, b: hidden(p, b["inputs"], cfg.model, weights=b["weights"]).aux)(placed, batch)
        np.testing.assert_array_equal(found[1]["uses"].sum(1)[0], [128, 128, 0, 0, 0, 0, 0, 0])
