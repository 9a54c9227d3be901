"""The plan: on small topologies of every TPU generation, where the compiler is installed; and what needs no compiler."""

import importlib.util
import json
import math
import subprocess
import sys

import jax
import pytest
from common import ROOT, TINY, arguments, change, run_module, slow

from minitf import config
from minitf import job as job_lib
from minitf.config import CompilerOptions
from minitf.model.flops import flops_per_token
from minitf.model.remat import REMAT
from minitf.model.transformer import model_params
from minitf.params import count_params
from minitf.plan import hlo, topology
from minitf.plan.__main__ import main
from minitf.plan.figures import DOES_NOT_FIT, in_a_slice, kernel_flops, local_bytes, plan, search
from minitf.plan.program import abstract_batch, job_of, too_large
from minitf.plan.report import COLUMNS, describe_plan, searched
from minitf.runtime.devices import DEVICES, GiB
from minitf.sharding.devices import make_mesh
from minitf.sharding.mesh import MeshConfig

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: extra plan, on Linux with Python 3.12 or newer",
)
TOY = change(TINY, batch_size=16, model__dtype="bfloat16", model__num_layers=3)
SMALLEST = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


@pytest.fixture(autouse=True)
def _as_main_sets_it(monkeypatch):
    for name, value in topology.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def planned(name, cfg=TOY):
    return plan(job_of(cfg, topology.find_devices(name)), name)


# ---- on topologies


@needs_compiler
@pytest.mark.parametrize("kind", slow(topology.TPUS, but=("v5e",)))
def test_a_plan_adds_up_on_every_generation(kind):
    p = planned(SMALLEST[kind])
    n, count = p["devices"], count_params(model_params(TOY.model))["total"]
    assert n == (8 if kind == "tpu7x" else 4)
    assert p["mesh"] == {"data": 1, "fsdp": n, "expert": 1, "tensor": 1}
    assert (p["fits"], p["parameters"], p["has_bytes"]) == (True, count, DEVICES[p["device"]].hbm)

    m = p["memory"]
    assert 4 * count / n <= m["parameters"] < 4 * count / n + 1000  # scales are on every device
    assert 2 * m["parameters"] <= m["optimizer state"] < 2 * m["parameters"] + 100  # AdamW's moments, a counter
    assert m["batch"] == 16 * 16 * 12 // n
    parts = ("parameters", "optimizer state", "batch", "padding of these", "outputs", "temporary")
    assert m["total"] == sum(m[name] for name in parts)
    assert min(m[name] for name in parts) >= 0

    assert p["flops_per_token"] == flops_per_token(TOY.model, model_params(TOY.model), 16)
    assert {tuple(c["axes"]) for c in p["collectives"]} == {("fsdp",)}
    # Each weight is gathered at least once, and in 16 bits; and its gradient scattered.
    assert p["wire_bytes"] > 2 * 2 * 0.9 * count * (n - 1) / n
    assert 0 <= p["exposed_bytes"] <= p["wire_bytes"] == pytest.approx(sum(c["wire_bytes"] for c in p["collectives"]))

    t, device = p["time"], DEVICES[p["device"]]
    assert p["cycles"] > 0
    assert t["compute_s"] == p["cycles"] / device.clock
    assert t["step_s"] == t["compute_s"] + t["kernels_s"] + t["exposed_s"]
    assert t["ideal_s"] == pytest.approx(p["flops_per_token"] * 256 / n / device.flops)
    assert t["mfu"] == t["ideal_s"] / t["step_s"] > t["mfu_causal"] > 0
    assert "modelled, not measured on hardware" in p["assumptions"]

    text = describe_plan(p)
    assert f"{SMALLEST[kind]}: {n} x {p['device']}" in text
    assert all(f"- {line}" in text for line in p["assumptions"])
    assert json.loads(json.dumps(p)) == p


@needs_compiler
def test_collectives_by_hand_lie_along_the_factors_of_fsdp():
    p = planned("v5e:2x2", change(TOY, mesh__collectives="manual"))
    assert set(p["mesh"]) == {"data", "fsdp", "fsdp_inner", "expert", "tensor"}
    assert {tuple(c["axes"]) for c in p["collectives"]} >= {("fsdp",), ("fsdp_inner",)}


MIXTURE = change(
    TOY,
    batch_size=64,  # enough rows for more than one chunk
    model__num_layers=2,
    model__mlp__router="sigmoid",
    model__mlp__experts=8,
    model__mlp__experts_per_token=2,
    mesh__fsdp=2,
    mesh__expert=4,
)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("name", "collectives"), [("v5e:2x4", "auto"), ("v5p:2x2x2", "manual"), ("v6e:2x4", "auto")])
def test_the_plan_of_a_mixture_counts_the_chosen_experts_and_what_is_exchanged(name, collectives):
    p = planned(name, change(MIXTURE, mesh__collectives=collectives))
    assert p["fits"]
    assert p["mesh"]["expert"] == 4
    products = [k for k in p["kernels"] if "gmm" in k["name"]]
    rows, product = 64 * 16 // 8 * 2, 2 * 16 * 32  # pairs of a token and an expert on a device; FLOPs of one
    # Three products a layer: forward, and for the gradients of rows and weights; gate and up again in the backward pass.
    assert sum(k["flops"] for k in products) == 2 * (3 + 2 + 6) * rows * product
    sent = {(c["kind"], tuple(c["axes"])): c["count"] for c in p["collectives"]}
    assert sent["all-gather", ("expert",)] >= 2 * 3
    assert sent["reduce-scatter", ("expert",)] >= 2
    assert p["active_parameters"] == p["parameters"] - 2 * 6 * 3 * 16 * 32
    assert f"({p['active_parameters']:,} for a token)" in describe_plan(p)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "mesh", "inside"),
    [
        ("v5e:2x2", dict(), (1, 4, 1, 1, 1)),
        ("2xv5e:2x2", dict(), (1, 4, 1, 1, 1)),
        ("2xv5e:2x2", dict(data=2), (1, 4, 1, 1, 1)),
        ("2xv5e:2x2", dict(data=4, tensor=2), (2, 1, 1, 1, 2)),
    ],
)
def test_the_mesh_within_a_slice(name, mesh, inside):
    made = make_mesh(MeshConfig(**mesh), topology.find_devices(name))
    assert tuple(in_a_slice(made).values()) == inside


@needs_compiler
@pytest.mark.slow
def test_two_slices_share_the_mesh_and_what_goes_across_is_told_apart():
    p = planned("2xv5e:2x2", change(TOY, mesh__data=2, mesh__fsdp=-1))
    assert (p["devices"], p["slices"], p["mesh"]) == (8, 2, {"data": 2, "fsdp": 4, "expert": 1, "tensor": 1})
    across = [c for c in p["collectives"] if c["across_slices"]]
    assert {c["kind"] for c in across} == {"all-reduce"}  # of gradients over data, which has the slices
    assert {tuple(c["axes"]) for c in p["collectives"] if not c["across_slices"]} == {("fsdp",)}
    assert "their network is not known" in " ".join(p["assumptions"])


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="the GPU's compiler is not installed: packages jax-cuda13-plugin and jax-cuda13-pjrt",
)
def test_a_plan_for_gpus_has_memory_and_collectives_and_says_that_it_has_no_time():
    p = planned("h100:1x1x8", change(TOY, model__attention__implementation="xla"))
    assert (p["devices"], p["device"], p["fits"]) == (8, "NVIDIA H100 80GB HBM3", True)
    assert p["memory"]["total"] > p["memory"]["parameters"] > 0
    assert {tuple(c["axes"]) for c in p["collectives"]} == {("fsdp",)}
    assert "time" not in p
    assert p["assumptions"][0].startswith("no time")
    assert "estimated time" not in describe_plan(p)


def test_devices_of_a_topology_are_those_of_the_table():
    assert {gpu.name for gpu in topology.GPUS.values()} <= set(DEVICES)
    assert all(DEVICES[gpu.name].hbm == gpu.memory for gpu in topology.GPUS.values())


@needs_compiler
@pytest.mark.parametrize(("name", "mesh"), [("v5p:4x4x4", dict(tensor=2)), ("v5p:4x4x8", dict(data=2, tensor=16))])
def test_a_mesh_axis_may_be_a_part_of_an_axis_of_the_torus(name, mesh):
    devices = topology.find_devices(name)
    made = make_mesh(MeshConfig(**mesh), devices)
    assert {made.shape[axis] for axis in mesh} == set(mesh.values())
    assert {d.id for d in made.devices.flat} == {d.id for d in devices}


HUGE = dict(model__dim=8192, model__num_layers=1, model__vocab_size=262_144, model__mlp__hidden=64)


@needs_compiler
def test_what_does_not_fit_says_how_much_it_needs_and_ends_with_its_status(tmp_path):
    done = run_module(
        "minitf.plan", *arguments(change(TOY, **HUGE), tmp_path / "w")[:2], "--topology", "v5e:1x1", "--json",
        *arguments(change(TOY, **HUGE), tmp_path / "w")[4:],
    )  # fmt: skip
    assert done.returncode == DOES_NOT_FIT, done.stderr
    (p,) = json.loads(done.stdout)["plans"]
    assert not p["fits"]
    assert p["needs_bytes"] > p["has_bytes"] == pytest.approx(DEVICES[p["device"]].hbm)
    assert "does not fit: needs" in describe_plan(p)


@pytest.mark.slow
@needs_compiler
def test_several_topologies_in_one_call_make_a_table(tmp_path):
    flags = arguments(change(TOY, model__num_layers=1), tmp_path / "w")
    names = ["--topology", "v5e:1x1", "--topology", "v5e:2x2"]
    done = run_module("minitf.plan", *flags[:2], *flags[4:], *names, JAX_PLATFORMS="")
    assert done.returncode == 0, done.stderr
    table = done.stdout.strip().splitlines()[-3:]
    assert table[0].split() == ["topology", "devices", *COLUMNS]
    assert [line.split()[:2] for line in table[1:]] == [["v5e:1x1", "1"], ["v5e:2x2", "4"]]
    # Nothing but our own progress: the compiler's complaints that this is no TPU are no news.
    assert all("compiling the train step" in line for line in done.stderr.splitlines()), done.stderr


@needs_compiler
@pytest.mark.parametrize("name", ["v5e:3x5", "v5p:3x5x7"])
def test_a_size_that_does_not_exist_is_refused_in_the_compilers_words(name):
    with pytest.raises(ValueError, match=f"--topology {name}: .*not divisible.*known: v4:4x4x4, v5e:16x16"):
        topology.find_devices(name)


@needs_compiler
def test_the_compilers_options_are_those_of_the_topologys_platform():
    devices = topology.find_devices("v5e:1x1")
    cfg = change(
        TOY, compiler_options=CompilerOptions(cpu=("xla_nonsense=1",), tpu=("xla_tpu_scoped_vmem_limit_kib=65536",))
    )
    assert job_lib.options(cfg, job_of(cfg, devices).mesh) == {"xla_tpu_scoped_vmem_limit_kib": "65536"}
    with pytest.raises(ValueError, match=r"compiler_options\.tpu=xla_nonsense=1: No such compile option"):
        job_of(change(TOY, compiler_options=CompilerOptions(tpu=("xla_nonsense=1",))), devices)


# ---- without a compiler


@pytest.mark.parametrize(
    "name",
    [
        "v9:2x2",
        "v5e",
        "v5e:16",
        "v5e:2x2x2",
        "v5p:4x4",
        "v5e:0x4",
        "0xv5e:2x2",
        "h100:8",
        "2xh100:1x1x8",
        "v5e:2x2,v4:2x2x1",
    ],
)
def test_a_name_that_is_none_is_refused_with_those_that_are(name):
    with pytest.raises(ValueError) as e:
        topology.find_devices(name)
    assert f"--topology {name}: " in str(e.value)
    assert "v5e:16x16, v5p:8x8x8" in str(e.value)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("v5e:2x2", r"needs libtpu.*pip install '\.\[plan\]'"),
        ("h100:1x1x8", r"pip install --no-deps jax-cuda13-plugin=="),
    ],
)
def test_without_the_compiler_the_message_says_how_to_get_it(name, how, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"--topology {name}: .*{how}"):
        topology.find_devices(name)


def test_a_plan_needs_no_data():
    cfg = config.freeze(config.load_file(str(ROOT / "configs/llama3_8b.py")))
    job = job_of(cfg, jax.devices()[:8])
    state = job_lib.program(job).state
    assert local_bytes(state.params) == pytest.approx(8_030_261_248 * 4 / 8, rel=1e-3)
    batch = abstract_batch(job)
    assert {name: a.shape for name, a in batch.items()} == dict.fromkeys(
        ("inputs", "targets", "weights", "segments", "positions"), (512, 8192)
    )


def test_a_vocabulary_that_only_data_know_is_asked_for():
    devices = jax.devices()[:1]
    vocabulary = lambda **changes: job_of(change(TINY, model__vocab_size=None, **changes), devices).cfg.model.vocab_size
    assert vocabulary(data__kind="stdlib", data__tokenizer="bytes") == 259
    for changes in (dict(data__kind="stdlib", data__tokenizer="chars"), dict(data__kind="tokens", data__path="x")):
        with pytest.raises(ValueError, match=r"model\.vocab_size=None: .*--config\.model\.vocab_size=N"):
            vocabulary(**changes)


def test_a_length_in_epochs_needs_no_data_either():
    cfg = change(TINY, steps=None, epochs=2.0, optimizer__warmup_steps=7, optimizer__schedule="cosine")
    assert job_of(cfg, jax.devices()[:1]).steps > 7


@pytest.mark.parametrize(
    ("message", "needs", "has"),
    [
        ("E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO temporaries (600.00G) exceeds "
         "available HBM (15.75G). HLO module: jit_f.", 600, 15.75),
        ("XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm.", 20.5, 15.75),
    ],
)  # fmt: skip
def test_what_a_program_lacks_is_read_from_the_compilers_message(message, needs, has):
    error = too_large(message)
    assert (error.needs, error.has) == (needs * GiB, has * GiB)
    assert too_large("E1001: CompileTimeScopedVmemOom: Ran out of memory in memory space vmem") is None


def test_flops_of_attention_kernels():
    q, k = "bf16[2,8,64,128]{3,2,1,0}", "bf16[2,2,64,128]{3,2,1,0}"
    call = lambda name: hlo.KernelCall(name, 3, ("s8[1,1]{1,0}", q, k, k), None)
    square = 3 * 2 * 2 * 8 * 64 * 64 * 128  # of three calls, one product
    flops = lambda *names: [row["flops"] for row in kernel_flops([call(n) for n in names], 0.5, 0)]
    assert flops("splash_mha_fwd_residuals", "splash_mha_dkv_no_residuals", "mine") == [square, 2.5 * square, None]
    assert flops("splash_mqa_fwd", "splash_mqa_dkv", "splash_mqa_dq") == [square, 2 * square, 1.5 * square]


def test_flops_of_grouped_products_are_those_of_the_chosen_rows():
    """4 experts of 32 x 48, and room for 100 rows."""
    x, y, w, swapped = (f"bf16[{shape}]{{1,0}}" for shape in ("100,32", "100,48", "4,32,48", "4,48,32"))
    forms = {"jit(gmm)": (x, w), "transpose(jvp(jit(gmm)))": (x, swapped), "transpose(jvp(jit(tgmm)))": (x, y)}
    calls = [hlo.KernelCall(name, 3, ("s32[]", "s32[5]{0}", *given), None) for name, given in forms.items()]
    for rows, multiplied in [(80, 80), (120, 100)]:
        assert [row["flops"] for row in kernel_flops(calls, 1.0, rows)] == 3 * [3 * 2 * multiplied * 32 * 48]


@pytest.fixture
def _no_compiler(monkeypatch):
    """A plan that has room for a row or, by its policy, for more; fastest where the experts are in two."""
    rows_at_once = {"none": 1, "full": 99, "dots": 4}

    def fake(job, name):
        cfg, shape = job.cfg, job.mesh.shape
        at_once = cfg.batch_size // cfg.accumulation // job.mesh.size
        fits = at_once <= rows_at_once.get(cfg.model.remat, 2)
        if cfg.model.remat == "offload":
            raise ValueError("the compiler refuses the train step: no such memory")
        known = {"topology": name, "remat": cfg.model.remat, "batch_size": cfg.batch_size, "mesh": shape}
        rate = at_once / (1 + abs(2 - shape["expert"]))
        time = {"time": {"tokens_per_s": rate, "step_s": 1.0, "mfu": 0.5}} if fits else {}
        return known | {"accumulation": cfg.accumulation, "fits": fits, "has_bytes": GiB} | time | (
            {"memory": {"total": GiB / 2}} if fits else {"needs_bytes": 2 * GiB}
        )  # fmt: skip

    monkeypatch.setattr("minitf.plan.figures.plan", fake)


@pytest.mark.usefixtures("_no_compiler")
def test_a_search_cuts_the_batch_until_it_fits_and_doubles_it_while_it_does():
    job = job_of(change(TINY, batch_size=8), jax.devices()[:2])  # four rows a device
    found = list(search(job, "here"))
    tried = lambda remat: [(p["batch_size"], p["accumulation"], p["fits"]) for p in found if p["remat"] == remat]
    assert tried("none") == [(8, 1, False), (8, 2, False), (8, 4, True)]
    assert tried("full") == [(8, 1, True), (16, 1, True), (32, 1, True)]
    assert tried("dots") == [(8, 1, True), (16, 1, False)]
    assert tried("offload") == [(8, 1, False)]
    assert {p["remat"] for p in found} == set(REMAT)
    text = searched(found)
    best = "most tokens/s: --config.model.remat=full --config.batch_size=32 --config.accumulation=1"
    assert best in text.splitlines()
    assert "refused: the compiler refuses the train step: no such memory" in text
    assert math.isclose(sum("does not fit" in line for line in text.splitlines()), sum(not p["fits"] for p in found))


@pytest.mark.usefixtures("_no_compiler")
def test_a_search_divides_a_mixture_in_other_ways():
    mixture = change(TINY, model__mlp__router="softmax", model__mlp__experts=6, model__mlp__experts_per_token=2)
    found = list(search(job_of(change(mixture, mesh__fsdp=4, mesh__data=2, mesh__expert=1), jax.devices()), "here"))
    divisions = [(p["mesh"]["fsdp"], p["mesh"]["expert"]) for p in found if "why" not in p]
    assert set(divisions[:-1]) == {(4, 1)}
    assert divisions[-1] == (2, 2)  # neither 4, which does not divide 6, nor 3, which does not divide 4
    assert searched(found).endswith("--config.mesh.fsdp=2 --config.mesh.expert=2\nrefused: the compiler refuses the train step: "
                                    "no such memory")  # fmt: skip


@needs_compiler
@pytest.mark.slow
def test_a_search_on_a_topology(monkeypatch, capsys):
    monkeypatch.setattr("minitf.plan.figures.REMAT", {name: REMAT[name] for name in ("products", "full")})
    found = list(search(job_of(change(TOY, batch_size=4), topology.find_devices("v5e:2x2")), "v5e:2x2"))
    assert [(p["remat"], p["batch_size"], p["fits"]) for p in found] == [
        (remat, n, True) for remat in ("products", "full") for n in (4, 8, 16)
    ]
    assert "model.remat=full batch_size=16 accumulation=1" in capsys.readouterr().err


def test_nothing_happens_at_import():
    code = "import os; before = dict(os.environ); import minitf.plan; assert dict(os.environ) == before"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("name", ["v9:1x1", "v5e"])
def test_a_mistake_is_one_message_and_status_2(name, capsys):
    with pytest.raises(SystemExit) as e:
        main(["--config", str(ROOT / "configs/tiny.py"), "--topology", name])
    assert e.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
