"""The description of a run that is printed before it compiles."""

import math
from typing import Any

import jax
import jax.numpy as jnp

import minitf
from minitf.data.tokenizer_files import lost_note
from minitf.job import Job, implementation
from minitf.model.choose import grouped_for
from minitf.model.transformer import ModelConfig, pattern, places
from minitf.params import count_params, named
from minitf.runtime.terminal import columns
from minitf.sharding.devices import host_count, mesh_shape
from minitf.sharding.mesh import MeshConfig, mesh_settings, mesh_sizes
from minitf.sharding.rules import mesh_axes, partition, settings_of


def describe_mesh(cfg: MeshConfig, mesh: jax.sharding.Mesh) -> str:
    """Sizes of the axes, factors of fsdp, and factors of the axes across hosts."""
    devices = list(mesh.devices.flat)
    text = ", ".join(f"{a}={n}" for a, n in mesh_sizes(mesh).items())
    if mesh.shape["fsdp_inner"] > 1:
        text += f"; fsdp as {mesh.shape['fsdp']} x {mesh.shape['fsdp_inner']}"
    if (n := host_count(devices)) > 1:
        _, across = mesh_shape(cfg, len(devices), n)
        kind = "slices" if devices[0].platform == "tpu" else "hosts"
        text += f"; across {n} {kind}: " + ", ".join(
            f"{a}={f}" for a, f in zip(mesh_settings(), across, strict=True) if f > 1
        )
    return text


def parameter_table(specs: Any, mesh: jax.sharding.Mesh) -> str:
    """Table of the parameters: name, shape, dtype, partition, bytes per device."""
    rows = [("parameter", "shape", "dtype", "partition", "bytes/device")]
    total = 0
    for name, p in named(specs):
        local = jax.sharding.NamedSharding(mesh, partition(p)).shard_shape(p.full_shape)
        n = math.prod(local) * jnp.dtype(p.dtype).itemsize
        total += n
        spec = ", ".join(" x ".join(settings_of(axes, mesh)) or "-" for axes in mesh_axes(p))
        rows.append((name, "x".join(map(str, p.full_shape)), p.dtype, f"({spec})", f"{n:,}"))
    rows.append(("total", "", "", "", f"{total:,}"))
    return "\n".join(columns(rows, left=4))


def mixtures(cfg: ModelConfig, mesh: jax.sharding.Mesh) -> list[str]:
    """A line on the model's mixtures of experts, if it has any."""
    m, layers = cfg.mlp, [n for place in places(cfg) if place.mlp.router != "none" for n in place.layers]
    if not layers:
        return []
    shared = f" and {m.shared} shared" if m.shared else ""
    return [
        f"mixtures in {len(layers)} of {cfg.num_layers} layers: {m.experts_per_token} of {m.experts} experts{shared}, router "
        f"{m.router}: {grouped_for(cfg, mesh)} (model.mlp.grouped={m.grouped})"
    ]


def describe(job: Job) -> str:
    """Versions, devices, mesh, data, attention kernel, parameters and length of a run, as text."""
    cfg, corpora, mesh = job.cfg, job.corpora, job.mesh
    count = count_params(job.specs)
    chosen = implementation(cfg, mesh)
    kind, processes = mesh.devices.flat[0].device_kind, jax.process_count()
    active = "" if count["active"] == count["total"] else f"; a token uses {count['active']:,}"
    several = f" in {processes} processes" if processes > 1 else ""
    lines = [
        f"minitf {minitf.__version__}, JAX {jax.__version__}, devices: {mesh.size} x {kind}{several}, mesh "
        f"{describe_mesh(cfg.mesh, mesh)}",
        f"data {cfg.data.kind}: {sum(c.size for c in corpora):,} bytes, sha256 {job.sha256[:16]}, "
        f"{sum(len(c.train) for c in corpora):,} training and {sum(len(c.val) for c in corpora):,} validation tokens, "
        f"{job.rows:,} rows of {cfg.seq_len}",
        *(f"  {corpus.note}" for corpus in corpora if corpus.note),
        *(
            f"  {weight:g} of {corpus.name}: {len(corpus.train):,} training tokens"
            for corpus, (_, weight) in zip(corpora, cfg.data.mixture or (), strict=False)
        ),
        f"attention {', '.join(pattern(cfg.model))}: {chosen} (model.attention.implementation={cfg.model.attention.implementation})",
        *mixtures(cfg.model, mesh),
        parameter_table(job.specs, mesh),
        f"parameters: {count['total']:,} ({count['embedding']:,} embedding, {count['non_embedding']:,} non-embedding{active})",
        f"training for {job.steps:,} steps of {cfg.batch_size} x {cfg.seq_len} tokens, "
        f"logits of shape [{cfg.batch_size},{cfg.seq_len},{cfg.model.vocab_size}]",
    ]
    if cfg.sample_every is not None:
        note = lost_note(job.tokenizer, "".join(cfg.sample.prompts), "sample.prompts")
        lines += [] if note is None else [note]
    if job.rows < cfg.batch_size:
        lines.append(
            f"warning: {job.rows} training rows are fewer than batch_size={cfg.batch_size}: a batch repeats rows"
        )
    return "\n".join(lines)
