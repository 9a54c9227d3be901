import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import TINY, assert_close, change, fit, initial_params, make_mesh, random_batch, random_params, slow

from minitf.model import reference
from minitf.model.loss import LossConfig, Parts, loss_sums, mean, token_sums
from minitf.model.transformer import model_params
from minitf.plan import hlo
from minitf.sharding.mesh import batch_sharding
from minitf.sharding.rules import shardings
from minitf.training import step as step_lib

SGD = change(TINY, optimizer__kind="sgd", optimizer__learning_rate=0.1, model__attention__num_kv_heads=4)
UNEQUAL = np.concatenate([np.arange(16) < 2] * 4 + [np.arange(16) < 6] * 4).reshape(8, 16)  # 2 or 6 valid targets a row


@functools.cache
def gradients(cfg):
    return jax.jit(functools.partial(step_lib.gradients, step=0, cfg=cfg))


def test_the_combiner_weighs_tokens_not_parts():
    w = jnp.eye(2, 4) * 0  # equal logits: every token costs ln 4
    sums = [
        token_sums(w, Parts(jnp.ones((1, n, 2)), jnp.zeros((1, n), int), jnp.full((1, n), c)), TINY.model)
        for n, c in ((2, 4), (6, 1))
    ]
    total = sum(s["loss"].sum() for s in sums) / np.log(4)
    assert float(mean(total, jnp.float32(8))) == pytest.approx(1.75, abs=1e-6)


@pytest.mark.core
@pytest.mark.parametrize("accumulation", slow([2, 4], but=[4]))
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5, 6, 7], [0, 4, 1, 5, 2, 6, 3, 7]])  # unequal parts for any cut
def test_accumulation_does_not_change_loss_or_update(accumulation, order):
    batch = random_batch(SGD, weights=UNEQUAL[order])
    one, params_1 = fit(SGD, [batch])
    many, params_n = fit(change(SGD, accumulation=accumulation), [batch])
    assert many[0]["train/loss"] == pytest.approx(one[0]["train/loss"], abs=1e-6)
    assert_close(params_n, params_1, 1e-6)


@pytest.mark.parametrize("mesh", ["data8", "fsdp8"])
def test_the_spread_over_devices_does_not_change_loss_or_update(mesh):
    batch, params = random_batch(SGD, weights=UNEQUAL), random_params(SGD.model)
    one, params_1 = fit(SGD, [batch], params=params)
    many, params_n = fit(SGD, [batch], params=params, mesh=mesh)
    assert many[0]["train/loss"] == pytest.approx(one[0]["train/loss"], abs=1e-5)
    assert_close(params_n, params_1, 1e-5)


def test_the_auxiliary_loss_is_kept_apart_and_does_not_shrink_under_accumulation():
    cfg = change(SGD, loss__z_loss=1e-2)
    batch, params = random_batch(cfg), initial_params(cfg)
    (losses, _), grads = gradients(cfg)(params, batch)
    (losses_4, _), grads_4 = gradients(change(cfg, accumulation=4))(params, batch)
    assert_close({**losses, **grads}, {**losses_4, **grads_4}, 1e-6)
    assert losses["loss"] > 0
    total = reference.loss_fn(params, batch, cfg.model, z_loss=1e-2)
    assert float(losses["loss"] + 1e-2 * losses["z_loss"]) == pytest.approx(float(total), abs=1e-5)
    assert "z_loss" not in gradients(SGD)(params, batch)[0].losses  # not asked for, not reported


def test_a_batch_without_targets_changes_nothing():
    batches = [random_batch(SGD, 0), random_batch(SGD, 1, weights=np.zeros((8, 16))), random_batch(SGD, 2)]
    (losses, _), grads = gradients(SGD)(random_params(SGD.model), batches[1])
    assert float(losses["loss"]) == 0
    assert all(np.all(np.asarray(g) == 0) for g in jax.tree.leaves(grads))
    history, params = fit(SGD, batches)
    assert np.isfinite([m["train/loss"] for m in history]).all()
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(params))
    assert history[2]["train/loss"] == fit(SGD, [batches[0], batches[2]])[0][1]["train/loss"]


@pytest.mark.core
def test_the_content_and_length_of_padding_do_not_matter():
    weights = np.broadcast_to(np.arange(16) < 6, (8, 16))
    batch, params = random_batch(SGD, weights=weights), random_params(SGD.model)
    keep = weights.astype(bool)
    zeroed = {k: jnp.where(keep, v, 0) for k, v in batch.items()}
    shorter = {k: v[:, :12] for k, v in batch.items()}
    results = [gradients(SGD)(params, b) for b in (batch, zeroed, shorter)]
    for (losses, _), grads in results[1:]:
        assert_close({**losses, **grads}, {**results[0][0].losses, **results[0][1]}, 1e-6)


@pytest.mark.parametrize(
    ("mesh", "accumulation", "seq_len", "tied"),
    slow(
        [
            ("1", 1, 16, False),
            ("1", 2, 7, True),
            ("2x2x2", 2, 16, False),
            ("2x2x2", 1, 16, True),
            ("fsdp8", 1, 16, True),
        ],
        but=[("1", 2, 7, True), ("2x2x2", 2, 16, False)],
    ),
)
def test_the_untrained_loss_is_the_log_of_the_vocabulary(mesh, accumulation, seq_len, tied):
    cfg = change(SGD, model__vocab_size=256, model__tie_embeddings=tied, accumulation=accumulation, seq_len=seq_len)
    params = random_params(cfg.model)
    name = "embedding" if tied else "head"
    params[name] = jnp.zeros_like(params[name])
    history, _ = fit(cfg, [random_batch(cfg)], params=params, mesh=mesh)
    assert history[0]["train/loss"] == pytest.approx(5.545177, abs=1e-5)


def test_masked_targets_may_be_anything():
    weights = np.ones((8, 16))
    weights[:, 3:6] = 0
    batch, params = random_batch(SGD, weights=weights), random_params(SGD.model)
    batch["targets"] = batch["targets"].at[:, 3:6].set(0)
    wild = {**batch, "targets": batch["targets"].at[:, 3].set(-1).at[:, 4].set(-100).at[:, 5].set(64)}
    (losses, _), grads = gradients(SGD)(params, batch)
    (losses_w, _), grads_w = gradients(SGD)(params, wild)
    assert_close({**losses_w, **grads_w}, {**losses, **grads}, 0.0)


@pytest.mark.parametrize(("chunk", "passes"), [(1, 1), (5, 1), (5, 2), (8, 1), (16, 1), (None, 1), (None, 4)])
@pytest.mark.parametrize("changes", [{}, dict(logit_softcap=2.0), dict(tie_embeddings=True)])
def test_chunked_loss_equals_the_whole_in_value_and_gradient(chunk, passes, changes):
    cfg, rng = change(SGD.model, **changes), np.random.default_rng(0)
    batch, head = random_batch(SGD, weights=rng.random((8, 16))), random_params(cfg)
    head = {name: head[name] for name in ("embedding", "head") if name in head}
    x = jnp.asarray(rng.standard_normal((8, 16, cfg.dim)), jnp.float32)

    def total(head, x):
        found, sums = loss_sums(head, x, batch["targets"], batch["weights"], cfg, LossConfig(0.1, chunk, passes))
        return found, {name: jnp.sum(rows) for name, rows in sums.items()}

    def plain(head, x):
        logits = x @ (head["embedding"].T if cfg.tie_embeddings else head["head"])
        if cfg.logit_softcap is not None:
            logits = cfg.logit_softcap * jnp.tanh(logits / cfg.logit_softcap)
        loss = reference.cross_entropy(logits, batch["targets"], batch["weights"]) * batch["weights"].sum()
        z = (jax.nn.logsumexp(logits, axis=-1) ** 2 * batch["weights"]).sum()
        return loss + 0.1 * z, {"loss": loss, "z_loss": z}

    results = [jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(head, x) for f in (total, plain)]
    (sums, grads), (sums_0, grads_0) = (({**r[0][1]}, r[1]) for r in results)
    assert_close({"sums": sums, "grads": grads}, {"sums": sums_0, "grads": grads_0}, 1e-5, relative_to_largest=True)


def test_whole_logits_never_exist_in_the_chunked_loss():
    cfg = change(TINY, model__vocab_size=1024, loss__chunk=4)
    step = gradients(cfg)
    text = step.lower(random_params(cfg.model), random_batch(cfg)).compile().as_text()
    assert "f32[8,4,1024]" in text
    assert "f32[8,16,1024]" not in text
    whole = (
        gradients(change(cfg, loss__chunk=None)).lower(random_params(cfg.model), random_batch(cfg)).compile().as_text()
    )
    assert "f32[8,16,1024]" in whole  # so that the search would have found it


@pytest.mark.parametrize(
    ("name", "tied"),
    slow([(n, t) for n in ("data8", "fsdp8") for t in (False, True)], but=[("data8", True), ("fsdp8", False)]),
)
def test_the_heads_gradient_is_summed_over_devices_once(name, tied):
    cfg, mesh = change(TINY, model__vocab_size=1024, loss__chunk=4, model__tie_embeddings=tied), make_mesh(name)
    specs = shardings(model_params(cfg.model), mesh)
    with jax.set_mesh(mesh):
        params = jax.device_put(random_params(cfg.model), specs)
        batch = jax.device_put(random_batch(cfg), batch_sharding(mesh))
        step = jax.jit(functools.partial(step_lib.gradients, step=0, cfg=cfg), out_shardings=(None, specs))
        text = step.lower(params, batch).compile().as_text()
    module = hlo.parse(text)
    sums = [c for c in hlo.collectives(module, hlo.runs(module), mesh.shape) if c.kind == "all-reduce"]
    shapes = [s for c in sums for s in hlo.elements(c.instruction.shape) * c.count]
    assert (
        sum(bool(re.match(r"\w+\[(1024,16|16,1024)\]", s)) for s in shapes) == 2
    )  # the embedding's, too; not one a chunk
