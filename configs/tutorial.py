"""The tutorial's check: 103,744 parameters, the counting task, plain SGD at 1e-3; seconds on one CPU.

python -m minitf.train --config configs/tutorial.py

The loss starts near ln 32 = 3.47 and after 1,000 steps is below 1.3.
"""

from minitf import config


def get_config():
    c = config.default()
    c.steps = 1000
    c.batch_size = 2
    c.seq_len = 16
    c.log_every = 100
    c.eval_every = None
    c.data.kind = "synthetic"
    c.data.shuffle = False  # the same two rows in every step
    c.model.vocab_size = 32
    c.model.max_seq_len = 16
    c.model.dim = 64
    c.model.num_layers = 2
    c.model.positions = "learned"
    c.model.attention.num_heads = 4
    c.model.mlp.kind = "gelu"
    c.optimizer.kind = "sgd"
    c.optimizer.learning_rate = 1e-3
    c.optimizer.schedule = "constant"
    c.optimizer.weight_decay = 0.0
    c.optimizer.clip_norm = None
    c.mesh.fsdp = 1
    return c
