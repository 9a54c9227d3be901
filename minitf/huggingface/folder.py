"""Tensors of a Hugging Face model folder ("theirs") and minitf's arrays ("ours"); reads files in chunks and writes shards."""

import collections
import contextlib
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  NumPy's bfloat16: without it safetensors reads none
import numpy as np

from minitf.huggingface.families import FAMILIES, Family
from minitf.model.transformer import ModelConfig, model_params, places
from minitf.params import Param, named
from minitf.paths import inside

# ---- their tensors


class TensorPiece(NamedTuple):
    """One of our arrays, or one layer or one layer's expert of it, inside one of their tensors."""

    path: str  # e.g. blocks/0/attention/q
    index: tuple[int, ...]  # in the stacks of layers and experts; (): not stacked
    param: Param  # declaration without stacks


class Tensor(NamedTuple):
    """One of their tensors. Several pieces are concatenated along its last axis."""

    name: str
    layer: int | None
    pieces: tuple[TensorPiece, ...]
    outputs_first: bool

    @property
    def shape(self) -> tuple[int, ...]:
        *rows, _ = shape = shape_of(self.pieces[0].param, self.outputs_first)
        if len(self.pieces) == 1:
            return shape
        return *rows, sum(shape_of(piece.param, self.outputs_first)[-1] for piece in self.pieces)


def shape_of(p: Param, outputs_first: bool) -> tuple[int, ...]:
    """Shape of one of our arrays in their layout: products are matrices of inputs and outputs, embeddings unchanged, others flat."""
    if p.kind == "embedding":
        return p.shape
    if not p.inputs:
        return (math.prod(p.shape),)
    shape = p.fan_in, math.prod(p.shape) // p.fan_in
    return shape[::-1] if outputs_first else shape


def as_theirs(a: Any, p: Param, outputs_first: bool) -> Any:
    """A view in their layout of one of our arrays, which must be contiguous; for reading and writing."""
    if p.inputs and outputs_first:
        return a.reshape(p.fan_in, -1).T
    return a.reshape(shape_of(p, outputs_first))


def tensors_of(name: str, cfg: ModelConfig) -> list[Tensor]:
    """All their tensors of a model with the pieces of our arrays that each holds, in layer order."""
    family, specs = FAMILIES[name], dict(named(model_params(cfg)))
    where = {layer: (i, n) for i, place in enumerate(places(cfg)) for n, layer in enumerate(place.layers)}
    found: dict[str, Tensor] = {}
    for path, template in family.names.items():
        layers = range(cfg.num_layers) if "{layer}" in template else (None,)
        experts = range(cfg.mlp.experts) if "{expert}" in template else (None,)
        for layer, expert in itertools.product(layers, experts):
            full, index = path, ()
            if layer is not None:
                place, n = where[layer]
                full, index = f"blocks/{place}/{path}", (n,) if expert is None else (n, expert)
            if full not in specs:
                continue
            theirs = template.format(layer=layer, expert=expert)
            piece = TensorPiece(full, index, dataclasses.replace(specs[full], stack=()))
            before = found[theirs].pieces if theirs in found else ()
            # The head is a torch.nn.Linear even in families whose blocks store [inputs, outputs].
            found[theirs] = Tensor(theirs, layer, (*before, piece), family.outputs_first or path == "head")
    covered = {piece.path for tensor in found.values() for piece in tensor.pieces}
    assert covered == set(specs), covered ^ set(specs)
    place = lambda t: t.layer if t.layer is not None else -1 if "embedding" in t.pieces[0].path else cfg.num_layers
    return sorted(found.values(), key=place)


# ---- files

MODEL_CONFIG, GENERATION = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # name in safetensors -> dtype
READ_BYTES = 2**25  # bytes of a tensor read at a time


def safetensors() -> Any:
    try:
        import safetensors.numpy

        return safetensors
    except ImportError:
        raise ValueError("needs the package safetensors: pip install '.[hf]'") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError naming the file."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ValueError(f"{path}: {e.strerror}") from None
    except ValueError as e:
        raise ValueError(f"{path}: no JSON: {e}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: is no JSON object")
    return tree


# ---- reading


def files_of(folder: Path) -> list[Path]:
    """The safetensors files of a folder. Raises ValueError if there are none, or the index names a missing file or one outside."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = folder / INDEX
    if not index.is_file():
        pickled = sorted(p.name for p in folder.glob("*.bin"))
        why = ""
        if pickled:
            why = (
                f"; {pickled[0]} is a pickle, which can run any code and is not read: where you trust it, "
                "save_pretrained of transformers writes safetensors"
            )
        raise ValueError(f"{folder}: has no {WEIGHTS} and no {INDEX}{why}")
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{index}: has no weight_map of file names")
    files = {name: inside(folder, name, index) for name in sorted(set(names.values()))}
    for name, file in files.items():
        if not file.is_file():
            raise ValueError(f"{index}: names {name!r}, which is not there")
    return list(files.values())


class Stored(NamedTuple):
    """A tensor in a file, readable in parts."""

    values: Any  # safetensors' slice: values[rows, columns]
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class ExpertSlice:
    """One expert's rows, from `first` on, of a safetensors slice [E, rows, columns]; readable as a slice of a matrix."""

    values: Any
    expert: int
    first: int

    def __getitem__(self, at: tuple[slice, slice]) -> np.ndarray:
        rows, columns = at
        rows = slice(self.first + rows.start, self.first + rows.stop)
        return self.values[self.expert : self.expert + 1, rows, columns][0]


def each_expert(name: str, tensor: Stored, family: Family) -> dict[str, Stored]:
    """The tensor by the family's name. transformers 5 has two tensors per layer in memory, `gate_up_proj` [E, 2F, D] with the gate's
    rows first, and `down_proj` [E, D, F], and may store them: of these, one per expert and matrix."""
    name = name.replace(*family.renamed) if family.renamed else name
    match = re.fullmatch(r".*\.(\d+)\.\w+\.experts\.(gate_up|down)_proj", name)
    parts = match[2].split("_") if match else []
    if not match or len(tensor.shape) != 3 or tensor.shape[1] % len(parts):
        return {name: tensor}
    (E, rows, columns), found = tensor.shape, {}
    for e, (i, part) in itertools.product(range(E), enumerate(parts)):
        theirs = family.names[f"mlp/experts/{part}"].format(layer=match[1], expert=e)
        height = rows // len(parts)
        found[theirs] = Stored(ExpertSlice(tensor.values, e, i * height), (height, columns), tensor.dtype)
    return found


@contextlib.contextmanager
def stored_tensors(folder: Path, family: Family) -> Iterator[dict[str, Stored]]:
    """All tensors of a folder by the family's names. Adds its prefix to names without it, saved from a headless model."""
    library = safetensors()
    found: dict[str, Stored] = {}
    with contextlib.ExitStack() as stack:
        for path in files_of(folder):
            try:
                file = stack.enter_context(library.safe_open(path, framework="np"))
            except (library.SafetensorError, OSError) as e:
                raise ValueError(f"{path}: no file of safetensors, or not a whole one: {e}") from None
            for name in file.keys():  # noqa: SIM118  not a dict
                if name in found:
                    raise ValueError(f"{path}: has {name}, which another file of the folder has, too")
                values = file.get_slice(name)
                found[name] = Stored(values, tuple(values.get_shape()), values.get_dtype())
        if not any(name.startswith(family.prefix) for name in found):
            found = {name if name.startswith("lm_head.") else family.prefix + name: t for name, t in found.items()}
        parts = [part for name, tensor in found.items() for part in each_expert(name, tensor, family).items()]
        if len(by_name := dict(parts)) < len(parts):
            twice = next(name for name, n in collections.Counter(name for name, _ in parts).items() if n > 1)
            raise ValueError(f"{folder}: has {twice} twice, by itself and in a tensor of all experts")
        yield by_name


SHOWN = 40  # tensors listed in an error message


def check_tensors(folder: Path, stored: dict[str, Stored], wanted: dict[str, tuple[int, ...]]) -> None:
    """Raises ValueError that lists tensors that are missing, unexpected, of another shape, or of an unknown dtype."""
    size = lambda shape: f"[{', '.join(map(str, shape))}]"
    lines = [f"missing: {name} {size(shape)}" for name, shape in wanted.items() if name not in stored]
    lines += [f"not in this model: {name} {size(t.shape)}" for name, t in stored.items() if name not in wanted]
    for name in (name for name in wanted if name in stored):
        if stored[name].shape != wanted[name]:
            lines.append(f"shape of {name}: {size(stored[name].shape)}, by {MODEL_CONFIG} {size(wanted[name])}")
        if stored[name].dtype not in SAFETENSORS_DTYPES:
            lines.append(f"numbers of {name}: {stored[name].dtype}, known: {', '.join(SAFETENSORS_DTYPES)}")
    if lines:
        more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
        raise ValueError(
            f"{folder}: its tensors are not those of its {MODEL_CONFIG}\n  " + "\n  ".join(lines[:SHOWN] + more)
        )


def chunks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Slices that cover the rows of a tensor, of about READ_BYTES each in float32."""
    rows = max(READ_BYTES // (4 * math.prod(shape[1:])), 1)
    for start in range(0, shape[0], rows):
        yield slice(start, min(start + rows, shape[0]))


def read_tensor(tensor: Tensor, stored: Stored, stacks: dict[str, np.ndarray]) -> None:
    """Copies a tensor, as float32, into our arrays (`stacks`, by path)."""
    column = 0
    for path, index, p in tensor.pieces:
        ours = as_theirs(stacks[path][index], p, tensor.outputs_first)
        width = ours.shape[-1]
        for rows in chunks(ours.shape):
            if ours.ndim == 2:
                ours[rows] = stored.values[rows, column : column + width]
            else:
                ours[rows] = stored.values[column + rows.start : column + rows.stop]
        column += width


def same_values(a: Stored, b: Stored) -> bool:
    return a.shape == b.shape and all(
        np.array_equal(a.values[rows].astype(np.float32), b.values[rows].astype(np.float32)) for rows in chunks(a.shape)
    )


# ---- writing


def their_tensor(tensor: Tensor, params: dict[str, np.ndarray], dtype: Any) -> np.ndarray:
    pieces = [as_theirs(params[path][index], p, tensor.outputs_first) for path, index, p in tensor.pieces]
    whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=-1)
    # safetensors 0.8 writes an array's memory regardless of strides: a transposed view would be scrambled without an error.
    return np.ascontiguousarray(whole, dtype)


def shards(tensors: list[Tensor], itemsize: int, limit: int) -> dict[str, list[Tensor]]:
    """File name -> its tensors, in order; a file has at most `limit` bytes, or a single larger tensor."""
    groups: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        n = math.prod(tensor.shape) * itemsize
        if groups[-1] and size + n > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += n
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


def write_tensors(
    folder: Path,
    tensors: list[Tensor],
    params: dict[str, np.ndarray],
    dtype: Any,
    limit: int,
    done: Callable[[Tensor], None],
) -> list[str]:
    """Writes the tensors' files and, if there are several, their index; returns the file names. `done` is called per tensor."""
    library = safetensors()
    files = shards(tensors, np.dtype(dtype).itemsize, limit)
    for file, group in files.items():
        arrays = {}
        for tensor in group:
            arrays[tensor.name] = their_tensor(tensor, params, dtype)
            done(tensor)
        library.numpy.save_file(arrays, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(folder.stat().st_mode & 0o666)  # safetensors 0.8 lets only the owner read it
    if len(files) > 1:
        total = sum(math.prod(tensor.shape) for tensor in tensors) * np.dtype(dtype).itemsize
        weight_map = {tensor.name: file for file, group in files.items() for tensor in group}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return list(files)


def write_json(path: Path, tree: dict[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
