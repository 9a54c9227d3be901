"""Prints rows of a config's training batches as text: where documents begin, which tokens count as targets, what is padding.

python -m tools.show_batch --config configs/tiny.py
python -m tools.show_batch --config configs/tiny.py --batch 100 --rows 2 --config.data.isolate_documents=True
python -m tools.show_batch --config configs/tiny.py --split val

In a terminal, isolated documents alternate between two colours, tokens that are not targets are dim, special tokens are inverted.
Elsewhere (or with --color never), {2| begins the row's second document, <...> is not a target, [eos] is a special token. The first
token of a row is never a target. A newline is shown as \\n and a newline.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from minitf import command_line
from minitf.data import pipeline
from minitf.data.tokenizer import Tokenizer
from minitf.job import phases, prepare

RESET, DIM, INVERSE = "\033[0m", "\033[2m", "\033[7m"
COLOURS = ("\033[36m", "\033[33m")  # cyan and yellow, for alternating documents


def pieces(row: dict[str, np.ndarray]) -> Iterator[tuple[int, bool, np.ndarray]]:
    """(document's number in the row from 1, whether its tokens are targets, ids) of each uniform run of tokens, without padding."""
    segments = row.get("segments", np.ones(len(row["inputs"]), int))
    counts = row["weights"] > 0
    held = np.flatnonzero(counts | (segments > 0 if "segments" in row else row["inputs"] > 0))
    if not len(held):
        return
    n = held[-1] + 1
    # Position t predicts the token at t + 1; no position predicts a document's first token.
    predicted = np.r_[False, counts[: n - 1] & (segments[1:n] == segments[: n - 1])]
    ids, number = row["inputs"][:n], segments[:n]
    if counts[n - 1]:  # the last target is not among the inputs
        ids, number = np.r_[ids, row["targets"][n - 1]], np.r_[number, number[-1]]
        predicted = np.r_[predicted, True]
    keys = zip(number.tolist(), predicted.tolist(), ids.tolist(), strict=True)
    for (segment, counted), group in itertools.groupby(keys, key=lambda key: key[:2]):
        yield segment, counted, np.array([key[2] for key in group])


def text_of(ids: np.ndarray, tokenizer: Tokenizer | None, special: str) -> str:
    """The ids as text, without a tokenizer as numbers. `special`: format string for the role of a special token."""
    if tokenizer is None:
        return " ".join(map(str, ids.tolist())) + " "
    names = {i: name for name, i in tokenizer.specials.items()}
    parts = []
    for is_special, group in itertools.groupby(ids.tolist(), key=names.__contains__):
        if is_special:
            parts += [special.format(names[i]) for i in group]
        else:
            text = tokenizer.decode(np.array(list(group))).decode(errors="replace")
            parts.append(text.replace("\r", "\\r").replace("\n", "\\n\n"))
    return "".join(parts)


def rendered(row: dict[str, np.ndarray], tokenizer: Tokenizer | None, colour: bool) -> str:
    """A row as text, marked as the module's docstring describes."""
    out, last = [], 1
    for segment, counted, ids in pieces(row):
        text = text_of(ids, tokenizer, f"{INVERSE}{{}}\033[27m" if colour else "[{}]")
        if colour:
            out.append(f"{COLOURS[segment % 2]}{'' if counted else DIM}{text}{RESET}")
        else:
            out.append(f"{{{segment}|" if segment != last else "")
            out.append(text if counted else f"<{text}>")
        last = segment
    return "".join(out)


def header(place: str, row: dict[str, np.ndarray]) -> str:
    n = len(row["inputs"])
    said = [f"{n} positions", f"{int((row['weights'] > 0).sum())} targets count"]
    if "segments" in row:
        said += [f"{row['segments'].max()} documents", f"{int((row['segments'] == 0).sum())} padding"]
    return f"--- {place}: {', '.join(said)}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.show_batch", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="a Python file with get_config()")
    parser.add_argument(
        "--batch", type=int, default=0, metavar="K", help="number of the global batch, from 0 (default: 0)"
    )
    parser.add_argument("--rows", type=int, metavar="N", help="its first rows (default: all)")
    parser.add_argument("--split", choices=("train", "val"), default="train", help="val: rows of the evaluation")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    try:
        args, cfg = command_line.parse_args(sys.argv[1:] if argv is None else argv, parser)
        for name in ("batch", "rows"):
            value, least = getattr(args, name), {"batch": 0, "rows": 1}[name]
            command_line.require(f"--{name}", value, value is None or value >= least, f"at least {least}")
        job = prepare(cfg)
        cfg = job.cfg
        if args.split == "train":
            stores = [c.train for c in job.corpora]
            rows: Any = pipeline.mixed_rows(stores, phases(job), cfg.seq_len, cfg.data, cfg.seed)
        else:
            rows = pipeline.evaluation_rows(job.corpora[0].val, cfg.seq_len, cfg.data, cfg.batch_size, cfg.eval_batches)
            batches = len(rows) // cfg.batch_size
            command_line.require(
                "--batch", args.batch, args.batch < batches, f"below {batches}, the evaluation's batches"
            )
        colour = args.color == "always" or (
            args.color == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        )
        for r in range(min(args.rows or cfg.batch_size, cfg.batch_size)):
            row = rows[args.batch * cfg.batch_size + r]
            print(header(f"batch {args.batch}, row {r}", row))
            print(rendered(row, job.tokenizer, colour))
    except ValueError as e:
        command_line.fail(str(e))
    except BrokenPipeError:  # | head
        sys.stderr.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
