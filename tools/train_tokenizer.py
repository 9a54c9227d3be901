"""Trains a byte-level BPE tokenizer: any text goes in and comes back unchanged, and digits stand alone.

python -m tools.train_tokenizer --input corpus/ more.jsonl.zst --output tokenizers/bpe --vocab_size 4096

Reads about 1 MB of text per second. Memory grows with the number of distinct words: 100 MB (--max_bytes) of mixed text are plenty.
The same inputs give the same file, byte for byte. Writes tokenizer.json and tokenizer_config.json to DIR in Hugging Face's format:
use `--tokenizer DIR` with tools.prepare_data, data.tokenizer=DIR in training.
"""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from minitf.data import long_texts
from minitf.data.store import MANIFEST
from minitf.data.tokenizer import SPELLINGS
from minitf.data.tokenizer_files import TOKENIZER_CONFIG, TOKENIZER_FILE, make_tokenizer
from minitf.paths import given, write_whole
from tools.preparation import documents

SPECIALS = [SPELLINGS[role][0] for role in ("eos", "turn_start", "turn_end")]
SAMPLE = 4 << 20  # bytes of text on which the compression is measured


def read_texts(paths: list[str], text_key: str, max_bytes: int | None) -> Iterator[bytes]:
    """The documents' texts, long ones in pieces, at most max_bytes in all. Raises ValueError naming a bad record."""
    from tqdm import tqdm

    left = max_bytes
    spans, position = [span for path in paths for span in documents.spans_of(path)], documents.Position()
    total = sum(span.size for span in spans)
    with tqdm(desc="reading", total=total, unit="B", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
        for record in documents.read_records(spans, documents.Reading(text_key=text_key), position):
            try:
                parts = record.parts()
            except documents.Unreadable:
                raise
            except ValueError as e:
                raise ValueError(f"{record.where()}: {e}") from None
            for blocks, _ in parts:
                # Any cut will do: it affects one word in many thousands.
                for piece in long_texts.pieces(blocks, lambda before, behind: True):
                    text = piece if left is None else piece[:left]
                    left = None if left is None else left - len(text)
                    bar.update(position.bytes - bar.n)
                    yield text
                    if left == 0:
                        return


def train(
    inputs: list[str],
    output: Path,
    vocab_size: int,
    *,
    text_key: str = "text",
    max_bytes: int | None = None,
    specials: list[str] | None = None,
) -> str:
    """Writes a tokenizer to `output`; returns a summary. Raises ValueError for user errors."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise ValueError("needs the package tokenizers: pip install '.[data]'") from None
    specials = list(dict.fromkeys(SPECIALS + (specials or [])))
    if vocab_size < 256 + len(specials):
        raise ValueError(
            f"--vocab_size {vocab_size}: 256 bytes and {len(specials)} special tokens need {256 + len(specials)}"
        )
    if (output / MANIFEST).exists():
        raise ValueError(f"--output {output}: is a token store, whose ids need the tokenizer that is there")
    paths = documents.find_files(inputs)
    ids = [p for p in paths if documents.kind_of(p)[0] == "ids"]
    if ids:
        raise ValueError(f"--input {ids[0]}: holds token ids, not text")
    sample: list[bytes] = []
    size = sampled = 0

    def texts() -> Iterator[str]:
        nonlocal size, sampled
        for text in read_texts(paths, text_key, max_bytes):
            size += len(text)
            if sampled < SAMPLE:
                sample.append(text)
                sampled += len(text)
            yield text.decode(errors="ignore")  # max_bytes may split a character

    first = list(itertools.islice(source := texts(), 1))
    if not first:
        raise ValueError(f"--input {' '.join(inputs)}: no documents")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # else bytes absent from these texts could not be encoded
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(itertools.chain(first, source), trainer)

    output.mkdir(parents=True, exist_ok=True)
    write_whole(output / TOKENIZER_FILE, (tokenizer.to_str(pretty=True) + "\n").encode())
    write_whole(output / TOKENIZER_CONFIG, (json.dumps({"eos_token": specials[0]}, indent=2) + "\n").encode())
    ours = make_tokenizer(f"{output}{os.sep}", [])
    ids = ours.encode_batch([text.decode(errors="ignore") for text in sample])
    fewer = (
        "" if ours.vocab_size == vocab_size else f" of {vocab_size:,} asked for: the text has no more pairs to merge"
    )
    return (
        f"{output}: {size:,} bytes of text read; vocabulary {ours.vocab_size:,}{fewer}; "
        f"{sampled / max(sum(map(len, ids)), 1):.3f} bytes a token on the first {sampled:,}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.train_tokenizer", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="files, directories, patterns, or - for JSON lines")
    add("--output", required=True, metavar="DIR")
    add("--vocab_size", type=int, required=True, metavar="N", help="with all bytes and special tokens")
    add("--text_key", default="text", metavar="KEY", help="of records; dots lead into objects (default: text)")
    add("--max_bytes", type=int, metavar="N", help="of text to train on, the first ones (default: all)")
    add("--special", nargs="+", default=[], metavar="TOKEN", help=f"more special tokens than {' '.join(SPECIALS)}")
    args = parser.parse_args(argv)
    if args.max_bytes is not None and args.max_bytes < 1:
        parser.error("--max_bytes: must be positive")
    try:
        options = dict(text_key=args.text_key, max_bytes=args.max_bytes, specials=args.special)
        print(train(args.input, given(args.output, "--output"), args.vocab_size, **options))
    except ValueError as e:
        from minitf import command_line

        command_line.fail(str(e))
    return 0


if __name__ == "__main__":
    sys.exit(main())
