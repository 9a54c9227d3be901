"""The tutorial's task, trained with the core alone: no files, no services. python docs/plain_loop.py

Declares the parameters, derives update and state from them, compiles the step, feeds it batches. The losses are those of
`minitf.train` with configs/tutorial.py."""

import dataclasses
import functools

import jax
import numpy as np

from minitf.model.attention import AttentionConfig
from minitf.model.loss import LossConfig
from minitf.model.mlp import MlpConfig
from minitf.model.transformer import ModelConfig, model_params
from minitf.optimizer import OptimizerConfig, make_optimizer, make_schedule
from minitf.sharding import MeshConfig, make_mesh, surroundings
from minitf.state import init_state
from minitf.step import train_step


@dataclasses.dataclass(frozen=True)
class Task:
    model: ModelConfig
    loss: LossConfig = LossConfig()
    mesh: MeshConfig = MeshConfig(1, 1, 1)
    accumulation: int = 1
    seed: int = 0


def train(steps: int = 1000):
    """The loss of each step."""
    sizes = dict(vocab_size=32, max_seq_len=16, dim=64, num_layers=2, positions="learned")
    attention = AttentionConfig(num_heads=4)
    task = Task(ModelConfig(**sizes, attention=attention, mlp=MlpConfig(kind="gelu")))
    update = OptimizerConfig("sgd", learning_rate=1e-3, schedule="constant", weight_decay=0.0, clip_norm=None)
    specs, schedule = model_params(task.model), make_schedule(update, steps)
    tx = make_optimizer(update, specs, schedule)
    inputs = np.arange(2 * 16, dtype=np.int32).reshape(2, 16)  # the next token is this one plus one
    batch = {"inputs": inputs, "targets": (inputs + 1) % 32, "weights": np.ones((2, 16), np.float32)}
    with surroundings(make_mesh(task.mesh, jax.devices()[:1]), task.model.dtype):
        state = jax.jit(functools.partial(init_state, specs=specs, tx=tx))(jax.random.key(task.seed))
        step = jax.jit(functools.partial(train_step, cfg=task, tx=tx, schedule=schedule), donate_argnums=0)
        for _ in range(steps):
            state, metrics = step(state, batch)
            yield float(metrics["train/loss"])


if __name__ == "__main__":
    print(*(f"step {i:4}  loss {loss:.4f}" for i, loss in enumerate(train(), 1) if i % 100 == 0), sep="\n")
