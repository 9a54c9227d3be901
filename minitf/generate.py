"""Continues texts, or answers messages: python -m minitf.generate --workdir DIR --prompt "..." [--chat]

Without --prompt, prompts are read from --prompts FILE or typed. Text is streamed to standard output. The same prompts, settings and
seed give the same texts.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from minitf import checks, command_line, settings
from minitf.data import chat
from minitf.data.frame import Frame
from minitf.data.tokenizer import Tokenizer
from minitf.data.tokenizer_files import lost_note
from minitf.paths import given
from minitf.runtime.hooks import leave_absent_tpu
from minitf.sampling import TEMPERATURE, Sampler, Sampling, prepared
from minitf.sharding.devices import make_mesh
from minitf.sharding.mesh import MeshConfig, mesh_settings
from minitf.text import Completion, complete, prompt_ids
from minitf.workdir import Model, frame_of, load_model, resolve, tokenizer_of, use_compilation_cache

NEW_TOKENS = 256  # most tokens per text without --max_new_tokens

Prompt = str | list[dict[str, str]]  # the beginning of a text, or messages


class Writer(NamedTuple):
    """A run's model, ready to complete prompts."""

    sampler: Sampler
    params: Any
    tokenizer: Tokenizer
    frame: Frame

    def ids(self, prompt: Prompt, *, specials: bool = False) -> np.ndarray:
        """int32 ids of the beginning of a text, or of messages up to the beginning of the answer."""
        if isinstance(prompt, str):
            return prompt_ids(self.tokenizer, self.frame, prompt, specials=specials)
        ids = chat.chat_prompt_ids(self.tokenizer, self.frame.template, self.frame.start, prompt)
        return np.array(ids, np.int32)

    def new_tokens(self, prompts: list[np.ndarray], most: int | None) -> list[int]:
        """Most new tokens for each prompt; `most` None: as many as fit, up to NEW_TOKENS. Raises ValueError naming the number of a
        prompt that does not fit."""
        new = self.sampler.room(prompts, NEW_TOKENS) if most is None else [most] * len(prompts)
        self.sampler.check(prompts, new)
        return new

    def complete(
        self, prompts: list[np.ndarray], new_tokens: list[int], sampling: Sampling, **keywords: Any
    ) -> list[Completion]:
        return complete(self.sampler, self.params, self.tokenizer, prompts, new_tokens, sampling, **keywords)

    def warn(self, prompts: list[Prompt]) -> None:
        """Prints to stderr which characters of the prompts the tokenizer drops."""
        texts = (p if isinstance(p, str) else "".join(message["content"] for message in p) for p in prompts)
        note = lost_note(self.tokenizer, "".join(texts), "the prompt" if len(prompts) == 1 else "the prompts")
        if note is not None:
            print(note, file=sys.stderr)


def writer_of(model: Model, tokenizer: Tokenizer, mesh: jax.sharding.Mesh) -> Writer:
    frame = frame_of(model, tokenizer)
    params, cfg = prepared(model.params, model.cfg.model, mesh)
    return Writer(Sampler.of(cfg, mesh, tokenizer, frame), params, tokenizer, frame)


# ---- prompts


def read_prompts(path: str, is_chat: bool) -> list[Prompt]:
    """One prompt per line; in *.jsonl, one JSON object per line with `prompt`, or for a chat `messages`; "-": standard input.
    Raises ValueError naming the file and the line."""
    try:
        text = sys.stdin.read() if path == "-" else given(path, "--prompts").read_bytes().decode()
    except OSError as e:
        raise ValueError(f"--prompts {path}: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise ValueError(f"--prompts {path}: not UTF-8 at byte {e.start}") from None
    prompts: list[Prompt] = []
    # An editor's byte-order mark is no part of a prompt.
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        if not line.strip():
            continue
        try:
            prompts.append(read_record(line, is_chat) if path.endswith(".jsonl") else line.removesuffix("\r"))
        except ValueError as e:
            raise ValueError(f"--prompts {path}: line {number} {e}") from None
    if not prompts:
        raise ValueError(f"--prompts {path}: holds no prompt")
    return prompts


def read_record(line: str, is_chat: bool) -> Prompt:
    """The prompt in a line of JSON. Raises ValueError if it has none, with a message to append to "line N"."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise ValueError("is no JSON object")
    if is_chat and "messages" in record:
        messages = record["messages"]
        roles = isinstance(messages, list) and messages and [m for m in messages if isinstance(m, dict)] == messages
        if not roles or not all(is_text(m.get(field)) for m in messages for field in ("role", "content")):
            raise ValueError('has no "messages", a list of objects with texts "role" and "content"')
        return [{field: m[field] for field in ("role", "content")} for m in messages]
    if not is_text(record.get("prompt")):
        raise ValueError('has no text "prompt"' + (' and no "messages"' if is_chat else ""))
    return record["prompt"]


def is_text(value: Any) -> bool:
    """Whether this is a string that UTF-8 can encode: JSON can contain half a surrogate pair."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def typed(what: str) -> Iterator[str]:
    """Yields typed lines until the end of input; if standard input is not a terminal, all of it as one text."""
    if not sys.stdin.isatty():
        yield sys.stdin.read()
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (gives input() its editing and history)
    print(f"{what}; ^C stops a text, ^D ends.", file=sys.stderr)
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
    """Prints a text to standard output as it grows, after its given beginning."""

    def __init__(self, beginning: str):
        self._beginning, self._shown = beginning, 0

    def __call__(self, completions: list[Completion]) -> None:
        text = self._beginning + completions[0].text
        sys.stdout.write(text[self._shown :])
        sys.stdout.flush()
        self._shown = len(text)


REASONS = {"stop": "a stop string", "end": "an end token", "length": "its length"}


def told(completions: list[Completion], seconds: float) -> str:
    """A one-line summary: tokens, time, speed, and the reasons that ended the texts."""
    n = sum(len(c.ids) for c in completions)
    ends = {reason: sum(c.reason == reason for c in completions) for reason in REASONS}
    by = ", ".join(f"{REASONS[r]}{f' ({count})' if len(completions) > 1 else ''}" for r, count in ends.items() if count)
    return f"[{n} tokens in {seconds:.1f} s, compilation included: {n / seconds:.1f} tokens/s; ended by {by}]"


def as_json(prompt: Prompt, completion: Completion, log_probs: bool) -> str:
    given = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
    found = {**given, "text": completion.text, "reason": completion.reason, "tokens": len(completion.ids)}
    if log_probs:
        found |= {"ids": completion.ids, "log_probs": completion.log_probs}
    return json.dumps(found, ensure_ascii=False)


def write_one(writer: Writer, prompt: Prompt, number: int, args: argparse.Namespace, how: dict[str, Any]) -> str:
    """Streams one completion to standard output, and returns its text."""
    began = time.perf_counter()
    ids = [writer.ids(prompt, specials=args.parse_special)]
    writer.warn([prompt])
    new_tokens = writer.new_tokens(ids, args.max_new_tokens)
    found = writer.complete(ids, new_tokens, numbers=[number], show=Stream("" if args.chat else prompt), **how)
    print(flush=True)
    print(told(found, time.perf_counter() - began), file=sys.stderr, flush=True)
    return found[0].text


def write_many(writer: Writer, prompts: list[Prompt], args: argparse.Namespace, how: dict[str, Any]) -> None:
    """Prints completions of the prompts, in batches. Raises ValueError before the first batch if any prompt does not fit."""
    began, done = time.perf_counter(), []
    ids = [writer.ids(prompt, specials=args.parse_special) for prompt in prompts]
    writer.warn(prompts)
    new_tokens = writer.new_tokens(ids, args.max_new_tokens)
    for at in range(0, len(prompts), args.batch_size):
        part = slice(at, at + args.batch_size)
        numbers = range(at, at + len(prompts[part]))
        found = writer.complete(ids[part], new_tokens[part], numbers=numbers, **how)
        for i, (prompt, completion) in enumerate(zip(prompts[part], found, strict=True), at + 1):
            if args.json:
                print(as_json(prompt, completion, args.log_probs))
            else:
                beginning = prompt if isinstance(prompt, str) else f"{prompt[-1]['role']}: {prompt[-1]['content']}\n"
                print(f"--- {i} of {len(prompts)}\n{beginning}{completion.text}")
        sys.stdout.flush()
        done += found
    if not args.json:
        print(told(done, time.perf_counter() - began), file=sys.stderr, flush=True)


def converse(writer: Writer, begin: list[dict[str, str]], args: argparse.Namespace, how: dict[str, Any]) -> None:
    """Answers typed messages, each in the context of the conversation so far."""
    messages = list(begin)
    for number, said in enumerate(typed("Type a message; an empty one begins a new conversation")):
        if not said.strip():
            messages = list(begin)
            continue
        messages.append({"role": "user", "content": said})
        try:
            messages.append({"role": "assistant", "content": write_one(writer, messages, number, args, how)})
        except KeyboardInterrupt:
            messages.pop()
            print()
        except ValueError as e:
            if not sys.stdin.isatty():
                raise
            messages.pop()
            print(f"error: {e}", file=sys.stderr)


# ---- the command line


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m minitf.generate",
        description="Continues texts, or with --chat answers messages, by a run's model.",
        epilog="Without --prompt and --prompts, prompts are typed, or standard input is one. An empty prompt begins a document. A "
        "text ends where those that trained the model do: at an end token, or at the end of a turn. What a prompt spells is text, "
        "special tokens too: see --chat and --parse_special.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--workdir", required=True, metavar="DIR", help="the run")
    add("--step", type=int, metavar="N", help="its checkpoint of this step (default: the newest)")
    add("--prompt", action="append", metavar="TEXT", help="the beginning of a text; may be given several times")
    add(
        "--prompts",
        metavar="FILE",
        help='a prompt a line; of *.jsonl the field "prompt", with --chat also "messages"; -: standard input',
    )
    add("--chat", action="store_true", help="prompts are a user's messages, written as those that tuned the model")
    add("--system", metavar="TEXT", help="with --chat: the message of the role system before them")
    add(
        "--parse_special",
        action="store_true",
        help="what a prompt spells like a special token is that token (default: text, as in documents)",
    )
    add("--num_samples", type=int, default=1, metavar="N", help="texts for each prompt (default: 1)")
    add(
        "--max_new_tokens",
        type=int,
        metavar="N",
        help=f"tokens behind a prompt (default: as many as fit into model.max_seq_len, at most {NEW_TOKENS})",
    )
    default = Sampling(temperature=TEMPERATURE)
    for f in settings.fields(Sampling):
        value = getattr(default, f.name)
        add(f"--{f.name}", type=f.kind, default=value, metavar="X", help=f"{f.setting.meaning} (default: {value})")
    add("--seed", type=int, default=0, metavar="N", help="another gives other texts (default: 0)")
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="ends a text before it, a special token by its spelling; may be given several times",
    )
    add("--json", action="store_true", help="print one JSON object a text")
    add(
        "--log_probs",
        action="store_true",
        help="with --json: ids of the new tokens, and their natural log-probabilities",
    )
    add("--batch_size", type=int, default=8, metavar="N", help="texts at a time; changes speed only (default: 8)")
    add("--chunk", type=int, metavar="N", help="tokens between two looks at the text; changes speed only (default: 16)")
    for axis in mesh_settings():
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
    """The sampling settings. Raises ValueError for the first invalid argument."""
    for name in ("num_samples", "max_new_tokens", "batch_size", "chunk"):
        value = getattr(args, name)
        command_line.require(f"--{name}", value, value is None or value >= 1, "at least 1")
    command_line.require("--seed", args.seed, 0 <= args.seed < 2**32, "from 0 to 4294967295 (2^32 - 1)")
    if args.prompt and args.prompts is not None:
        raise ValueError("--prompt and --prompts: give one of them")
    if args.log_probs and not args.json:
        raise ValueError("--log_probs: is for --json")
    if args.system is not None and not args.chat:
        raise ValueError("--system: is for --chat")
    if args.parse_special and args.chat:
        raise ValueError("--parse_special: a message's text stays text; --chat writes the special tokens itself")
    if "" in args.stop:
        raise ValueError("--stop: an empty text stands everywhere")
    sampling = Sampling(args.repetition_penalty, args.temperature, args.top_k, args.top_p, args.min_p)
    checks.check(sampling, "--")
    return sampling


def main(argv: list[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    leave_absent_tpu()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal of another encoding must not end a text
    try:
        sampling = checked(args)
        prompts = args.prompt or (read_prompts(args.prompts, args.chat) if args.prompts is not None else None)
        begin = [] if args.system is None else [{"role": "system", "content": args.system}]
        if args.chat and prompts is not None:
            prompts = [begin + ([{"role": "user", "content": p}] if isinstance(p, str) else p) for p in prompts]
        workdir = resolve(args.workdir)
        mesh = make_mesh(MeshConfig(**{axis: getattr(args, f"mesh.{axis}") for axis in mesh_settings()}))
        use_compilation_cache(None, workdir)
        # No name for the loaded model: the writer has its own arrays, and the loaded ones are freed.
        writer = writer_of(load_model(workdir, args.step, mesh), tokenizer_of(workdir), mesh)
        how = dict(sampling=sampling, seed=args.seed, stops=args.stop, chunk=args.chunk)
        several = prompts is not None and (len(prompts) > 1 or args.num_samples > 1)
        if several or args.json:
            if prompts is None:
                prompts = [[*begin, {"role": "user", "content": p}] if args.chat else p for p in typed("Type a prompt")]
            write_many(writer, [p for p in prompts for _ in range(args.num_samples)], args, how)
            return 0
        how["chunk"] = args.chunk or 16
        if args.chat and prompts is None:
            converse(writer, begin, args, how)
            return 0
        for number, prompt in enumerate(prompts or typed("Type the beginning of a text")):
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
        command_line.fail(str(e))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
