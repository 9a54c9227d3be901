"""minitf: a scan-based, multi-device training framework for decoder-only language models in JAX."""

__version__ = "0.1.0"
