"""Every single-choice departure from one recipe equals the plain model: logits, gradients, a three-step loss curve."""

import pytest
from common import MESHES, change, sizes_of_axes

from minitf.model.attention import ATTENTION, QK_NORM
from minitf.model.grouped import GROUPED
from minitf.model.kernels import IMPLEMENTATIONS
from minitf.model.mlp import MLP
from minitf.model.remat import REMAT
from minitf.model.routers import ROUTERS
from minitf.model.transformer import NORMS, POSITIONS
from minitf.params import SCHEMES
from minitf.sharding.mesh import COLLECTIVES, MeshConfig
from tools import parity
from tools.parity import DEPARTURES, ROWS, departure

STEPS = 3


def test_every_kind_in_every_table_is_a_departure():
    configs = [departure(name).model for name in DEPARTURES]
    assert {k for c in configs for k in (c.pattern or (c.attention.kind,))} == set(ATTENTION)
    assert {c.mlp.kind for c in configs} == set(MLP)
    assert {c.attention.qk_norm_over for c in configs if c.attention.qk_norm} == set(QK_NORM)
    assert {c.norm for c in configs} == set(NORMS)
    assert {c.positions for c in configs} == set(POSITIONS)
    rows = [departure(name) for name in ROWS]
    assert {c.model.remat for c in rows} == set(REMAT)
    assert {c.model.init for c in rows} == set(SCHEMES)
    assert {c.mesh.collectives for c in rows} == set(COLLECTIVES)
    assert {c.model.attention.implementation for c in rows} == {"auto", *IMPLEMENTATIONS}
    assert {c.mlp.router for c in configs} == set(ROUTERS)
    assert {c.model.mlp.grouped for c in rows} == {"auto", *GROUPED} - {"megablox"}  # see test_grouped.py


def check(name: str, remat: str, mesh: str) -> None:
    cfg = change(departure(name), model__remat=remat, mesh=MeshConfig(**sizes_of_axes(MESHES[mesh])))
    truth = parity.expected(cfg, steps=STEPS)
    assert abs(truth.logits).max() > 0.1
    assert truth.losses[-1] < truth.losses[0]
    assert not parity.missed(parity.check(cfg, steps=STEPS))


FAST = [("products", "1"), ("full", "2x2x2")]
ON_MESHES = [("products", mesh) for mesh in MESHES if mesh != "1"]
# What is computed otherwise, with each policy and mesh.
PATHS = ("unroll", "kernel_reference", "accumulation", "loss_chunk")
# Every other policy on a mesh, with all that a policy names: a gated MLP and one without, two kinds of layers.
POLICIES = [(remat, "2x2x2") for remat in REMAT if remat not in ("products", "full")]


def elsewhere(i: int) -> tuple[str, str]:
    """Another way than in the fast suite, on a mesh where that was on one device; neighbours in the table take turns."""
    way = ON_MESHES[i // 2 % len(ON_MESHES)]
    return ("full", "1") if way[1] == FAST[i % 2][1] else way


# Each departure in one of two ways here, in another in the slow suite. Of mixtures one is here, which differs most from the recipe.
ONE_WAY = [(name, *FAST[i % 2]) for i, name in enumerate(DEPARTURES)]
SLOWLY = [case for case in ONE_WAY if case[0].startswith("experts") and case[0] != "experts_shared"]
ONCE = [case for case in ONE_WAY if case not in SLOWLY]

# A quarter of them, of both ways, are the core's.
CORE = [pytest.param(*case, marks=pytest.mark.core) if i % 8 in (0, 5) else case for i, case in enumerate(ONCE)]


@pytest.mark.parametrize(("name", "remat", "mesh"), CORE)
def test_equals_reference(name, remat, mesh):
    check(name, remat, mesh)


@pytest.mark.parametrize(("remat", "mesh"), FAST[-1:])
@pytest.mark.parametrize("name", ["kernel_reference", "accumulation", "loss_chunk"])
def test_other_ways_equal_the_reference(name, remat, mesh):
    check(name, remat, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "remat", "mesh"),
    SLOWLY
    + [(name, *elsewhere(i)) for i, name in enumerate(DEPARTURES)]
    + [(name, *way) for name in PATHS for way in [*FAST, ("full", "1"), *ON_MESHES]]
    + [(name, *way) for name in ("geglu", "alternating") for way in POLICIES],
)
def test_equals_reference_on_every_mesh_and_policy(name, remat, mesh):
    check(name, remat, mesh)
