"""nanoGPT's CPU recipe on the characters of any text: 4 layers, width 128, block 64, 2,000 steps; minutes on two CPU cores.

python -m minitf.train --config configs/char_cpu.py --config.data.path=FILE

On tiny-shakespeare (65 symbols, 804,096 parameters) the validation loss over the last 10 % ends below 1.94.
"""

from minitf import config


def get_config():
    c = config.default()
    c.steps = 2000
    c.batch_size = 12
    c.seq_len = 64
    c.log_every = 50
    c.eval_every = 500
    c.eval_batches = None  # the whole validation split
    c.data.kind = "text"
    c.data.tokenizer = "chars"
    c.data.val_fraction = 0.1
    c.model.dim = 128
    c.model.num_layers = 4
    c.model.attention.num_heads = 4
    c.model.mlp.kind = "gelu_erf"
    c.model.norm = "layer_norm_no_bias"
    c.model.norm_eps = 1e-5
    c.model.positions = "learned"
    c.model.tie_embeddings = True
    c.model.init = "gpt2"
    c.optimizer.learning_rate = 1e-3
    c.optimizer.end_learning_rate = 1e-4
    c.optimizer.warmup_steps = 100
    c.optimizer.b1 = 0.9
    c.optimizer.b2 = 0.99
    c.optimizer.weight_decay = 0.1
    c.optimizer.decay_embeddings = True
    c.optimizer.clip_norm = 1.0
    c.mesh.data = -1  # rows sharded over all devices, parameters replicated: too small to shard
    c.mesh.fsdp = 1
    return c
