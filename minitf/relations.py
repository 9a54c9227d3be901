"""Relations between settings: what no limit of a single one says. `cfg` is a config.Config."""

from typing import Any

from minitf import checks, settings
from minitf.checks import INT32
from minitf.model.attention import sizes
from minitf.model.loss import LossConfig
from minitf.model.mlp import MLP
from minitf.model.routers import ROUTERS
from minitf.model.transformer import POSITIONS, places
from minitf.text import SampleConfig
from minitf.training.optimizer import SCHEDULES


def validate(cfg: Any) -> None:
    """Raises ValueError for the first invalid setting or combination, before JAX starts."""
    check_lengths(cfg)
    checks.check(cfg)
    m, a, o, mesh = cfg.model, cfg.model.attention, cfg.optimizer, cfg.mesh
    if cfg.batch_size % cfg.accumulation:
        raise ValueError(f"batch_size={cfg.batch_size}: not divisible by accumulation={cfg.accumulation}")
    if m.dim % cfg.loss.passes:
        raise ValueError(f"model.dim={m.dim}: not divisible by loss.passes={cfg.loss.passes}")
    if mesh.collectives == "manual" and (mesh.tensor, mesh.dcn_tensor) != (1, 1):
        raise ValueError(
            f"mesh.collectives=manual: knows the axes data, fsdp and expert, and not mesh.tensor={mesh.tensor}, "
            f"mesh.dcn_tensor={mesh.dcn_tensor}; set both to 1, or mesh.collectives=auto"
        )
    H, G, K = sizes(a, m.dim)
    if a.head_dim is None and m.dim % H:
        raise ValueError(
            f"model.dim={m.dim}: not divisible by model.attention.num_heads={H}; else set model.attention.head_dim"
        )
    if H % G:
        raise ValueError(f"model.attention.num_heads={H}: not divisible by model.attention.num_kv_heads={G}")
    if POSITIONS[m.positions].frequencies is not None and K % 2:
        derived = " (model.dim / model.attention.num_heads)" if a.head_dim is None else ""
        raise ValueError(
            f"model.attention.head_dim={K}{derived}: model.positions={m.positions} turns pairs, so it must be even"
        )
    if not a.qk_norm and a.qk_norm_over != "head":
        raise ValueError(
            f"model.attention.qk_norm_over={a.qk_norm_over} has no effect with model.attention.qk_norm=False"
        )
    if a.rope_low_freq_factor >= a.rope_high_freq_factor:
        raise ValueError(
            f"model.attention.rope_low_freq_factor={a.rope_low_freq_factor}: must be below "
            f"rope_high_freq_factor={a.rope_high_freq_factor}"
        )
    if m.max_seq_len is not None and cfg.seq_len > m.max_seq_len:
        raise ValueError(f"seq_len={cfg.seq_len}: longer than model.max_seq_len={m.max_seq_len}")
    check_experts(cfg)
    check_narrow(cfg)
    if "end_learning_rate" in SCHEDULES[o.schedule].reads and o.end_learning_rate > o.learning_rate:
        raise ValueError(
            f"optimizer.end_learning_rate={o.end_learning_rate}: must be at most optimizer.learning_rate={o.learning_rate}: a "
            "rate that decays does not rise"
        )
    if cfg.data.mixture is not None and cfg.epochs is not None:
        raise ValueError(f"epochs={cfg.epochs}: each store of data.mixture has its own epochs; set steps or tokens")
    if cfg.checkpoint.keep_best is not None and cfg.eval_every is None:
        raise ValueError(f"checkpoint.keep_best={cfg.checkpoint.keep_best} has no effect where eval_every=None")
    if cfg.sample_every is None:
        unused = settings.flat(SampleConfig())
        for name, value in settings.flat(cfg.sample).items():
            if value != unused[name]:
                raise ValueError(f"sample.{name}={value!r} has no effect where sample_every=None")
    if cfg.steps is not None:
        check_length(cfg, cfg.steps)


def check_experts(cfg: Any) -> None:
    """Raises ValueError for settings of a mixture of experts that do not fit together, or have no effect."""
    m, unused = cfg.model.mlp, LossConfig()
    router = ROUTERS[m.router]
    of_mixtures = ("balance", "router_z") if m.router == "none" else ()
    for name in (*of_mixtures, *(() if router.biased else ("bias_rate",))):
        if getattr(cfg.loss, name) != getattr(unused, name):
            raise ValueError(f"loss.{name}={getattr(cfg.loss, name)} has no effect with model.mlp.router={m.router}")
    if m.router == "none":
        return
    if MLP[m.kind].gate is None:
        gated = ", ".join(name for name, kind in MLP.items() if kind.gate is not None)
        raise ValueError(
            f"model.mlp.kind={m.kind}: experts are MLPs with a gate (model.mlp.router={m.router}): {gated}"
        )
    if m.bias:
        raise ValueError(f"model.mlp.bias={m.bias}: experts have no biases (model.mlp.router={m.router})")
    if m.experts_per_token > m.experts:
        raise ValueError(f"model.mlp.experts_per_token={m.experts_per_token}: there are model.mlp.experts={m.experts}")
    if m.experts % m.groups:
        raise ValueError(f"model.mlp.experts={m.experts}: not divisible by model.mlp.groups={m.groups}")
    if m.groups_per_token > m.groups:
        raise ValueError(f"model.mlp.groups_per_token={m.groups_per_token}: there are model.mlp.groups={m.groups}")
    if (n := m.experts // m.groups * m.groups_per_token) < m.experts_per_token:
        raise ValueError(
            f"model.mlp.experts_per_token={m.experts_per_token}: model.mlp.groups_per_token={m.groups_per_token} of "
            f"model.mlp.groups={m.groups} groups have {n} experts"
        )
    found = {place.mlp.router != "none" for place in places(cfg.model)}
    if True not in found:
        raise ValueError(
            f"model.mlp.router={m.router}: none of model.num_layers={cfg.model.num_layers} layers has a mixture with "
            f"model.mlp.dense_first={m.dense_first} and model.mlp.every={m.every}"
        )
    if m.dense_hidden is not None and False not in found:
        raise ValueError(f"model.mlp.dense_hidden={m.dense_hidden} has no effect where every layer has a mixture")


def check_narrow(cfg: Any) -> None:
    """Raises ValueError for a factor that is used in a narrower dtype than float32 and is out of its limits there."""
    o = cfg.optimizer
    first = ["b1", "muon_momentum", *(["b2"] if o.kind == "lion" else [])]  # factors of the moment in moment_dtype
    used = {"model.embedding_scale": cfg.model.dtype, **{f"optimizer.{n}": o.moment_dtype for n in first}}
    for field in settings.fields(type(cfg)):
        if field.name in used:
            checks.check_value(field.name, settings.flat(cfg)[field.name], field, used[field.name])


# ---- the length of the run


def check_lengths(cfg: Any) -> None:
    """Raises ValueError unless exactly one of steps, tokens and epochs is set."""
    lengths = {n: getattr(cfg, n) for n in ("steps", "tokens", "epochs")}
    if sum(v is not None for v in lengths.values()) != 1:
        text = ", ".join(f"{n}={v}" for n, v in lengths.items())
        raise ValueError(
            f"{text}: exactly one sets the length of the run; set the others to None (--config.steps=None)"
        )


def check_length(cfg: Any, steps: int) -> None:
    """Raises ValueError if the run is too long, or if warm-up, decay or profile do not fit into it."""
    o = cfg.optimizer
    if steps > INT32:
        raise ValueError(f"steps={steps}: must be at most {INT32}, as they are counted in 32 bits")
    if cfg.profile is not None and sum(cfg.profile) - 1 > steps:
        start, n = cfg.profile
        raise ValueError(f"profile={start},{n}: ends with step {start + n - 1}, and the run has {steps}")
    if steps == 0:
        return
    if o.warmup_steps > steps:
        raise ValueError(f"optimizer.warmup_steps={o.warmup_steps}: longer than the run of {steps} steps")
    if steps == 1 and o.warmup_steps:
        raise ValueError(
            f"optimizer.warmup_steps={o.warmup_steps}: must be 0 in a run of one step, as the first update of a warm-up has rate 0: "
            "nothing would be trained"
        )
    if o.decay_steps is not None:
        after = steps - o.warmup_steps
        constraint = (
            f"from 1 to {after}, the steps after warm-up" if after else "None where the warm-up takes all steps"
        )
        if not 1 <= o.decay_steps <= after:
            raise ValueError(f"optimizer.decay_steps={o.decay_steps}: must be {constraint}")
