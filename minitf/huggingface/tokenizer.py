"""Tokenizers of exported models: Hugging Face's are copied, minitf's own are converted to tokenizer.json."""

import json
from pathlib import Path
from typing import Any

from minitf.data.frame import Frame
from minitf.data.tokenizer import SPELLINGS, ByteTokenizer, CharTokenizer, Tokenizer
from minitf.data.tokenizer_files import (
    SPECIALS_FILE,
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    HuggingFaceTokenizer,
    bytes_of_letters,
)


def library() -> Any:
    try:
        import tokenizers

        return tokenizers
    except ImportError:
        raise ValueError("needs the package tokenizers: pip install '.[hf]'") from None


def byte_level(tokenizer: ByteTokenizer) -> Any:
    """Byte-level BPE without merges: one id per byte."""
    t = library()
    out = t.Tokenizer(t.models.BPE(vocab=bytes_of_letters(), merges=[]))
    out.pre_tokenizer = t.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    out.decoder = t.decoders.ByteLevel()
    roles = sorted(tokenizer.specials, key=tokenizer.specials.get)  # the library assigns ids in order
    out.add_special_tokens([t.AddedToken(SPELLINGS[role][0], special=True, normalized=False) for role in roles])
    return out


def char_level(tokenizer: CharTokenizer) -> Any:
    """A word-level tokenizer with characters as words; it fails on unknown characters, as CharTokenizer does."""
    t = library()
    out = t.Tokenizer(t.models.WordLevel(vocab={c: i for i, c in enumerate(tokenizer.alphabet)}))
    out.pre_tokenizer = t.pre_tokenizers.Split(t.Regex(r"(?m:.)"), "isolated")
    out.decoder = t.decoders.Fuse()
    return out


CARRIED = (TOKENIZER_FILE, TOKENIZER_CONFIG, SPECIALS_FILE)  # copied byte for byte, on import and export
TEMPLATE = "chat_template.jinja"  # transformers prefers it to tokenizer_config.json


def template_of(folder: Path, config: dict[str, Any]) -> str | None:
    """The chat template of a model folder, the default one of several; None: none."""
    if (folder / TEMPLATE).is_file():
        return (folder / TEMPLATE).read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):  # [{"name": ..., "template": ...}]
        found = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}.get("default")
    return found if isinstance(found, str) else None


def write_tokenizer(tokenizer: Tokenizer, frame: Frame, source: Path, folder: Path) -> None:
    """Writes a run's tokenizer, whose files are in `source`, and its frame's chat template to a model folder."""
    if frame.template is not None:
        (folder / TEMPLATE).write_text(frame.template, encoding="utf-8")
    # lm-evaluation-harness predicts the first token of a text from bos_token: it must be the token that training used.
    begins = frame.first not in (None, tokenizer.specials.get("bos", tokenizer.specials.get("eos")))
    first = {"bos_token": {i: token for token, i in tokenizer.spelled.items()}[frame.first]} if begins else {}
    if isinstance(tokenizer, HuggingFaceTokenizer):
        if "tokenizer_class" in tokenizer.config and not first:
            for name in CARRIED:
                if (source / name).is_file():
                    (folder / name).write_bytes((source / name).read_bytes())
            return
        (folder / TOKENIZER_FILE).write_bytes(tokenizer.contents)
        # Without a class, transformers uses the class of the model's family, whose pre-tokenizer may differ.
        config = {"tokenizer_class": TOKENIZER_CLASS, **tokenizer.config, **first}
    else:
        made = byte_level(tokenizer) if isinstance(tokenizer, ByteTokenizer) else char_level(tokenizer)
        made.save(str(folder / TOKENIZER_FILE))
        # No clean-up: decoding must return exactly the text.
        config = {"tokenizer_class": TOKENIZER_CLASS, "clean_up_tokenization_spaces": False, **tokenizer.named, **first}
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")


TOKENIZER_CLASS = "PreTrainedTokenizerFast"  # uses tokenizer.json unchanged
