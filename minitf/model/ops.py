"""Pure functions on arrays: no configuration, no parameter trees."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from minitf.sharding.seams import row_sum


def matmul(x: jax.Array, w: jax.Array, inputs: int = 1, *, transposed: bool = False, dtype: Any = None) -> jax.Array:
    """Contracts the last `inputs` dimensions of x with the first `inputs` of w; `transposed`: the last dimension of x with the last
    of the matrix w. The result has `dtype` (None: x's).

    Every product of an activation with a weight goes through here, so that a faster form is one change. Computed as a product
    of two matrices, whose gradients are also products of two matrices: XLA's CPU compiler is slower on other forms.
    """
    return product(x, w, inputs, transposed, x.dtype if dtype is None else dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def product(x: jax.Array, w: jax.Array, inputs: int, transposed: bool, dtype: Any) -> jax.Array:
    """`matmul`. Differs from autodiff in the gradient w.r.t. w: this sum over tokens is computed in float32 on each device."""
    rows, columns = x.shape[: x.ndim - inputs], w.shape[:1] if transposed else w.shape[inputs:]
    contracted = math.prod(x.shape[x.ndim - inputs :])
    w = w.astype(x.dtype).reshape((-1, contracted) if transposed else (contracted, -1))
    # Not w.T: for one row of x XLA's CPU compiler would materialise it.
    dims = ((1,), (1 if transposed else 0,)), ((), ())
    y = jax.lax.dot_general(x.reshape(-1, contracted), w, dims, preferred_element_type=dtype)
    return y.reshape(*rows, *columns)


def product_fwd(x, w, inputs, transposed, dtype):
    return product(x, w, inputs, transposed, dtype), (x, w)


def product_bwd(inputs, transposed, dtype, kept, g):
    x, w = kept
    rows = x.shape[: x.ndim - inputs]
    x_rows, g = x.reshape(*rows, -1), g.astype(x.dtype).reshape(*rows, -1)
    # With w's order of dimensions when it is summed over devices.
    dw = row_sum(outer if transposed else lambda g, x: outer(g, x).T, g, x_rows)
    dx = matmul(g, w if transposed else w.reshape(-1, g.shape[-1]), transposed=not transposed)
    return dx.reshape(x.shape), dw.reshape(w.shape).astype(w.dtype)


product.defvjp(product_fwd, product_bwd)


def outer(a: jax.Array, b: jax.Array) -> jax.Array:
    """float32 [D, F]: sum of a[..., D] b[..., F] over all leading dimensions."""
    a, b = (t.reshape(-1, t.shape[-1]) for t in (a, b))
    return jax.lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def linear(x: jax.Array, w: jax.Array, bias: jax.Array | None = None, inputs: int = 1) -> jax.Array:
    """`matmul` in x's dtype; the bias, if any, is added in float32."""
    if bias is None:
        return matmul(x, w, inputs)
    return (matmul(x, w, inputs, dtype=jnp.float32) + bias).astype(x.dtype)


def rms_norm(scale: jax.Array, x: jax.Array, eps: float = 1e-6) -> jax.Array:
    """x / rms(x) * scale over the last dimensions, those of scale; statistics and scale in float32, output in x's dtype."""
    x32, over = x.astype(jnp.float32), tuple(range(-scale.ndim, 0))
    y = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=over, keepdims=True) + eps)
    return (y * scale).astype(x.dtype)


def layer_norm(scale: jax.Array, bias: jax.Array | None, x: jax.Array, eps: float = 1e-6) -> jax.Array:
    """(x - mean) / std * scale + bias over the last dimension; statistics in float32, output in x's dtype."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    y = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps) * scale
    return (y if bias is None else y + bias).astype(x.dtype)


def softcap(x: jax.Array, cap: float | None) -> jax.Array:
    """cap * tanh(x / cap): x for small |x|, never beyond +-cap; None leaves x unchanged (Gemma 2, arXiv:2408.00118)."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def rope_frequencies(head_dim: int, base: float) -> jax.Array:
    """float32 [head_dim/2], radians per position: base ** (-2i / head_dim) (RoFormer, arXiv:2104.09864)."""
    return base ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)


def stretched(frequencies: jax.Array, factor: float, low: float, high: float, length: int) -> jax.Array:
    """Llama 3.1's frequencies for contexts `factor` times as long as the `length` of pretraining: those with fewer than `low` turns
    in `length` are divided by the factor, those with more than `high` are unchanged, those between are interpolated (Llama 3,
    arXiv:2407.21783; formula: apply_scaling in github.com/meta-llama/llama-models)."""
    turns = length * frequencies / (2 * math.pi)
    stay = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (stay + (1 - stay) / factor)


def rope_table(positions_BS: jax.Array, frequencies: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), each float32 [B, S, 1, K/2], of position * frequency.

    Positions and angles are float32: bfloat16 does not distinguish all positions above 256.
    """
    angles = positions_BS.astype(jnp.float32)[:, :, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BSHK: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates (x[i], x[i + K/2]) by angle i: the half-split layout of Llama in Hugging Face, not neighbouring pairs."""
    cos, sin = table
    a, b = jnp.split(x_BSHK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BSHK.dtype)


def check_rate(name: str, rate: float) -> None:
    """Raises ValueError for a positive dropout rate for which 1 - rate, the probability of keeping an element, is 1 in float32."""
    if 0 < rate <= 2.0**-25:
        raise ValueError(f"{name}={rate}: must be 0, or above 2.98e-8, as 1 less it is 1 in float32")


def dropout(keys_B: jax.Array, x: jax.Array, rate: float) -> jax.Array:
    """Zeroes elements of x [B, ...] with probability `rate` and scales the rest; one key per row, so that a row's mask
    depends on neither its index in the batch nor the mesh."""
    keep = jax.vmap(lambda k: jax.random.bernoulli(k, 1 - rate, x.shape[1:]))(keys_B)
    keep = checkpoint_name(keep, "dropout")
    return jnp.where(keep, x / (1 - rate), jnp.zeros((), x.dtype)).astype(x.dtype)
