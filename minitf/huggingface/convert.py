"""Converts a Hugging Face model folder to a work directory, and a run's model to such a folder."""

import contextlib
import dataclasses
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

import minitf
from minitf import config as config_lib
from minitf.config import Config
from minitf.data import frame as frames
from minitf.data.datasets import DataConfig
from minitf.data.frame import Frame
from minitf.data.tokenizer import Tokenizer
from minitf.data.tokenizer_files import TOKENIZER_FILE as TOKENIZER
from minitf.data.tokenizer_files import load_tokenizer
from minitf.huggingface import folder as files
from minitf.huggingface import tokenizer as tokenizers
from minitf.huggingface.families import FAMILIES, fitting, misfits, read_config, write_config
from minitf.huggingface.folder import Stored, Tensor
from minitf.model.transformer import model_params
from minitf.params import named, tree_map
from minitf.paths import given, is_local, write_whole
from minitf.runtime import lock
from minitf.runtime.checkpoint import Checkpoints, versions
from minitf.tables import pick
from minitf.workdir import clear, commit, frame_of, load_model, resolve, store_frame, written_by_us

SEQ_LEN = 2048  # seq_len of an imported model's config, at most its max_seq_len


class Done(NamedTuple):
    """Result of an import or export."""

    family: str
    parameters: int
    notes: list[str]


@contextlib.contextmanager
def layer_bar(text: str, layers: int) -> Iterator[Callable[[Tensor], None]]:
    """A progress bar over layers, if stderr is a terminal; yields the function to call after each tensor."""
    from tqdm import tqdm

    with tqdm(desc=text, total=layers, unit="layer", dynamic_ncols=True, disable=not sys.stderr.isatty()) as bar:
        yield lambda tensor: None if tensor.layer is None else bar.update(tensor.layer + 1 - bar.n)


# ---- import


def import_model(
    source: str | os.PathLike,
    workdir: str | os.PathLike,
    *,
    dtype: str = "float32",
    overwrite: bool = False,
    ignore: tuple[str, ...] = (),
) -> Done:
    """Converts a model folder to a work directory: its parameters in float32 as the checkpoint of step 0, its tokenizer, and a
    config. `dtype`: model.dtype. `ignore`: keys of config.json to ignore. Raises ValueError for user errors before it writes."""
    source = given(source, "HF_DIR")
    if not source.is_dir():
        raise ValueError(f"{source}: no such directory")
    name, cfg = described(source, dtype, ignore)
    tokenizer, frame, notes = read_tokenizer(source, cfg.model.vocab_size)
    tensors = files.tensors_of(name, cfg.model)
    workdir = resolve(os.fspath(workdir), "WORKDIR")
    if workdir == resolve(os.fspath(source)):
        raise ValueError(f"{workdir}: is the folder to import; give another directory")
    with files.stored_tensors(source, FAMILIES[name]) as stored:
        check_stored(source, stored, tensors, name, cfg.model.tie_embeddings)
        with lock.locked(workdir):
            found = [] if overwrite else [path.name for path in written_by_us(workdir)]
            if found:
                raise ValueError(
                    f"{workdir}: holds {', '.join(found)}; give another directory, or --overwrite to start anew in this one"
                )
            clear(workdir)
            params = read_params(stored, tensors, cfg, workdir)
            about = {
                "config": dataclasses.asdict(cfg),
                "imported": {"from": str(source.resolve()), "model_type": name},
                "versions": {"minitf": minitf.__version__, **versions()},
                "commit": commit(),
            }
            with Checkpoints(workdir / "checkpoints") as checkpoints:
                checkpoints.save(0, {"params": params}, about)
            for file, contents in tokenizer.items():
                (workdir / file).write_bytes(contents)
            store_frame(workdir, frame)
            # Last: a directory without it is not a run.
            write_whole(workdir / "config.json", config_lib.to_json(cfg))
    return Done(name, sum(a.size for a in jax.tree.leaves(params)), notes)


def described(source: Path, dtype: str, ignore: tuple[str, ...]) -> tuple[str, Config]:
    """(family, config of a run with the folder's model and no data). Raises ValueError naming config.json."""
    where = source / files.MODEL_CONFIG
    tree = files.read_json(where)
    model = dataclasses.replace(read_config(tree, str(where), ignore), dtype=dtype)
    # batch_size 1: logits over a large vocabulary take much memory.
    cfg = Config(steps=0, batch_size=1, seq_len=min(SEQ_LEN, model.max_seq_len), model=model)
    cfg = dataclasses.replace(cfg, data=DataConfig(kind="none"))
    try:
        config_lib.validate(cfg)
    except ValueError as e:
        raise ValueError(f"{where}: {e}") from None
    return tree["model_type"], cfg


def read_tokenizer(source: Path, vocab_size: int) -> tuple[dict[str, bytes], Frame, list[str]]:
    """(contents of the tokenizer's files by name, frame of the model's texts, notes for the user)"""
    generation = files.read_json(source / files.GENERATION) if (source / files.GENERATION).is_file() else {}
    ends = generation.get("eos_token_id") or files.read_json(source / files.MODEL_CONFIG).get("eos_token_id") or []
    ends = [i for i in (ends if isinstance(ends, list) else [ends]) if type(i) is int and 0 <= i < vocab_size]
    if not (source / TOKENIZER).is_file():
        return {}, Frame(stops=tuple(ends)), [f"{source} has no {TOKENIZER}: text cannot be read with this model"]
    tokenizers.library()
    tokenizer = load_tokenizer(source / TOKENIZER)
    frame = frames.of_import(tokenizer, ends, tokenizers.template_of(source, tokenizer.config))
    notes = []
    if tokenizer.vocab_size > vocab_size:
        notes.append(
            f"warning: {TOKENIZER} has {tokenizer.vocab_size} ids, the model {vocab_size} rows: text with others is refused"
        )
    left = sorted(generation.keys() - {*GENERATION_READ, "transformers_version", "_from_model_config"})
    if left:
        notes.append(f"left behind, of {files.GENERATION}: {', '.join(left)}")
    found = (name for name in tokenizers.CARRIED if (source / name).is_file())
    return {name: (source / name).read_bytes() for name in found}, frame, notes


GENERATION_READ = ("bos_token_id", "eos_token_id", "pad_token_id")


def check_stored(source: Path, stored: dict[str, Stored], tensors: list[Tensor], name: str, tied: bool) -> None:
    """Raises ValueError if the folder's tensors are not the model's. Removes tensors that are no parameters from `stored`."""
    family = FAMILIES[name]
    for extra in [tensor for tensor in stored if re.fullmatch(family.ignored, tensor)]:
        del stored[extra]
    head, embedding = family.names["head"], family.names["embedding"]
    copy = stored.pop(head, None) if tied else None
    files.check_tensors(source, stored, {tensor.name: tensor.shape for tensor in tensors})
    if copy is not None and not files.same_values(copy, stored[embedding]):
        raise ValueError(
            f"{source}: {head} is not {embedding}, though by {files.MODEL_CONFIG} (tie_word_embeddings) they are one; where the head "
            "is its own, set tie_word_embeddings to false there"
        )


def read_params(stored: dict[str, Stored], tensors: list[Tensor], cfg: Config, workdir: epath.Path) -> Any:
    """The parameters, as arrays in files until they are saved: memory stays near one chunk of a tensor."""
    stacks = tree_map(lambda p: scratch(p.full_shape, workdir), model_params(cfg.model))
    by_name = dict(named(stacks))
    with layer_bar("layers read", cfg.model.num_layers) as done:
        for tensor in tensors:
            files.read_tensor(tensor, stored[tensor.name], by_name)
            done(tensor)
    # On CPU, device_put shares the files' memory; Orbax would copy NumPy arrays before it writes them.
    return jax.tree.map(lambda a: jax.device_put(np.asarray(a)), stacks)


def scratch(shape: tuple[int, ...], workdir: epath.Path) -> np.ndarray:
    """A float32 array in an unnamed file, in workdir if that is local: the file vanishes with the process, even after a crash."""
    with tempfile.TemporaryFile(dir=workdir if is_local(workdir) else None) as f:
        size = 4 * math.prod(shape)
        if hasattr(os, "posix_fallocate"):  # a full disk is an error here; on a later write it would be SIGBUS
            os.posix_fallocate(f.fileno(), 0, size)
        else:
            f.truncate(size)
        return np.memmap(f, np.float32, "r+", shape=shape)


# ---- export


def export_model(
    workdir: str | os.PathLike,
    out: str | os.PathLike,
    *,
    step: int | None = None,
    dtype: str = "float32",
    family: str | None = None,
    max_shard_size: int = 5 * 10**9,
) -> Done:
    """Converts a run's checkpoint of `step` (None: the newest) to a model folder that transformers loads. `dtype`: of the tensors.
    `family`: one of FAMILIES; None: the first that expresses the model. `max_shard_size`: bytes per file. Raises ValueError for
    user errors."""
    pick("--dtype", dict.fromkeys(("float32", "bfloat16")), dtype)
    if family is not None:
        pick("--family", FAMILIES, family)
    out, source = given(out, "HF_DIR"), resolve(os.fspath(workdir), "WORKDIR")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: is there already; give another directory")
    model = load_model(workdir, step)
    cfg, params, at = model.cfg, model.params, model.step
    name = fitting(cfg.model) if family is None else family
    why = misfits(name, cfg.model)
    if why:
        raise ValueError(f"--family {name} does not express this model: {'; '.join(why)}")
    tokenizer = load_tokenizer(source / TOKENIZER) if (source / TOKENIZER).exists() else None
    notes = [f"the checkpoint of step {at}"] + ([] if tokenizer else [f"{source} has no {TOKENIZER}: none is written"])
    arrays = {path: np.asarray(a) for path, a in named(params)}
    # Atomic: written to a temporary directory beside it, then renamed.
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    part.mkdir()
    try:
        with layer_bar("layers written", cfg.model.num_layers) as done:
            numbers = jax.numpy.dtype(dtype)
            files.write_tensors(part, files.tensors_of(name, cfg.model), arrays, numbers, max_shard_size, done)
        frame = frame_of(model, tokenizer)
        write_configs(part, name, cfg, tokenizer, frame, dtype)
        if tokenizer is not None:
            tokenizers.write_tokenizer(tokenizer, frame, source, part)
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Done(name, sum(a.size for a in arrays.values()), notes)


def write_configs(folder: Path, name: str, cfg: Config, tokenizer: Tokenizer | None, frame: Frame, dtype: str) -> None:
    """Writes config.json and, if the frame has stop ids, generation_config.json."""
    specials = {} if tokenizer is None else tokenizer.specials
    ids = {f"{role}_token_id": specials.get(role) for role in ("bos", "eos", "pad")}
    if frame.first is not None:
        ids["bos_token_id"] = frame.first
    config = write_config(name, cfg.model) | ids
    config |= {"dtype": dtype, "torch_dtype": dtype}  # transformers 5 reads the first, 4 the second
    files.write_json(folder / files.MODEL_CONFIG, config)
    if frame.stops:
        ids["eos_token_id"] = frame.stops[0] if len(frame.stops) == 1 else list(frame.stops)
        files.write_json(folder / files.GENERATION, {k: v for k, v in ids.items() if v is not None})
