"""Which kernel computes attention: decided once, before anything is traced, by the devices and by what its rows ask."""

import dataclasses
from typing import Any

from jax.sharding import Mesh

from minitf.model.attention import sizes
from minitf.model.kernels import AUTO, IMPLEMENTATIONS, Needs, refusal
from minitf.model.transformer import ModelConfig
from minitf.sharding.devices import compute_capability, platform_of
from minitf.sharding.mesh import batch_shards


def choose(implementation: str, platform: str | None, needs: Needs) -> str:
    """The implementation that will run. Raises ValueError where one was named that cannot; only "auto" may choose. `platform` None: it
    is not asked about."""
    if implementation != "auto":
        why = refusal(implementation, platform, needs)
        if why:
            can = [n for n in IMPLEMENTATIONS if not refusal(n, platform, needs)]
            raise ValueError(
                f"model.attention.implementation={implementation}: {why}; these can: {', '.join(['auto', *can])}"
            )
        return implementation
    return next(n for n in AUTO if not refusal(n, platform, needs))


def needs_of(
    cfg: ModelConfig, mesh: Mesh, length: int, *, rows: int | None = None, training: bool = False, **asked: Any
) -> Needs:
    """What rows of `length` queries ask of a kernel on a mesh. rows: of a batch (None: they divide evenly over the devices); training:
    with the model's dropout; asked: further fields of `Needs`."""
    a = cfg.attention
    return Needs(
        dtype=cfg.dtype,
        length=length,
        head_dim=sizes(a, cfg.dim)[2],
        softcap=a.softcap is not None,
        dropout=training and bool(cfg.dropout if a.dropout is None else a.dropout),
        spread=rows is None or rows % batch_shards(mesh) == 0,
        capability=compute_capability(mesh.devices.flat[0]),
        **asked,
    )


def kernel_for(cfg: ModelConfig, mesh: Mesh, length: int, **asked: Any) -> str:
    """The implementation that computes these rows; keywords as of `needs_of`. Raises ValueError where the config names one that
    cannot."""
    return choose(cfg.attention.implementation, platform_of(mesh), needs_of(cfg, mesh, length, **asked))


def with_kernel(cfg: ModelConfig, implementation: str) -> ModelConfig:
    return dataclasses.replace(cfg, attention=dataclasses.replace(cfg.attention, implementation=implementation))


def with_best_kernel(cfg: ModelConfig, mesh: Mesh, length: int, **asked: Any) -> ModelConfig:
    """The model where rows are of another kind than in training: the kernel that was named for it may not know them, and any that can
    is taken. Keywords as of `needs_of`."""
    open_cfg = with_kernel(cfg, "auto")
    return with_kernel(cfg, kernel_for(open_cfg, mesh, length, **asked))
