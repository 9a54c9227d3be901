"""Pure functions on arrays: no configuration, no parameter trees."""

import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name


def matmul(x: jax.Array, w: jax.Array, inputs: int = 1, *, transposed: bool = False, **kwargs) -> jax.Array:
    """Contracts the last `inputs` dimensions of x with the first `inputs` of w, or the last one of both where w is a matrix
    given transposed; keywords as of `jax.lax.dot`.

    Every product of an activation with a weight goes through here, so that a faster form is one change. Written as a product
    of two matrices, whose gradients are products of two matrices again: XLA's CPU compiler has a slower way for others.
    """
    if transposed:  # not w.T: for one row of x XLA's CPU compiler would write it out
        y = jax.lax.dot_general(x.reshape(-1, x.shape[-1]), w, (((1,), (1,)), ((), ())), **kwargs)
        return y.reshape(*x.shape[:-1], -1)
    rows, columns = x.shape[: x.ndim - inputs], w.shape[inputs:]
    contracted = math.prod(w.shape[:inputs])
    y = jax.lax.dot(x.reshape(-1, contracted), w.reshape(contracted, -1), **kwargs)
    return y.reshape(*rows, *columns)


def linear(x: jax.Array, w: jax.Array, bias: jax.Array | None = None, inputs: int = 1) -> jax.Array:
    """`matmul`, and the bias in x's dtype where there is one."""
    y = matmul(x, w, inputs)
    return y if bias is None else y + bias.astype(y.dtype)


def rms_norm(scale: jax.Array, x: jax.Array, eps: float = 1e-6) -> jax.Array:
    """x / rms(x) * scale over the last dimension; statistics and scale in float32, output in x's dtype."""
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (y * scale).astype(x.dtype)


def layer_norm(scale: jax.Array, bias: jax.Array | None, x: jax.Array, eps: float = 1e-6) -> jax.Array:
    """(x - mean) / std * scale + bias over the last dimension; statistics in float32, output in x's dtype."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    y = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps) * scale
    return (y if bias is None else y + bias).astype(x.dtype)


def softcap(x: jax.Array, cap: float | None) -> jax.Array:
    """cap * tanh(x / cap): x for small |x|, never beyond +-cap; None leaves x as it is (Gemma 2, arXiv:2408.00118)."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def rope_frequencies(head_dim: int, base: float) -> jax.Array:
    """float32 [head_dim/2], radians a position: base ** (-2i / head_dim) (RoFormer, arXiv:2104.09864)."""
    return base ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)


def stretched(frequencies: jax.Array, factor: float, low: float, high: float, length: int) -> jax.Array:
    """Llama 3.1's frequencies for texts `factor` times as long as the `length` of pretraining: those of fewer than `low` turns
    in it are divided by the factor, those of more than `high` stay, in between it is a mean of both (Llama 3, arXiv:2407.21783;
    the formula is that of github.com/meta-llama/llama-models, apply_scaling)."""
    turns = length * frequencies / (2 * math.pi)
    stay = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (stay + (1 - stay) / factor)


def rope_table(positions_BS: jax.Array, frequencies: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), each float32 [B, S, 1, K/2], of position * frequency.

    Positions and angles are float32: in bfloat16 positions from 257 on coincide.
    """
    angles = positions_BS.astype(jnp.float32)[:, :, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BSHK: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates (x[i], x[i + K/2]) by angle i: the half-split layout of Llama in Hugging Face, not neighbouring pairs."""
    cos, sin = table
    a, b = jnp.split(x_BSHK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BSHK.dtype)


def dropout(keys_B: jax.Array, x: jax.Array, rate: float) -> jax.Array:
    """Zeroes elements of x [B, ...] with probability `rate` and scales the rest; one key a row, so that a row's mask
    depends on neither its place in a batch nor the mesh."""
    keep = jax.vmap(lambda k: jax.random.bernoulli(k, 1 - rate, x.shape[1:]))(keys_B)
    keep = checkpoint_name(keep, "dropout")
    return jnp.where(keep, x / (1 - rate), jnp.zeros((), x.dtype)).astype(x.dtype)
