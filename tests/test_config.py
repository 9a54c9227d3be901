"""Settings together: dataclasses, ConfigDict and JSON, and the relations between settings."""

import dataclasses
import functools
import json
import math
import threading

import jax
import ml_collections
import numpy as np
import pytest
from common import ROOT, TINY, change

from minitf import checks, command_line, config, settings
from minitf.config import Config
from minitf.data.store import TOKENS
from minitf.model.transformer import model_params
from minitf.params import abstract_params
from minitf.runtime.watch import Watchdog
from minitf.training.optimizer import make_optimizer, make_schedule
from minitf.training.step import row_sums
from tools.fuzz_config import replace

FIELDS = settings.fields(Config)

# ---- dataclasses, ConfigDict, JSON


def test_defaults_survive_the_config_dict():
    assert config.freeze(config.default()) == Config()


def test_changed_settings_survive_the_config_dict():
    tree = config.default()
    tree.update(dataclasses.asdict(TINY))
    assert config.freeze(tree) == TINY


@pytest.mark.parametrize("cfg", [Config(), TINY, change(TINY, model__pattern=("full", "sliding"))])
def test_json_round_trip_is_exact(cfg):
    assert config.from_stored(json.loads(config.to_json(cfg))) == (cfg, [])


@pytest.mark.parametrize("field", FIELDS, ids=lambda f: f.name)
def test_every_default_has_its_declared_type(field):
    value = config.of_type(field.name, field.default, command_line.find(field.name))
    assert (value, type(value)) == (field.default, type(field.default))


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda p: p.stem)
def test_shipped_configs_are_valid(path):
    assert f"--config configs/{path.name}" in path.read_text()
    config.validate(config.freeze(config.load_file(str(path))))


def test_older_config_loads_with_new_settings_at_their_defaults():
    stored = json.loads(config.to_json(TINY))
    del stored["log_every"], stored["loss"], stored["model"]["attention"]["window"], stored["optimizer"]["b1"]
    cfg, missing = config.from_stored(stored)
    assert cfg == change(TINY, log_every=Config().log_every)
    assert set(missing) == {"log_every", "loss", "model.attention.window", "optimizer.b1"}


def test_a_policy_keeps_its_meaning_in_a_config_from_before_versions():
    """What was named none is products now, and none is another policy."""
    older = json.loads(config.to_json(change(TINY, model__remat="none")))
    assert config.from_stored(older)[0].model.remat == "none"
    del older["version"]
    assert config.from_stored(older)[0].model.remat == "products"
    del older["model"]["remat"]
    assert config.from_stored(older)[0].model.remat == "products"
    for other in ("full", "dots"):
        older["model"]["remat"] = other
        assert config.from_stored(older)[0].model.remat == other


@pytest.mark.parametrize(("tree", "message"), [({"version": 99}, "version=99: is unknown"), ([], "is list, no config")])
def test_what_no_version_wrote_is_refused(tree, message):
    with pytest.raises(ValueError, match=message):
        config.from_stored(tree)


@pytest.mark.parametrize(
    ("section", "name", "message"),
    [
        ([], "stepps", "stepps: no such setting; did you mean 'steps'?"),
        (["model", "attention"], "number", "model.attention.number: no such setting"),
    ],
)
def test_unknown_setting_of_a_stored_config_is_refused(section, name, message):
    stored = json.loads(config.to_json(TINY))
    node = stored
    for part in section:
        node = node[part]
    node[name] = 3
    with pytest.raises(ValueError, match="no such setting") as e:
        config.from_stored(stored)
    assert message in str(e.value)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"steps": 3.0}, "steps=3.0: is float, must be int or None"),
        ({"seq_len": None}, "seq_len=None: is NoneType, must be int"),
        ({"seq_len": True}, "seq_len=True: is bool, must be int"),
        ({"optimizer": {"b1": "0.9"}}, "optimizer.b1='0.9': is str, must be float"),
        ({"optimizer": {"b1": True}}, "optimizer.b1=True: is bool, must be float"),
        ({"data": {"shuffle": 1}}, "data.shuffle=1: is int, must be bool"),
        ({"model": {"pattern": "full"}}, "model.pattern='full': is str, must be tuple[str, ...] or None"),
        ({"model": {"pattern": ["full", 3]}}, "model.pattern=3: is int, must be str"),
        ({"model": 3}, "model=3: is a section; set its settings: num_layers, "),
        ({"data": {"path": ""}}, "data.path='': is empty, must be str or None"),
        ({"data": {"kind": ""}}, "data.kind='': is empty, must be str"),
    ],
)
def test_value_of_a_wrong_type_is_refused(stored, message):
    with pytest.raises(ValueError) as e:
        config.freeze(stored)
    assert message in str(e.value)


# ---- validate

MIXTURE, SIGMOID = ("model.mlp.router=softmax", "model.mlp.router=sigmoid")
WSD = "optimizer.schedule=warmup_stable_decay"
TEXT = "data.kind=text data.path=x"

REFUSED = [
    ("model.dtype=float16 model.embedding_scale=1e5", "and so in float16, in which it is inf"),
    ("optimizer.moment_dtype=bfloat16 optimizer.b1=0.999", "at least 0 and below 1, and so in bfloat16, in which it is 1"),
    ("optimizer.kind=lion optimizer.moment_dtype=bfloat16 optimizer.b2=0.999", "optimizer.b2=0.999: must be finite and at least 0"),
    ("optimizer.schedule=cosine optimizer.end_learning_rate=0.002", "must be at most optimizer.learning_rate=0.001"),
    ("model.dropout=1e-9", "model.dropout=1e-09: must be 0, or above 2.98e-8"),
    ("max_run_time=12000d", "max_run_time=12000d: must be above 0 and at most 1e+09 seconds"),
    # the length
    ("steps=None", "steps=None, tokens=None, epochs=None: exactly one sets the length of the run"),
    ("tokens=100", "steps=3, tokens=100, epochs=None: exactly one sets the length of the run"),
    ("steps=None tokens=100 epochs=1", "steps=None, tokens=100, epochs=1.0: exactly one"),
    ("steps=2147483648", "steps=2147483648: must be at least 0 and at most 2147483647"),
    ("steps=1" + "0" * 400, "must be at least 0 and at most 2147483647"),
    # sizes against each other
    ("accumulation=3", "batch_size=8: not divisible by accumulation=3"),
    ("model.dim=18", "model.dim=18: not divisible by model.attention.num_heads=4"),
    ("model.attention.num_kv_heads=3", "=4: not divisible by model.attention.num_kv_heads=3"),
    ("model.attention.num_kv_heads=8", "=4: not divisible by model.attention.num_kv_heads=8"),
    ("model.attention.head_dim=5", "model.attention.head_dim=5: model.positions=rope turns pairs"),
    ("model.dim=20", "model.attention.head_dim=5 (model.dim / model.attention.num_heads): "),
    ("seq_len=17", "seq_len=17: longer than model.max_seq_len=16"),
    # the pattern
    ("model.pattern=full model.attention.kind=sliding", "model.attention.kind='sliding' has no effect where model.pattern"),
    # settings that the chosen kinds do not read
    ("model.attention.window=8", "model.attention.window=8 has no effect with full; it is read by sliding"),
    ("model.pattern=full model.attention.window=8", "model.attention.window=8 has no effect with full"),
    (
        "model.attention.block_kv=256 model.attention.implementation=xla",
        "model.attention.block_kv=256 has no effect with xla; it is read by auto, splash",
    ),
    ("model.attention.qk_norm_over=heads", "qk_norm_over=heads has no effect with model.attention.qk_norm=False"),
    ("model.positions=learned model.attention.rope_base=100", "rope_base=100.0 has no effect with learned"),
    ("optimizer.momentum=0.9", "optimizer.momentum=0.9 has no effect with adamw; it is read by sgd"),
    ("optimizer.kind=sgd optimizer.b1=0.5", "optimizer.b1=0.5 has no effect with sgd; it is read by adamw, lion, muon"),
    ("optimizer.end_learning_rate=1e-5", "optimizer.end_learning_rate=1e-05 has no effect with constant"),
    ("optimizer.decay_steps=2", "optimizer.decay_steps=2 has no effect with constant"),
    ("mesh.fsdp_inner=2", "mesh.fsdp_inner=2 has no effect with auto; it is read by manual"),
    ("mesh.collectives=manual mesh.tensor=2", "not mesh.tensor=2, mesh.dcn_tensor=1; set both to 1, or mesh.collectives=auto"),
    ("mesh.collectives=manual mesh.dcn_tensor=-1", "not mesh.tensor=1, mesh.dcn_tensor=-1; set both to 1"),
    ("data.path=x.txt", "data.path='x.txt' has no effect with synthetic; it is read by text, parquet"),
    (f"{TEXT} data.eos_id=3", "data.eos_id=3 has no effect with text; it is read by tokens"),
    # mixtures of experts
    ("model.mlp.experts=4", "model.mlp.experts=4 has no effect with none; it is read by softmax, softmax_of_chosen, sigmoid"),
    ("loss.balance=0.1", "loss.balance=0.1 has no effect with model.mlp.router=none"),
    (f"{MIXTURE} loss.bias_rate=0.1", "loss.bias_rate=0.1 has no effect with model.mlp.router=softmax"),
    (f"{MIXTURE} model.mlp.groups=2", "model.mlp.groups=2 has no effect with softmax; it is read by sigmoid"),
    (f"{MIXTURE} model.mlp.kind=gelu", "model.mlp.kind=gelu: experts are MLPs with a gate (model.mlp.router=softmax): "),
    (f"{MIXTURE} model.mlp.bias=True", "model.mlp.bias=True: experts have no biases"),
    (f"{MIXTURE} model.mlp.experts_per_token=9", "model.mlp.experts_per_token=9: there are model.mlp.experts=8"),
    (f"{SIGMOID} model.mlp.groups=3", "model.mlp.experts=8: not divisible by model.mlp.groups=3"),
    (f"{SIGMOID} model.mlp.groups_per_token=2", "model.mlp.groups_per_token=2: there are model.mlp.groups=1"),
    (f"{SIGMOID} model.mlp.groups=8", "model.mlp.groups_per_token=1 of model.mlp.groups=8 groups have 1 experts"),
    (f"{MIXTURE} model.mlp.dense_first=2", "none of model.num_layers=2 layers has a mixture with model.mlp.dense_first=2"),
    (f"{MIXTURE} model.mlp.dense_hidden=8", "model.mlp.dense_hidden=8 has no effect where every layer has a mixture"),
    # schedules
    ("optimizer.warmup_steps=4", "optimizer.warmup_steps=4: longer than the run of 3 steps"),
    ("profile=2,3", "profile=2,3: ends with step 4, and the run has 3"),
    ("profile=2", "--config.profile=2: must be tuple[int, int] or None"),
    ("profile=1,1,1", "--config.profile=1,1,1: must be tuple[int, int] or None"),
    ("compiler_options.tpu=xla_a", "compiler_options.tpu: 'xla_a': must be NAME=VALUE"),
    ("compiler_options.gpu=a=1", "compiler_options.gpu: 'a=1': must be NAME=VALUE"),
    ("compiler_options.cpu=xla_a=", "compiler_options.cpu: 'xla_a=': must be NAME=VALUE"),
    ("compiler_options.cpu=xla_a=1,xla_b=2,xla_a=3", "compiler_options.cpu: 'xla_a=3': is there twice"),
    (f"{WSD} optimizer.decay_steps=4", "optimizer.decay_steps=4: must be from 1 to 3, the steps after warm-up"),
    (f"{WSD} optimizer.warmup_steps=2 optimizer.decay_steps=2", "optimizer.decay_steps=2: must be from 1 to 1"),
    (f"{WSD} optimizer.warmup_steps=3 optimizer.decay_steps=1", "optimizer.decay_steps=1: must be None where the warm-up takes all"),
    ("steps=1 optimizer.warmup_steps=1", "optimizer.warmup_steps=1: must be 0 in a run of one step, as the first update"),
]  # fmt: skip


def overridden(text: str) -> Config:
    """TINY with these overrides, checked."""
    cfg = TINY
    for name, value in command_line.split_overrides([f"--config.{o}" for o in text.split()])[1].items():
        cfg = replace(cfg, name, value)
    config.validate(cfg)
    return cfg


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[o.strip()[:60] for o, _ in REFUSED])
def test_validate_refuses(overrides, message):
    with pytest.raises(ValueError) as e:
        overridden(overrides)
    assert message in str(e.value)


@pytest.mark.parametrize(
    "overrides",
    [
        "optimizer.schedule=cosine optimizer.end_learning_rate=0.001",
        "watchdog.at_least=1e9 watchdog.factor=1e9 distributed.start_timeout=1e9 max_run_time=11574d",
        *[f"{f.name}=None" for f in FIELDS if f.optional and f.name != "steps"],
        "steps=0",
        "steps=2147483647",
        "steps=None tokens=0",
        "steps=None tokens=9223372036854775807",  # how many steps these are is known with the data
        "steps=None epochs=0.5 optimizer.warmup_steps=1000000",
        "seed=4294967295 data.seed=0",
        "accumulation=8",
        "seq_len=16",
        "model.max_seq_len=None seq_len=17",
        "model.dim=18 model.attention.head_dim=4",
        "model.attention.head_dim=5 model.positions=learned",
        "mesh.data=-1 mesh.fsdp=1",
        "mesh.collectives=manual mesh.dcn_data=-1 mesh.fsdp_inner=1",
        "model.pattern=full,sliding model.attention.window=8",
        "optimizer.kind=sgd optimizer.momentum=0.9",
        f"{MIXTURE} model.mlp.experts_per_token=8",
        f"{MIXTURE} model.mlp.dense_first=1 model.mlp.dense_hidden=8",
        f"{SIGMOID} model.mlp.groups=4 loss.bias_rate=0.0",
        "profile=1,3",
        "profile=3,1",
        "compiler_options.tpu=xla_a=1,xla_b=true",
        "optimizer.warmup_steps=3",
        "steps=0 optimizer.warmup_steps=3",
        f"{WSD} optimizer.decay_steps=3",
        f"{WSD} optimizer.warmup_steps=2 optimizer.decay_steps=1",
        "data.kind=tokens data.path=x data.eos_id=63 data.token_dtype=int32",
        f"{TEXT} data.val_path=y",
    ],
    ids=lambda o: o.strip()[:60],
)
def test_validate_accepts_the_border(overrides):
    overridden(overrides)


NUMBERS = [f for f in FIELDS if f.kind in (int, float)]
EXTREMES = {int: (0, 2**31 - 1, 2**31, 2**63, -(2**63)), float: (-0.0, 1e-300, 1e9, 1e10, 1e300, math.inf, math.nan)}


def with_a_reader(cfg: Config, name: str) -> Config:
    """The config with kinds that read this setting."""
    for choice in checks.choices(Config):
        readers = [kind for kind, entry in choice.table.items() if name in map(choice.full, entry.reads)]
        chosen = choice.settings[-1]
        if readers and settings.flat(cfg)[chosen] not in readers:
            cfg = replace(cfg, chosen, readers[0])
    return cfg


def accepted(cfg):
    try:
        config.validate(cfg)
        config.check_length(cfg, config.total_steps(cfg, rows=10**9))
    except ValueError:  # any other error fails the test
        return False
    return True


@pytest.mark.parametrize("field", NUMBERS, ids=lambda f: f.name)
def test_an_extreme_number_is_refused_at_once_or_works(field):
    for value in EXTREMES[field.kind]:
        given = {"steps": None} if field.name in ("tokens", "epochs") else {}
        cfg = with_a_reader(replace(change(TINY, **given), field.name, value), field.name)
        if not accepted(cfg):
            continue
        if field.name.startswith("optimizer."):
            schedule = make_schedule(cfg.optimizer, cfg.steps)
            make_optimizer(cfg.optimizer, model_params(cfg.model), schedule)
            assert math.isfinite(np.float32(schedule(1)))
        elif field.name.startswith("watchdog."):
            watchdog = Watchdog(cfg.watchdog)
            watchdog._times.extend((1e3, 1e3))
            assert 0 < watchdog.limit() + 2 < threading.TIMEOUT_MAX
        elif field.name in TRACED:
            batch = {name: jax.ShapeDtypeStruct((8, 16), kind) for name, kind in TOKENS.items()}
            jax.eval_shape(functools.partial(row_sums, cfg=cfg), abstract_params(model_params(cfg.model)), batch)


TRACED = [s.name for s in NUMBERS if s.name.startswith(("model.attention.", "loss.")) or s.name == "model.unroll"]


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        (dict(steps=7), 7),
        (dict(steps=None, tokens=0), 0),
        (dict(steps=None, tokens=8 * 16), 1),
        (dict(steps=None, tokens=8 * 16 + 1), 2),
        (dict(steps=None, tokens=10**12), math.ceil(10**12 / 128)),
        (dict(steps=None, epochs=1.0), 5),  # of 40 rows
        (dict(steps=None, epochs=1.01), 6),
        (dict(steps=None, epochs=0.0), 0),
    ],
)
def test_run_is_at_least_as_long_as_asked_for(length, steps):
    assert config.total_steps(change(TINY, **length), rows=40) == steps


@pytest.mark.parametrize(
    ("values", "steps", "message"),
    [
        (dict(optimizer__warmup_steps=6), 5, "optimizer.warmup_steps=6: longer than the run of 5 steps"),
        (dict(optimizer__decay_steps=6), 5, "optimizer.decay_steps=6: must be from 1 to 5"),
        (dict(profile=(5, 2)), 5, "profile=5,2: ends with step 6, and the run has 5"),
        (dict(), 2**31, "steps=2147483648: must be at most 2147483647, as they are counted in 32 bits"),
    ],
)
def test_length_known_with_the_data_is_checked_too(values, steps, message):
    with pytest.raises(ValueError) as e:
        config.check_length(change(TINY, steps=None, **values), steps)
    assert message in str(e.value)


def test_default_config_dict_is_locked():
    c = config.default()
    assert isinstance(c, ml_collections.ConfigDict)
    with pytest.raises(AttributeError):
        c.stepps = 3


def test_compiler_options_are_given_by_platform_and_truth_in_the_compilers_words():
    given = config.CompilerOptions(cpu=("xla_a=true", "xla_b=x=y"), tpu=("xla_c=3", "xla_d=FALSE"))
    assert given.of("cpu") == {"xla_a": "True", "xla_b": "x=y"}
    assert given.of("gpu") == {}
    assert given.of("tpu") == {"xla_c": "3", "xla_d": "False"}
