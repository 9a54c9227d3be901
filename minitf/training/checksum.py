"""Checksums of arrays, computed on the arrays' devices: equal on any mesh, different if any element changes."""

import math

import jax
import jax.numpy as jnp


def words(x: jax.Array) -> jax.Array:
    """The bits of an array as uint32; 64-bit elements become two along a new last dimension."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def mixed(x: jax.Array) -> jax.Array:
    """A bijection of uint32 whose every output bit depends on every input bit: MurmurHash3's 32-bit finaliser (A. Appleby)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def checksum(x: jax.Array) -> jax.Array:
    """uint32 [2]. Each element's bits are multiplied by two odd numbers derived from its index and summed modulo 2^32. Integer sums do
    not depend on their order, so neither mesh nor compiler changes them. Odd factors are invertible, so one changed element always
    changes both sums; other changes are missed once in 2^64."""
    x = words(x)
    strides = [math.prod(x.shape[i + 1 :]) % 2**32 for i in range(x.ndim)]
    place = jnp.zeros(x.shape, jnp.uint32)
    for i, stride in enumerate(strides):
        place += jax.lax.broadcasted_iota(jnp.uint32, x.shape, i) * jnp.uint32(stride)
    products = tuple(x * (mixed(place + jnp.uint32(salt)) | 1) for salt in (0x9E3779B9, 0x7F4A7C15))
    # One reduction for both: with two, XLA's CPU compiler materialises the products, twice the array, and takes ten times as long.
    add = lambda sums, more: tuple(s + m for s, m in zip(sums, more, strict=True))
    return jnp.stack(jax.lax.reduce(products, (jnp.uint32(0),) * 2, add, tuple(range(x.ndim))))
