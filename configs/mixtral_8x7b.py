"""Mixtral's 8x7B shape (arXiv:2401.04088): 46,702,792,704 parameters, 12,879,925,248 for a token, 4 M tokens a step.

python -m minitf.train --config configs/mixtral_8x7b.py --config.data.path=DIR

DIR holds train.bin and val.bin: Mixtral token ids as raw uint16. About 560 GB of parameters and optimizer state, sharded over all
devices, whose number must be a multiple of 8: each group of 8 shares out the experts. Not yet run at this size. To see what it needs
on devices that you do not have: python -m minitf.plan --config configs/mixtral_8x7b.py --topology v5p:4x4x8
"""

from pathlib import Path

from minitf import config


def get_config():
    c = config.load_file(str(Path(__file__).with_name("llama3_8b.py")))
    c.mesh.expert = 8
    c.data.path = "data/mixtral"
    c.data.token_dtype = "uint16"
    c.data.eos_id = 2
    c.model.vocab_size = 32_000
    c.model.max_seq_len = 32_768
    c.model.attention.rope_base = 1e6
    c.model.mlp.router = "softmax"
    c.model.mlp.experts = 8
    c.model.mlp.experts_per_token = 2
    # The released config's 0.02: transformers' loss is experts_per_token where all experts are used equally, ours 1.
    c.loss.balance = 0.04
    return c
