"""Products of sorted rows with one matrix per group of rows: the products of a mixture with its experts' weights."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from minitf.tables import Kind


def reference_product(x_ND: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    rows, ends = jnp.arange(len(x_ND))[:, None], jnp.cumsum(sizes_E)
    own_NE = (rows < ends) & (rows >= ends - sizes_E)
    all_NEF = jnp.einsum("nd,edf->nef", x_ND, w_EDF.astype(x_ND.dtype))
    return jnp.sum(jnp.where(own_NE[..., None], all_NEF, 0), axis=1)


def ragged_product(x_ND: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x_ND, w_EDF.astype(x_ND.dtype), sizes_E, preferred_element_type=x_ND.dtype)


def megablox_product(x_ND: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Tiles are as large as a TPU's scratch memory allows; of fewer rows in small groups, as each group computes tiles of its own."""
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    rows, most = max(128, min(512, 1 << (len(x_ND) // (8 * len(w_EDF))).bit_length())), 2048 // x_ND.dtype.itemsize
    even = lambda n: -(-n // (-(-n // most) * 128)) * 128  # as many tiles as of `most`
    tiling = lambda _, inputs, outputs: (rows, even(inputs), even(outputs))
    x = jnp.pad(x_ND, ((0, -len(x_ND) % rows), (0, 0)))
    return gmm(x, w_EDF.astype(x.dtype), sizes_E, x.dtype, tiling, interpret=interpret)[: len(x_ND)]


# ---- blocks of rows, in a loop over as many as there are


def over_blocks(f: Callable, result: Any, rows: int, sizes_E: jax.Array) -> Any:
    """Folds f: (result, group, reader of a block's rows, whether each row is the block's own [R, 1], its first row) -> result. Blocks
    have a power of two near a fourth of a group's mean number of rows, from 8 to 256."""
    R = min(rows, max(8, min(256, 1 << (rows // (4 * len(sizes_E))).bit_length())))
    blocks_E = -(-sizes_E // R)
    ends, until = jnp.cumsum(sizes_E), jnp.cumsum(blocks_E)

    def block(i: jax.Array, result: Any) -> Any:
        e = jnp.sum(until <= i)
        begin = ends[e] - sizes_E[e] + (i - until[e] + blocks_E[e]) * R
        first = jnp.minimum(begin, rows - R)  # the last block begins earlier, with rows that are not its own
        at = first + jnp.arange(R)[:, None]
        return f(result, e, lambda x: jax.lax.dynamic_slice_in_dim(x, first, R), (at >= begin) & (at < ends[e]), first)

    return jax.lax.fori_loop(0, until[-1], block, result)


def block_product(x_ND: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, *, transposed: bool = False) -> jax.Array:
    """x @ w[e] for the rows of each group; `transposed`: x [N, F] @ w[e].T. Only the matrices of groups that have rows are read."""
    dims = ((1,), (1 if transposed else 0,)), ((), ())

    def one(y: jax.Array, e: jax.Array, read: Callable, own: jax.Array, first: jax.Array) -> jax.Array:
        w = jax.lax.dynamic_index_in_dim(w_EDF, e, keepdims=False).astype(x_ND.dtype)
        new = jax.lax.dot_general(read(x_ND), w, dims, preferred_element_type=x_ND.dtype)
        return jax.lax.dynamic_update_slice_in_dim(y, jnp.where(own, new, read(y)), first, 0)

    zero = jnp.zeros((len(x_ND), w_EDF.shape[1 if transposed else 2]), x_ND.dtype)
    return over_blocks(one, zero, len(x_ND), sizes_E)


blocks_product = jax.custom_vjp(lambda x_ND, w_EDF, sizes_E: block_product(x_ND, w_EDF, sizes_E))


def blocks_product_bwd(kept, g):
    x, w, sizes = kept

    def one(dw, e, read, own, first):
        x_RD, g_RF = (jnp.where(own, read(a), 0) for a in (x, g))
        return dw.at[e].add(jnp.einsum("rd,rf->df", x_RD, g_RF, preferred_element_type=jnp.float32))

    dw = over_blocks(one, jnp.zeros(w.shape, jnp.float32), len(x), sizes)
    return block_product(g, w, sizes, transposed=True), dw.astype(w.dtype), None


blocks_product.defvjp(lambda x, w, sizes: (block_product(x, w, sizes), (x, w, sizes)), blocks_product_bwd)


class GroupedKind(NamedTuple):
    """A way to compute x_ND @ w_EDF[e], where the first sizes_E[0] rows of x are of group 0, the next sizes_E[1] of group 1 ...
    Results of rows beyond all groups, and gradients of x there, are undefined; such rows do not change the gradient of w."""

    meaning: str
    apply: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # (x_ND, w_EDF, sizes_E) -> [N, F] in x's dtype
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")


GROUPED = {
    "reference": GroupedKind("every matrix with every row: E times the work", reference_product),
    "blocks": GroupedKind("blocks of rows, in a loop", blocks_product),
    "megablox": GroupedKind("JAX's Pallas kernel, on TPUs", megablox_product, ("tpu",)),
    "ragged": GroupedKind("jax.lax.ragged_dot, on CPUs and GPUs with E times the work", ragged_product),
}
BEST = {"cpu": "blocks", "gpu": "blocks", "tpu": "megablox"}  # platform -> what "auto" is there
GROUPED_CHOICES = {"auto": Kind("megablox on TPUs, blocks elsewhere"), **GROUPED}
