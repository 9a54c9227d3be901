"""2 M parameters on the bytes of Python's standard library; about three minutes on two CPU cores.

python -m minitf.train --config configs/tiny.py
"""

from minitf import config


def get_config():
    c = config.default()
    c.steps = 300
    c.batch_size = 16
    c.seq_len = 128
    c.log_every = 10
    c.eval_every = 50
    c.eval_batches = 16
    c.checkpoint.every = 40  # less than half a minute: the most that a kill loses
    c.data.kind = "stdlib"
    c.data.tokenizer = "bytes"
    c.model.vocab_size = 320  # at least 259 ids, and a multiple of 64 so that every mesh divides it
    c.model.dim = 192
    c.model.num_layers = 4
    c.model.norm = "rms_norm"
    c.model.positions = "rope"
    c.model.tie_embeddings = True
    c.model.init = "gpt2"
    c.model.attention.num_heads = 8
    c.model.attention.num_kv_heads = 4
    c.model.mlp.kind = "swiglu"
    c.model.mlp.hidden = 640
    c.optimizer.kind = "adamw"
    c.optimizer.learning_rate = 3e-3
    c.optimizer.end_learning_rate = 3e-4
    c.optimizer.warmup_steps = 20
    return c
