"""Turns text into a store of token ids that training reads: data.kind="store", data.path=DIR.

python -m tools.prepare_data --input corpus/ more.jsonl.zst 'web/*.parquet' --output data/store --tokenizer tokenizers/bpe
python -m tools.prepare_data --input chats.jsonl --format chat --output data/chats --tokenizer tokenizers/bpe --pack 2048
python -m tools.prepare_data --output data/store --verify

A core encodes 1 to 4 MB of text per second; until the end, the disk holds the ids twice. After a kill at any time, the same command
resumes, and the store is byte for byte the same, whatever the kills and the number of workers. Each document begins with the start
token that the tokenizer's post-processor adds, if any, and ends with its end token; the manifest records this (`frame`) for
training, evaluation and generation. A document's text alone determines whether it is for validation. Exit status: 0 done (or
already done before), 1 a failure, or files that --verify finds changed, 2 a user error, 3 stopped by Ctrl-C.

File formats: see tools/preparation/documents.py. A record of --format text has a text (--text_key); of completion, `prompt` and
`completion`, of which only the latter counts in the loss; of chat, `messages`, of which the assistant's count. Rows of parquet and
tokens are numbered from 0, lines from 1. A process takes less than 2 GB of memory, however long texts are; but lines of JSON and
texts in parquet are limited to 256 MB. Ordering the documents takes about 100 bytes of memory per document.
"""

import argparse
import functools
import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from minitf.data import frame as frames
from minitf.data import store
from minitf.data.packing import add_plan
from minitf.data.store import MANIFEST
from minitf.data.tokenizer import SPELLINGS, Tokenizer
from minitf.data.tokenizer_files import (
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    HuggingFaceTokenizer,
    make_tokenizer,
    save_tokenizer,
)
from minitf.paths import given, inside
from tools.preparation import documents
from tools.preparation.directory import (
    BEGUN,
    INPUTS,
    UNFINISHED,
    claim,
    clear,
    describe_inputs,
    differences,
    foreign,
    made_of,
    read_json,
    size_of,
    sync,
    write_json,
)
from tools.preparation.documents import FORMATS, STDIN, Reading, Span
from tools.preparation.duplicates import Shingles
from tools.preparation.shards import choose, cut_shards, write_shard
from tools.preparation.tokens import COUNTS, Work, load_tokenizer, tokenise
from tools.preparation.workers import Task, WorkerDied, cores, parallel

# ---- a preparation: its settings, its two phases, its manifest


def settings_of(args: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, Any]:
    """Settings that determine the store, besides the inputs. Not --skip_bad: adding it resumes a run that stopped at a bad record."""
    names = "format text_key token_dtype val_fraction seed shuffle dedup near_threshold shard_tokens"
    start = frames.start_of(tokenizer)
    # Omitted if there is none, so that stores made before this key existed still match.
    more = ({} if start is None else {"start_token": start}) | ({"as_text": True} if args.as_text else {})
    return {"tokenizer": tokenizer.fingerprint, **more, **{name: getattr(args, name) for name in names.split()}}


def check_tokenizer(args: argparse.Namespace) -> Tokenizer:
    if args.tokenizer == "chars":
        raise ValueError(
            "--tokenizer chars: its alphabet comes from one text; bytes takes any, tools.train_tokenizer makes one"
        )
    tokenizer = load_tokenizer(args.tokenizer)
    for role in ["eos"] + ["turn_start", "turn_end"] * (args.format == "chat"):
        if role not in tokenizer.specials:
            raise ValueError(
                f"--tokenizer {args.tokenizer}: has no special token {role}, which "
                + ("ends a document" if role == "eos" else "--format chat needs")
                + f"; known spellings: {', '.join(SPELLINGS[role])}; {TOKENIZER_CONFIG} beside it may name another, {role}_token"
            )
    return tokenizer


def check_inputs(args: argparse.Namespace) -> list[str]:
    output = args.output.resolve()
    for path in args.input:
        if path != STDIN and output.is_relative_to(given(path, "--input").resolve()):
            raise ValueError(f"--output {args.output}: lies inside --input {path}")
    paths = documents.find_files(args.input)
    if not paths:
        raise ValueError(f"--input {' '.join(args.input)}: no documents: no file there")
    inside = [p for p in paths if os.path.realpath(p).startswith(f"{output}{os.sep}")]
    if inside:
        raise ValueError(f"--input {inside[0]}: lies inside --output {args.output}")
    kinds = [documents.kind_of(p, args.as_text)[0] for p in paths]
    closed = [p for p, kind in zip(paths, kinds, strict=True) if kind == "closed"]
    if closed:
        raise ValueError(
            f"--input {closed[0]}: such files are not read; unpack it, or take it as one text by --as_text"
        )
    if args.text_key is None:
        args.text_key = "text"
    elif set(kinds) <= {"text", "ids"}:
        raise ValueError(
            f"--text_key {args.text_key}: has no effect: no input has records, all are files of text or ids"
        )
    ids = [p for p, kind in zip(paths, kinds, strict=True) if kind == "ids"]
    if ids and (args.dedup == "near" or args.format != "text"):
        setting = f"--format {args.format}" if args.format != "text" else "--dedup near"
        raise ValueError(f"{ids[0]}: holds token ids, and {setting} needs text")
    return paths


def prepare(args: argparse.Namespace) -> None:
    """Makes or resumes a store. Raises ValueError for user errors, WorkerDied or OSError for failures of the system."""
    tokenizer, paths = check_tokenizer(args), check_inputs(args)
    if args.dedup == "near":
        Shingles()  # raises now if its package is missing
    ours = {"settings": settings_of(args, tokenizer), "inputs": describe_inputs(paths)}
    directory = args.output
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"--output {directory}: is no directory")
    manifest = store.read_manifest(directory) if (directory / store.MANIFEST).exists() else None
    begun = read_json(directory / UNFINISHED / BEGUN)
    if not any((directory / UNFINISHED).glob("unit-*.json")):
        begun = None  # there is no progress to lose
    strange = foreign(directory, bool(manifest or begun or args.overwrite))
    if strange:
        raise ValueError(
            f"--output {directory}: holds {', '.join(strange[:5])}: not a store, so nothing is written there"
        )
    if (manifest or begun) and not args.overwrite:
        theirs = made_of(directory, manifest) if manifest else begun
        changed = (
            differences(theirs, ours) if theirs else [f"{INPUTS}, which lists its inputs, is missing or has changed"]
        )
        if changed:
            state = "a finished store" if manifest else "an unfinished one"
            lines = [f"--output {directory}: is {state} of other settings; --overwrite begins anew:", *changed[:10]]
            raise ValueError("\n  ".join(lines + [f"and {len(changed) - 10} more"] * (len(changed) > 10)))
        if manifest:
            stdin = "; what standard input brings now was not looked at" if STDIN in paths else ""
            print(f"{directory}: already done{stdin}")
            shutil.rmtree(directory / UNFINISHED, ignore_errors=True)
            return
    with claim(directory):
        if args.overwrite or not begun:
            clear(directory)
            begun = {**ours, "unit": documents.unit_size(size_of(ours["inputs"]))}
            write_json(directory / UNFINISHED / BEGUN, begun)
        eos = tokenizer.specials["eos"]
        utf8 = isinstance(tokenizer, HuggingFaceTokenizer)
        work = Work(
            directory,
            args.tokenizer,
            store.ids_dtype(tokenizer.vocab_size).str,
            Reading(args.format, args.text_key, utf8, args.token_dtype, eos, tokenizer.vocab_size, args.as_text),
            args.skip_bad,
            args.dedup == "near",
        )
        numbers = tokenise_all(work, documents.make_units(paths, begun["unit"], args.as_text), args.workers)
        if not numbers["documents"]:
            shutil.rmtree(work.unfinished)
            raise ValueError(
                f"--input {' '.join(args.input)}: no documents: {numbers['empty']} empty and {numbers['bad']} bad records"
            )
        assemble(work, ours, numbers, tokenizer, args.workers)


def tokenise_all(work: Work, units: list[list[Span]], workers: int) -> dict[str, Any]:
    """Tokenises all units that are not done yet; returns counts summed over units, and the first bad record."""
    records = [read_json(work.unit(i, "json")) for i in range(len(units))]
    tasks = []
    for i, (spans, record) in enumerate(zip(units, records, strict=True)):
        if spans[0].path == STDIN and not (record and record["done"]):
            if record:
                print("standard input is read again from its beginning", file=sys.stderr)
                work.unit(i, "json").unlink()
            tokenise(work, i, spans, lambda n: None)
        elif not (record and record["done"]):
            tasks.append(Task((i, spans), sum(s.size for s in spans), record["read"] if record else 0))
    if any(records):
        print(f"going on: {len(units) - len(tasks)} of {len(units)} units of the input are tokenised", file=sys.stderr)
    parallel("tokenising", functools.partial(tokenise, work), tasks, workers)
    records = [read_json(work.unit(i, "json")) for i in range(len(units))]
    counts = {name: sum(r["counts"][name] for r in records) for name in COUNTS}
    first_bad = next((r["first_bad"] for r in records if r["first_bad"]), None)
    return {"units": len(units), "records": sum(r["records"] for r in records), **counts, "first_bad": first_bad}


def assemble(work: Work, ours: dict[str, Any], numbers: dict[str, Any], tokenizer: Tokenizer, workers: int) -> None:
    """Writes the shards, the tokenizer and, once all else is on disk, the manifest."""
    directory, width = work.directory, np.dtype(work.dtype).itemsize
    chosen, text_bytes, duplicates = choose(work, numbers["units"], ours["settings"])
    masked = numbers["uncounted"] > 0
    names, tasks = {}, []
    for split, places in chosen.items():
        places.tofile(work.unfinished / f"{split}.places")
        cuts = cut_shards(places["tokens"], ours["settings"]["shard_tokens"])
        names[split] = [store.shard_name(split, i) for i in range(len(cuts))]
        for i, (first, end) in enumerate(cuts):
            if not (work.unfinished / f"{names[split][i]}.json").exists():
                size = int(places["tokens"][first:end].sum()) * width
                tasks.append(Task((split, i, first, end, masked), size))
    del chosen
    parallel("writing shards", functools.partial(write_shard, work), tasks, workers)

    splits = {}
    for split in store.SPLITS:
        shards = [read_json(work.unfinished / f"{name}.json") for name in names[split]]
        splits[split] = {
            "documents": sum(s["documents"] for s in shards),
            "tokens": sum(s["tokens"] for s in shards),
            "bytes": text_bytes[split],
            "shards": shards,
            "plans": {},
        }
    told = {name: numbers[name] for name in ("records", "documents", "empty", "bad")} | duplicates
    save_tokenizer(tokenizer, directory)
    for name in (TOKENIZER_FILE, TOKENIZER_CONFIG):
        if (directory / name).exists():
            sync(directory / name)
    inputs = {
        "files": len(ours["inputs"]),
        "bytes": size_of(ours["inputs"]),
        "sha256": write_json(directory / INPUTS, ours["inputs"]),
    }
    sync(directory)
    manifest = {
        "format": store.STORE_FORMAT,
        "version": store.STORE_VERSION,
        "dtype": work.dtype,
        "byteorder": "little",
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
        "frame": frames.to_tree(frames.of_tokenizer(tokenizer, conversations=ours["settings"]["format"] == "chat")),
        "masked": masked,
        "splits": splits,
        "prepared": {"settings": ours["settings"], "inputs": inputs, "numbers": told},
    }
    write_json(directory / store.MANIFEST, manifest)
    shutil.rmtree(work.unfinished)
    summarise(manifest, numbers)


def summarise(manifest: dict[str, Any], numbers: dict[str, Any]) -> None:
    told = manifest["prepared"]["numbers"]
    for name, split in manifest["splits"].items():
        told_bytes = ""
        if split["bytes"]:
            told_bytes = f", {split['bytes']:,} bytes of text, {split['tokens'] / split['bytes']:.4f} tokens a byte"
        counts = f"{split['documents']:,} documents, {split['tokens']:,} tokens"
        print(f"{name}: {counts}{told_bytes}, {len(split['shards'])} shards")
    print(
        f"{told['records']:,} records read: {told['empty']:,} empty, {told['bad']:,} bad; left out as duplicates: "
        f"{told['exact_duplicates']:,} exact, {told['near_duplicates']:,} near"
    )
    warnings = []
    if numbers["first_bad"]:
        warnings.append(f"bad records were left out; the first: {numbers['first_bad']}")
    if numbers["lossy"]:
        warnings.append(
            f"{numbers['lossy']} of {numbers['tried']} texts that were tried do not come back from their ids: the tokenizer "
            "changes text"
        )
    if manifest["prepared"]["settings"]["val_fraction"] and not manifest["splits"]["val"]["documents"]:
        warnings.append("no document fell into val; a larger --val_fraction gives some")
    if not manifest["splits"]["train"]["documents"]:
        warnings.append("all documents fell into val; a smaller --val_fraction leaves some to train on")
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


# ---- a finished store


def pack(directory: Path, lengths: list[int]) -> None:
    for length in lengths:
        plans = store.read_manifest(directory)["splits"]["train"]["plans"]
        if str(length) in plans:
            print(f"{directory}: has a plan for rows of {length} already")
        else:
            add_plan(directory, length)
            plans = {name: s["plans"][str(length)] for name, s in store.read_manifest(directory)["splits"].items()}
            print(f"rows of {length}: " + ", ".join(f"{name} {plan['rows']:,}" for name, plan in plans.items()))


def verify(directory: Path) -> int:
    """Prints how a store's files differ from its manifest; returns the exit status."""
    manifest = store.read_manifest(directory)
    expected: dict[str, str] = {INPUTS: manifest["prepared"]["inputs"]["sha256"]}
    for split in manifest["splits"].values():
        for shard in split["shards"]:
            expected |= {f"{shard['name']}.{suffix}": sha for suffix, sha in shard["sha256"].items()}
        expected |= {plan["file"]: plan["sha256"] for plan in split["plans"].values()}

    def state(name: str) -> str | None:
        try:
            with open(inside(directory, name, directory / MANIFEST), "rb") as f:
                found = hashlib.file_digest(f, "sha256").hexdigest()
        except OSError as e:
            return f"{name}: {e.strerror}"
        return None if found == expected[name] else f"{name}: its sha256 is {found}, not {expected[name]}"

    with ThreadPoolExecutor(cores()) as pool:  # hashing releases the GIL
        wrong = [line for line in pool.map(state, expected) if line]
    try:
        if make_tokenizer(f"{directory}/{TOKENIZER_FILE}", []).fingerprint != manifest["tokenizer"]["fingerprint"]:
            wrong.append(f"{TOKENIZER_FILE}: is not the tokenizer of these ids")
    except ValueError as e:
        wrong.append(str(e))
    for line in wrong:
        print(line)
    print(
        f"{directory}: {len(wrong)} of {len(expected) + 1} files are not as the manifest says"
        if wrong
        else f"{directory}: all {len(expected) + 1} files are as the manifest says"
    )
    return int(bool(wrong))


def number(kind: Callable[[str], Any], low: float, high: float = float("inf")) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text}: must be in {low} .. {high}")
        return value

    parse.__name__ = kind.__name__  # for argparse's messages
    return parse


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.prepare_data", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--input", nargs="+", metavar="PATH", help="files, directories, patterns, or - for JSON lines on standard input"
    )
    add("--output", required=True, metavar="DIR")
    add("--tokenizer", metavar="NAME", help="bytes, or a tokenizer.json or its directory")
    add("--format", choices=FORMATS, default="text")
    add("--text_key", metavar="KEY", help="of --format text, of records; dots lead into objects (default: text)")
    add("--as_text", action="store_true", help="take each file as the text of one document, whatever its name")
    add("--token_dtype", choices=("uint16", "uint32"), default="uint16", help="of .bin files")
    add(
        "--val_fraction", type=number(float, 0, 1), default=0.005, metavar="X", help="of the documents (default: 0.005)"
    )
    add("--seed", type=number(int, 0), default=0, metavar="N", help="of the documents' order")
    add("--shuffle", action="store_true", default=True, help="documents in random order (default)")
    add("--no_shuffle", dest="shuffle", action="store_false", help="documents in the order of the input")
    add("--dedup", choices=("none", "exact", "near"), default="none", help="duplicates to leave out but for the first")
    add("--near_threshold", type=number(float, 0.1, 1), default=0.8, metavar="X", help="similarity of near duplicates")
    add("--shard_tokens", type=number(int, 1), default=2**29, metavar="N", help="the most in a shard (default: 2^29)")
    add("--pack", type=number(int, 1), nargs="+", default=[], metavar="LENGTH", help="rows to plan for data.packing")
    add("--workers", type=number(int, 1), default=cores(), metavar="N", help="processes (default: as many as cores)")
    add("--skip_bad", action="store_true", help="leave out, and count, records that cannot be read")
    add("--overwrite", action="store_true", help="begin anew where there is a store")
    add("--verify", action="store_true", help="compare the store's files with its manifest")
    args = parser.parse_args(argv)
    if args.input and not args.tokenizer:
        parser.error("--input needs --tokenizer")
    if not (args.input or args.pack or args.verify):
        parser.error("nothing to do: needs --input, --pack or --verify")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        args.output = given(args.output, "--output")
        if args.input:
            prepare(args)
        pack(args.output, args.pack)
        return verify(args.output) if args.verify else 0
    except ValueError as e:
        from minitf import command_line  # imports JAX, which workers do not need

        command_line.fail(str(e))
    except (WorkerDied, OSError) as e:
        print(f"error: {e}; the same command goes on from here", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main())
