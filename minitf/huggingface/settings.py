"""Equivalent settings of config.json and ModelConfig, each pair declared once, for reading and writing."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

REQUIRED = object()
# Keys of config.json that do not change a forward pass: origin, token ids, dropout rates, losses, sampling, memory.
HARMLESS = frozenset(
    "architectures model_type transformers_version _name_or_path name_or_path dtype torch_dtype initializer_range "
    "use_cache bos_token_id eos_token_id pad_token_id unk_token_id return_dict output_attentions "
    "output_hidden_states id2label label2id num_labels chunk_size_feed_forward attention_dropout pretraining_tp "
    "cache_implementation attn_implementation _attn_implementation _flash_attn_2_enabled task_specific_params "
    "max_length min_length do_sample num_beams temperature top_k top_p repetition_penalty is_llama_config "
    "transformers.js_config unsloth_version unsloth_fixed predict_special_tokens output_past n_special _num_labels "
    "_attn_implementation_autoset max_sequence_length router_aux_loss_coef output_router_logits".split()
)


class Keys:
    """A config.json that records which of its keys were read."""

    def __init__(self, tree: Mapping[str, Any], where: str = "config.json"):
        self._tree, self._read, self._where = tree, set(), where

    def get(self, name: str, default: Any = REQUIRED) -> Any:
        """The value, or the default if the key is absent. Without a default, raises ValueError if it is absent or null."""
        self._read.add(name)
        value = self._tree.get(name, default)
        if value is REQUIRED or (value is None and default is REQUIRED):
            raise self.error(f"has no {name}")
        return value

    def pick(self, name: str, table: Mapping[Any, Any], default: Any = REQUIRED) -> Any:
        """The table's entry for the value. Raises ValueError naming the known values."""
        value = self.get(name, default)
        found = [v for known, v in table.items() if known == value]
        if not found:
            raise self.error(f"{name}={value!r}: unknown; known: {', '.join(map(str, table))}")
        return found[0]

    def error(self, text: str) -> ValueError:
        return ValueError(f"{self._where}: {text}")

    def unread(self) -> dict[str, Any]:
        """Keys that were not read and are neither off (null, false, 0, empty) nor HARMLESS, with their values."""
        known, off = self._read | HARMLESS, (None, False, 0, "", [], {})
        return {name: value for name, value in self._tree.items() if name not in known and value not in off}


class FolderSetting(NamedTuple):
    """Keys of config.json and the equivalent settings of ModelConfig."""

    read: Callable[[Keys], dict[str, Any]]  # config.json -> settings of ModelConfig by dotted name
    write: Callable[[dict[str, Any]], dict[str, Any]]  # settings of ModelConfig by dotted name -> keys of config.json


def same(ours: str, theirs: str, default: Any = REQUIRED) -> FolderSetting:
    return FolderSetting(lambda keys: {ours: keys.get(theirs, default)}, lambda m: {theirs: m[ours]})


def one_of_names(ours: str, *theirs: str) -> FolderSetting:
    """A setting that has had several names, all of which are written; a folder has any of them."""

    def read(keys: Keys) -> dict[str, Any]:
        found = {name: value for name in theirs if (value := keys.get(name, None)) is not None}
        if len(set(found.values())) > 1:
            raise keys.error(", ".join(f"{name}={value}" for name, value in found.items()) + ": differ")
        return {ours: next(iter(found.values()))} if found else {ours: keys.get(theirs[0])}

    return FolderSetting(read, lambda m: dict.fromkeys(theirs, m[ours]))


def choice(ours: str, theirs: str, table: dict[Any, Any], default: Any) -> FolderSetting:
    """A choice with table {their value: our value}; of several values for one of ours, the first is written."""

    def write(m: dict[str, Any]) -> dict[str, Any]:
        return {theirs: next((name for name, kind in table.items() if kind == m[ours]), default)}

    return FolderSetting(lambda keys: {ours: keys.pick(theirs, table, default)}, write)


def always(settings: dict[str, Any]) -> FolderSetting:
    """Settings that are fixed for the family, without a key in config.json."""
    return FolderSetting(lambda keys: settings, lambda m: {})


# ---- RoPE: transformers 5 writes rope_parameters; earlier versions, and so most folders, have rope_theta and rope_scaling

ROPE = {  # rope_type -> (model.positions, {their key: our setting})
    "default": ("rope", {}),
    "llama3": (
        "rope_llama3",
        {
            "factor": "attention.rope_factor",
            "low_freq_factor": "attention.rope_low_freq_factor",
            "high_freq_factor": "attention.rope_high_freq_factor",
            "original_max_position_embeddings": "attention.rope_original_len",
        },
    ),
}


def read_rope(keys: Keys, base: float) -> dict[str, Any]:
    new, old = keys.get("rope_parameters", None) or {}, keys.get("rope_scaling", None) or {}
    theta = keys.get("rope_theta", None)
    old = {("rope_type" if k == "type" else k): v for k, v in old.items()}
    old |= {} if theta is None else {"rope_theta": theta}
    different = [k for k in new if k in old and new[k] != old[k]]
    if different:
        raise keys.error(f"rope_parameters={new} and rope_theta, rope_scaling={old} differ in {', '.join(different)}")
    both = {"rope_type": "default", "rope_theta": base} | new | old
    rope = Keys(both, "config.json: rope_parameters or rope_scaling")
    positions, names = rope.pick("rope_type", ROPE)
    found = {"positions": positions, "attention.rope_base": rope.get("rope_theta")}
    longest = keys.get("max_position_embeddings")
    for theirs, ours in names.items():
        found[ours] = rope.get(theirs, longest if theirs == "original_max_position_embeddings" else REQUIRED)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise rope.error("partial_rotary_factor: only 1, all of a head turns")
    if rope.unread():
        raise rope.error(f"unknown settings {rope.unread()} of rope_type={rope.get('rope_type')}")
    return found


def write_rope(m: dict[str, Any]) -> dict[str, Any]:
    kind = next((k for k, (positions, _) in ROPE.items() if positions == m["positions"]), "default")
    scaling = {"rope_type": kind} | {theirs: m[ours] for theirs, ours in ROPE[kind][1].items()}
    theta = {"rope_theta": m["attention.rope_base"]}
    return {"rope_parameters": scaling | theta, **theta} | ({} if kind == "default" else {"rope_scaling": scaling})


def rotary(base: float) -> FolderSetting:
    """RoPE; `base`: the default."""
    return FolderSetting(functools.partial(read_rope, base=base), write_rope)


# ---- layers with sliding-window attention


def attention_kinds(m: dict[str, Any]) -> tuple[str, ...]:
    """The attention kind of every layer."""
    period = m["pattern"] or (m["attention.kind"],)
    return tuple(period[i % len(period)] for i in range(m["num_layers"]))


def as_pattern(layers: tuple[str, ...]) -> dict[str, Any]:
    """Settings for layers of these attention kinds: the shortest pattern that repeats to them."""
    n = next(n for n in range(1, len(layers) + 1) if all(k == layers[i % n] for i, k in enumerate(layers)))
    return {"attention.kind": layers[0], "pattern": None} if n == 1 else {"pattern": layers[:n]}


LAYER_TYPES = {"full_attention": "full", "sliding_attention": "sliding"}


def layers_and_window(keys: Keys, default: list[str], window: int | None, off: str) -> dict[str, Any]:
    """Our settings for the key layer_types, or for `default` if it is absent. `off`: the reason for a window of None, for errors."""
    types = keys.get("layer_types", None) or default
    if not types or set(types) - set(LAYER_TYPES) or len(types) != keys.get("num_hidden_layers"):
        raise keys.error(f"layer_types={types}: must be one of {', '.join(LAYER_TYPES)} for each of num_hidden_layers")
    if "sliding_attention" not in types:
        return as_pattern(tuple(LAYER_TYPES[t] for t in types))
    if window is None:
        raise keys.error(f"layer_types names sliding_attention, but {off}")
    return as_pattern(tuple(LAYER_TYPES[t] for t in types)) | {"attention.window": window}


def types_of(m: dict[str, Any]) -> list[str]:
    names = {ours: theirs for theirs, ours in LAYER_TYPES.items()}
    return [names[kind] for kind in attention_kinds(m)]


def read_qwen_layers(keys: Keys) -> dict[str, Any]:
    used, window = keys.get("use_sliding_window", False), keys.get("sliding_window", 4096)
    first, n = keys.get("max_window_layers", 28), keys.get("num_hidden_layers")
    window = window if used else None
    default = ["full_attention" if window is None or i < first else "sliding_attention" for i in range(n)]
    return layers_and_window(keys, default, window, "use_sliding_window is false or sliding_window null")


def write_qwen_layers(m: dict[str, Any]) -> dict[str, Any]:
    types = types_of(m)
    used = "sliding_attention" in types
    return {
        "use_sliding_window": used,
        "sliding_window": m["attention.window"] if used else None,
        "layer_types": types,
        "max_window_layers": types.index("sliding_attention") if used else len(types),
    }


def read_gemma_layers(keys: Keys) -> dict[str, Any]:
    default = [("sliding_attention", "full_attention")[i % 2] for i in range(keys.get("num_hidden_layers"))]
    return layers_and_window(keys, default, keys.get("sliding_window", 4096), "sliding_window is null")


def write_gemma_layers(m: dict[str, Any]) -> dict[str, Any]:
    return {"layer_types": types_of(m), "sliding_window": m["attention.window"]}


def read_mistral_layers(keys: Keys, default: int | None = 4096) -> dict[str, Any]:
    window = keys.get("sliding_window", default)
    return {"attention.kind": "full"} if window is None else {"attention.kind": "sliding", "attention.window": window}


def write_mistral_layers(m: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": m["attention.window"] if set(types_of(m)) == {"sliding_attention"} else None}


def read_qwen3_moe_layers(keys: Keys) -> dict[str, Any]:
    if keys.get("use_sliding_window", False):
        return read_mistral_layers(keys)  # and max_window_layers is refused unless 0: transformers 5 ignores it
    for unused in ("sliding_window", "max_window_layers"):
        keys.get(unused, None)
    return {"attention.kind": "full"}


def write_qwen3_moe_layers(m: dict[str, Any]) -> dict[str, Any]:
    window = write_mistral_layers(m)["sliding_window"]
    layers = m["num_layers"] if window is None else 0
    return {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": layers}


QWEN_LAYERS = FolderSetting(read_qwen_layers, write_qwen_layers)
GEMMA_LAYERS = FolderSetting(read_gemma_layers, write_gemma_layers)
MISTRAL_WINDOW = FolderSetting(read_mistral_layers, write_mistral_layers)
MIXTRAL_WINDOW = FolderSetting(functools.partial(read_mistral_layers, default=None), write_mistral_layers)
QWEN3_MOE_LAYERS = FolderSetting(read_qwen3_moe_layers, write_qwen3_moe_layers)


# ---- layers with a mixture of experts


def as_every(mixed: list[int], num_layers: int) -> dict[str, int] | None:
    """Settings for mixtures in these layers, from the first that fits; None: no settings express them."""
    for every in range(1, num_layers + 1):
        layers = [i for i in range(num_layers) if (i + 1) % every == 0]
        if mixed and layers[-len(mixed) :] == mixed:
            return {"mlp.every": every, "mlp.dense_first": mixed[0] if len(layers) > len(mixed) else 0}
    return None


def read_qwen_mixtures(keys: Keys) -> dict[str, Any]:
    n, every = keys.get("num_hidden_layers"), keys.get("decoder_sparse_step", 1)
    dense = keys.get("mlp_only_layers", None) or []
    mixed = [i for i in range(n) if i not in dense and (i + 1) % every == 0]
    found, width = as_every(mixed, n), keys.get("intermediate_size", None)
    if found is None:
        raise keys.error(
            f"mlp_only_layers={dense}, decoder_sparse_step={every}: mixtures in layers {mixed} of {n}; known: in every n-th "
            "layer, and in those of them from some layer on"
        )
    return found | {"mlp.dense_hidden": None if len(mixed) == n else width}


def write_qwen_mixtures(m: dict[str, Any]) -> dict[str, Any]:
    return {
        "decoder_sparse_step": m["mlp.every"],
        "mlp_only_layers": list(range(m["mlp.dense_first"])),
        "intermediate_size": m["mlp.dense_hidden"] or m["mlp.hidden"],
    }


QWEN_MIXTURES = FolderSetting(read_qwen_mixtures, write_qwen_mixtures)
