"""Scores a run's model on text: python -m minitf.evaluate --workdir DIR [--data PATH ...]

Each document is scored alone, framed like the training documents (data/frame.py): its first token is predicted from the start token,
else from the token that ends a document, or is not scored if training never predicted it. A document longer than `context` is cut
into pieces of that many tokens, each of which sees only the last token of the previous piece. Start and end tokens are not scored.
So scores depend on the model, the text and the context, not on how rows are packed. Bits per byte, of the documents' bytes, are
comparable across tokenizers.
"""

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Iterator

import jax
import numpy as np

from minitf import command_line
from minitf.config import Config
from minitf.data import datasets, pipeline
from minitf.data import texts as texts_lib
from minitf.data.frame import Frame
from minitf.data.packing import PackedRows, best_fit, cut
from minitf.data.store import MANIFEST, SPLITS, Joined, Replaced, Store
from minitf.data.texts import characters, tokenized
from minitf.data.tokenizer import Tokenizer
from minitf.data.tokenizer_files import TOKENIZER_FILE, lost_note
from minitf.model.choose import with_best_kernels
from minitf.paths import given
from minitf.runtime.hooks import leave_absent_tpu
from minitf.runtime.terminal import lasting_output
from minitf.sharding.devices import make_mesh, surroundings
from minitf.sharding.mesh import MeshConfig, batch_sharding, batch_shards, replicated
from minitf.training.evaluation import eval_step, scores, totals
from minitf.workdir import Model, frame_of, load_model, resolve, tokenizer_of

# ---- the documents to score


@dataclasses.dataclass(frozen=True)
class Scored:
    """The (input, target) pairs of a dataset to score."""

    name: str
    store: Store  # if the frame has a first token, one precedes the first document
    spans: np.ndarray  # int64 [documents, 2]: (index of the first input token, number of pairs)
    text_bytes: int | None  # bytes of the targets' text; None: unknown


def documents_of(
    name: str, store: Store, written: Frame, frame: Frame, byte_lengths: np.ndarray | None, rows: int | None = None
) -> Scored:
    """The documents of a store, each as a span of its own. written: frame of the store; frame: of the model; rows: number of ids that
    the model has embeddings for; None: the store's vocabulary."""
    offsets = store.offsets
    if offsets is None:
        ends = [] if written.end is None else 1 + np.flatnonzero(np.asarray(store.ids[0 : len(store)]) == written.end)
        offsets = np.unique(np.r_[0, ends, len(store)]).astype(np.int64)
    begins, ends = offsets[:-1], offsets[1:]
    begins, ends = begins[ends > begins], ends[ends > begins]
    id_at = lambda i: store.ids[i : i + 1][0]
    if written.end is not None:  # the last document may be truncated
        ends = ends - np.array([id_at(e - 1) == written.end for e in ends.tolist()], bool)
    begins = begins + (written.opens is not None)
    rows = store.vocab_size if rows is None else min(rows, store.vocab_size)
    store = dataclasses.replace(store, offsets=None, vocab_size=rows)
    text_bytes = store.text_bytes if store.mask is None else None
    if frame.first is None:
        if text_bytes is not None:
            first = np.array([id_at(b) for b in begins.tolist()], np.int64)
            text_bytes = None if byte_lengths is None else text_bytes - int(byte_lengths[first].sum())
        return Scored(name, store, np.stack([begins, ends - begins - 1], axis=1), text_bytes)
    # The token before each document's text: its own start token, or the previous document's end token; none yet before the first.
    before = written.end if written.opens is None else written.opens
    if before is None:
        if len(begins) > 1:
            raise ValueError(
                f"{name}: nothing stands between its documents, from which their first tokens could be predicted"
            )
        before = frame.first
    joined = lambda value, parts: Joined([np.array([value], np.uint32), parts])
    ids, mask = joined(before, store.ids), None if store.mask is None else joined(0, store.mask)
    ids = ids if before == frame.first else Replaced(ids, before, frame.first)
    # The prepended token shifts all indices by one, and each span begins one token earlier: the indices stay the same.
    return Scored(
        name, dataclasses.replace(store, ids=ids, mask=mask), np.stack([begins, ends - begins], axis=1), text_bytes
    )


def chosen(paths: list[str], split: str, cfg: Config, tokenizer: Tokenizer | None, frame: Frame) -> Iterator[Scored]:
    """Yields the datasets to score: stores or texts at the paths; without paths, the run's own data. Raises ValueError for a missing
    path, and for text with an id that the model has no embedding for."""
    lengths, rows = None if tokenizer is None else tokenizer.byte_lengths, cfg.model.vocab_size
    if not paths:
        for corpus in datasets.load_all(cfg.data, rows, lambda _: frame):
            store = getattr(corpus, split)
            yield documents_of(corpus.name or f"{cfg.data.kind} ({split})", store, corpus.frame, frame, lengths, rows)
    for path in paths:
        if tokenizer is None:
            raise ValueError(f"--data {path}: the run has no tokenizer; its own data can be scored (leave --data out)")
        if (given(path, "--data") / MANIFEST).is_file():
            # Only the ids that are read must have embeddings.
            corpus = datasets.load(datasets.DataConfig(kind="store", path=path), None)
            if corpus.tokenizer.fingerprint != tokenizer.fingerprint:
                raise ValueError(f"--data {path}: was made with another tokenizer than the run's")
            yield documents_of(path, getattr(corpus, split), corpus.frame, frame, lengths, rows)
        else:
            texts, _ = texts_lib.read_text(path, "--data")
            store = tokenized(path, texts, tokenizer, frame, rows)
            note = lost_note(tokenizer, characters(tokenizer, texts), path)
            if note is not None:
                print(note, file=sys.stderr)
            yield documents_of(path, store, frame, frame, lengths, rows)


# ---- scoring


def dataset_sums(
    model: Model, data: Scored, mesh: jax.sharding.Mesh, *, context: int, row_length: int, batch_size: int
) -> dict[str, np.ndarray]:
    """`evaluation.totals` of a dataset. Documents are cut into pieces of at most `context` tokens, packed into rows of row_length."""
    plan = best_fit(cut(data.spans[data.spans[:, 1] > 0], context), row_length)
    rows = pipeline.spread_rows(PackedRows(data.store, plan, row_length, segments=True), batch_size, None)
    asked = dict(rows=batch_size, segments=True)  # documents share rows
    cfg = dataclasses.replace(model.cfg, model=with_best_kernels(model.cfg.model, mesh, row_length, **asked))
    step = jax.jit(functools.partial(eval_step, byte_lengths=None, cfg=cfg), out_shardings=replicated(mesh))
    batches = pipeline.batches(rows, batch_size, batch_sharding(mesh), model.cfg.data)
    with surroundings(mesh, model.cfg.model.dtype):
        return totals(step, model.params, batches)


def score(
    model: Model,
    data: Scored,
    mesh: jax.sharding.Mesh,
    *,
    context: int,
    row_length: int | None = None,
    batch_size: int = 8,
) -> dict[str, float]:
    """`evaluation.scores` of a dataset, and counts of documents, tokens and bytes. row_length (None: context) and batch_size change
    only the standard error, which is over rows."""
    row_length = context if row_length is None else row_length
    sums = dataset_sums(model, data, mesh, context=context, row_length=row_length, batch_size=batch_size)
    counted = {"documents": len(data.spans), "tokens": int(sums["tokens"].sum())}
    return counted | ({"bytes": data.text_bytes} if data.text_bytes else {}) | scores(sums, data.text_bytes)


def lines(results: dict[str, dict[str, float]]) -> Iterator[str]:
    """A table of the results, one line per dataset."""
    width = max(len(name) for name in results)
    yield f"{'':{width}}  {'documents':>10} {'tokens':>12} {'loss':>8} {'+-':>7} {'perplexity':>10} {'bits/byte':>9}"
    for name, r in results.items():
        error = f"{r['standard_error']:7.4f}" if "standard_error" in r else f"{'':7}"
        bits = f"{r['bits_per_byte']:9.4f}" if "bits_per_byte" in r else f"{'':9}"
        yield (
            f"{name:{width}}  {r['documents']:10,} {r['tokens']:12,} {r['loss']:8.4f} {error} {r['perplexity']:10.4g} {bits}"
        )


@lasting_output()
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m minitf.evaluate",
        description="Scores a run's model: loss in nats a token and its standard error, perplexity, bits per byte of text.",
        epilog="Each document is scored alone, in pieces of at most --context tokens. --tasks needs the extra eval.",
        allow_abbrev=False,
    )
    parser.add_argument("--workdir", required=True, metavar="DIR", help="the run")
    parser.add_argument("--step", type=int, metavar="N", help="its checkpoint of this step (default: the newest)")
    parser.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="PATH",
        help="stores of tools.prepare_data, or text: files, directories, globs (default: the run's own data)",
    )
    parser.add_argument(
        "--split", choices=SPLITS, default="val", help="of stores and the run's own data (default: val)"
    )
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens that a piece of a document has at most (default: seq_len)"
    )
    parser.add_argument(
        "--row_length", type=int, metavar="N", help="positions of a row; changes speed only (default: context)"
    )
    parser.add_argument(
        "--batch_size", type=int, metavar="N", help="rows at a time; changes speed only (default: the run's)"
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        metavar="FILE",
        help="task files (YAML) or directories of lm-evaluation-harness to run instead",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    leave_absent_tpu()
    try:
        workdir, mesh = resolve(args.workdir), make_mesh(MeshConfig())
        model = load_model(workdir, args.step, mesh)
        if args.tasks:
            from minitf import harness  # needs the extra eval

            results = harness.run_tasks(args.tasks, model, tokenizer_of(workdir), mesh)
            print(json.dumps(results) if args.json else harness.results_table(results))
            return 0
        for name in ("context", "row_length", "batch_size"):
            command_line.require(
                f"--{name}", getattr(args, name), getattr(args, name) is None or getattr(args, name) >= 1, "at least 1"
            )
        context = model.cfg.seq_len if args.context is None else args.context
        if context > model.cfg.model.max_seq_len:
            raise ValueError(f"--context {context}: longer than model.max_seq_len={model.cfg.model.max_seq_len}")
        if args.row_length is not None and args.row_length < context:
            raise ValueError(f"--row_length {args.row_length}: shorter than the context of {context}")
        shards = batch_shards(mesh)
        batch_size = args.batch_size or -(-model.cfg.batch_size // shards) * shards
        if batch_size % shards:
            raise ValueError(f"--batch_size {batch_size}: not divisible by the {shards} devices")
        tokenizer = tokenizer_of(workdir) if (workdir / TOKENIZER_FILE).exists() else None
        results = {
            data.name: score(model, data, mesh, context=context, row_length=args.row_length, batch_size=batch_size)
            for data in chosen(args.data, args.split, model.cfg, tokenizer, frame_of(model, tokenizer))
        }
    except ValueError as e:
        command_line.fail(str(e))
    if args.json:
        print(json.dumps({"workdir": str(workdir), "step": model.step, "context": context, "data": results}))
    else:
        print(f"{workdir}, step {model.step}; documents alone, context of {context} tokens")
        print("\n".join(lines(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
