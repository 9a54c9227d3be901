"""Checksums of arrays: the same on any mesh, others for any changed element."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import MESHES, make_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from minitf.runtime import digests

pytestmark = pytest.mark.core

DTYPES = ("float32", "bfloat16", "float16", "int32", "uint8", "bool")


def of(x) -> str:
    (value,) = digests.checksums({"x": jnp.asarray(x)}).values()
    return value


def by_hand(x: np.ndarray) -> str:
    """The definition in Python's integers."""

    def mixed(n):
        n = ((n ^ (n >> 16)) * 0x85EBCA6B) % 2**32
        n = ((n ^ (n >> 13)) * 0xC2B2AE35) % 2**32
        return n ^ (n >> 16)

    words = x.ravel().view(np.uint32)
    sums = [
        sum(int(w) * (mixed((i + salt) % 2**32) | 1) for i, w in enumerate(words)) for salt in (0x9E3779B9, 0x7F4A7C15)
    ]
    return "".join(f"{s % 2**32:08x}" for s in sums)


def test_equals_its_definition():
    x = np.random.default_rng(0).standard_normal((3, 5, 2)).astype(np.float32)
    assert of(x) == by_hand(x)


@pytest.mark.parametrize("mesh", MESHES)
def test_is_the_same_on_every_mesh(mesh):
    x = jax.random.normal(jax.random.key(0), (8, 16, 4))
    sharded = jax.device_put(x, NamedSharding(make_mesh(mesh), P(("data", "fsdp"), None, "tensor")))
    assert of(sharded) == of(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_changed_element_changes_it(dtype):
    x = jnp.zeros((4, 3), dtype)
    seen = {of(x)} | {of(x.at[i, j].set(True if dtype == "bool" else 1)) for i in range(4) for j in range(3)}
    assert len(seen) == 13


def test_knows_the_sign_of_zero_two_changed_places_and_a_scalar():
    x = jnp.arange(6.0)
    assert of(x) != of(x[::-1])
    assert of(jnp.float32(0.0)) != of(jnp.float32(-0.0))
    assert of(jnp.int32(3)) != of(jnp.int32(4))
    assert len({of(jax.random.key(0)), of(jax.random.key(1))}) == 2


def test_combined_depends_on_every_array_below_the_prefix():
    arrays = {"params/a": {"checksum": "1"}, "params/b": {"checksum": "2"}, "opt/a": {"checksum": "3"}}
    whole = digests.combined(arrays, "params/")
    assert whole != digests.combined(arrays | {"params/b": {"checksum": "4"}}, "params/")
    assert whole == digests.combined(arrays | {"opt/a": {"checksum": "4"}}, "params/")
