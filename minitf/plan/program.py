"""The train step, compiled ahead of time for devices that are not attached."""

import re

import jax

from minitf import config as config_lib
from minitf import job as job_lib
from minitf.config import Config
from minitf.data import pipeline
from minitf.data.datasets import DATASETS
from minitf.data.store import ISOLATED, TOKENS
from minitf.data.tokenizer_files import is_file_name, make_tokenizer
from minitf.plan import topology
from minitf.plan.report import gib
from minitf.sharding.devices import surroundings
from minitf.sharding.mesh import batch_sharding
from minitf.training.step import Batch

# ---- the step, compiled


def vocabulary(cfg: Config) -> int:
    """Vocabulary size of the model, without data. Raises ValueError if it depends on the data."""
    if cfg.model.vocab_size is not None:
        return cfg.model.vocab_size
    d = cfg.data
    if "tokenizer" in DATASETS[d.kind].reads and (d.tokenizer == "bytes" or is_file_name(d.tokenizer)):
        return make_tokenizer(d.tokenizer, []).vocab_size
    raise ValueError(
        f"model.vocab_size=None: follows from the data (data.kind={d.kind}), which a plan does not read; give it by "
        "--config.model.vocab_size=N"
    )


def job_of(cfg: Config, devices: list) -> job_lib.Job:
    """The job on these devices, without data. Raises ValueError if config and devices do not fit."""
    o = cfg.optimizer
    # A length in epochs depends on the data; the compiled step is the same for any length.
    steps = o.warmup_steps + (o.decay_steps or 1) if cfg.epochs is not None else config_lib.total_steps(cfg, 0)
    return job_lib.design(cfg, steps, vocabulary(cfg), devices)


def abstract_batch(job: job_lib.Job) -> Batch:
    """Shapes, dtypes and shardings of a real batch."""
    cfg, layout = job.cfg, batch_sharding(job.mesh)
    fields = ISOLATED if pipeline.has_segments(cfg.data) else TOKENS
    shape = (cfg.batch_size, cfg.seq_len)
    return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=layout) for name, dtype in fields.items()}


class OutOfMemory(Exception):
    """The program does not fit into a device's memory."""

    def __init__(self, needs: float, has: float):
        super().__init__(f"needs {gib(needs)} of {gib(has)}")
        self.needs, self.has = needs, has


BINARY_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
OUT_OF_MEMORY = (  # compilers' messages; groups: number and unit needed, number and unit available
    re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"),
    re.compile(r"Used ([\d.]+)([KMGT]?)i?B? of ([\d.]+)([KMGT]?)i?B? hbm"),
)


def too_large(message: str) -> OutOfMemory | None:
    """OutOfMemory from a compiler's message; None for another message."""
    for pattern in OUT_OF_MEMORY:
        if found := pattern.search(message):
            needs, unit, has, has_unit = found.groups()
            return OutOfMemory(float(needs) * BINARY_UNITS[unit], float(has) * BINARY_UNITS[has_unit])
    return None


def compile_step(job: job_lib.Job) -> tuple[jax.stages.Compiled, job_lib.Program]:
    """(compiled train step, the job's jitted functions). Raises OutOfMemory; ValueError if the compiler refuses the step."""
    functions = job_lib.program(job)
    with surroundings(job.mesh, job.cfg.model.dtype):
        try:
            lowered = functions.step.lower(functions.state, abstract_batch(job))
        except RuntimeError as e:  # JAX looks for cuDNN during tracing
            if "cuDNN" not in str(e):
                raise
            raise ValueError(
                "model.attention.implementation=cudnn: cuDNN is not here (pip install nvidia-cudnn-cu13); a plan with "
                "--config.model.attention.implementation=xla needs more memory than a run with cudnn"
            ) from None
        try:
            return lowered.compile(), functions
        except jax.errors.JaxRuntimeError as e:
            raise too_large(str(e)) or ValueError(
                f"the compiler refuses the train step: {topology.first_line(e)}"
            ) from None
