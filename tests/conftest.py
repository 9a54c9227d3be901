"""Eight simulated devices in this process, and code that compiles fast; both must be set before JAX starts."""

import os

os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["JAX_PLATFORMS"] = "cpu"

# Tests compile much and compute little. MINITF_TEST_OPTIMIZED=1 compiles as a real run does.
if not os.environ.get("MINITF_TEST_OPTIMIZED"):
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
