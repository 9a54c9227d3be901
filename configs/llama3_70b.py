"""Llama 3's 70B shape: 70,553,706,496 parameters, 8192 positions, 4 M tokens a step.

python -m minitf.train --config configs/llama3_70b.py --config.data.path=DIR

DIR holds train.bin and val.bin: Llama 3 token ids as raw uint32. About 850 GB of parameters and optimizer state, sharded over all
devices by default. Not yet run at this size. To see what it needs on devices that you do not have:
python -m minitf.plan --config configs/llama3_70b.py --topology v5p:8x8x8
"""

from pathlib import Path

from minitf import config


def get_config():
    c = config.load_file(str(Path(__file__).with_name("llama3_8b.py")))
    c.model.dim = 8192
    c.model.num_layers = 80
    c.model.attention.num_heads = 64
    c.model.mlp.hidden = 28_672
    c.optimizer.learning_rate = 1.5e-4
    c.optimizer.end_learning_rate = 1.5e-5
    return c
