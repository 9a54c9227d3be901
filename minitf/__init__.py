"""minitf: a scan-based, multi-device training framework for decoder-only language models in JAX."""

import time

__version__ = "0.1.0"

STARTED = time.perf_counter()  # approximately the start of the process: this module is imported first
