"""The machine's peak rate, and what a start takes."""

from types import SimpleNamespace

import jax
import pytest

from minitf.runtime.devices import PEAK_FLOPS, measured_flops, peak_flops
from minitf.runtime.log import StartUp


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", [*PEAK_FLOPS, "some other device"])
def test_the_table_is_of_products_in_16_bits_and_the_rest_is_measured(kind, dtype, monkeypatch):
    monkeypatch.setattr("minitf.runtime.devices.measured_flops", lambda dtype: 1e9)
    devices = [SimpleNamespace(device_kind=kind, platform="gpu")] * 3
    tabled = kind in PEAK_FLOPS and dtype != "float32"
    assert peak_flops(devices, dtype) == 3 * (PEAK_FLOPS[kind] if tabled else 1e9)


@pytest.mark.parametrize(("dtype", "asked"), {"float32": "HIGHEST", "bfloat16": "DEFAULT"}.items())
def test_the_measured_product_has_the_bits_of_the_steps_products(dtype, asked, monkeypatch):
    found, jit = [], jax.jit
    monkeypatch.setattr(jax, "jit", lambda f: found.append(f) or jit(f))
    assert measured_flops(dtype, repeats=1) > 0
    (f,) = found
    (product,) = (
        e for e in jax.make_jaxpr(f)(*[jax.numpy.ones((2, 2), dtype)] * 2).eqns if e.primitive.name == "dot_general"
    )
    assert {p.name for p in product.params["precision"]} == {asked}


def test_the_line_of_the_first_step_leaves_out_what_takes_no_time():
    ended = {
        "seconds": 5.12,
        "phases": {"imports": 1.94, "processes": 0.01, "compile": 2.66, "step": 0.5, "other": 0.01},
    }
    assert StartUp.described(ended) == "first step after 5.1 s: imports 1.9, compile 2.7, step 0.5"
