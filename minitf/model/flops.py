"""Model FLOPs."""

from typing import Any

from minitf.model.attention import ATTENTION, sizes
from minitf.model.transformer import ModelConfig, places
from minitf.params import named


def flops_per_token(cfg: ModelConfig, specs: Any, seq_len: int, *, causal: bool = False) -> float:
    """FLOPs of forward and backward pass per token: 6 x (matrix and head elements; a tied head once, of a mixture the
    experts that a token uses) + 12 x H x K x S for each layer's attention over the full square of S keys, the usual convention (PaLM,
    arXiv:2204.02311, appendix B); a sliding layer counts min(S, window) keys. `causal`: counts only the keys that a query sees."""
    weights = sum(p.multiplied for _, p in named(specs))
    if cfg.tie_embeddings:
        weights += specs["embedding"].size
    H, _, K = sizes(cfg.attention, cfg.dim)

    def keys(kind: str) -> float:
        w = min(seq_len, ATTENTION[kind].window(cfg.attention) or seq_len)
        return w - w * (w - 1) / (2 * seq_len) if causal else w

    squares = sum(12 * H * K * keys(place.attention) * len(place.layers) for place in places(cfg))
    return 6 * weights + squares
