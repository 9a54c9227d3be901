"""Checkpoints by themselves: what is saved comes back, what is damaged does not, and nothing is skipped in silence."""

import contextlib
import math
import os
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import assert_close, make_mesh
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from minitf.runtime.checkpoint import CheckpointConfig, Checkpoints, DamagedError, SaveError, check_fit, loss_of


def tree(n: int = 0, size: int = 64) -> dict:
    """A small train state that differs with n."""
    a = jax.random.normal(jax.random.key(n), (size, 8))
    return {"params": {"a": a, "b": jnp.full(3, n, jnp.bfloat16)}, "opt": {"a": a * 2}, "step": jnp.int32(n)}


def target(tree, **changes):
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree)
    return abstract | changes


def saved(directory, *steps, losses=(), **cfg):
    """Checkpoints of these steps; their committed steps."""
    with Checkpoints(directory, CheckpointConfig(**cfg)) as checkpoints:
        for step, loss in zip(steps, losses or [None] * len(steps), strict=True):
            checkpoints.save(step, tree(step), {}, loss)
            checkpoints.wait()
        return checkpoints.steps()


def largest_file(directory) -> str:
    files = [os.path.join(d, f) for d, _, names in os.walk(directory / "state") for f in names]
    return max(files, key=os.path.getsize)


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert jax.tree.map(lambda x: x.dtype, a) == jax.tree.map(lambda x: x.dtype, b)


@pytest.fixture
def directory(tmp_path):
    return epath.Path(tmp_path / "checkpoints")


def test_what_is_saved_comes_back_bit_for_bit(directory):
    saved(directory, 7)
    restored = Checkpoints(directory).restore_newest(target(tree()))
    equal(restored.tree, tree(7))
    assert restored.about["step"] == 7
    assert restored.damaged == {}


def test_an_empty_directory_restores_nothing(directory):
    assert Checkpoints(directory).restore_newest(target(tree())) is None


def test_a_part_of_the_tree_can_be_restored_alone(directory):
    saved(directory, 7)
    restored = Checkpoints(directory, read_only=True).restore_newest({"params": target(tree())["params"]})
    equal(restored.tree, {"params": tree(7)["params"]})


def test_values_are_those_at_the_save_though_the_step_takes_the_buffers(directory):
    step = jax.jit(lambda t: jax.tree.map(lambda a: a + 1, t), donate_argnums=0)
    state = tree(1, size=100_000)
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(1, state, {})
        for _ in range(20):
            state = step(state)
        jax.block_until_ready(state)
    equal(Checkpoints(directory).restore_newest(target(tree(1, size=100_000))).tree, tree(1, size=100_000))


@pytest.mark.parametrize("mesh", ["1", "data8", "2x2x2"])
def test_restores_on_another_mesh(directory, mesh):
    def layout(name, *axes):
        of = {True: NamedSharding(make_mesh(name), P(*axes)), False: NamedSharding(make_mesh(name), P())}
        return jax.tree.map(lambda a: of[a.ndim == 2], tree(7))

    with Checkpoints(directory) as checkpoints:
        checkpoints.save(7, jax.device_put(tree(7), layout("fsdp8", "fsdp")), {})
    wanted = layout(mesh, "data", "tensor")
    abstract = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree(7), wanted)
    restored = Checkpoints(directory).restore_newest(abstract).tree
    equal(restored, tree(7))
    assert jax.tree.map(lambda a: a.sharding, restored) == wanted


# ---- damage


def truncate(path):
    os.truncate(path, 0)


def flip_four_bytes(path):
    with open(path, "r+b") as f:
        f.seek(os.path.getsize(path) // 2)
        four = f.read(4)
        f.seek(-4, os.SEEK_CUR)
        f.write(bytes(b ^ 0xFF for b in four))


@pytest.mark.parametrize("damage", [truncate, flip_four_bytes, os.unlink])
def test_damaged_newest_falls_back_to_the_newest_good_one(directory, damage):
    saved(directory, 1, 2, 3)
    damage(largest_file(directory / "3"))
    with Checkpoints(directory) as checkpoints:
        restored = checkpoints.restore_newest(target(tree()))
        equal(restored.tree, tree(2))
        assert list(restored.damaged) == [3]
        # Put aside, not deleted; its step can be saved again.
        (directory / "3.damaged").mkdir()  # of an earlier time
        checkpoints.put_aside([3])
        checkpoints.save(3, tree(30), {})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2, 3]
    assert (directory / "3.damaged-2/state").exists()
    equal(Checkpoints(directory).restore_newest(target(tree())).tree, tree(30))


def test_orbax_alone_restores_flipped_bytes(directory):
    # Why the checksums are there: should this ever fail, they may go.
    import orbax.checkpoint as ocp

    state = {"a": jax.random.normal(jax.random.key(0), (64, 64))}
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(1, state, {})
    flip_four_bytes(largest_file(directory / "1"))
    args = ocp.args.Composite(state=ocp.args.PyTreeRestore(item=target(state)))
    silent = ocp.CheckpointManager(directory).restore(1, args=args).state["a"]
    assert not np.array_equal(silent, state["a"])
    with pytest.raises(DamagedError, match="the checksum is"):
        Checkpoints(directory).restore_newest(target(state))


def test_where_all_are_damaged_nothing_starts_anew(directory):
    saved(directory, 1, 2)
    truncate(largest_file(directory / "1"))
    os.unlink(directory / "2/about/metadata")
    with pytest.raises(DamagedError, match=r"no checkpoint can be read\n  step 2: .*\n  step 1: "):
        Checkpoints(directory).restore_newest(target(tree()))


def test_a_half_written_checkpoint_is_none(directory):
    saved(directory, 1)
    (directory / "2.orbax-checkpoint-tmp/state").mkdir(parents=True)
    with Checkpoints(directory) as checkpoints:
        assert checkpoints.steps() == [1]
        checkpoints.save(3, tree(), {})
    assert not (directory / "2.orbax-checkpoint-tmp").exists()


@pytest.fixture
def small_files():
    """Within it no file may grow beyond 100 kB, as on a disk that is full."""

    @contextlib.contextmanager
    def small_files():
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return small_files


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax leaves an event loop open
def test_a_failing_write_is_an_error_and_leaves_the_older_ones(directory, keep, small_files):
    checkpoints = Checkpoints(directory, CheckpointConfig(keep=keep))
    for step in (1, 2):
        checkpoints.save(step, tree(step, size=20_000), {})
        checkpoints.wait()
    with small_files():
        checkpoints.save(3, tree(3, size=20_000), {})
        message = (
            "checkpoint of step 3 could not be written: File too large; the newest complete checkpoint is of step 2"
        )
        with pytest.raises(SaveError, match=message):
            checkpoints.wait()
    restored = Checkpoints(directory).restore_newest(target(tree(size=20_000)))
    assert (restored.about["step"], restored.damaged) == (2, {})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_leaving_tells_that_the_last_write_failed(directory, small_files):
    checkpoints = Checkpoints(directory).__enter__()
    with small_files():
        checkpoints.save(1, tree(1, size=20_000), {})
        with pytest.raises(SaveError, match=r"step 1 could not be written: .*there is no complete checkpoint"):
            checkpoints.__exit__(None, None, None)


# ---- saves


@pytest.mark.parametrize(("end", "times"), [("leaves", 20), ("raises", 5)])
def test_the_last_save_is_complete_every_time(directory, end, times):
    for step in range(1, times + 1):
        try:
            with Checkpoints(directory) as checkpoints:
                checkpoints.save(step, tree(step, size=50_000), {})
                if end == "raises":
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        restored = Checkpoints(directory).restore_newest(target(tree(size=50_000)))
        assert (restored.about["step"], restored.damaged) == (step, {})


def test_a_save_that_would_be_skipped_is_an_error(directory):
    saved(directory, 100)
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(10, tree(10), {})  # below the newest: Orbax would skip it
        checkpoints.wait()
        assert checkpoints.steps() == [10, 100]
        with pytest.raises(SaveError, match="checkpoint of step 100 could not be written: StepAlreadyExistsError"):
            checkpoints.save(100, tree(100), {})


KEPT = {  # (keep, keep_every, keep_best) -> steps left of 1..9
    (3, None, None): [7, 8, 9],
    (1, None, None): [9],
    (None, None, None): [1, 2, 3, 4, 5, 6, 7, 8, 9],
    (2, 4, None): [4, 8, 9],
    (1, None, 2): [3, 5, 9],
    (1, 4, 1): [3, 4, 8, 9],
}


@pytest.mark.parametrize("settings", KEPT)
def test_keeps_the_newest_the_multiples_and_the_best(directory, settings):
    keep, keep_every, keep_best = settings
    losses = [5.0, None, 1.0, 4.0, 2.0, None, 3.0, 6.0, 7.0]
    cfg = dict(keep=keep, keep_every=keep_every, keep_best=keep_best)
    assert saved(directory, *range(1, 10), losses=losses, **cfg) == KEPT[settings]
    assert Checkpoints(directory).lowest_loss() == min([losses[s - 1] or np.inf for s in KEPT[settings]])


def test_nothing_is_deleted_that_a_save_did_not_write(directory):
    saved(directory, 1, 2, keep=1)
    for name in ("notes/mine", "7.bak/mine", "tmp/mine"):
        (directory / name).parent.mkdir()
        (directory / name).write_text("mine")
    assert saved(directory, 3, 4, keep=1) == [4]
    assert sorted(p.name for p in directory.iterdir()) == ["4", "7.bak", "notes", "tmp"]


def test_best_is_kept_across_a_restart(directory):
    saved(directory, 1, 2, losses=[1.0, 2.0], keep=1, keep_best=1)
    assert saved(directory, 3, 4, losses=[3.0, 4.0], keep=1, keep_best=1) == [1, 4]


# ---- what does not fit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["params"].pop("a"), r"not in this model: params/a \[64, 8\]"),
        (
            lambda t: t["params"].update(c=jax.ShapeDtypeStruct((2,), "float32")),
            r"missing from the checkpoint: params/c \[2\]",
        ),
        (
            lambda t: t["params"].update(a=jax.ShapeDtypeStruct((64, 9), "float32")),
            r"shape of params/a: saved \[64, 8\], wanted \[64, 9\]",
        ),
    ],
)
def test_missing_extra_and_misshapen_arrays_are_listed(directory, change, message):
    saved(directory, 1)
    wanted = target(tree())
    change(wanted)
    with pytest.raises(ValueError, match=rf"checkpoints/1: does not fit\n  {message}$"):
        Checkpoints(directory).restore_newest(wanted)


@pytest.mark.parametrize(
    ("name", "dtype"), [("params/a", "bfloat16"), ("params/b", "float32"), ("opt/a", "float16"), ("step", "float32")]
)
def test_another_number_type_is_refused(directory, name, dtype):
    saved(directory, 1)
    wanted = target(tree())
    *section, last = name.split("/")
    node = wanted[section[0]] if section else wanted
    node[last] = jax.ShapeDtypeStruct(node[last].shape, dtype, sharding=node[last].sharding)
    with pytest.raises(ValueError, match=f"dtype of {name}: saved .*, wanted {dtype}$"):
        Checkpoints(directory).restore_newest(wanted)


def test_a_part_is_compared_with_its_part_only():
    about = {"params/a": {"shape": [2], "dtype": "float32"}, "opt/a": {"shape": [2], "dtype": "float32"}}
    check_fit("here", about, {"params": {"a": jax.ShapeDtypeStruct((2,), "float32")}})


def test_saved_floats_are_the_same_numbers_on_the_way_back(directory):
    state = {"x": jnp.array([np.nan, np.inf, -0.0, 1e-45], jnp.float32)}
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(1, state, {})
    restored = Checkpoints(directory).restore_newest(target(state)).tree
    np.testing.assert_array_equal(np.asarray(restored["x"]).view(np.uint32), np.asarray(state["x"]).view(np.uint32))
    assert_close({"x": restored["x"][2:]}, {"x": state["x"][2:]}, 0.0)


def test_what_is_no_number_is_never_the_best(tmp_path):
    cfg = CheckpointConfig(keep=1, keep_best=1)
    state = {"a": jnp.ones(3)}
    with Checkpoints(epath.Path(tmp_path) / "c", cfg) as checkpoints:
        for step, loss in enumerate([2.0, math.nan, 3.0, math.inf], 1):
            checkpoints.save(step, state, {}, loss)
            checkpoints.wait()
        assert checkpoints.lowest_loss() == 2.0
    with Checkpoints(epath.Path(tmp_path) / "c", cfg) as checkpoints:
        assert checkpoints.lowest_loss() == 2.0
        checkpoints.save(5, state, {}, math.nan)
        checkpoints.wait()
        assert checkpoints.steps() == [1, 5]
    assert loss_of({"loss": math.nan}) == math.inf
