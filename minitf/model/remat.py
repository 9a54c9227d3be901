"""Rematerialisation: which activations of a block are saved for the backward pass."""

from collections.abc import Callable
from typing import NamedTuple

import jax

policies = jax.checkpoint_policies


def kept(*names: str) -> Callable:
    """Saves values of these names, and what routers chose: another program could choose otherwise between nearly equal scores."""
    return policies.save_only_these_names("router", *names)


class Remat(NamedTuple):
    meaning: str
    # Which values of a block are saved, by their `checkpoint_name`; None: no `jax.checkpoint`.
    policy: Callable | None = None


REMAT = {  # every policy saves a block's input
    "none": Remat("nothing"),
    # Operations between products are cheaper to recompute than to write and read.
    "products": Remat(
        "all but the products with weights and attention's result",
        kept("q", "k", "v", "context", "o", "attention_out", "gate", "up", "down", "dropout"),
    ),
    "full": Remat("all", kept()),
    "dots": Remat(
        "all but the products with weights",
        policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, kept()),
    ),
    "context": Remat("all but attention's result", kept("context")),
    "qkv_context": Remat("all but attention's operands and result", kept("q", "k", "v", "context")),
    "minimal": Remat(
        "all but attention's operands and result and the MLP's first products",
        kept("q", "k", "v", "context", "gate", "up"),
    ),
    "offload": Remat(
        "as qkv_context, but what is saved, a block's input too, lies in host memory",
        policies.save_and_offload_only_these_names(
            names_which_can_be_saved=["router"],
            names_which_can_be_offloaded=["layer_in", "q", "k", "v", "context"],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    ),
}


def rematerialised(f: Callable, remat: str) -> Callable:
    """f, whose backward pass recomputes what the policy `remat` does not save."""
    if (policy := REMAT[remat].policy) is None:
        return f
    # XLA cannot merge the recomputation with the forward pass of a scan, so preventing that would only cost time.
    return jax.checkpoint(f, policy=policy, prevent_cse=False)
