"""Qwen3-30B-A3B's shape (arXiv:2505.09388): 30,532,122,624 parameters, 3,353,032,704 for a token, 4 M tokens a step.

python -m minitf.train --config configs/qwen3_30b_a3b.py --config.data.path=DIR

DIR holds train.bin and val.bin: Qwen3 token ids as raw uint32. About 366 GB of parameters and optimizer state, sharded over all
devices, whose number must be a multiple of 16: each group of 16 shares out the experts. Not yet run at this size. To see what it
needs on devices that you do not have: python -m minitf.plan --config configs/qwen3_30b_a3b.py --topology v5e:16x16
"""

from pathlib import Path

from minitf import config


def get_config():
    c = config.load_file(str(Path(__file__).with_name("llama3_8b.py")))
    c.mesh.expert = 16
    c.batch_size = 1024
    c.seq_len = 4096
    c.data.path = "data/qwen3"
    c.data.eos_id = 151_643
    c.model.vocab_size = 151_936
    c.model.max_seq_len = 40_960
    c.model.dim = 2048
    c.model.num_layers = 48
    c.model.norm_eps = 1e-6
    c.model.attention.num_kv_heads = 4
    c.model.attention.head_dim = 128
    c.model.attention.rope_base = 1e6
    c.model.attention.qk_norm = True
    c.model.mlp.router = "softmax"
    c.model.mlp.hidden = 768
    c.model.mlp.experts = 128
    c.model.mlp.experts_per_token = 8
    # The released config's 0.001: transformers' loss is experts_per_token where all experts are used equally, ours 1.
    c.loss.balance = 0.008
    return c
