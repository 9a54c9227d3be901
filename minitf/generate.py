"""Goes on with text: python -m minitf.generate --workdir DIR --prompt "..." (or --prompts FILE, or neither, to type prompts)

Text goes to standard output as it comes. The same prompts, settings and seed give the same texts.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from minitf import config as config_lib
from minitf import run, sharding
from minitf.data.tokenizer import Tokenizer
from minitf.sampling import TEMPERATURE, Completion, Sampler, Sampling, complete, prepared, prompt_ids
from minitf.sharding import AXES, MeshConfig
from minitf.train import use_compilation_cache

NEW_TOKENS = 256  # at most, where --max_new_tokens does not say


class Writer(NamedTuple):
    """A run's model, ready to write."""

    sampler: Sampler
    params: Any
    tokenizer: Tokenizer

    def complete(
        self, prompts: list[str], new_tokens: int | None, sampling: Sampling, **keywords: Any
    ) -> list[Completion]:
        """`sampling.complete`. new_tokens: None: as many as fit, up to NEW_TOKENS."""
        ids = [prompt_ids(self.tokenizer, prompt) for prompt in prompts]
        n = self.sampler.room(ids, NEW_TOKENS) if new_tokens is None else new_tokens
        return complete(self.sampler, self.params, self.tokenizer, ids, n, sampling, **keywords)


def writer_of(model: run.Model, tokenizer: Tokenizer, mesh: jax.sharding.Mesh) -> Writer:
    params, cfg = prepared(model.params, model.cfg.model, mesh)
    return Writer(Sampler.of(cfg, mesh, tokenizer), params, tokenizer)


# ---- prompts


def read_prompts(path: str) -> list[str]:
    """A prompt a line; of *.jsonl, the field `prompt` of a JSON object a line; "-": standard input. Raises ValueError naming the
    file and the line."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as e:
        raise ValueError(f"--prompts {path}: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise ValueError(f"--prompts {path}: not UTF-8 at byte {e.start}") from None
    lines = [line for line in text.split("\n") if line.strip()]
    if path.endswith(".jsonl"):
        for i, line in enumerate(lines):
            try:
                lines[i] = json.loads(line)["prompt"]
                if not isinstance(lines[i], str):
                    raise TypeError
            except (ValueError, KeyError, TypeError):
                raise ValueError(f'--prompts {path}: line {i + 1} is no JSON object with a text "prompt"') from None
    if not lines:
        raise ValueError(f"--prompts {path}: holds no prompt")
    return lines


def typed() -> Iterator[str]:
    """Prompts that are typed, until the end of input; all of standard input as one where it is no terminal."""
    if not sys.stdin.isatty():
        yield sys.stdin.read()
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (gives input() its editing and history)
    print("Type the beginning of a text; ^C stops one, ^D ends.", file=sys.stderr)
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()


# ---- output


class Stream:
    """Shows a prompt and the growing text behind it on standard output."""

    def __init__(self, prompt: str):
        self._prompt, self._shown = prompt, 0

    def __call__(self, completions: list[Completion]) -> None:
        text = self._prompt + completions[0].text
        sys.stdout.write(text[self._shown :])
        sys.stdout.flush()
        self._shown = len(text)


REASONS = {"stop": "a stop string", "end": "the end token", "length": "its length"}


def told(completions: list[Completion], seconds: float) -> str:
    """What was made, in a line."""
    n = sum(len(c.ids) for c in completions)
    ends = {reason: sum(c.reason == reason for c in completions) for reason in REASONS}
    by = ", ".join(f"{REASONS[r]}{f' ({count})' if len(completions) > 1 else ''}" for r, count in ends.items() if count)
    return f"[{n} tokens in {seconds:.1f} s, compilation included: {n / seconds:.1f} tokens/s; ended by {by}]"


def as_json(prompt: str, completion: Completion, log_probs: bool) -> str:
    found = {"prompt": prompt, "text": completion.text, "reason": completion.reason, "tokens": len(completion.ids)}
    if log_probs:
        found |= {"ids": completion.ids, "log_probs": completion.log_probs}
    return json.dumps(found, ensure_ascii=False)


def write_one(writer: Writer, prompt: str, number: int, args: argparse.Namespace, how: dict[str, Any]) -> None:
    """A text, as it comes."""
    began = time.perf_counter()
    found = writer.complete([prompt], args.max_new_tokens, numbers=[number], show=Stream(prompt), **how)
    print(flush=True)
    print(told(found, time.perf_counter() - began), file=sys.stderr, flush=True)


def write_many(writer: Writer, prompts: list[str], args: argparse.Namespace, how: dict[str, Any]) -> None:
    """Texts in batches."""
    began, done = time.perf_counter(), []
    for at in range(0, len(prompts), args.batch_size):
        part = prompts[at : at + args.batch_size]
        found = writer.complete(part, args.max_new_tokens, numbers=range(at, at + len(part)), **how)
        for i, (prompt, completion) in enumerate(zip(part, found, strict=True), at + 1):
            if args.json:
                print(as_json(prompt, completion, args.log_probs))
            else:
                print(f"--- {i} of {len(prompts)}\n{prompt}{completion.text}")
        sys.stdout.flush()
        done += found
    if not args.json:
        print(told(done, time.perf_counter() - began), file=sys.stderr, flush=True)


# ---- the command line


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m minitf.generate",
        description="Goes on with text, by a run's model.",
        epilog="Without --prompt and --prompts, prompts are typed, or standard input is one. An empty prompt begins a document.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--workdir", required=True, metavar="DIR", help="the run")
    add("--step", type=int, metavar="N", help="its checkpoint of this step (default: the newest)")
    add("--prompt", action="append", metavar="TEXT", help="the beginning of a text; may be given several times")
    add("--prompts", metavar="FILE", help='a prompt a line; of *.jsonl the field "prompt"; -: standard input')
    add("--num_samples", type=int, default=1, metavar="N", help="texts for each prompt (default: 1)")
    add(
        "--max_new_tokens",
        type=int,
        metavar="N",
        help=f"tokens behind a prompt (default: as many as the model tells apart, at most {NEW_TOKENS})",
    )
    default = Sampling(temperature=TEMPERATURE)
    for name, kind, meaning in (
        ("temperature", float, "divides the logits; 0: the likeliest token"),
        ("top_k", int, "draw from so many likeliest tokens; 0: from all"),
        ("top_p", float, "from the fewest likeliest that have this probability together; 1: from all"),
        ("min_p", float, "from those at least this likely, compared with the likeliest; 0: from all"),
        ("repetition_penalty", float, "above 1: tokens seen so far become less likely"),
    ):
        value = getattr(default, name)
        add(f"--{name}", type=kind, default=value, metavar="X", help=f"{meaning} (default: {value})")
    add("--seed", type=int, default=0, metavar="N", help="another gives other texts (default: 0)")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends a text before it; may be given several times")
    add("--json", action="store_true", help="print one JSON object a text")
    add(
        "--log_probs",
        action="store_true",
        help="with --json: ids of the new tokens, and their natural log-probabilities",
    )
    add("--batch_size", type=int, default=8, metavar="N", help="texts at a time; changes speed only (default: 8)")
    add("--chunk", type=int, metavar="N", help="tokens between two looks at the text; changes speed only (default: 16)")
    for axis in AXES:
        default_size = getattr(MeshConfig(), axis)
        add(
            f"--mesh.{axis}",
            type=int,
            default=default_size,
            metavar="N",
            help=f"devices along this axis, as in training (default: {default_size})",
        )
    return parser


def checked(args: argparse.Namespace) -> Sampling:
    """The sampling settings. Raises ValueError for the first argument that cannot work."""
    for name in ("num_samples", "max_new_tokens", "batch_size", "chunk"):
        value = getattr(args, name)
        config_lib.require(f"--{name}", value, value is None or value >= 1, "at least 1")
    config_lib.require("--seed", args.seed, 0 <= args.seed < 2**32, "from 0 to 4294967295 (2^32 - 1)")
    if args.prompt and args.prompts:
        raise ValueError("--prompt and --prompts: give one of them")
    if args.log_probs and not args.json:
        raise ValueError("--log_probs: is for --json")
    if "" in args.stop:
        raise ValueError("--stop: an empty text stands everywhere")
    sampling = Sampling(args.repetition_penalty, args.temperature, args.top_k, args.top_p, args.min_p)
    sampling.check("--")
    return sampling


def main(argv: list[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal of another encoding must not end a text
    try:
        sampling = checked(args)
        prompts = args.prompt or (read_prompts(args.prompts) if args.prompts else None)
        workdir = run.resolve(args.workdir)
        mesh = sharding.make_mesh(MeshConfig(**{axis: getattr(args, f"mesh.{axis}") for axis in AXES}))
        use_compilation_cache(None, workdir)
        # The model's own arrays are let go at once: the writer has others.
        writer = writer_of(run.load_model(workdir, args.step, mesh), run.tokenizer_of(workdir), mesh)
        how = dict(sampling=sampling, seed=args.seed, stops=args.stop, chunk=args.chunk)
        several = prompts is not None and (len(prompts) > 1 or args.num_samples > 1)
        if several or args.json:
            texts = prompts if prompts is not None else list(typed())
            write_many(writer, [p for p in texts for _ in range(args.num_samples)], args, how)
            return 0
        how["chunk"] = args.chunk or 16
        for number, prompt in enumerate(prompts or typed()):
            try:
                write_one(writer, prompt, number, args, how)
            except KeyboardInterrupt:
                print()
                if prompts:
                    return 130
            except ValueError as e:
                if prompts or not sys.stdin.isatty():
                    raise
                print(f"\nerror: {e}", file=sys.stderr)
    except ValueError as e:
        config_lib.fail(str(e))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the text has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
