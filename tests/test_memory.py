import subprocess
import sys
import types

import pytest
from common import ROOT

from minitf.runtime import memory

FAULTS = """
import resource, sys
from minitf.runtime import memory
if sys.argv[1] == "True":
    assert memory.keep_freed()
for _ in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    b"x" * (64 * 2**20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_memory_that_is_freed_is_found_again_without_a_page_fault():
    run = lambda keep: int(
        subprocess.run(
            [sys.executable, "-c", FAULTS, str(keep)],
            cwd=ROOT,
            env={"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            check=True,
        ).stdout
    )
    assert run(True) < 100
    assert run(False) > 1000


def test_the_allocator_is_left_alone_where_jax_computes_elsewhere(monkeypatch):
    monkeypatch.setattr("minitf.runtime.memory.on_cpu", lambda: False)
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda *_: pytest.fail("touched"))
    assert not memory.keep_freed()


@pytest.mark.parametrize(("platforms", "cpu"), [("cpu", True), ("cuda", False), ("tpu,cpu", False)])
def test_where_jax_computes_is_known_before_it_starts(monkeypatch, platforms, cpu):
    config = types.SimpleNamespace(jax_platforms=platforms)
    monkeypatch.setattr("minitf.runtime.memory.jax", types.SimpleNamespace(config=config))
    assert memory.on_cpu() == cpu
