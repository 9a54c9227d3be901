"""A run's model for lm-evaluation-harness (extra `eval`): log-likelihoods of continuations, and texts."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from minitf import run, sharding
from minitf.data.tokenizer import Tokenizer
from minitf.model.transformer import model as forward
from minitf.sampling import Sampler, Sampling, bucket, complete

try:
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
except ImportError as e:
    raise ValueError(f"--tasks needs lm-evaluation-harness: pip install '.[eval]' ({e})") from None


class Model(TemplateLM):
    """What lm-evaluation-harness asks of a model. Contexts longer than the model's positions lose their beginnings."""

    def __init__(self, model: run.Model, tokenizer: Tokenizer, mesh: jax.sharding.Mesh, batch_size: int = 8):
        super().__init__()
        self._model, self._tokenizer, self._mesh = model, tokenizer, mesh
        self._cfg, self._longest = model.cfg.model, model.cfg.model.max_seq_len
        shards = sharding.batch_shards(mesh)
        self._batch_size = -(-batch_size // shards) * shards
        everywhere = sharding.replicated(mesh)
        self._score = jax.jit(self._score_rows, out_shardings=everywhere)
        self._sampler = Sampler.of(self._cfg, mesh, tokenizer)

    @property
    def eot_token_id(self) -> int:
        if "eos" not in self._tokenizer.specials:
            raise ValueError(f"tokenizer {self._tokenizer.name}: has no token that ends a document, which tasks need")
        return self._tokenizer.specials["eos"]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self._tokenizer.encode(string.encode()).tolist()

    # ---- rows of one length

    def _logits(self, params: Any, inputs: jax.Array) -> jax.Array:
        """Float32 [B, S, V], of ids that the tokenizer knows."""
        logits = forward(params, inputs, self._cfg)
        return jnp.where(jnp.arange(logits.shape[-1]) < self._tokenizer.vocab_size, logits, -jnp.inf)

    def _score_rows(self, params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """(log-likelihood of the targets that count, whether each is the likeliest), [B]."""
        logits, targets = self._logits(params, batch["inputs"]), batch["targets"]
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
        counts = batch["counts"]
        return jnp.sum(jnp.where(counts, logp, 0), axis=1), jnp.all((logits.argmax(-1) == targets) | ~counts, axis=1)

    def _call(self, function: Any, rows: list[dict[str, Any]], length: int) -> list[np.ndarray]:
        """The function over at most batch_size rows, padded at their ends; its results for these rows."""
        batch = {}
        for name, value in rows[0].items():
            of_positions = (length,) if np.ndim(value) else ()
            batch[name] = np.zeros((self._batch_size, *of_positions), bool if name == "counts" else np.int32)
            for r, row in enumerate(rows):
                place = (r, slice(len(row[name]))) if of_positions else r
                batch[name][place] = row[name]
        layout = sharding.batch_sharding(self._mesh)
        with sharding.surroundings(self._mesh, self._cfg.dtype):
            found = function(self._model.params, {k: jax.device_put(v, layout) for k, v in batch.items()})
        return [np.asarray(a)[: len(rows)] for a in jax.tree.leaves(found)]

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        """(log-likelihood, greedy?) of each request's continuation after its context, both ids."""
        rows = []
        for _, context, continuation in requests:
            ids = np.array([*context, *continuation])[-(self._longest + 1) :]
            counts = np.arange(len(ids) - 1) >= len(ids) - 1 - len(continuation)
            rows.append(dict(inputs=ids[:-1], targets=ids[1:], counts=counts))
        out: list[Any] = [None] * len(rows)
        # Rows of like length together, as all of a batch are as long as its longest.
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]["inputs"]))
        for at in range(0, len(order), self._batch_size):
            group = order[at : at + self._batch_size]
            length = min(bucket(len(rows[group[-1]]["inputs"])), self._longest)
            likelihoods, greedy = self._call(self._score, [rows[i] for i in group], length)
            for i, n, g in zip(group, likelihoods.tolist(), greedy.tolist(), strict=True):
                out[i] = (n, g)
        return out

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each text, from nothing but the token that ends a document, in pieces of the longest row."""
        out = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self._longest, context_len=1)
            pieces = [(None, *make_disjoint_window(w)) for w in windows]
            out.append(sum(nats for nats, _ in self._loglikelihood_tokens(pieces)))
        return out

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text after each context, up to the first of its stop strings."""
        out: list[Any] = [None] * len(requests)
        # Rows of one request's settings and of like length together.
        contexts = [self.tok_encode(r.args[0]) or [self.eot_token_id] for r in requests]
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
        until = settings.get("until") or []
        n = min(settings.get("max_gen_toks", 256), self._longest - 1)
        greedy = not settings.get("do_sample") or not settings.get("temperature")
        named = {k: settings[k] for k in ("temperature", "top_k", "top_p", "min_p") if k in settings}
        found = complete(
            self._sampler,
            self._model.params,
            self._tokenizer,
            [np.array(ids[-(self._longest - n) :]) for ids in contexts],
            n,
            Sampling(temperature=0) if greedy else Sampling(**named),
            numbers=numbers,
            stops=[until] if isinstance(until, str) else until,
        )
        return [c.text for c in found]


def task_files(arguments: list[str]) -> tuple[list[str], list[str]]:
    """(names of tasks, directories that hold their files) of task files, directories of such, and names of stock tasks, whose
    data come from the network. Raises ValueError for a file that names no task."""
    names, directories = [], []
    for argument in arguments:
        path = Path(argument).expanduser()
        if not path.exists():
            names.append(argument)
            continue
        files = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
        for file in files:
            found = [
                line.split(":", 1)[1].strip() for line in file.read_text().splitlines() if line.startswith("task:")
            ]
            if not found:
                raise ValueError(f"--tasks {file}: has no line `task: NAME`")
            names += found
            directories.append(str(file.parent))
        if not files:
            raise ValueError(f"--tasks {path}: no *.yaml in this directory")
    return names, sorted(set(directories))


def run_tasks(
    arguments: list[str], model: run.Model, tokenizer: Tokenizer, mesh: jax.sharding.Mesh
) -> dict[str, dict[str, Any]]:
    """The metrics of each task, as lm-evaluation-harness names them."""
    names, directories = task_files(arguments)
    only_files = all(Path(a).expanduser().exists() for a in arguments)
    manager = TaskManager(include_path=directories, include_defaults=not only_files)
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise ValueError(f"--tasks {', '.join(unknown)}: neither a file nor a task of lm-evaluation-harness")
    found = lm_eval.simple_evaluate(Model(model, tokenizer, mesh), tasks=names, task_manager=manager)
    return {"results": found["results"], **{k: found[k] for k in ("versions", "n-shot", "higher_is_better")}}


table = make_table
