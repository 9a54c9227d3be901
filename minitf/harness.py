"""A run's model for lm-evaluation-harness (extra `eval`): log-likelihoods of continuations, and generated texts.

Everything that affects a score follows the harness: the meaning of a task's settings, beginnings of texts, stop strings, truncation.
The same weights get the same scores as with its adapter for transformers (lm_eval/models/huggingface.py).
"""

import dataclasses
import itertools
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from minitf import workdir as workdir_lib
from minitf.config import freeze
from minitf.data.store import check_rows
from minitf.data.tokenizer import Tokenizer
from minitf.model.choose import with_best_kernels
from minitf.model.transformer import model as forward
from minitf.paths import given
from minitf.sampling import Sampler, Sampling, bucket
from minitf.sharding.devices import surroundings
from minitf.sharding.mesh import batch_sharding, batch_shards, replicated
from minitf.text import complete
from minitf.workdir import frame_of

try:
    import lm_eval
    import yaml  # a dependency of lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
except ImportError as e:
    raise ValueError(f"--tasks needs lm-evaluation-harness: pip install '.[eval]' ({e})") from None


log = logging.getLogger("minitf")

TASK_NEW_TOKENS = 256  # the harness's default


class HarnessModel(TemplateLM):
    """The model interface of lm-evaluation-harness."""

    def __init__(self, model: workdir_lib.Model, tokenizer: Tokenizer, mesh: jax.sharding.Mesh, batch_size: int = 8):
        super().__init__()
        self._model, self._tokenizer, self._mesh = model, tokenizer, mesh
        self._frame = frame_of(model, tokenizer)
        self._cfg, self._longest = model.cfg.model, model.cfg.model.max_seq_len
        shards = batch_shards(mesh)
        self._batch_size = -(-batch_size // shards) * shards
        everywhere = replicated(mesh)
        self._score = jax.jit(self._score_rows, out_shardings=everywhere)
        self._sampler = Sampler.of(self._cfg, mesh, tokenizer, self._frame)
        self._said: set[str] = set()

    def _say_once(self, kind: str, text: str) -> None:
        """Logs a warning, once per kind."""
        if kind not in self._said:
            self._said.add(kind)
            log.warning(text)

    @property
    def eot_token_id(self) -> int:
        if "eos" not in self._tokenizer.specials:
            raise ValueError(f"tokenizer {self._tokenizer.name}: has no token that ends a document, which tasks need")
        return self._tokenizer.specials["eos"]

    @property
    def prefix_token_id(self) -> int:
        """The id that precedes the first token of a text, as in training; the end token if training had none."""
        return self.eot_token_id if self._frame.first is None else self._frame.first

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text. Spelled special tokens become their ids; a start token is prepended unless the text spells it."""
        ids = self._tokenizer.encode(string.encode(), "a text of the task", specials=True).tolist()
        check_rows(np.array(ids), self._cfg.vocab_size, f"a text of the task, {string[:40]!r}")
        if add_special_tokens is None:
            add_special_tokens = ids[:1] != [self.prefix_token_id]
        return [self._frame.start, *ids] if add_special_tokens and self._frame.start is not None else ids

    # ---- rows of one length

    def _score_rows(self, params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """(log-likelihood of the targets where `counts`, whether all of these are the likeliest), both [B]."""
        inputs, targets = batch["inputs"], batch["targets"]
        # Padded to lengths that the kernel named for training may not support.
        cfg = with_best_kernels(self._cfg, self._mesh, inputs.shape[1], rows=len(inputs))
        logits = forward(params, inputs, cfg)
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
        counts = batch["counts"]
        return jnp.sum(jnp.where(counts, logp, 0), axis=1), jnp.all((logits.argmax(-1) == targets) | ~counts, axis=1)

    def _call(self, function: Any, rows: list[dict[str, Any]], length: int) -> list[np.ndarray]:
        """Results of the function for at most batch_size rows, right-padded to `length`."""
        batch = {}
        for name, value in rows[0].items():
            of_positions = (length,) if np.ndim(value) else ()
            batch[name] = np.zeros((self._batch_size, *of_positions), bool if name == "counts" else np.int32)
            for r, row in enumerate(rows):
                place = (r, slice(len(row[name]))) if of_positions else r
                batch[name][place] = row[name]
        layout = batch_sharding(self._mesh)
        with surroundings(self._mesh, self._cfg.dtype):
            found = function(self._model.params, {k: jax.device_put(v, layout) for k, v in batch.items()})
        return [np.asarray(a)[: len(rows)] for a in jax.tree.leaves(found)]

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy) of each request's continuation given its context, both as ids."""
        rows = []
        for _, context, continuation in requests:
            if len(continuation) > self._longest:
                raise ValueError(
                    f"a continuation of {len(continuation)} tokens is longer than model.max_seq_len={self._longest}"
                )
            if len(context) + len(continuation) > self._longest + 1:
                self._say_once(
                    "context", f"{CUT}, the first of {len(context) + len(continuation)} with its continuation"
                )
            ids = np.array([*context, *continuation])[-(self._longest + 1) :]
            counts = np.arange(len(ids) - 1) >= len(ids) - 1 - len(continuation)
            rows.append(dict(inputs=ids[:-1], targets=ids[1:], counts=counts))
        out: list[Any] = [None] * len(rows)
        # Sorted by length: all rows of a batch are padded to its longest.
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]["inputs"]))
        for at in range(0, len(order), self._batch_size):
            group = order[at : at + self._batch_size]
            length = min(bucket(len(rows[group[-1]]["inputs"])), self._longest)
            likelihoods, greedy = self._call(self._score, [rows[i] for i in group], length)
            for i, n, g in zip(group, likelihoods.tolist(), greedy.tolist(), strict=True):
                out[i] = (n, g)
        return out

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each text, in pieces of max_seq_len. Its first token is predicted as in training, or not scored if
        training never predicted it."""
        out = []
        for request in requests:
            ids, first = self.tok_encode(request.args[0]), self._frame.first
            if first is None and ids:
                first, *ids = ids
            windows = get_rolling_token_windows(ids, first, self._longest, context_len=1)
            pieces = [(None, *make_disjoint_window(w)) for w in windows]
            out.append(sum(nats for nats, _ in self._loglikelihood_tokens(pieces)))
        return out

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The generated text after each context, up to the first stop string."""
        out: list[Any] = [None] * len(requests)
        # Grouped by settings, as a batch has one, and sorted by length.
        contexts = [self.tok_encode(r.args[0]) or [self.prefix_token_id] for r in requests]
        key = lambda i: json.dumps(requests[i].args[1], sort_keys=True, default=str)
        order = sorted(range(len(requests)), key=lambda i: (key(i), len(contexts[i])))
        for _, alike in itertools.groupby(order, key):
            rows = list(alike)
            for at in range(0, len(rows), self._batch_size):
                group = rows[at : at + self._batch_size]
                texts = self._texts([contexts[i] for i in group], requests[group[0]].args[1], group)
                for i, text in zip(group, texts, strict=True):
                    out[i] = text
        return out

    def _texts(self, contexts: list[list[int]], settings: dict[str, Any], numbers: list[int]) -> list[str]:
        """Generated texts after these contexts. numbers: of the contexts, folded into their random keys."""
        kwargs = dict(normalize_gen_kwargs(settings, TASK_NEW_TOKENS))
        until, most, total = kwargs.pop("until"), kwargs.pop("max_gen_toks"), kwargs.pop("max_length", None)
        sampling = sampling_of(kwargs, self._say_once)
        if max(map(len, contexts)) >= self._longest:
            self._say_once("prompt", CUT)
        prompts = [np.array(ids[-(self._longest - 1) :], np.int32) for ids in contexts]
        # The harness's adapter refuses max_gen_toks beyond the model's positions; here new tokens are limited to the positions that
        # the context leaves.
        new_tokens = self._sampler.room(prompts, most)
        if total is not None:  # of context and text together, as in transformers
            new_tokens = [max(1, min(n, total - len(ids))) for n, ids in zip(new_tokens, prompts, strict=True)]
        if min(new_tokens) < most and total is None:
            self._say_once(
                "room", f"texts end where model.max_seq_len={self._longest} does, before max_gen_toks={most}"
            )
        found = complete(
            self._sampler,
            self._model.params,
            self._tokenizer,
            prompts,
            new_tokens,
            sampling,
            numbers=numbers,
            stops=until,
        )
        return [c.text for c in found]


CUT = "contexts longer than the model's positions lose their beginnings"

# Settings of a task's generation_kwargs that have no effect at these values.
OFF = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "length_penalty": 1.0,
    "use_cache": True,
    "early_stopping": False,
    "typical_p": 1.0,
}


def sampling_of(kwargs: dict[str, Any], say_once: Callable[[str, str], None]) -> Sampling:
    """Sampling settings from a task's settings, as normalised by the harness. Raises ValueError for an unsupported setting."""
    names = [field.name for field in dataclasses.fields(Sampling)]
    do_sample = kwargs.pop("do_sample")
    for name in [n for n in kwargs if n not in names]:
        if kwargs[name] is not None and (name not in OFF or kwargs[name] != OFF[name]):
            raise ValueError(f"generation_kwargs.{name}={kwargs[name]!r}: is not known here; known: {', '.join(names)}")
        del kwargs[name]
    given = {name: value for name, value in kwargs.items() if value is not None}
    if not do_sample:
        return Sampling(temperature=0, repetition_penalty=given.get("repetition_penalty", 1.0))
    if not given.get("temperature"):
        say_once("temperature", "do_sample=True without a temperature above 0: drawn at temperature 1")
        given["temperature"] = 1.0
    return freeze(given, Sampling, "generation_kwargs.")


def task_files(arguments: list[str]) -> tuple[list[str], list[str]]:
    """(names of tasks, directories of their files) from task files, directories of task files, and names of stock tasks, whose data
    come from the network. Raises ValueError for a file that names no task."""
    names, directories = [], []
    for argument in arguments:
        path = given(argument, "--tasks")
        if not path.exists():
            names.append(argument)
            continue
        files = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
        found = [name for name in map(task_name, files) if name is not None]
        if not found:
            what = "has no `task: NAME`" if files == [path] else "no *.yaml in this directory names a task"
            raise ValueError(f"--tasks {path}: {what}")
        names += found
        directories += [str(file.parent) for file in files]
    return names, sorted(set(directories))


class TaskFile(yaml.SafeLoader):
    """Loads a task file without its function tags, which the harness itself resolves."""


TaskFile.add_multi_constructor("!", lambda loader, suffix, node: None)


def task_name(file: Path) -> str | None:
    """Name of the task or group that a file declares; None for a file that others include. Raises ValueError for invalid YAML."""
    try:
        tree = yaml.load(file.read_text(encoding="utf-8"), TaskFile)
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ValueError(f"--tasks {file}: {e}") from None
    if not isinstance(tree, dict):
        return None
    # In a group, `task` is a list and `group` the name.
    name = tree.get("group") if isinstance(tree.get("task"), list) else tree.get("task")
    return name if isinstance(name, str) else None


def run_tasks(
    arguments: list[str], model: workdir_lib.Model, tokenizer: Tokenizer, mesh: jax.sharding.Mesh
) -> dict[str, dict[str, Any]]:
    """Metrics of each task, as named by lm-evaluation-harness."""
    names, directories = task_files(arguments)
    only_files = all(given(a, "--tasks").exists() for a in arguments)
    manager = TaskManager(include_path=directories, include_defaults=not only_files)
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise ValueError(f"--tasks {', '.join(unknown)}: neither a file nor a task of lm-evaluation-harness")
    found = lm_eval.simple_evaluate(HarnessModel(model, tokenizer, mesh), tasks=names, task_manager=manager)
    return {"results": found["results"], **{k: found[k] for k in ("versions", "n-shot", "higher_is_better")}}


results_table = make_table
