"""The reader of compiled programs: on short texts that say what each backend says, and on programs compiled here."""

import functools

import jax
import jax.numpy as jnp
import pytest
from common import make_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from minitf.plan import hlo

MESH = {"data": 2, "fsdp": 4, "tensor": 1}


def read(text):
    module = hlo.parse(text)
    return module, hlo.runs(module)


def found(text, mesh=MESH):
    return hlo.collectives(*read(text), mesh)


def entry(*lines):
    body = "".join(f"  {line}\n" for line in lines)
    return "HloModule m, is_scheduled=true\n\nENTRY %main (x: f32[8]) -> f32[8] {\n" + body + "}\n"


# ---- shapes


@pytest.mark.parametrize(
    ("shape", "n"),
    [
        ("f32[]", 4),
        ("bf16[1,192,4,24]{3,2,0,1:T(4,128)(2,1)S(1)}", 2 * 192 * 4 * 24),
        ("(f32[4]{0:T(256)}, /*index=5*/(u32[2], pred[8]))", 16 + 8 + 8),
        ("s4[6]", 3),
        ("f8e4m3fn[5]", 5),
        ("token[]", 0),
        ("()", 0),
    ],
)
def test_bytes_of_a_shape(shape, n):
    assert hlo.nbytes(shape) == n


# ---- how often things run

LOOP = """HloModule step

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %f = f32[8]{0:T(128)} fusion(%i), kind=kLoop, calls=%inside, backend_config={"estimated_cycles":"100"}
  ROOT %t = (s32[], f32[8]) tuple(%i, %f)
}

%inside (a: s32[]) -> f32[8] {
  %a = s32[] parameter(0)
  ROOT %b = f32[8] broadcast(%a), dimensions={}, backend_config={"estimated_cycles":"7"}
}

CONDITION

%outer (q: (s32[], f32[8])) -> (s32[], f32[8]) {
  %q = (s32[], f32[8]) parameter(0)
  %w = (s32[], f32[8]) while(%q), condition=%cond, body=%body, metadata={op_name="jit(step)/while"}
  %c = f32[8] copy(%w), backend_config={"estimated_cycles":"1000"}
  ROOT %u = (s32[], f32[8]) tuple(%w, %c)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  %v = (s32[], f32[8]) while(%x), condition=%never_read, body=%outer, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %r = f32[8] get-tuple-element(%v), index=1
}
"""
COMPARED = """%cond (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]) parameter(0)
  %limit = s32[]{:T(128)} constant(5)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT
}"""
FUSED = """%compare_inside (i.1: s32[], n.1: s32[]) -> pred[] {
  %i.1 = s32[] parameter(0)
  %n.1 = s32[] parameter(1)
  ROOT %lt.1 = pred[] compare(%i.1, %n.1), direction=LT
}

%cond (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]) parameter(0)
  %limit = s32[] constant(5)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %wrapped = pred[] fusion(%i, /*index=1*/%limit), kind=kLoop, calls=%compare_inside
}"""


@pytest.mark.parametrize(
    ("condition", "turns"),
    [
        (COMPARED, 5),
        (
            COMPARED.replace("%i, %limit", "%limit, %i").replace("LT", "GT"),
            None,
        ),  # no form that is known: said, not guessed
        (COMPARED.replace("direction=LT", "direction=LE"), 6),
        (FUSED, 5),
        (COMPARED.replace("constant(5)", "parameter(1)"), None),
    ],
)
def test_loops_turn_as_often_as_their_conditions_constant_says_times_the_loops_around_them(condition, turns):
    module, run = read(LOOP.replace("CONDITION", condition))
    assert run.counts["body"] == 3 * (turns or 1)
    assert run.counts["outer"] == 3
    assert run.unknown == (() if turns else ("w",))
    # A fusion's cycles hold what is inside it.
    assert sum(c.cycles for c in hlo.costs(module, run)) == 3 * 1000 + 3 * (turns or 1) * 100


def test_each_branch_of_a_conditional_counts_once_and_what_nothing_calls_does_not():
    text = """%a (p: f32[8]) -> f32[8] {
  ROOT %p = f32[8] copy(%p), backend_config={"estimated_cycles":"10"}
}

%b (p.1: f32[8]) -> f32[8] {
  ROOT %p.1 = f32[8] copy(%p.1), backend_config={"estimated_cycles":"20"}
}

%lost (p.2: f32[8]) -> f32[8] {
  ROOT %p.2 = f32[8] copy(%p.2), backend_config={"estimated_cycles":"40"}
}

""" + entry(
        "%x = f32[8] parameter(0)",
        "%one = f32[8] conditional(%x, %x, %x), branch_computations={%a, %b}",
        "ROOT %two = f32[8] conditional(%x, %x, %x), true_computation=%a, false_computation=%b",
    )
    module, run = read(text)
    assert sum(c.cycles for c in hlo.costs(module, run)) == 2 * 10 + 2 * 20
    assert "lost" not in run.counts


def test_a_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.parse("HloModule m\n")


# ---- kernels

CALL = (
    "(bf16[2,4,64,128]{3,2,1,0:T(8,128)(2,1)S(1)}, f32[2,4,64]) custom-call(%m, %q, /*index=5*/%k), "
    'custom_call_target="tpu_custom_call", '
    "operand_layout_constraints={s8[1,2]{1,0}, bf16[2,4,64,128]{3,2,1,0}, bf16[2,4,32,128]{3,2,1,0}}"
)
KERNEL = """HloModule k

%body (p: bf16[2,4,64,128]) -> bf16[2,4,64,128] {
  %splash.2 = CALL, frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="jit(f)/while/body/splash_mha_fwd/pallas_call" stack_frame_id=15}, backend_config={"body":"TUzv"}
  ROOT %g = bf16[2,4,64,128] get-tuple-element(%splash.2), index=0, frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}
}

%cond (p.1: bf16[2]) -> pred[] {
  %n = s32[] constant(4)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: bf16[2,4,64,128]) -> bf16[2,4,64,128] {
  %x = bf16[2,4,64,128] parameter(0)
  %other = f32[8] custom-call(), custom_call_target="AllocateBuffer"
  ROOT %w = bf16[2,4,64,128] while(%x), condition=%cond, body=%body
}
"""


def test_kernels_are_found_though_their_metadata_span_lines():
    module, run = read(KERNEL.replace("CALL", CALL))
    (kernel,) = hlo.kernels(module, run)
    assert (kernel.name, kernel.count) == ("splash_mha_fwd", 4)
    assert kernel.operands[1:] == ("bf16[2,4,64,128]{3,2,1,0}", "bf16[2,4,32,128]{3,2,1,0}")
    assert [i.name for i in module.computations["body"]] == ["splash.2", "g"]
    assert list(module.computations) == ["body", "cond", "main"]


# ---- collectives

GATHER = "%g = f32[64] all-gather(%x), channel_id=1, {groups}, dimensions={{0}}, use_global_device_ids=true"


@pytest.mark.parametrize(
    ("groups", "axes", "group"),
    [
        ("replica_groups=mesh['data'=2,'fsdp'=4,'tensor'=1] {'fsdp'}", ("fsdp",), (0, 1, 2, 3)),
        ("replica_groups=mesh['data'=2,'fsdp'=4,'tensor'=1] {'data'}", ("data",), (0, 4)),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'data','fsdp'}", ("data", "fsdp"), tuple(range(8))),
        ("replica_groups=mesh['axis_0'=8] {'axis_0'}", ("data", "fsdp"), tuple(range(8))),  # the compiler's own names
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ("data",), (0, 4)),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=(0,4,1,5,2,6,3,7) {'b'}", ("data",), (0, 4)),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", ("data",), (0, 4)),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", ("fsdp",), (0, 1, 2, 3)),
        ("replica_groups=[2,4]<=[8]", ("fsdp",), (0, 1, 2, 3)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ("data",), (0, 4)),
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", ("fsdp",), (0, 1, 2, 3)),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("data",), (0, 4)),
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", None, (0, 1)),
        ("replica_groups={}", ("data", "fsdp"), tuple(range(8))),
    ],
)
def test_groups_in_every_notation_and_the_mesh_axes_they_lie_along(groups, axes, group):
    (c,) = found(entry("%x = f32[8] parameter(0)", "ROOT " + GATHER.format(groups=groups)))
    assert (c.kind, c.axes, c.group, c.synchronous) == ("all-gather", axes, group, True)
    assert c.wire == 256 * (len(group) - 1) / len(group)


def test_the_numbers_of_a_transposed_iota_are_those_of_numpy():
    import numpy as np

    text = "[3,8]<=[2,3,4]T(2,0,1)"
    assert hlo.iota(text) == np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1).ravel().tolist()


FOUR = "replica_groups=[2,4]<=[8]"


@pytest.mark.parametrize(
    ("line", "kind", "wire"),
    [
        (f"(f32[8], f32[16]) all-reduce(%x, %y), {FOUR}, to_apply=%add", "all-reduce", 2 * 96 * 3 / 4),
        (f"(f32[8], f32[16]) all-reduce-start(%x, %y), {FOUR}, to_apply=%add", "all-reduce", 2 * 96 * 3 / 4),
        (f"bf16[8] all-gather(%x), {FOUR}, dimensions={{0}}", "all-gather", 16 * 3 / 4),
        (f"(bf16[2], bf16[8]) all-gather-start(%x), {FOUR}, dimensions={{0}}", "all-gather", 16 * 3 / 4),
        (f"((bf16[2], f32[1]), (bf16[8], f32[4])) all-gather-start(%x, %y), {FOUR}", "all-gather", 32 * 3 / 4),
        (f"f32[2] reduce-scatter(%x), {FOUR}, dimensions={{0}}, to_apply=%add", "reduce-scatter", 8 * 3),
        (f"f32[8] all-to-all(%x), {FOUR}, dimensions={{0}}", "all-to-all", 32 * 3 / 4),
        ("f32[8] collective-permute(%x), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}", "collective-permute", 32),
        (
            "(f32[8], f32[8], u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,4},{4,0}}",
            "collective-permute",
            32,
        ),
    ],
)
def test_bytes_on_the_wire_of_a_ring(line, kind, wire):
    (c,) = found(entry("%x = f32[8] parameter(0)", f"ROOT %c = {line}"))
    assert (c.kind, c.wire) == (kind, wire)
    assert c.synchronous == ("-start(" not in line)
    if kind == "collective-permute":
        assert c.axes == (("data",) if "{0,4}" in line else ("fsdp",))


def test_a_group_of_one_sends_nothing():
    assert found(entry("%x = f32[8] parameter(0)", "ROOT " + GATHER.format(groups="replica_groups=[8,1]<=[8]"))) == []


ONE = "channel_id=1, replica_groups=mesh['data'=2,'fsdp'=4,'tensor'=1] {'fsdp'}, dimensions={0}"
ASYNCHRONOUS = f"""HloModule m

%start.1 (p.1: f32[2]) -> (f32[2], f32[8], u32[]) {{
  %p.1 = f32[2] parameter(0)
  %ag.1 = f32[8]{{0:T(128)}} all-gather(%p.1), {ONE}
  ROOT %s.1 = (f32[2], f32[8], u32[]) custom-call(%ag.1), custom_call_target="AsyncCollectiveStart"
}}

%async_collective_fusion.7 (p.2: f32[2], b.2: f32[8]) -> (f32[2], f32[8]) {{
  %p.2 = f32[2] parameter(0)
  %ag.2 = f32[8]{{0:T(128)S(1)}} all-gather(%p.2), {ONE}
  ROOT %t.2 = (f32[2], f32[8]) tuple(%p.2, %ag.2)
}}

%done.3 (p.3: f32[2], b.3: f32[8]) -> f32[8] {{
  %p.3 = f32[2] parameter(0)
  %ag.3 = f32[8]{{0:T(128)}} all-gather(%p.3), {ONE}
  ROOT %d.3 = f32[8] custom-call(%p.3, %ag.3), custom_call_target="AsyncCollectiveDone"
}}

%start.4 (p.4: f32[2]) -> (f32[2], f32[8], u32[]) {{
  %p.4 = f32[2] parameter(0)
  %ag.4 = f32[8]{{0:T(128)}} all-gather(%p.4), {ONE}
  ROOT %s.4 = (f32[2], f32[8], u32[]) custom-call(%ag.4), custom_call_target="AsyncCollectiveStart"
}}

%all-reduce-scatter.5 (p.5: f32[8]) -> f32[2] {{
  %p.5 = f32[8] parameter(0)
  %ar.5 = f32[8] all-reduce(%p.5), channel_id=1, replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}, to_apply=%add
  ROOT %ds.5 = f32[2] dynamic-slice(%ar.5, %n), dynamic_slice_sizes={{2}}
}}

%wrapped.6 (p.6: f32[8]) -> f32[8] {{
  %p.6 = f32[8] parameter(0)
  ROOT %a2a.6 = f32[8] all-to-all(%p.6), {FOUR}, dimensions={{0}}
}}

ENTRY %main (x: f32[2]) -> f32[8] {{
  %x = f32[2] parameter(0)
  %f.1 = (f32[2], f32[8], u32[]) fusion(%x), kind=kCustom, calls=%start.1
  %f.2 = (f32[2], f32[8]) fusion(%f.1), kind=kOutput, calls=%async_collective_fusion.7
  %f.3 = f32[8] fusion(%f.2), kind=kCustom, calls=%done.3
  %f.4 = (f32[2], f32[8], u32[]) fusion(%x), kind=kCustom, calls=%start.4
  %f.5 = f32[2] fusion(%f.3), kind=kCustom, calls=%all-reduce-scatter.5
  %a.6 = ((f32[8]), f32[8], u32[]) async-start(%f.3), calls=%wrapped.6
  %plain.7 = f32[8] all-gather(%f.5), {ONE}
  ROOT %d.6 = f32[8] async-done(%a.6), calls=%wrapped.6
}}
"""


def test_what_runs_beside_other_work_counts_once_where_it_starts():
    """Also where two share a channel, as those of a shard_map do."""
    kinds = sorted((c.kind, c.instruction.name, c.synchronous, c.wire) for c in found(ASYNCHRONOUS))
    assert kinds == [
        ("all-gather", "ag.1", False, 24.0),
        ("all-gather", "ag.4", False, 24.0),
        ("all-gather", "plain.7", True, 24.0),
        ("all-to-all", "a2a.6", False, 24.0),
        ("reduce-scatter", "ar.5", True, 24.0),
    ]


OFFLOADED = f"""HloModule m

%called.1 (p.1: f32[2]) -> f32[8] {{
  %p.1 = f32[2] parameter(0)
  %b.1 = f32[2] copy(%p.1), backend_config={{"estimated_cycles":"50"}}
  ROOT %ag.1 = f32[8] all-gather(%b.1), {ONE}
}}, execution_thread="sparsecore"

ENTRY %main (x: f32[2]) -> f32[8] {{
  %x = f32[2] parameter(0)
  %s.2 = ((f32[2]), f32[8]) custom-call-start(%x), async_execution_thread="sparsecore", called_computations={{%called.1}}
  %f.3 = f32[2] copy(%x), backend_config={{"estimated_cycles":"3"}}
  %f.4 = f32[2] copy(%x), backend_config={{"estimated_cycles":"9223372036854775807"}}
  ROOT %d.2 = f32[8] custom-call-done(%s.2)
}}
"""


def test_what_another_core_does_is_asynchronous_and_none_of_the_cycles():
    module, run = read(OFFLOADED)
    (c,) = hlo.collectives(module, run, MESH)
    assert (c.kind, c.synchronous) == ("all-gather", False)
    assert [c.cycles for c in hlo.costs(module, run)] == [3]


def test_transfers_between_slices_are_found_by_the_collective_they_are_part_of():
    attributes = '_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_transfer_type="ALL_GATHER"'
    text = entry(
        "%x = bf16[1,16] parameter(0)",
        f"%s = (bf16[1,16]{{1,0:T(8,128)}}, u32[], token[]) send(%x, %t), is_host_transfer=true, frontend_attributes={{{attributes}}}",
        "ROOT %plain = (bf16[1,16], u32[], token[]) send(%x, %t), channel_id=3",
    )
    (t,) = hlo.transfers(*read(text))
    assert (t.kind, t.count, t.nbytes) == ("all-gather", 1, 32)


# ---- arrays


def test_the_largest_arrays_are_those_in_main_memory_with_where_they_come_from():
    text = entry(
        "%x = f32[4096] parameter(0)",
        '%a = f32[64,8]{1,0:T(8,128)} fusion(%x), calls=%f, metadata={op_name="jit(f)/mul"}',
        "%b = f32[64,8]{1,0:T(8,128)} copy(%a)",
        "%c = f32[1024]{0:T(128)S(1)} copy(%x)",  # in the core's own memory
        '%d = (f32[128]{0}, f32[2]) fusion(%x), calls=%f, metadata={op_name="jit(f)/add"}',
        "%e = f32[128] get-tuple-element(%d), index=0",
        "ROOT %w = (f32[1024]) while(%x), condition=%c, body=%b",
    )
    assert [tuple(a) for a in hlo.formed_arrays(*read(text))] == [
        ("f32[64,8]", 2048, "jit(f)/mul", 2),
        ("f32[128]", 512, "jit(f)/add", 1),
        ("f32[2]", 8, "jit(f)/add", 1),
    ]


# ---- programs compiled here


def compiled(f, *shapes, mesh, specs, out=None):
    args = [
        jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, p))
        for s, p in zip(shapes, specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        text = jax.jit(f, out_shardings=out).lower(*args).compile().as_text()
    return hlo.collectives(*read(text), mesh.shape)


PROGRAMS = {  # a function of x [16, 16] on one device, of the mesh axis; what travels; bytes sent among g devices
    "all-gather": (lambda x, a: jax.lax.all_gather(x, a, tiled=True), lambda g: 1024 * g * (g - 1) / g),
    "all-reduce": (lambda x, a: jax.lax.psum(x, a), lambda g: 2 * 1024 * (g - 1) / g),
    "reduce-scatter": (
        lambda x, a: jax.lax.psum_scatter(x, a, scatter_dimension=0, tiled=True),
        lambda g: 1024 * (g - 1) / g,
    ),
    "all-to-all": (lambda x, a: jax.lax.all_to_all(x, a, 0, 1, tiled=True), lambda g: 1024 * (g - 1) / g),
    "collective-permute": (
        lambda x, a: jax.lax.ppermute(x, a, [(i, i ^ 1) for i in range(jax.lax.axis_size(a))]),
        lambda g: 1024,
    ),
}


@pytest.mark.parametrize("axis", ["fsdp", "tensor"])
@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_collective_in_a_loop_is_read_as_it_was_written(kind, axis):
    function, wire = PROGRAMS[kind]
    mesh = make_mesh("2x2x2")

    @functools.partial(jax.shard_map, in_specs=P("data"), out_specs=P("data"), mesh=mesh, check_vma=False)
    def local(x):
        def body(total, _):
            return total + jnp.sum(jnp.sin(function(jnp.cos(x * total), axis))), None

        return x * jax.lax.scan(body, jnp.float32(1), None, length=7)[0]

    (c,) = compiled(local, (32, 16), mesh=mesh, specs=[P("data")])
    assert (c.kind, c.axes, len(c.group), c.count) == (kind, (axis,), 2, 7)
    assert c.wire == wire(2)


def test_what_the_partitioner_adds_is_read_too():
    mesh = make_mesh("fsdp8")
    (c,) = compiled(lambda x: x + 1, (64, 16), mesh=mesh, specs=[P("fsdp")], out=NamedSharding(mesh, P()))
    assert (c.kind, c.axes, c.nbytes, c.count) == ("all-gather", ("fsdp",), 64 * 16 * 4, 1)
    assert compiled(lambda x: x + 1, (64, 16), mesh=mesh, specs=[P("fsdp")], out=NamedSharding(mesh, P("fsdp"))) == []
