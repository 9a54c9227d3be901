"""python -m minitf.huggingface import HF_DIR WORKDIR; python -m minitf.huggingface export WORKDIR HF_DIR"""

import argparse
import re
import sys
from typing import Any

from minitf import command_line
from minitf.huggingface.convert import Done, export_model, import_model
from minitf.huggingface.families import FAMILIES
from minitf.runtime import hooks
from minitf.runtime.checkpoint import SaveError

SIZE_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def size(text: str) -> int:
    """Bytes of a size such as 5GB, in powers of ten as in Hugging Face."""
    found = re.fullmatch(r"(\d+) ?([KMG]B|)", text.strip().upper())
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text}: must be a size such as 5GB or 300MB")
    return int(found[1]) * SIZE_UNITS[found[2]]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m minitf.huggingface",
        description="Weights from and to Hugging Face model folders (safetensors).",
        epilog=f"Families: {', '.join(FAMILIES)}. Needs the extra hf.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    of_hf = commands.add_parser(
        "import",
        help="make a work directory of a model folder",
        description="Makes a work directory that minitf.evaluate and --config.init_from take of a model folder.",
        allow_abbrev=False,
    )
    of_hf.add_argument("source", metavar="HF_DIR", help="the folder: config.json, *.safetensors, tokenizer.json")
    of_hf.add_argument("target", metavar="WORKDIR", help="the work directory to make")
    of_hf.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="model.dtype, of products and activations; parameters are float32 (default: float32)",
    )
    of_hf.add_argument("--overwrite", action="store_true", help="start anew in a work directory that holds a run")
    of_hf.add_argument(
        "--ignore",
        nargs="+",
        default=[],
        metavar="NAME",
        help="settings of config.json not to mind, though not known here",
    )
    to_hf = commands.add_parser(
        "export",
        help="make a model folder of a run",
        description="Makes a model folder that transformers loads of a run's model.",
        allow_abbrev=False,
    )
    to_hf.add_argument("source", metavar="WORKDIR", help="the run")
    to_hf.add_argument("target", metavar="HF_DIR", help="the folder to make")
    to_hf.add_argument("--step", type=int, metavar="N", help="its checkpoint of this step (default: the newest)")
    to_hf.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the numbers (default: float32)"
    )
    to_hf.add_argument("--family", choices=FAMILIES, help="default: the first that expresses the model")
    to_hf.add_argument(
        "--max_shard_size", type=size, default=size("5GB"), metavar="SIZE", help="of a file (default: 5GB)"
    )
    return parser


def convert(args: argparse.Namespace) -> tuple[Done, str]:
    """(what was written, its dtype in words)"""
    if args.command == "import":
        options: dict[str, Any] = dict(dtype=args.dtype, overwrite=args.overwrite, ignore=tuple(args.ignore))
        return import_model(args.source, args.target, **options), f"float32, computed in {args.dtype}"
    options = dict(step=args.step, dtype=args.dtype, family=args.family, max_shard_size=args.max_shard_size)
    return export_model(args.source, args.target, **options), args.dtype


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    hooks.use_cpu()
    try:
        done, numbers = convert(args)
    except ValueError as e:
        command_line.fail(str(e))
    except (SaveError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    for note in done.notes:
        print(note)
    print(f"{args.target}: {done.family}, {done.parameters:,} parameters in {numbers}, from {args.source}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
