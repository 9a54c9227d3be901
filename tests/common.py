"""What several test files share: the small set-up of the cases, meshes, and a training loop without files."""

import dataclasses
import functools
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.experimental import topologies

from minitf import config, loop, settings
from minitf import job as job_lib
from minitf.config import Config
from minitf.data.datasets import DataConfig
from minitf.model.attention import AttentionConfig
from minitf.model.mlp import MlpConfig
from minitf.model.transformer import ModelConfig, model_params
from minitf.params import init_params, named
from minitf.runtime import lock as lock_lib
from minitf.runtime.checkpoint import CheckpointConfig
from minitf.runtime.log import json_lines
from minitf.sharding import devices as devices_lib
from minitf.sharding.mesh import MeshConfig, batch_sharding
from minitf.training import step as step_lib
from minitf.training.layout import state_shardings
from minitf.training.optimizer import OptimizerConfig, make_optimizer, make_schedule
from minitf.training.state import TrainState
from minitf.workdir import begin, resolve
from tools.parity import change, random_batch, random_params, sizes_of_axes  # noqa: F401  for the tests, as the rest here

ROOT = Path(__file__).resolve().parent.parent

MESHES = {  # name -> sizes of (data, fsdp, tensor), as all meshes of three sizes; of four: (data, fsdp, expert, tensor)
    "1": (1, 1, 1),
    "data8": (8, 1, 1),
    "fsdp8": (1, 8, 1),
    "2x2x2": (2, 2, 2),
    "1x2x4": (1, 2, 4),
}


def slow(cases: Iterable[Any], *, but: Collection[Any] = ()) -> list:
    """Parameters of a test, tuples where it has several: all but a few of them only in the slow suite."""
    values = lambda case: case if isinstance(case, tuple) else (case,)
    return [case if case in but else pytest.param(*values(case), marks=pytest.mark.slow) for case in cases]


# The cases' standard set-up: vocabulary 64, width 16, two blocks, 4 query and 2 key/value heads of size 4.
TINY = Config(
    steps=3,
    batch_size=8,
    seq_len=16,
    log_every=1,
    eval_every=None,
    data=DataConfig(kind="synthetic"),
    checkpoint=CheckpointConfig(every_minutes=None, last=False),
    model=ModelConfig(
        num_layers=2,
        dim=16,
        vocab_size=64,
        max_seq_len=16,
        attention=AttentionConfig(num_heads=4, num_kv_heads=2),
        mlp=MlpConfig(kind="swiglu", hidden=32),
    ),
    optimizer=OptimizerConfig(learning_rate=1e-3, schedule="constant", weight_decay=0.0, clip_norm=None),
)


def make_mesh(name: str, cfg: MeshConfig | None = None) -> jax.sharding.Mesh:
    """A mesh of MESHES, or of sizes written as there; with the settings of the config besides."""
    sizes = MESHES.get(name) or tuple(map(int, name.split("x")))
    cfg = dataclasses.replace(cfg or MeshConfig(), **sizes_of_axes(sizes))
    return devices_lib.make_mesh(cfg, jax.devices()[: int(np.prod(sizes))])


@functools.cache
def initial_params(cfg: Config) -> Any:
    return jax.tree.map(np.asarray, init_params(model_params(cfg.model), jax.random.key(cfg.seed)))


@functools.cache
def jitted_step(cfg: Config, mesh_name: str, steps: int) -> tuple:
    """(mesh, initial state of parameters, train step), jitted; shared by tests that use the same."""
    specs = model_params(cfg.model)
    schedule = make_schedule(cfg.optimizer, steps)
    tx = make_optimizer(cfg.optimizer, specs, schedule)
    mesh = make_mesh(mesh_name, cfg.mesh)
    layout = state_shardings(specs, tx, mesh)
    state = lambda params: TrainState(jnp.int32(0), jnp.int32(0), params, tx.init(params))
    step = functools.partial(step_lib.train_step, cfg=cfg, tx=tx, schedule=schedule)
    return mesh, jax.jit(state, out_shardings=layout), jax.jit(step, donate_argnums=0, out_shardings=(layout, None))


def fit(cfg: Config, batches: list, *, mesh: str = "1", params: Any = None) -> tuple[list[dict[str, float]], Any]:
    """(metrics of each step, parameters at the end) of the real train step over these batches, on a mesh."""
    mesh, start, step = jitted_step(cfg, mesh, len(batches) if cfg.steps is None else cfg.steps)
    # Copied: the step gives its buffers away.
    params = jax.tree.map(np.array, initial_params(cfg) if params is None else params)
    with jax.set_mesh(mesh):
        state = start(params)
        history = []
        for batch in batches:
            state, metrics = step(state, jax.device_put(batch, batch_sharding(mesh)))
            history.append({k: float(v) for k, v in metrics.items() if k not in ("batch", "routed")})
    return history, jax.tree.map(np.asarray, state.params)


def topology(name: str) -> list:
    """The devices of a TPU that is not here, as `v5e:2x2`: programs can be compiled for them. Skips where libtpu is absent."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs libtpu (extra plan)")
    # Read when libtpu is loaded: ask no metadata server, leave other processes alone, write no files.
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_LOG_DIR": "disabled"}
    one_device_a_chip = {"chip_config_name": "megacore"} if name.startswith("v4:") else {}
    return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **one_device_a_chip).devices)


TEXT = "".join(chr(97 + (i * i + i // 7) % 26) for i in range(8 * 16 * 5 + 1))  # 40 windows of 16


def text_config(corpus: Path, **changes: Any) -> Config:
    """TINY on the characters of TEXT, on one device; see the fixture `corpus`."""
    cfg = change(
        TINY,
        data__kind="text",
        data__path=str(corpus / "train.txt"),
        data__val_path=str(corpus / "val.txt"),
        data__tokenizer="chars",
        mesh__fsdp=1,
    )
    return change(cfg, **changes)


def series(lines: list[dict[str, Any]], tag: str) -> dict[int, Any]:
    """step -> value of a tag, of the objects of metrics.jsonl."""
    return {line["step"]: line[tag] for line in lines if tag in line}


def steps_of(workdir: Path) -> list[int]:
    """The steps whose loss a run has logged so far."""
    return list(series(json_lines(epath.Path(workdir) / "metrics.jsonl"), "train/loss"))


def launch(cfg: Config, workdir: Path, *, devices: int | None = 1, **options: Any) -> tuple[int, list[dict[str, Any]]]:
    """Trains as main does after parsing, on the first devices (None: all); (status, objects of metrics.jsonl)."""
    config.validate(cfg)
    workdir = resolve(str(workdir))
    job = job_lib.prepare(cfg, jax.devices()[:devices])
    with lock_lib.locked(workdir) as lock:
        begin(workdir, job.cfg, **options)
        status = loop.train(job, workdir, lock)
    return status, json_lines(workdir / "metrics.jsonl")


def assert_close(actual: Any, expected: Any, tolerance: float, *, relative_to_largest: bool = False) -> None:
    """Every leaf within tolerance; `relative_to_largest`: within tolerance x max(1, largest absolute value of the leaf)."""
    expected = dict(named(expected))
    for name, a in named(actual):
        a, e = np.asarray(a, np.float64), np.asarray(expected[name], np.float64)
        bound = tolerance * (max(1.0, np.abs(e).max(initial=0)) if relative_to_largest else 1.0)
        error = np.abs(a - e).max(initial=0)
        assert error <= bound, f"{name}: differs by {error:.3g}, more than {bound:.3g}"


def run_module(module: str, *args: str, **keywords: Any) -> subprocess.CompletedProcess:
    """`python -m MODULE ARGS` in a process of its own, as `run_python`."""
    return run_python("-m", module, *args, **keywords)


def run_python(*args: str, devices: int = 1, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess:
    """`python ARGS` in a process of its own, with so many simulated devices; text captured."""
    inherited = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}  # compiled as users' runs are
    environment = {**inherited, "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(ROOT), **env}
    command = [sys.executable, *map(str, args)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


# ---- several processes


class Processes:
    """`python -m MODULE ARGS` as n processes on this machine that find one another, each with so many simulated devices. On
    leaving, what still runs is killed."""

    def __init__(self, n: int, module: str, *args: Any, devices: int = 2, logs: Path, of_each: Any = None, **env: str):
        """`of_each(i)`: more variables of process i."""
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self._files = [open(logs / f"process-{i}.{k}", "w+") for i in range(n) for k in ("out", "err")]
        command = [sys.executable, "-m", module, *map(str, args)]
        common = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        common |= {"MINITF_COORDINATOR": f"127.0.0.1:{port}", "MINITF_NUM_PROCESSES": str(n), **env}
        self.all = [
            subprocess.Popen(
                command,
                env={**common, "MINITF_PROCESS_ID": str(i), **(of_each(i) if of_each else {})},
                cwd=ROOT,
                stdout=self._files[2 * i],
                stderr=self._files[2 * i + 1],
            )
            for i in range(n)
        ]

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: Any) -> None:
        for p in self.all:
            p.kill()
            p.wait()
        for f in self._files:
            f.close()

    def wait(self, timeout: float | None = None) -> list[int]:
        """Their exit statuses."""
        return [p.wait(timeout) for p in self.all]

    def _text(self, number: int) -> str:
        self._files[number].seek(0)
        return self._files[number].read()

    def out(self, i: int) -> str:
        return self._text(2 * i)

    def err(self, i: int) -> str:
        return self._text(2 * i + 1)

    def wait_for_step(self, workdir: Path, step: int) -> None:
        """Until metrics of a step at least so high are logged. Raises AssertionError where they end before."""
        while not any(line["step"] >= step for line in json_lines(epath.Path(workdir) / "metrics.jsonl")):
            assert all(p.poll() is None for p in self.all), self.err(0)
            time.sleep(0.02)


def arguments(cfg: Config, workdir: Path) -> list[str]:
    """The command line of minitf.train for a config that was made here."""
    file = Path(workdir).parent / "default_config.py"
    file.write_text("from minitf import config\n\nget_config = config.default\n")
    before = settings.flat(Config())
    changed = {name: v for name, v in settings.flat(cfg).items() if v != before[name]}
    flags = [f"--config.{name}={','.join(map(str, v)) if isinstance(v, tuple) else v}" for name, v in changed.items()]
    return ["--config", str(file), "--workdir", str(workdir), *flags]


# ---- token stores


def make_store(directory: Path, texts: list[str], *options: Any, tokenizer: str = "bytes") -> Path:
    """A store of these documents, by the tool."""
    from tools import prepare_data

    source = Path(directory).with_suffix(".jsonl")
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    arguments = ["--input", source, "--output", directory, "--tokenizer", tokenizer, "--workers", 1, *options]
    assert prepare_data.main(list(map(str, arguments))) == 0
    return Path(directory)


def some_texts(n: int, seed: int = 0, longest: int = 60) -> list[str]:
    """Documents of different lengths over four letters."""
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list("abcd"), rng.integers(1, longest))) for _ in range(n)]
