"""Conversations as token ids: in ChatML, the format of `tools.prepare_data --format chat`, or by the Jinja template of a Hugging Face
tokenizer.

A template is untrusted code: it runs only in Jinja's sandbox. Its own output may spell special tokens; the contents of messages
are always encoded as text.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from minitf.data.tokenizer import Tokenizer, split_specials

Messages = Sequence[Mapping[str, str]]  # each with `role` and `content`

ChatPiece = tuple[bytes | str, bool]  # (text, or the role of a special token; whether its tokens count as targets)


def chatml_pieces(messages: Messages) -> list[ChatPiece]:
    """Pieces of a conversation in ChatML. Targets are the assistant's contents and ends of turn. Each piece is encoded separately, so
    that a prompt, which ends before the answer, has the same ids as in training."""
    pieces: list[ChatPiece] = []
    for message in messages:
        counts = message["role"] == "assistant"
        pieces += [("turn_start", False), (f"{message['role']}\n".encode(), False)]
        pieces += [(message["content"].encode(), counts), ("turn_end", counts), (b"\n", False)]
    return pieces


ANSWER: list[ChatPiece] = [("turn_start", False), (b"assistant\n", False)]  # the end of a prompt


def chatml(tokenizer: Tokenizer, start: int | None) -> str:
    """A Jinja template that writes the start token, if any, and then what `chatml_pieces` does; exported for other programs."""
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
    """The text as a string literal of Jinja."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def chat_prompt_ids(tokenizer: Tokenizer, template: str | None, start: int | None, messages: Messages) -> list[int]:
    """Ids of a conversation up to the start of the assistant's answer. Raises ValueError if the template is None or fails."""
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


# ---- templates of other models

# Inserted after the first character of special tokens spelled in messages, so that they stay text; removed after rendering.
MARK = "\U000f0000"  # a private-use code point: it has no meaning in text


def encoded(tokenizer: Tokenizer, template: str, messages: Messages) -> list[int]:
    """Ids of a conversation rendered by a template; only the template's own output can become special tokens."""

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
    """Text that a template renders for messages, up to the start of an answer. `named`: bos_token, eos_token, ... Raises ValueError
    if the template fails or rejects these messages, or jinja2 is missing."""
    try:
        import jinja2
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ValueError("a chat template of Hugging Face needs the package jinja2: pip install '.[hf]'") from None

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    class Generation(Extension):
        """The tag that marks an assistant's text for training; its body is rendered unchanged."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    # As in transformers (utils/chat_template_utils.py), for which the templates are written.
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
    except Exception as e:  # a template may raise anything
        raise ValueError(f"the chat template: {type(e).__name__}: {e}") from None
