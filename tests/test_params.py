import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from common import MESHES, TINY, change, sizes_of_axes, slow

from minitf import job as job_lib
from minitf.model.transformer import model_params
from minitf.params import Param, abstract_params, count_params, init_params, named, stacked
from minitf.sampling import unstacked
from minitf.sharding.devices import surroundings
from minitf.sharding.mesh import MeshConfig

pytestmark = pytest.mark.core

WIDE = change(TINY, model__dim=256, model__num_layers=4).model


def test_stacked_initialisation_has_the_scale_of_one_layer():
    four = init_params(model_params(change(WIDE, init="fan_in")), jax.random.key(0))
    one = init_params(model_params(change(WIDE, init="fan_in", num_layers=1)), jax.random.key(0))
    up = np.asarray(four["blocks"][0]["mlp"]["up"])
    assert up.shape[0] == 4
    for layer in up:
        assert layer.std() == pytest.approx(1 / np.sqrt(256), rel=0.03)
    assert abs(np.corrcoef(up[0].ravel(), up[1].ravel())[0, 1]) < 0.05
    # One layer fewer or more changes no other layer's values.
    np.testing.assert_array_equal(up[0], one["blocks"][0]["mlp"]["up"][0])


@pytest.mark.parametrize(
    ("scheme", "matrix", "residual", "embedding"),
    [
        ("fixed", 0.02, 0.02, 0.02),
        ("gpt2", 0.02, 0.02 / np.sqrt(8), 0.02),
        ("fan_in", 1 / 16, 1 / np.sqrt(512), 1 / 16),
    ],
)
def test_schemes_have_their_documented_deviation(scheme, matrix, residual, embedding):
    cfg = change(WIDE, init=scheme, vocab_size=512, mlp__hidden=512)
    params = init_params(model_params(cfg), jax.random.key(0))
    assert np.std(params["blocks"][0]["attention"]["q"]) == pytest.approx(matrix, rel=0.03)
    assert np.std(params["blocks"][0]["mlp"]["down"]) == pytest.approx(residual, rel=0.03)
    assert np.std(params["embedding"]) == pytest.approx(embedding, rel=0.03)
    assert np.all(params["final_norm"]["scale"] == 1)


P57 = change(
    TINY,
    model__vocab_size=32,
    model__dim=8,
    model__mlp__hidden=16,
    model__attention__num_heads=4,
    model__attention__num_kv_heads=2,
    model__attention__head_dim=2,
).model


@pytest.mark.parametrize(("tied", "total"), [(True, 1448), (False, 1704)])
def test_parameter_count(tied, total):
    specs = model_params(change(P57, tie_embeddings=tied))
    count = count_params(specs)
    assert count["total"] == total == sum(a.size for a in jax.tree.leaves(init_params(specs, jax.random.key(0))))
    assert count["embedding"] == 32 * 8
    assert count["embedding"] + count["non_embedding"] == count["total"]


def test_another_parameter_changes_no_initial_value():
    plain = init_params(model_params(TINY.model), jax.random.key(0))
    more = init_params(
        model_params(change(TINY, model__attention__qk_norm=True, model__mlp__bias=True).model), jax.random.key(0)
    )
    others = dict(named(more))
    for name, a in named(plain):
        np.testing.assert_array_equal(a, others[name])


def test_every_array_has_its_own_key():
    attention = init_params(model_params(TINY.model), jax.random.key(0))["blocks"][0]["attention"]
    assert not np.array_equal(attention["k"], attention["v"])


@functools.cache
def first_state(mesh: str):
    """What a run starts from, through the program that a run compiles."""
    cfg = change(TINY, model__attention__num_kv_heads=4, mesh=MeshConfig(**sizes_of_axes(MESHES[mesh])))
    job = job_lib.prepare(cfg, jax.devices()[: math.prod(MESHES[mesh])])
    with surroundings(job.mesh, job.cfg.model.dtype):
        return jax.tree.map(np.asarray, job_lib.program(job).init(jax.random.key(3)))


@pytest.mark.parametrize("mesh", slow([name for name in MESHES if name != "1"], but=["2x2x2", "fsdp8"]))
def test_initial_values_are_bit_identical_on_every_mesh(mesh):
    for (name, a), (_, b) in zip(named(first_state("1")), named(first_state(mesh)), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


def test_unstacked_undoes_stacked():
    specs = model_params(TINY.model)["blocks"][0]
    layers = unstacked(specs)
    assert len(layers) == 2
    assert stacked(layers[0], 2) == specs
    arrays = init_params(specs, jax.random.key(0))
    np.testing.assert_array_equal(unstacked(arrays)[1]["mlp"]["up"], arrays["mlp"]["up"][1])


def test_abstract_agrees_with_init():
    specs = model_params(TINY.model)
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), init_params(specs, jax.random.key(0)))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), abstract_params(specs)) == shapes


def test_a_declaration_that_contradicts_itself_is_refused():
    p = Param((4, 4), ("embed", "mlp"), "matrix", inputs=1)
    for wrong in (dict(kind="matrx"), dict(axes=("embed",)), dict(inputs=2)):
        with pytest.raises(AssertionError):
            dataclasses.replace(p, **wrong)
