"""The tutorial's task, trained with minitf's core alone: no files, no services. python docs/plain_loop.py

The losses equal those of `minitf.train` with configs/tutorial.py to the last bit."""

import functools
from typing import NamedTuple

import jax
import numpy as np

from minitf.model.attention import AttentionConfig
from minitf.model.choose import with_best_kernels
from minitf.model.loss import LossConfig
from minitf.model.mlp import MlpConfig
from minitf.model.transformer import ModelConfig, model_params
from minitf.sharding.devices import make_mesh, surroundings
from minitf.sharding.mesh import MeshConfig
from minitf.training.optimizer import OptimizerConfig, make_optimizer, make_schedule
from minitf.training.state import init_state
from minitf.training.step import train_step


class Task(NamedTuple):
    model: ModelConfig
    loss: LossConfig = LossConfig()
    mesh: MeshConfig = MeshConfig()
    accumulation: int = 1
    seed: int = 0


def train(steps: int = 1000):
    sizes = dict(vocab_size=32, max_seq_len=16, dim=64, num_layers=2, positions="learned")
    model = ModelConfig(**sizes, attention=AttentionConfig(num_heads=4), mlp=MlpConfig(kind="gelu"))
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    task = Task(with_best_kernels(model, mesh, length=16))
    update = OptimizerConfig("sgd", learning_rate=1e-3, schedule="constant", weight_decay=0.0, clip_norm=None)
    specs, schedule = model_params(task.model), make_schedule(update, steps)
    tx = make_optimizer(update, specs, schedule)
    inputs = np.arange(2 * 16, dtype=np.int32).reshape(2, 16)  # each target is its input plus one
    batch = {"inputs": inputs, "targets": (inputs + 1) % 32, "weights": np.ones((2, 16), np.float32)}
    with surroundings(mesh, task.model.dtype):
        state = jax.jit(functools.partial(init_state, specs=specs, tx=tx))(jax.random.key(task.seed))
        step = jax.jit(functools.partial(train_step, cfg=task, tx=tx, schedule=schedule), donate_argnums=0)
        for _ in range(steps):
            state, metrics = step(state, batch)
            yield float(metrics["train/loss"])


if __name__ == "__main__":
    print(*(f"step {i:4}  loss {loss:.4f}" for i, loss in enumerate(train(), 1) if i % 100 == 0), sep="\n")
