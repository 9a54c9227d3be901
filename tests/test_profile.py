"""Profiles of a run, and their summary: on real traces of this process's CPU devices."""

import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from common import change, launch, series, text_config
from etils import epath
from jax.profiler import ProfileData

from minitf.runtime.log import json_lines
from minitf.runtime.profile import Profile
from tools import profile_summary
from tools.profile_summary import Instruction, Ran, covered, own_times

pytestmark = [
    pytest.mark.usefixtures("rate_known"),
    pytest.mark.filterwarnings("ignore:builtin type .*_stats has no __module__:DeprecationWarning"),  # JAX's
]


# ---- of a run


def profiles(workdir: Path) -> list[Path]:
    return sorted(workdir.glob("plugins/profile/*/*.xplane.pb"))


def traced_steps(file: Path) -> list[int]:
    """Those whose dispatch the trace holds."""
    planes = ProfileData.from_file(str(file)).planes
    return sorted(
        n for p in planes for line in p.lines for e in line.events for name, n in e.stats if name == "step_num"
    )


@pytest.fixture(scope="module")
def plain(corpus, tmp_path_factory):
    return launch(text_config(corpus, steps=6), tmp_path_factory.mktemp("plain") / "w")[1]


@pytest.mark.parametrize(
    "profile", [pytest.param((1, 2), marks=pytest.mark.slow), (2, 2), pytest.param((4, 3), marks=pytest.mark.slow)]
)
def test_a_profile_holds_its_steps_whole_and_changes_nothing(profile, plain, corpus, tmp_path, capfd):
    status, lines = launch(text_config(corpus, steps=6, profile=profile, eval_every=2), tmp_path / "w")
    assert status == 0
    assert series(lines, "train/loss") == series(plain, "train/loss")
    (file,) = profiles(tmp_path / "w")
    first, n = profile
    assert traced_steps(file) == list(range(first, first + n))
    found = profile_summary.summary([file])
    loops = {o["count"] for o in found["operations"] if o["module"] == "jit_train_step" and o["kind"] == "while"}
    assert loops == {n}  # over layers, and the update of each step, its last part
    assert (
        f"profile of steps {first} to {first + n - 1}: python -m tools.profile_summary {tmp_path / 'w'}"
        in capfd.readouterr().out
    )


def test_a_profile_of_steps_that_are_done_is_not_made(corpus, tmp_path, capfd):
    cfg = text_config(corpus, steps=3, checkpoint__last=True)
    launch(cfg, tmp_path / "w")
    launch(change(cfg, steps=6, profile=(3, 2)), tmp_path / "w")
    assert "profile=3,2: step 3 is already done; nothing is traced" in capfd.readouterr().out
    assert profiles(tmp_path / "w") == []
    launch(change(cfg, steps=9, profile=(7, 2)), tmp_path / "w")
    (file,) = profiles(tmp_path / "w")
    assert traced_steps(file) == [7, 8]


def test_a_run_that_ends_within_its_profile_writes_it(tmp_path):
    with Profile(epath.Path(tmp_path), (2, 10), 0, print) as profile:
        profile.begin(1)
        jax.block_until_ready(jnp.ones(8) + 1)
    assert len(profiles(tmp_path)) == 1
    with Profile(epath.Path(tmp_path / "more"), (1, 1), 0, print) as profile:  # nothing is under way any more
        profile.begin(0)
        profile.end(1)
    assert len(profiles(tmp_path / "more")) == 1


@pytest.mark.slow
def test_a_profile_that_cannot_be_made_or_written_is_told_and_the_run_goes_on(
    plain, corpus, tmp_path, capfd, monkeypatch
):
    stop = jax.profiler.stop_trace

    def full():
        stop()
        raise RuntimeError("No space left on device")

    with monkeypatch.context() as m:
        m.setattr(jax.profiler, "stop_trace", full)
        status, lines = launch(text_config(corpus, steps=6, profile=(3, 2)), tmp_path / "full")
    assert (status, series(lines, "train/loss")) == (0, series(plain, "train/loss"))
    assert "warning: the profile could not be written: No space left on device" in capfd.readouterr().out
    with jax.profiler.trace(str(tmp_path / "of another")):
        status, lines = launch(text_config(corpus, steps=6, profile=(3, 2)), tmp_path / "other")
    assert (status, series(lines, "train/loss")) == (0, series(plain, "train/loss"))
    assert "warning: no profile: " in capfd.readouterr().out


def test_an_older_runs_profile_goes_with_it(corpus, tmp_path):
    cfg = text_config(corpus, steps=2, profile=(1, 1))
    launch(cfg, tmp_path / "w")
    launch(change(cfg, profile=None, seed=1), tmp_path / "w", overwrite=True)
    assert profiles(tmp_path / "w") == []
    assert json_lines(epath.Path(tmp_path / "w/events.jsonl"))[-1]["reason"] == "done"


# ---- summed up

LAYERS, RUNS = 7, 3


def scanned(w_LDD, x_BD):
    def layer(x_BD, w_DD):
        with jax.named_scope("product"):
            x_BD = x_BD @ w_DD
        return jnp.sin(x_BD), None

    return jax.lax.scan(layer, x_BD, w_LDD)[0]


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """A work directory with a profile of RUNS runs of a scan over LAYERS products."""
    workdir = tmp_path_factory.mktemp("toy")
    f, arguments = jax.jit(scanned), (jnp.ones((LAYERS, 200, 200)), jnp.ones((100, 200)))
    jax.block_until_ready(f(*arguments))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(str(workdir), profiler_options=options)
    for step in range(RUNS):
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            jax.block_until_ready(f(*arguments))
    jax.profiler.stop_trace()
    return workdir


def summed(*arguments, capsys) -> dict:
    assert profile_summary.main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_operations_are_counted_and_named_by_their_source(toy, capsys):
    found = summed(toy, capsys=capsys)
    assert (found["devices"], found["hosts"], found["steps"]) == (1, 1, RUNS)
    of_scan = [o for o in found["operations"] if o["module"] == "jit_scanned"]
    (product,) = (o for o in of_scan if "product/dot_general" in o["source"] and "dot" in o["kind"])
    assert product["count"] == RUNS * LAYERS
    assert product["seconds"] > 0
    assert any(o["kind"] == "while" and o["count"] == RUNS for o in of_scan)
    for rows in (found["operations"], found["kinds"]):
        assert sum(row["share"] for row in rows) == pytest.approx(1)
        assert [row["seconds"] for row in rows] == sorted((row["seconds"] for row in rows), reverse=True)
        assert all(row["seconds"] >= 0 for row in rows)
    assert sum(k["count"] for k in found["kinds"]) == sum(o["count"] for o in found["operations"])
    assert 0 <= found["between_programs"] <= found["idle"] < 1


def test_the_newest_profile_is_found_and_so_is_one_by_its_directory_or_file(toy, capsys):
    (file,) = profiles(toy)
    by_workdir = summed(toy, capsys=capsys)
    assert summed(file.parent, capsys=capsys) == summed(file, capsys=capsys) == by_workdir
    newer = toy / "plugins/profile/9999_01_01_00_00_00"
    newer.mkdir()
    assert summed(toy, capsys=capsys) == by_workdir  # an empty directory is none
    for host in ("a", "b"):
        (newer / f"{host}.xplane.pb").write_bytes(file.read_bytes())
    both = summed(toy, capsys=capsys)
    assert (both["hosts"], both["devices"], both["steps"]) == (2, 2, RUNS)
    assert both["seconds"] == pytest.approx(by_workdir["seconds"])
    for two, one in zip(both["kinds"], by_workdir["kinds"], strict=True):
        assert (two["count"], two["seconds"]) == (2 * one["count"], pytest.approx(2 * one["seconds"]))


def test_the_table_has_a_row_for_each_of_the_top(toy, capsys):
    assert profile_summary.main([str(toy), "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"{RUNS} steps" in lines[0]
    assert "nothing ran in" in lines[1]
    assert [line.split()[-1] if line else "" for line in lines[2:4]] == ["", "operation"]
    assert len(lines) == 2 + 2 * (2 + 2)


def event(number: int, begin: int, length: int, **stats: int) -> str:
    """Of an XPlane's text form. Stats: t1=2 is the text of number 2 under the name of number 1, n1=2 the number 2."""
    form = {"t": "ref_value", "n": "int64_value"}
    more = "".join(f"stats {{ metadata_id: {k[1:]} {form[k[0]]}: {v} }}" for k, v in stats.items())
    return f"events {{ metadata_id: {number} offset_ps: {begin}000 duration_ps: {length}000 {more} }}"


def plane(name: str, names: list[str], strings: list[str], lines: dict[str, str]) -> bytes:
    of = lambda field, texts: "".join(
        f"{field} {{ key: {i} value {{ id: {i} name: {json.dumps(t)} }} }}" for i, t in enumerate(texts, 1)
    )
    parts = "".join(f"lines {{ name: {json.dumps(n)} {events} }}" for n, events in lines.items())
    whole = (
        f"planes {{ name: {json.dumps(name)} {of('event_metadata', names)} {of('stat_metadata', strings)} {parts} }}"
    )
    return ProfileData.text_proto_to_serialized_xspace(whole)


DEVICES = {
    # A product that another thread ends, a copy behind it; then another run.
    "cpu": plane(
        "/host:CPU",
        ["dot.1", "end: dot.1", "copy.2"],
        ["hlo_op", "dot.1", "copy.2", "hlo_module", "jit_step", "program_id", "run_id", "device_ordinal", "_p", "_c"],
        {
            "tf_XLAExecute/1": event(1, 100, 10, t1=2, t4=5, n6=1, n7=1, n8=0, n9=77)
            + event(3, 190, 10, t1=3, t4=5, n6=1, n7=1, n8=0, n9=78)
            + event(1, 250, 50, t1=2, t4=5, n6=1, n7=2, n8=0, n9=79),
            "tf_XLAEigen/2": event(2, 180, 1, n10=77),
        },
    ),
    # A loop of two products, a copy after it, and in the end a pause within and one between programs.
    "tpu": plane(
        "/device:TPU:0",
        [
            "jit_step(7)",
            "%while.1 = (s32[]) while(...)",
            "%fusion.2 = f32[8] fusion(...)",
            "%copy.3 = f32[8] copy(...)",
            "send",
        ],
        ["hlo_category", "convolution fusion"],
        {
            "XLA Modules": event(1, 100, 100) + event(1, 220, 80),
            "XLA Ops": event(2, 100, 80)
            + event(3, 110, 30, t1=2)
            + event(3, 140, 30, t1=2)
            + event(4, 180, 20)
            + event(4, 220, 80),
            "Async XLA Ops": event(5, 0, 1000),
            "Steps": event(1, 0, 1000),
        },
    ),
    "gpu": plane(
        "/device:GPU:0",
        ["kernel", "copy"],
        ["hlo_op", "fusion.2", "copy.3", "hlo_module", "jit_step"],
        {
            "Stream #1(compute)": event(1, 100, 60, t1=2, t4=5) + event(2, 250, 50, t1=3, t4=5),
            "Stream #2(compute)": event(2, 120, 80, t1=3, t4=5),
            "XLA Launch Stats": event(1, 0, 1000),
        },
    ),
}
EXPECTED = {  # operation -> (kind, nanoseconds, count); share of idle time, of time between programs
    "cpu": ({"dot.1": ("dot", 130, 2), "copy.2": ("copy", 10, 1)}, 0.3, 0.25),
    "tpu": (
        {"while.1": ("while", 20, 1), "fusion.2": ("convolution fusion", 60, 2), "copy.3": ("copy", 100, 2)},
        0.1,
        0.1,
    ),
    "gpu": ({"fusion.2": ("fusion", 60, 1), "copy.3": ("copy", 130, 2)}, 0.25, None),
}


@pytest.mark.parametrize("kind", DEVICES)
def test_devices_lines_are_read_as_they_are(kind, tmp_path, capsys):
    (tmp_path / "x.xplane.pb").write_bytes(DEVICES[kind])
    found = summed(tmp_path, capsys=capsys)
    operations, idle, between = EXPECTED[kind]
    assert {
        o["name"]: (o["kind"], pytest.approx(o["seconds"] * 1e9), o["count"]) for o in found["operations"]
    } == operations
    assert {o["module"] for o in found["operations"]} == {"jit_step"}
    assert found["seconds"] == pytest.approx(200e-9)
    assert found["idle"] == pytest.approx(idle)
    assert found["between_programs"] == (None if between is None else pytest.approx(between))
    assert profile_summary.main([str(tmp_path)]) == 0
    assert ("no program was under way" in capsys.readouterr().out) == (between is not None)


def ran(begin: float, end: float, kind: str = "dot") -> Ran:
    return Ran(begin, end, "m", f"{kind} {begin}", Instruction(kind))


def test_a_loops_own_time_is_what_nothing_inside_it_took():
    loops = [ran(0, 100, "while"), ran(10, 90, "while"), ran(10, 30), ran(20, 50), ran(60, 80), ran(95, 120)]
    own = {r.name: ns for r, ns in own_times(loops)}
    assert own == {"while 0": 20, "while 10": 20, "dot 10": 20, "dot 20": 30, "dot 60": 20, "dot 95": 25}


def test_covered_is_the_length_of_the_union():
    pieces = [(0, 10), (5, 7), (8, 12), (20, 21)]
    for order in itertools.permutations(pieces):
        assert covered(order) == 13
    assert covered([]) == 0


@pytest.mark.parametrize(
    ("place", "options", "message"),
    [
        ("nothing", [], "nothing: no profile; --config.profile=START,STEPS makes one"),
        ("idle", [], "idle: no operation of a compiled program was recorded"),
        ("idle", ["--top", "0"], "--top=0: must be at least 1"),
    ],
)
def test_what_holds_no_profile_is_refused(place, options, message, tmp_path, capsys):
    (tmp_path / "idle").mkdir()
    (tmp_path / "idle/x.xplane.pb").write_bytes(plane("/host:CPU", [], [], {}))
    with pytest.raises(SystemExit, match="2"):
        profile_summary.main([str(tmp_path / place), *options])
    assert message in capsys.readouterr().err
