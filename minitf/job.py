"""A config made ready to train: data, mesh and declarations; its jitted functions, its batches, and the metadata of checkpoints."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import minitf
from minitf import config as config_lib
from minitf.config import Config
from minitf.data import datasets, pipeline
from minitf.data import frame as frames
from minitf.data.frame import Frame
from minitf.data.mixture import Phase, with_weights
from minitf.data.tokenizer import Tokenizer
from minitf.model.choose import grouped_for, kernel_for, with_kernels
from minitf.model.transformer import model_params
from minitf.runtime.checkpoint import versions
from minitf.runtime.devices import free_memory
from minitf.runtime.terminal import human
from minitf.sampling import Sampler
from minitf.sharding.devices import make_mesh, platform_of
from minitf.sharding.mesh import AXES, BATCH, batch_sharding, batch_shards, mesh_sizes, replicated
from minitf.sharding.rules import check_divisible
from minitf.text import fixed_prompts
from minitf.training.evaluation import eval_step
from minitf.training.layout import abstract_state, state_shardings
from minitf.training.optimizer import SCHEDULES, make_optimizer, make_schedule
from minitf.training.state import TrainState, first_state, init_state
from minitf.training.step import Batch, train_step
from minitf.workdir import commit, differences


class Job(NamedTuple):
    """Everything that is determined before the first compilation."""

    cfg: Config  # resolved: vocab_size and max_seq_len are set
    steps: int
    rows: int  # number of rows in the training splits
    corpora: tuple[datasets.Corpus, ...]  # one, or those of data.mixture; () if no data were read: see `design`
    mesh: jax.sharding.Mesh
    specs: Any

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.corpora[0].tokenizer if self.corpora else None

    @property
    def frame(self) -> Frame:
        """Frame of the training texts."""
        return pipeline.frame_of_data(self.corpora, self.cfg.data)

    @property
    def sha256(self) -> str:
        """SHA-256 of the data."""
        digests = [c.sha256 for c in self.corpora]
        return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()


def check_mesh(cfg: Config, mesh: jax.sharding.Mesh, specs: Any) -> None:
    """Raises ValueError if the mesh does not divide a dimension or the batch, naming setting, axis and sizes; if the attention kernel
    in the config cannot run on it; or if the compiler refuses an option."""
    check_divisible(specs, mesh)
    shards = batch_shards(mesh)
    if cfg.batch_size % (shards * cfg.accumulation):
        settings = dict.fromkeys(AXES[a].setting for a in BATCH)
        rows = " and ".join(f"{s}={mesh_sizes(mesh)[s]}" for s in settings)
        raise ValueError(
            f"batch_size={cfg.batch_size}: not divisible by accumulation={cfg.accumulation} times the {shards} devices of the "
            f"mesh axes {rows}"
        )
    implementation(cfg, mesh)
    grouped_for(cfg.model, mesh)
    check_options(cfg, mesh)


def options(cfg: Config, mesh: jax.sharding.Mesh) -> dict[str, str] | None:
    """Compiler options for the platform of this mesh; None: defaults."""
    return cfg.compiler_options.of(platform_of(mesh)) or None


def check_options(cfg: Config, mesh: jax.sharding.Mesh) -> None:
    """Raises ValueError with the compiler's message if it refuses an option. Compiles a trivial program, as the step itself is only
    compiled minutes later."""
    given = options(cfg, mesh)
    if given is None:
        return
    x = jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated(mesh))
    try:
        jax.jit(lambda x: x, compiler_options=given).lower(x).compile()
    except jax.errors.JaxRuntimeError as e:
        text = str(e).removeprefix("INVALID_ARGUMENT: ")
        raise ValueError(
            f"compiler_options.{platform_of(mesh)}={' '.join(map('='.join, given.items()))}: {text}"
        ) from None


def implementation(cfg: Config, mesh: jax.sharding.Mesh, *, training: bool = True) -> str:
    """Attention kernel of the train step, or of the eval step if not `training`, on this mesh. Raises ValueError if the kernel in the
    config cannot run."""
    segments = pipeline.has_segments(cfg.data)
    return kernel_for(cfg.model, mesh, cfg.seq_len, training=training, segments=segments)


def design(cfg: Config, steps: int, vocab_size: int, devices: list | None = None) -> Job:
    """The job without data: derived settings, the mesh and the model. devices: None: all; may be only described, as in `minitf.plan`.
    Raises ValueError if config and devices do not fit."""
    model = dataclasses.replace(cfg.model, vocab_size=vocab_size, max_seq_len=cfg.model.max_seq_len or cfg.seq_len)
    cfg = dataclasses.replace(cfg, model=model)
    mesh = make_mesh(cfg.mesh, devices)
    specs = model_params(model)
    check_mesh(cfg, mesh, specs)
    return Job(cfg, steps, 0, (), mesh, specs)


def prepare(cfg: Config, devices: list | None = None, framing: datasets.Framing = frames.of_tokenizer) -> Job:
    """Loads the data, makes the mesh (over all devices if None) and declares the model. Raises ValueError for every mistake of the
    user's."""
    try:
        corpora = datasets.load_all(cfg.data, cfg.model.vocab_size, framing)
    except (OSError, RuntimeError) as e:  # a file that cannot be read, a home that does not exist
        raise ValueError(f"data.path={cfg.data.path}: {e}") from None
    rows = sum(len(pipeline.rows_of(c.train, cfg.seq_len, cfg.data)) for c in corpora)
    if cfg.eval_every is not None:
        try:
            for corpus in corpora:
                pipeline.rows_of(corpus.val, cfg.seq_len, cfg.data, tail=True)
        except ValueError as e:
            raise ValueError(f"{e}; name one by data.val_path, or set eval_every=None") from None
        for corpus in corpora:
            pipeline.check_ids(corpus.val, cfg.seq_len, cfg.data, cfg.batch_size, cfg.eval_batches)
    steps = config_lib.total_steps(cfg, rows)
    config_lib.check_length(cfg, steps)
    vocab_size = cfg.model.vocab_size or corpora[0].train.vocab_size
    job = design(cfg, steps, vocab_size, devices)._replace(rows=rows, corpora=corpora)
    if cfg.sample_every is not None:
        if job.tokenizer is None:
            raise ValueError(
                f"sample_every={cfg.sample_every}: data.kind={cfg.data.kind} has no tokenizer to write text with"
            )
        fixed_prompts(sampler(job), job.tokenizer, job.frame, cfg.sample)
    return job


def sampler(job: Job) -> Sampler:
    return Sampler.of(job.cfg.model, job.mesh, job.tokenizer, job.frame)


# ---- its jitted functions


class Program(NamedTuple):
    """The jitted functions of a job. Call them inside `surroundings`."""

    state: TrainState  # of jax.ShapeDtypeStruct with shardings: the result of init
    init: Callable[[jax.Array], TrainState]  # (key): initialised sharded, never unsharded on one device
    start: Callable[[Any], TrainState]  # (parameters): the first state with these
    step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]  # the state's buffers are donated
    evaluate: Callable[[Any, Batch], dict[str, jax.Array]]


def program(job: Job) -> Program:
    cfg, tokenizer = job.cfg, job.tokenizer
    schedule = make_schedule(cfg.optimizer, job.steps)
    tx = make_optimizer(cfg.optimizer, job.specs, schedule)
    layout = state_shardings(job.specs, tx, job.mesh)
    lengths = None if tokenizer is None else tokenizer.byte_lengths
    if lengths is not None:
        lengths = jnp.pad(lengths, (0, cfg.model.vocab_size - tokenizer.vocab_size))
    state = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract_state(job.specs, tx), layout
    )
    everywhere = replicated(job.mesh)
    init = functools.partial(init_state, specs=job.specs, tx=tx)
    grouped = grouped_for(cfg.model, job.mesh)
    # "auto" is resolved here, from the mesh: its devices may be only described.
    step_cfg, eval_cfg = (
        dataclasses.replace(
            cfg, model=with_kernels(cfg.model, implementation(cfg, job.mesh, training=training), grouped)
        )
        for training in (True, False)
    )
    step = functools.partial(train_step, cfg=step_cfg, tx=tx, schedule=schedule)
    # On CPU, optimising the random initialisation takes longer than compiling the step, and makes the last bits depend on the mesh.
    at_start = {"xla_backend_optimization_level": 1} if platform_of(job.mesh) == "cpu" else None
    given = options(cfg, job.mesh)
    return Program(
        state,
        jax.jit(init, out_shardings=layout, compiler_options=at_start),
        jax.jit(functools.partial(first_state, tx=tx), out_shardings=layout),
        # Metrics are replicated, so that every process can read them.
        jax.jit(step, donate_argnums=0, out_shardings=(layout, everywhere), compiler_options=given),
        jax.jit(
            functools.partial(eval_step, byte_lengths=lengths, cfg=eval_cfg),
            out_shardings=everywhere,
            compiler_options=given,
        ),
    )


class TooLarge(Exception):
    """The step does not fit into device memory."""


LOWER = "batch_size, accumulation (more), model.remat=full, loss.chunk, seq_len, or a mesh of more devices lower it"


def check_memory(step: jax.stages.Compiled, devices: list) -> None:
    """Raises TooLarge if the step needs more memory, beside its arguments, which are already allocated, than is free."""
    found = step.memory_analysis()
    free = [free_memory(d) for d in devices]
    if found is None or None in free:
        return
    needed = found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    # All CPU devices share the host's memory.
    shared = len(devices) if devices[0].platform == "cpu" else 1
    if needed * shared > min(free):
        raise TooLarge(
            f"the step needs {human(needed * shared)}B beside the state, and there are {human(min(free))}B; {LOWER}"
        )


def compiled_step(functions: Program, state: TrainState, batch: Batch, devices: list) -> jax.stages.Compiled:
    """The step compiled for batches of this shape. Raises TooLarge if it does not fit into memory."""
    step = functions.step.lower(state, batch).compile()
    check_memory(step, devices)
    return step


# ---- its batches


def training_batches(
    job: Job, start: int = 0, mixed: list[Phase] | None = None, until: Callable[[], bool] = lambda: False
) -> Iterator[Batch]:
    """Global batches, beginning with number `start`. mixed: see `phases`; None: the phases of a new run. until: see
    `pipeline.batches`."""
    cfg = job.cfg
    stores = [c.train for c in job.corpora]
    rows = pipeline.mixed_rows(stores, phases(job) if mixed is None else mixed, cfg.seq_len, cfg.data, cfg.seed)
    return pipeline.batches(rows, cfg.batch_size, batch_sharding(job.mesh), cfg.data, start, until)


def phases(job: Job, saved: dict[str, Any] | None = None) -> list[Phase]:
    """Phases of a mixture, each with constant weights: those of the checkpoint that the run resumes from, plus one that begins at its
    step if the weights have changed; [] without a mixture."""
    mixture = job.cfg.data.mixture
    if mixture is None:
        return []
    before = [] if saved is None else saved["data"]["mixture"]
    known = [Phase(row, tuple(weights), tuple(taken)) for row, weights, taken in before]
    row = 0 if saved is None else saved["step"] * job.cfg.batch_size
    return with_weights(known, tuple(weight for _, weight in mixture), row)


def evaluation_batches(job: Job, corpus: datasets.Corpus, until: Callable[[], bool] = lambda: False) -> Iterator[Batch]:
    cfg = job.cfg
    rows = pipeline.evaluation_rows(corpus.val, cfg.seq_len, cfg.data, cfg.batch_size, cfg.eval_batches)
    return pipeline.batches(rows, cfg.batch_size, batch_sharding(job.mesh), cfg.data, until=until)


def evaluates_a_part(job: Job) -> bool:
    """Whether evaluations omit rows of a validation split."""
    cfg = job.cfg
    if cfg.eval_every is None or cfg.eval_batches is None:
        return False
    rows = [len(pipeline.rows_of(c.val, cfg.seq_len, cfg.data, tail=True)) for c in job.corpora]
    return max(rows) > cfg.eval_batches * cfg.batch_size


# ---- metadata of checkpoints, and whether a run may resume from one


def position(job: Job, step: int) -> dict[str, Any]:
    """Position in the data: the index of the next global batch, and the facts that define these batches."""
    cfg = job.cfg
    return {
        "next_batch": step,
        "seed": cfg.seed if cfg.data.seed is None else cfg.data.seed,
        "batch_size": cfg.batch_size,
        "seq_len": cfg.seq_len,
        "sha256": job.sha256,
        "tokenizer": None if job.tokenizer is None else job.tokenizer.fingerprint,
    }


def about(job: Job, step: int, mixed: list[Phase], tokens: int, loss: float | None = None) -> dict[str, Any]:
    """Metadata saved with a checkpoint's arrays. tokens: number of targets trained on so far. loss: evaluation loss of this state;
    None: not evaluated."""
    return {
        "evaluation": loss,
        "tokens_seen": tokens,
        "data": position(job, step) | {"mixture": mixed},
        "config": config_lib.stored(job.cfg),
        "mesh": mesh_sizes(job.mesh),
        "processes": jax.process_count(),
        "versions": {"minitf": minitf.__version__, **versions()},
        "commit": commit(),
    }


def check_same_run(job: Job, saved: dict[str, Any]) -> None:
    """Raises ValueError if a checkpoint belongs to a run with other settings or other data."""
    fixed, _ = differences(config_lib.from_stored(saved["config"])[0], job.cfg)
    data, now = saved["data"], position(job, saved["step"])
    # Older checkpoints lack facts that are saved now: these are not compared.
    fixed += [f"data {name}: {data[name]} -> {now[name]}" for name in now if data.get(name, now[name]) != now[name]]
    if fixed:
        raise ValueError(
            f"the checkpoint of step {saved['step']} belongs to another run\n  "
            + "\n  ".join(fixed)
            + "\ngive another --workdir, or --overwrite to start anew in this one"
        )


def schedule_change(job: Job, saved: dict[str, Any], updates: int) -> str | None:
    """Message about the next learning rate, for a run that resumes with another schedule than its checkpoint's; None: same schedule.
    updates: number of updates applied so far."""
    described, rates = [], []
    before = config_lib.from_stored(saved["config"])[0]
    for cfg, steps in ((before, config_lib.total_steps(before, job.rows)), (job.cfg, job.steps)):
        o = cfg.optimizer
        follows = {name: getattr(o, name) for name in ("learning_rate", "warmup_steps", *SCHEDULES[o.schedule].reads)}
        described.append((o.schedule, follows, None if o.schedule == "constant" else steps))
        rates.append(float(make_schedule(o, steps)(updates)))
    if described[0] == described[1]:
        return None
    old, new = (
        f"{rate:.6g} ({d[0]}{'' if d[2] is None else f' over {d[2]} steps'})"
        for d, rate in zip(described, rates, strict=True)
    )
    return f"learning rate of step {saved['step'] + 1}: {old} by the schedule of the checkpoint, {new} by that of now"
