"""Chooses the kernels of attention and of a mixture's products, once and before tracing, from devices and requirements of rows."""

import dataclasses
from typing import Any

from jax.sharding import Mesh

from minitf.model.attention import sizes
from minitf.model.grouped import BEST, GROUPED
from minitf.model.kernels import AUTO, IMPLEMENTATIONS, Needs, refusal
from minitf.model.transformer import ModelConfig
from minitf.sharding.devices import compute_capability, platform_of
from minitf.sharding.mesh import batch_shards


def choose(implementation: str, platform: str | None, needs: Needs) -> str:
    """The kernel to run: the named one, or for "auto" the first that can. Raises ValueError if the named one cannot. platform None:
    not checked."""
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
    """Requirements of rows of `length` queries on a mesh. rows: batch size (None: divides evenly over the devices); training: the
    model's dropout applies; asked: further fields of `Needs`."""
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
    """The kernel that computes these rows; keywords as in `needs_of`. Raises ValueError if the config names a kernel that
    cannot."""
    return choose(cfg.attention.implementation, platform_of(mesh), needs_of(cfg, mesh, length, **asked))


def grouped_for(cfg: ModelConfig, mesh: Mesh) -> str:
    """How a mixture's products are computed on this mesh. Raises ValueError if the config names a way that its devices lack."""
    name, platform = cfg.mlp.grouped, platform_of(mesh)
    if name == "auto":
        return BEST[platform]
    if platform not in (known := GROUPED[name].platforms):
        can = [n for n, kind in GROUPED.items() if platform in kind.platforms]
        raise ValueError(
            f"model.mlp.grouped={name}: it runs on {' and '.join(known)}, this is {platform}; these can: {', '.join(['auto', *can])}"
        )
    return name


def with_kernels(cfg: ModelConfig, implementation: str, grouped: str) -> ModelConfig:
    attention, mlp = cfg.attention, cfg.mlp
    return dataclasses.replace(
        cfg,
        attention=dataclasses.replace(attention, implementation=implementation),
        mlp=dataclasses.replace(mlp, grouped=grouped),
    )


def with_best_kernels(cfg: ModelConfig, mesh: Mesh, length: int, **asked: Any) -> ModelConfig:
    """The model config with the first kernels that can compute these rows, which differ from those of training: the kernels named for
    training may not support them. Keywords as in `needs_of`."""
    open_cfg = with_kernels(cfg, "auto", "auto")
    return with_kernels(cfg, kernel_for(open_cfg, mesh, length, **asked), grouped_for(open_cfg, mesh))
