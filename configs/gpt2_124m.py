"""GPT-2 small by nanoGPT's recipe: 124,373,760 parameters (V=50304, no biases), 491,520 tokens a step.

python -m minitf.train --config configs/gpt2_124m.py --config.data.path=DIR

DIR holds train.bin and val.bin: GPT-2 token ids as raw uint16. For eight accelerators with bfloat16 and memory for a microbatch of
12 rows each; nanoGPT reports a validation loss of 2.85 on OpenWebText after 600,000 steps.
`--config configs/gpt2_124m.py:original` is GPT-2's own shape, V=50257 with biases: 124,439,808 parameters.
"""

from minitf import config


def get_config(variant=""):
    if variant not in ("", "original"):
        raise ValueError(f"unknown variant {variant!r}; known: original")
    original = variant == "original"
    c = config.default()
    c.steps = 600_000
    c.batch_size = 480
    c.accumulation = 5
    c.seq_len = 1024
    c.log_every = 10
    c.eval_every = 1000
    c.eval_batches = 20
    c.data.kind = "tokens"
    c.data.path = "data/openwebtext"
    c.model.vocab_size = 50257 if original else 50304  # 50304: the next multiple of 64
    c.model.max_seq_len = 1024
    c.model.dim = 768
    c.model.num_layers = 12
    c.model.attention.num_heads = 12
    c.model.attention.bias = "qkvo" if original else "none"
    c.model.mlp.kind = "gelu_erf"
    c.model.mlp.bias = original
    c.model.norm = "layer_norm" if original else "layer_norm_no_bias"
    c.model.norm_eps = 1e-5
    c.model.positions = "learned"
    c.model.tie_embeddings = True
    c.model.init = "gpt2"
    c.model.dtype = "bfloat16"
    c.loss.chunk = 128
    c.optimizer.learning_rate = 6e-4
    c.optimizer.end_learning_rate = 6e-5
    c.optimizer.warmup_steps = 2000
    c.optimizer.b1 = 0.9
    c.optimizer.b2 = 0.95
    c.optimizer.weight_decay = 0.1
    c.optimizer.decay_embeddings = True
    c.optimizer.clip_norm = 1.0
    return c
