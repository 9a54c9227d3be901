"""Llama 3's 8B shape: 8,030,261,248 parameters, 8192 positions, 4 M tokens a step.

python -m minitf.train --config configs/llama3_8b.py --config.data.path=DIR

DIR holds train.bin and val.bin: Llama 3 token ids as raw uint32. About 96 GB of parameters and optimizer state, sharded over
all devices by default; add --config.mesh.tensor=8 to also shard heads and MLP within a host. Not yet run at this size.
"""

from minitf import config


def get_config():
    c = config.default()
    c.steps = 500_000
    c.batch_size = 512
    c.seq_len = 8192
    c.log_every = 10
    c.eval_every = 1000
    c.eval_batches = 10
    c.data.kind = "tokens"
    c.data.path = "data/llama3"
    c.data.token_dtype = "uint32"
    c.data.eos_id = 128_001
    c.data.isolate_documents = True
    c.model.vocab_size = 128_256
    c.model.max_seq_len = 8192
    c.model.dim = 4096
    c.model.num_layers = 32
    c.model.attention.num_heads = 32
    c.model.attention.num_kv_heads = 8
    c.model.attention.rope_base = 500_000.0
    c.model.mlp.kind = "swiglu"
    c.model.mlp.hidden = 14_336
    c.model.norm = "rms_norm"
    c.model.norm_eps = 1e-5
    c.model.positions = "rope"
    c.model.init = "gpt2"
    c.model.dtype = "bfloat16"
    c.model.remat = "full"
    c.loss.chunk = 512
    c.loss.passes = 2
    c.optimizer.learning_rate = 3e-4
    c.optimizer.end_learning_rate = 3e-5
    c.optimizer.warmup_steps = 2000
    c.optimizer.b1 = 0.9
    c.optimizer.b2 = 0.95
    c.optimizer.weight_decay = 0.1
    c.optimizer.clip_norm = 1.0
    return c
