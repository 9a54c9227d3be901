"""Trains a model: python -m minitf.train --config configs/tiny.py [--workdir DIR] [--config.NAME=VALUE ...]"""

import argparse
import contextlib
import dataclasses
import functools
import math
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import minitf
from minitf import config as config_lib
from minitf import params as P
from minitf import run, sharding
from minitf.config import Config
from minitf.data import pipeline
from minitf.data.store import DataError, Rows
from minitf.distributed import stop_on_signals
from minitf.metrics import MetricWriter, group_of, peak_flops
from minitf.model import attention
from minitf.model.loss import loss_sums, mean
from minitf.model.transformer import flops_per_token, hidden, model_params, pattern
from minitf.optimizer import make_optimizer, make_schedule
from minitf.state import TrainState, abstract_state, init_state, state_shardings

Batch = dict[str, jax.Array]
INTERRUPTED, NONFINITE = 3, 4  # exit statuses


# ---- one step


def dropout_keys(cfg: Config, step: jax.Array, rows: jax.Array) -> jax.Array | None:
    """One key for each row of the global batch: a function of seed, step and row alone."""
    if not (cfg.model.dropout or cfg.model.attention.dropout):
        return None
    key = jax.random.fold_in(jax.random.key(cfg.seed), zlib.crc32(b"dropout"))
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, step), rows)


def batch_sums(params: Any, batch: Batch, cfg: Config, keys: jax.Array | None = None) -> dict[str, jax.Array]:
    """Weighted sums of losses over a batch."""
    positions, segments = batch.get("positions"), batch.get("segments")
    x = hidden(params, batch["inputs"], cfg.model, positions=positions, segments=segments, dropout_keys=keys)
    return loss_sums(params, x, batch["targets"], batch["weights"], cfg.model, cfg.loss.chunk)


def accumulated(f: Callable[[Batch], Any], batch: Batch, parts: int) -> Any:
    """The sum of f over `parts` microbatches, one after the other. Microbatch i takes rows i, i + parts, ..., so that each
    device works on its own rows."""
    if parts == 1:
        return f(batch)
    micro = jax.tree.map(lambda a: a.reshape(a.shape[0] // parts, parts, *a.shape[1:]).swapaxes(0, 1), batch)
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(f, jax.tree.map(lambda a: a[0], micro)))
    total, _ = jax.lax.scan(lambda total, b: (jax.tree.map(jnp.add, total, f(b)), None), zero, micro)
    return total


def gradients(params: Any, batch: Batch, step: jax.Array, cfg: Config) -> tuple[dict[str, jax.Array], Any]:
    """(mean losses, gradient) of the batch: sums over its tokens divided by the sum of its weights, which is known before any
    microbatch is computed, so that neither accumulation nor padding nor the mesh changes them."""
    weight = jnp.sum(batch["weights"])

    def loss_fn(params: Any, micro: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        sums = batch_sums(params, micro, cfg, dropout_keys(cfg, step, micro["rows"]))
        losses = {name: mean(total, weight) for name, total in sums.items()}
        if cfg.loss.z_loss is None:
            del losses["z_loss"]
        return losses["loss"] + (cfg.loss.z_loss or 0.0) * losses.get("z_loss", 0.0), losses

    def part(micro: Batch) -> tuple[dict[str, jax.Array], Any]:
        (_, losses), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, micro)
        return losses, grads

    rows = jnp.arange(batch["inputs"].shape[0])
    return accumulated(part, {**batch, "rows": rows}, cfg.accumulation)


def group_norms(kind: str, tree: Any) -> dict[str, jax.Array]:
    """Norms by group of parameters, tagged `norm/KIND/GROUP`."""
    squares: dict[str, Any] = {}
    for name, leaf in P.named(tree):
        group = group_of(name)
        squares[group] = squares.get(group, 0.0) + jnp.sum(jnp.square(leaf.astype(jnp.float32)))
    return {f"norm/{kind}/{group}": jnp.sqrt(s) for group, s in squares.items()}


def train_step(
    state: TrainState, batch: Batch, *, cfg: Config, tx: optax.GradientTransformation, schedule: optax.Schedule
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimizer step: accumulate, measure the norm, clip, update. An update that is not finite is not applied."""
    losses, grads = gradients(state.params, batch, state.step, cfg)
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(losses["loss"]) & jnp.isfinite(norm)

    def apply(params: Any, opt_state: Any) -> tuple[Any, Any, dict[str, jax.Array]]:
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, group_norms("update", updates)

    def keep(params: Any, opt_state: Any) -> tuple[Any, Any, dict[str, jax.Array]]:
        return params, opt_state, jax.tree.map(jnp.zeros_like, group_norms("update", params))

    params, opt_state, update_norms = jax.lax.cond(finite, apply, keep, state.params, state.opt_state)
    skipped = state.skipped + ~finite
    metrics = {f"train/{name}": value for name, value in losses.items()}
    metrics |= {
        # The optimizer counts the updates that were applied, and so does its schedule.
        "train/learning_rate": schedule(state.step - state.skipped),
        "train/grad_norm": norm,
        "train/skipped_steps": skipped,
        **group_norms("gradient", grads),
        **update_norms,
        **group_norms("parameter", params),
        "finite": finite,
    }
    return TrainState(state.step + 1, skipped, params, opt_state), metrics


# ---- evaluation


def eval_step(params: Any, batch: Batch, byte_lengths: jax.Array | None, *, cfg: Config) -> dict[str, jax.Array]:
    """Sums over a batch: nats, tokens, and bytes of the tokens' text where the tokenizer is known."""
    sums = {"nats": batch_sums(params, batch, cfg)["loss"], "tokens": jnp.sum(batch["weights"])}
    if byte_lengths is not None:
        sums["bytes"] = jnp.sum(byte_lengths[batch["targets"]] * batch["weights"])
    return sums


def evaluate(
    step_fn: Callable[[Any, Batch], dict[str, jax.Array]], params: Any, batches: Iterator[Batch]
) -> dict[str, float]:
    """Loss, perplexity and bits per byte over all tokens of the batches, each counted once. Sums are float64 on the host."""
    totals: dict[str, float] = {}
    for batch in batches:
        for name, value in step_fn(params, batch).items():
            totals[name] = totals.get(name, 0.0) + float(value)
    loss = totals["nats"] / max(totals["tokens"], 1)
    values = {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}
    if totals.get("bytes"):
        values["eval/bits_per_byte"] = totals["nats"] / math.log(2) / totals["bytes"]
    return values


# ---- a run


class Job(NamedTuple):
    """Everything that is decided before the first compilation."""

    cfg: Config  # resolved
    steps: int
    rows: int  # of the training split
    corpus: pipeline.Corpus
    mesh: jax.sharding.Mesh
    specs: Any


def check_mesh(cfg: Config, mesh: jax.sharding.Mesh, specs: Any) -> None:
    """Raises ValueError where a size does not divide by the mesh, naming setting, axis and sizes; and where the attention
    that the config names cannot run here."""
    sharding.check_divisible(specs, mesh)
    shards = sharding.batch_shards(mesh)
    if cfg.batch_size % (shards * cfg.accumulation):
        raise ValueError(
            f"batch_size={cfg.batch_size}: not divisible by accumulation={cfg.accumulation} times the {shards} devices of the "
            f"mesh axes data={mesh.shape['data']} and fsdp={mesh.shape['fsdp']}"
        )
    implementation(cfg, mesh)


def implementation(cfg: Config, mesh: jax.sharding.Mesh) -> str:
    """The attention implementation of the training step. Raises ValueError where the chosen one cannot run."""
    a = cfg.model.attention
    return attention.choose(
        a.implementation,
        jax.default_backend(),
        dtype=cfg.model.dtype,
        softcap=a.softcap is not None,
        dropout=bool(cfg.model.dropout if a.dropout is None else a.dropout),
        segments=cfg.data.isolate_documents,
        devices=mesh.size,
    )


def prepare(cfg: Config, devices: list | None = None) -> Job:
    """Loads the data, makes the mesh (over all devices if None) and declares the model. Raises ValueError for all that a
    user can mend."""
    try:
        corpus = pipeline.load(cfg.data, cfg.model.vocab_size)
    except (OSError, RuntimeError) as e:  # a file that cannot be read, a home that does not exist
        raise ValueError(f"data.path={cfg.data.path}: {e}") from None
    vocab_size = cfg.model.vocab_size or corpus.train.vocab_size
    model = dataclasses.replace(cfg.model, vocab_size=vocab_size, max_seq_len=cfg.model.max_seq_len or cfg.seq_len)
    cfg = dataclasses.replace(cfg, model=model)
    rows = len(Rows(corpus.train, cfg.seq_len, isolate=cfg.data.isolate_documents))
    if cfg.eval_every is not None:
        try:
            Rows(corpus.val, cfg.seq_len, isolate=cfg.data.isolate_documents, tail=True)
        except ValueError as e:
            raise ValueError(f"{e}; name one by data.val_path, or set eval_every=None") from None
    steps = config_lib.total_steps(cfg, rows)
    config_lib.check_length(cfg, steps)
    mesh = sharding.make_mesh(cfg.mesh, devices)
    specs = model_params(model)
    check_mesh(cfg, mesh, specs)
    return Job(cfg, steps, rows, corpus, mesh, specs)


def describe(job: Job) -> str:
    """What a run says before it compiles."""
    cfg, corpus, mesh = job.cfg, job.corpus, job.mesh
    count = P.count(job.specs)
    chosen = implementation(cfg, mesh)
    kind, axes = mesh.devices.flat[0].device_kind, ", ".join(f"{a}={n}" for a, n in mesh.shape.items())
    lines = [
        f"minitf {minitf.__version__}, JAX {jax.__version__}, devices: {mesh.size} x {kind}, mesh {axes}",
        f"data {cfg.data.kind}: {corpus.size:,} bytes, sha256 {corpus.sha256[:16]}, {len(corpus.train):,} training and "
        f"{len(corpus.val):,} validation tokens, {job.rows:,} rows of {cfg.seq_len}",
        f"attention {', '.join(pattern(cfg.model))}: {chosen} (model.attention.implementation={cfg.model.attention.implementation})",
        sharding.table(job.specs, mesh),
        f"parameters: {count['total']:,} ({count['embedding']:,} embedding, {count['non_embedding']:,} non-embedding)",
        f"training for {job.steps:,} steps of {cfg.batch_size} x {cfg.seq_len} tokens, "
        f"logits of shape [{cfg.batch_size},{cfg.seq_len},{cfg.model.vocab_size}]",
    ]
    if job.rows < cfg.batch_size:
        lines.append(
            f"warning: {job.rows} training rows are fewer than batch_size={cfg.batch_size}: a batch repeats rows"
        )
    return "\n".join(lines)


class Program(NamedTuple):
    """A job's functions, jitted. They run inside `surroundings`."""

    state: TrainState  # of jax.ShapeDtypeStruct with shardings: what init gives
    init: Callable[[jax.Array], TrainState]  # (key): born sharded, never whole on one device
    step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]  # gives the state's buffers away
    evaluate: Callable[[Any, Batch], dict[str, jax.Array]]


def program(job: Job) -> Program:
    cfg, tokenizer = job.cfg, job.corpus.tokenizer
    schedule = make_schedule(cfg.optimizer, job.steps)
    tx = make_optimizer(cfg.optimizer, job.specs, schedule)
    layout = state_shardings(job.specs, tx, job.mesh)
    lengths = None
    if tokenizer is not None:
        lengths = jnp.pad(tokenizer.byte_lengths, (0, cfg.model.vocab_size - tokenizer.vocab_size))
    state = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract_state(job.specs, tx), layout
    )
    init = functools.partial(init_state, specs=job.specs, tx=tx)
    step = functools.partial(train_step, cfg=cfg, tx=tx, schedule=schedule)
    # On a CPU, optimising the random numbers of the start takes longer than compiling the step, and gives other last bits on
    # other meshes.
    options = {"xla_backend_optimization_level": 1} if jax.default_backend() == "cpu" else None
    return Program(
        state,
        jax.jit(init, out_shardings=layout, compiler_options=options),
        jax.jit(step, donate_argnums=0, out_shardings=(layout, None)),
        jax.jit(functools.partial(eval_step, byte_lengths=lengths, cfg=cfg)),
    )


@contextlib.contextmanager
def surroundings(job: Job) -> Iterator[None]:
    """The mesh, and products in float32 where the config asks for float32: TPUs and GPUs would use fewer bits."""
    with (
        jax.set_mesh(job.mesh),
        jax.default_matmul_precision("highest" if job.cfg.model.dtype == "float32" else "default"),
    ):
        yield


def training_batches(job: Job, start: int = 0) -> Iterator[Batch]:
    """The global batches from number `start` on."""
    cfg = job.cfg
    rows = pipeline.training_rows(job.corpus.train, cfg.seq_len, cfg.data, cfg.seed)
    return pipeline.batches(rows, cfg.batch_size, sharding.batch_sharding(job.mesh), cfg.data, start)


def evaluation_batches(job: Job) -> Iterator[Batch]:
    cfg = job.cfg
    rows = pipeline.evaluation_rows(job.corpus.val, cfg.seq_len, cfg.data, cfg.batch_size, cfg.eval_batches)
    return pipeline.batches(rows, cfg.batch_size, sharding.batch_sharding(job.mesh), cfg.data)


class NonFinite(Exception):
    """A loss or gradient that is not finite where the config says to stop."""


def train(job: Job, workdir: Path) -> int:
    """Trains to the last step and returns the exit status; metrics and logs go to the work directory."""
    cfg = job.cfg
    tokens_a_step = cfg.batch_size * cfg.seq_len
    flops = flops_per_token(cfg.model, job.specs, cfg.seq_len)
    functions = program(job)

    with surroundings(job), stop_on_signals() as stop:
        state = functions.init(jax.random.key(cfg.seed))
        batches = training_batches(job)
        writer = MetricWriter(workdir, job.steps)
        try:
            writer.text("config", config_lib.to_json(cfg))
            writer.write(0, {f"params/{name}": n for name, n in P.count(job.specs).items()})
            if job.steps == 0:
                writer.say("0 steps: nothing to train")
                return 0
            peak = peak_flops(list(job.mesh.devices.flat), cfg.model.dtype)

            batch = next(batches)
            start = time.perf_counter()
            step_fn = functions.step.lower(state, batch).compile()  # once: a batch of another shape would be an error
            compile_time = time.perf_counter() - start
            writer.say(f"compiled in {compile_time:.1f} s")

            since, waited, last = time.perf_counter(), 0.0, 0

            def finish(step: int, metrics: dict[str, jax.Array]) -> None:
                """Reads a step's metrics, which waits for it, and logs them where due."""
                nonlocal since, waited, last
                if not metrics.pop("finite"):
                    where = f"step {step}: loss {float(metrics['train/loss'])}, gradient norm {float(metrics['train/grad_norm'])}"
                    if cfg.optimizer.nonfinite == "stop":
                        raise NonFinite(
                            f"{where}; this update was not applied. optimizer.nonfinite=skip would go on without it"
                        )
                    writer.say(f"{where}: skipped")
                writer.progress(step)
                if step % cfg.log_every and step != job.steps:
                    return
                now = time.perf_counter()
                step_time = (now - since) / (step - last)
                values = jax.device_get(metrics) | {
                    "train/tokens_seen": step * tokens_a_step,
                    "perf/step_time_s": step_time,
                    "perf/tokens_per_s": tokens_a_step / step_time,
                    "perf/mfu": flops * tokens_a_step / step_time / peak,
                    "perf/data_wait_frac": waited / (now - since),
                }
                if last == 0:
                    values["perf/compile_time_s"] = compile_time
                writer.write(step, values)
                since, waited, last = now, 0.0, step

            pending = None
            for step in range(1, job.steps + 1):
                state, metrics = step_fn(state, batch)
                if pending is not None:
                    finish(*pending)  # the step before: reading this one now would stall the device
                pending = (step, metrics)
                if step < job.steps:
                    began = time.perf_counter()
                    batch = next(batches)
                    waited += time.perf_counter() - began
                stopping = stop.signal  # read once: it may change at any time
                due = cfg.eval_every is not None and (step % cfg.eval_every == 0 or step == job.steps)
                if due or stopping or step == job.steps:
                    finish(*pending)
                    pending = None
                if due:
                    began = time.perf_counter()
                    writer.write(step, evaluate(functions.evaluate, state.params, evaluation_batches(job)))
                    since += time.perf_counter() - began
                if stopping and step < job.steps:
                    writer.say(f"stopped by {stopping} after step {step} of {job.steps}")
                    return INTERRUPTED
            return 0
        except NonFinite as e:
            writer.close()
            print(f"error: not finite at {e}", file=sys.stderr)
            return NONFINITE
        finally:
            writer.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m minitf.train",
        description="Trains a decoder-only language model.",
        epilog="--config.NAME=VALUE changes a setting, as in --config.model.num_layers=8; --print_config shows them all. "
        "Exit status: 0 done, 1 failure, 2 a mistake in settings or data, 3 stopped by a signal, 4 loss not finite.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="a Python file with get_config()")
    parser.add_argument(
        "--workdir", metavar="DIR", help="where the run is kept (default: runs/NAME of the config file)"
    )
    parser.add_argument(
        "--print_config", action="store_true", help="print the settings after overrides as JSON, and stop"
    )
    parser.add_argument("--overwrite", action="store_true", help="start anew in a work directory that holds a run")
    try:
        args, cfg = config_lib.parse_args(sys.argv[1:] if argv is None else argv, parser)
        if args.print_config:
            print(config_lib.to_json(cfg), end="")
            return 0
        workdir = run.resolve(args.workdir or f"runs/{Path(args.config.partition(':')[0]).stem}")
        run.check_free(workdir, args.overwrite)
        job = prepare(cfg)
        print(describe(job))
        run.create(workdir, config_lib.to_json(job.cfg))
    except ValueError as e:
        config_lib.fail(str(e))
    print(f"work directory {workdir}; watch it with: tensorboard --logdir {workdir}", flush=True)
    try:
        return train(job, workdir)
    except DataError as e:
        config_lib.fail(str(e))


if __name__ == "__main__":
    sys.exit(main())
