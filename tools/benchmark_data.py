"""Measures the way of the data in one run, side by side with the least that could be done: preparing a store against encoding the
same text alone, reading rows against slices of a bare memory map, and how long training waits for its batches.

python -m tools.benchmark_data --input corpus/ --tokenizer tokenizers/bpe
python -m tools.benchmark_data --input corpus/ --tokenizer tokenizers/bpe --seq_len 2048 --rounds 5 --config configs/tiny.py

The sides alternate; compare them by the ratio of each round, since other processes may use the CPU. Preparation is timed from the
start of the command to its end, start of its processes included. --json prints one object. Writes to a temporary directory only.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from minitf import command_line
from minitf.data import datasets, pipeline
from minitf.data.packing import add_plan
from minitf.data.tokenizer_files import HuggingFaceTokenizer, make_tokenizer
from minitf.sharding.devices import make_mesh
from minitf.sharding.mesh import MeshConfig, batch_sharding
from tools.preparation import documents

ROWS, BATCH = 4096, 32  # rows read per round; rows of a batch


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


# ---- preparing


def texts_of(inputs: list[str]) -> list[bytes]:
    """Texts of all documents, in memory."""
    spans = [span for path in documents.find_files(inputs) for span in documents.spans_of(path)]
    records = documents.read_records(spans, documents.Reading(), documents.Position())
    return [b"".join(itertools.chain(*(blocks for blocks, _ in record.parts()))) for record in records]


def encoded(tokenizer: Any, texts: list[bytes]) -> float:
    """Seconds to encode all texts, on as many threads as there are cores (Hugging Face's library; otherwise one)."""
    began = time.perf_counter()
    if isinstance(tokenizer, HuggingFaceTokenizer):
        for i in range(0, len(texts), 1000):
            tokenizer.library.encode_batch_fast([t.decode() for t in texts[i : i + 1000]], add_special_tokens=False)
    else:
        for text in texts:
            tokenizer.encode(text)
    return time.perf_counter() - began


def prepared(inputs: list[str], tokenizer: str, directory: Path, *options: str) -> float:
    """Seconds that tools.prepare_data takes."""
    command = [sys.executable, "-m", "tools.prepare_data", "--input", *inputs, "--output", str(directory)]
    began = time.perf_counter()
    subprocess.run([*command, "--tokenizer", tokenizer, *options], check=True, capture_output=True)
    return time.perf_counter() - began


def preparation(inputs: list[str], name: str, directory: Path, rounds: int) -> dict[str, Any]:
    tokenizer, texts = make_tokenizer(name, [], "--tokenizer"), texts_of(inputs)
    size = sum(map(len, texts)) / 1e6
    alone, whole = [], []
    for i in range(rounds):
        alone.append(encoded(tokenizer, texts))
        whole.append(prepared(inputs, name, directory / f"store-{i}", "--val_fraction", "0.1"))
    return {
        "megabytes": size,
        "encode_mb_per_s": [size / s for s in alone],
        "prepare_mb_per_s": [size / s for s in whole],
        "overhead": [w / a - 1 for w, a in zip(whole, alone, strict=True)],
    }


# ---- reading


def cpu_us(read: Callable[[int], Any], places: list[int]) -> float:
    """CPU microseconds, in all threads, per call of `read`."""
    began = time.process_time()
    for place in places:
        read(place)
    return (time.process_time() - began) / len(places) * 1e6


def reading(directory: Path, seq_len: int, rounds: int) -> dict[str, list[float]]:
    """Way to read -> CPU microseconds per row, in each round."""
    add_plan(directory, seq_len)
    cfg = datasets.DataConfig(kind="store", path=str(directory))
    store = datasets.load(cfg, None).train
    bare = np.memmap(directory / "train-00000.bin", store.ids[0:1].dtype, "r")
    count = len(bare) // seq_len - 1
    places = np.random.default_rng(0).integers(0, count, ROWS).tolist()
    layout = batch_sharding(make_mesh(MeshConfig(), jax.devices()[:1]))
    ways = {
        "bare memory map, slice copied": lambda i: np.array(bare[i * seq_len : (i + 1) * seq_len + 1]),
        "the store's slice": lambda i: np.array(store.ids[i * seq_len : (i + 1) * seq_len + 1]),
        "the store's slice, ids checked": lambda i: store.window(i * seq_len, (i + 1) * seq_len + 1),
    }
    kinds = {
        "concat": {},
        "concat, isolated": {"isolate_documents": True},
        "best_fit": {"packing": "best_fit"},
        "documents": {"packing": "documents"},
    }
    out: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, read in ways.items():
            out.setdefault(name, []).append(cpu_us(read, places))
        for name, settings in kinds.items():
            changed = datasets.DataConfig(kind="store", path=str(directory), **settings)
            batches = pipeline.batches(pipeline.training_rows(store, seq_len, changed, 0), BATCH, layout, changed)
            next(batches)
            took = cpu_us(lambda _, b=batches: jax.block_until_ready(next(b)), list(range(ROWS // BATCH))) / BATCH
            out.setdefault(f"the whole pipeline, {name}", []).append(took)
            batches.close()
    return out


# ---- waiting


def waiting(config: str, directory: Path, steps: int) -> list[float]:
    """Share of the time that training waited for data, at each logged step except the first, which includes the start-up."""
    command = [sys.executable, "-m", "minitf.train", "--config", config, "--workdir", str(directory / "run")]
    settings = dict(steps=steps, log_every=5, eval_every=None)
    subprocess.run(
        [*command, *(f"--config.{k}={v}" for k, v in settings.items()), "--config.checkpoint.last=False"],
        check=True,
        capture_output=True,
    )
    lines = map(json.loads, (directory / "run/metrics.jsonl").read_text().splitlines())
    return [line["perf/data_wait_frac"] for line in lines if "perf/data_wait_frac" in line][1:]


def lines(found: dict[str, Any]) -> Iterator[str]:
    p = found["preparation"]
    yield f"preparing {p['megabytes']:.1f} MB of text, MB/s; median (least to most)"
    yield f"  encoding alone       {spread(p['encode_mb_per_s'])}"
    yield f"  tools.prepare_data   {spread(p['prepare_mb_per_s'])}"
    yield f"  overhead             {spread([100 * x for x in p['overhead']])} %"
    yield f"reading a row of {found['seq_len']} tokens, CPU microseconds"
    width = max(map(len, found["reading"]))
    for name, values in found["reading"].items():
        yield f"  {name:{width}}  {spread(values)}"
    if "waiting" in found:
        yield f"waiting for data in {found['config']}: {100 * statistics.mean(found['waiting']):.3f} % of the time"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmark_data", description=__doc__.split(":")[0] + ".", allow_abbrev=False
    )
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="text, as for tools.prepare_data")
    parser.add_argument("--tokenizer", required=True, metavar="NAME", help="as for tools.prepare_data")
    parser.add_argument("--seq_len", type=int, default=2048, metavar="N", help="tokens of a row (default: 2048)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each comparison (default: 3)")
    parser.add_argument("--config", metavar="FILE", help="also train it for some steps, and say how long it waits")
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="of that training (default: 30)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    try:
        for name in ("seq_len", "rounds", "steps"):
            command_line.require(f"--{name}", getattr(args, name), getattr(args, name) >= 1, "at least 1")
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder)
            found: dict[str, Any] = {"cores": os.cpu_count(), "seq_len": args.seq_len}
            found["preparation"] = preparation(args.input, args.tokenizer, directory, args.rounds)
            found["reading"] = reading(directory / "store-0", args.seq_len, args.rounds)
            if args.config:
                found |= {"config": args.config, "waiting": waiting(args.config, directory, args.steps)}
    except ValueError as e:
        command_line.fail(str(e))
    print(json.dumps(found) if args.json else "\n".join(lines(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
