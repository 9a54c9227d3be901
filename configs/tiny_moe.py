"""tiny.py with a mixture of 8 experts, of which a token uses 2, in place of each MLP: 6 M parameters, 2 M for a token.

python -m minitf.train --config configs/tiny_moe.py
"""

from pathlib import Path

from minitf import config


def get_config():
    c = config.load_file(str(Path(__file__).with_name("tiny.py")))
    c.model.mlp.router = "sigmoid"
    c.model.mlp.experts = 8
    c.model.mlp.experts_per_token = 2
    c.model.mlp.hidden = 320  # half of tiny's: as many active parameters
    c.loss.balance = 1e-3
    return c
