"""Eight simulated devices in this process, and code that compiles fast; both must be set before JAX starts."""

import os
import tempfile

os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["JAX_PLATFORMS"] = "cpu"

# Tests compile much and compute little. MINITF_TEST_OPTIMIZED=1 compiles as a real run does.
if not os.environ.get("MINITF_TEST_OPTIMIZED"):
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

# Many tests train the same little model: one compiles it for all of them, the other workers' processes too.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    CACHE = tempfile.TemporaryDirectory(prefix="minitf-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = CACHE.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import pytest


def pytest_configure(config):
    """`-m core` takes the place of the `-m "not slow"` that pyproject.toml gives; slow tests are left out of it nevertheless."""
    if config.option.markexpr == "core":
        config.option.markexpr = "core and not slow"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder with a training and a validation text."""
    from common import TEXT

    folder = tmp_path_factory.mktemp("corpus")
    (folder / "train.txt").write_text(TEXT)
    (folder / "val.txt").write_text(TEXT[100:400])
    return folder


@pytest.fixture(scope="module")
def rate_known():
    """Measuring the machine's rate in each run would take longer than the runs."""
    from minitf.runtime import devices

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "peak_flops", lambda devices, dtype: 1e12)
        yield
