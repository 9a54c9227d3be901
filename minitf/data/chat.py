"""Conversations as token ids: ChatML, which `--format chat` of tools.prepare_data trains, and the Jinja templates that tokenizers of
Hugging Face bring along.

A template is code from outside: it runs in Jinja's sandbox alone. What it writes itself may be special tokens; what a message
says is text.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from minitf.data.tokenizer import Tokenizer, split_specials

Messages = Sequence[Mapping[str, str]]  # of `role` and `content`

ChatPiece = tuple[bytes | str, bool]  # (text, or the role of a special token; whether its tokens count as targets)


def chatml_pieces(messages: Messages) -> list[ChatPiece]:
    """ChatML. What the assistant says counts, and that its turn ends there. Each text is encoded by itself: what a model is
    prompted with ends before the answer."""
    pieces: list[ChatPiece] = []
    for message in messages:
        counts = message["role"] == "assistant"
        pieces += [("turn_start", False), (f"{message['role']}\n".encode(), False)]
        pieces += [(message["content"].encode(), counts), ("turn_end", counts), (b"\n", False)]
    return pieces


ANSWER: list[ChatPiece] = [("turn_start", False), (b"assistant\n", False)]  # what an answer follows


def chatml(tokenizer: Tokenizer, start: int | None) -> str:
    """The template that writes the same as `chatml_pieces` behind the start token, for others to read."""
    spelling = {i: token for token, i in tokenizer.spelled.items()}
    begin, end = (quoted(spelling[tokenizer.specials[role]]) for role in ("turn_start", "turn_end"))
    return "".join(
        [
            "" if start is None else f"{{{{ {quoted(spelling[start])} }}}}",
            f"{{% for message in messages %}}{{{{ {begin} + message['role'] + '\\n' + message['content'] + {end} + '\\n' }}}}",
            f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ {begin} + 'assistant\\n' }}}}{{% endif %}}",
        ]
    )


def quoted(text: str) -> str:
    """A string of Jinja's."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def chat_prompt_ids(tokenizer: Tokenizer, template: str | None, start: int | None, messages: Messages) -> list[int]:
    """Ids of a conversation up to where the assistant's answer begins. Raises ValueError where there is no template, or it fails."""
    if template is None:
        raise ValueError(
            "the model has no chat template: its data were not prepared with --format chat, and its tokenizer brings none"
        )
    has_turns = {"turn_start", "turn_end"} <= tokenizer.specials.keys()
    if not has_turns or template != chatml(tokenizer, start):
        return encoded(tokenizer, template, messages)
    ids = [] if start is None else [start]
    for content, _ in chatml_pieces(messages) + ANSWER:
        is_role = isinstance(content, str)
        ids += [tokenizer.specials[content]] if is_role else tokenizer.encode(content, "a message").tolist()
    return ids


# ---- templates from outside

# Written into what messages spell like a special token, behind its first character, and taken out of what is rendered.
MARK = "\U000f0000"  # of a private plane: it has no meaning in text


def encoded(tokenizer: Tokenizer, template: str, messages: Messages) -> list[int]:
    """Ids of a rendered conversation: special tokens are those that the template writes."""

    def marked(text: str) -> str:
        for token in tokenizer.spelled:
            text = text.replace(token, token[:1] + MARK + token[1:])
        return text

    marked_messages = [{k: marked(v.replace(MARK, "")) for k, v in m.items()} for m in messages]
    text, source = rendered(template, marked_messages, tokenizer.named), "the conversation"
    if MARK not in text:
        return tokenizer.encode(text.encode(), source, specials=True).tolist()
    ids: list[int] = []
    for part in split_specials(text.encode(), tokenizer.spelled):
        if isinstance(part, int):
            ids.append(part)
        else:
            ids += tokenizer.encode(part.replace(MARK.encode(), b""), source).tolist()
    return ids


def rendered(template: str, messages: Messages, named: Mapping[str, str]) -> str:
    """What a template makes of messages, up to where an answer begins. `named`: bos_token, eos_token, ... Raises ValueError for a
    template that fails, or refuses these messages."""
    try:
        import jinja2
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ValueError("a chat template of Hugging Face needs the package jinja2: pip install '.[hf]'") from None

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    class Generation(Extension):
        """Marks what an assistant says, for those who train on it; here it is written as it is."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    # As transformers has it, whose templates they are (utils/chat_template_utils.py).
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = lambda x, ensure_ascii=False, **kw: json.dumps(x, ensure_ascii=ensure_ascii, **kw)
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
    }
    values: dict[str, Any] = {
        "messages": [dict(m) for m in messages],
        "add_generation_prompt": True,
        "tools": None,
        "documents": None,
        **named,
    }
    try:
        return environment.from_string(template).render(**values)
    except Exception as e:  # whatever the template raises is its author's to mend
        raise ValueError(f"the chat template: {type(e).__name__}: {e}") from None
