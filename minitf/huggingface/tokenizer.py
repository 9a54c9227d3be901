"""Tokenizers that travel with a model: Hugging Face's stay their own files, ours are written as theirs."""

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
    """Byte-level BPE without merges: an id is a byte."""
    t = library()
    out = t.Tokenizer(t.models.BPE(vocab=bytes_of_letters(), merges=[]))
    out.pre_tokenizer = t.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    out.decoder = t.decoders.ByteLevel()
    roles = sorted(tokenizer.specials, key=tokenizer.specials.get)  # ids are given in order
    out.add_special_tokens([t.AddedToken(SPELLINGS[role][0], special=True, normalized=False) for role in roles])
    return out


def char_level(tokenizer: CharTokenizer) -> Any:
    """A word is a character; one that is not in the alphabet is an error, as with ours."""
    t = library()
    out = t.Tokenizer(t.models.WordLevel(vocab={c: i for i, c in enumerate(tokenizer.alphabet)}))
    out.pre_tokenizer = t.pre_tokenizers.Split(t.Regex(r"(?m:.)"), "isolated")
    out.decoder = t.decoders.Fuse()
    return out


CARRIED = (TOKENIZER_FILE, TOKENIZER_CONFIG, SPECIALS_FILE)  # byte for byte, both ways
TEMPLATE = "chat_template.jinja"  # what transformers looks at before tokenizer_config.json


def template_of(folder: Path, config: dict[str, Any]) -> str | None:
    """The chat template of a model folder; of several, the default one."""
    if (folder / TEMPLATE).is_file():
        return (folder / TEMPLATE).read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):  # of {name, template}
        found = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}.get("default")
    return found if isinstance(found, str) else None


def write_tokenizer(tokenizer: Tokenizer, frame: Frame, source: Path, folder: Path) -> None:
    """Writes a run's tokenizer, whose files lie in `source`, to a model folder, and the chat template of its texts."""
    if frame.template is not None:
        (folder / TEMPLATE).write_text(frame.template, encoding="utf-8")
    # lm-evaluation-harness predicts the first token of a text from the token that is named so: the one that training did.
    begins = frame.first not in (None, tokenizer.specials.get("bos", tokenizer.specials.get("eos")))
    first = {"bos_token": {i: token for token, i in tokenizer.spelled.items()}[frame.first]} if begins else {}
    if isinstance(tokenizer, HuggingFaceTokenizer):
        if "tokenizer_class" in tokenizer.config and not first:
            for name in CARRIED:
                if (source / name).is_file():
                    (folder / name).write_bytes((source / name).read_bytes())
            return
        (folder / TOKENIZER_FILE).write_bytes(tokenizer.contents)
        # Without a class, transformers takes that of the model's family, which may have another pre-tokenizer.
        config = {"tokenizer_class": TOKENIZER_CLASS, **tokenizer.config, **first}
    else:
        made = byte_level(tokenizer) if isinstance(tokenizer, ByteTokenizer) else char_level(tokenizer)
        made.save(str(folder / TOKENIZER_FILE))
        # Decoded to the very text.
        config = {"tokenizer_class": TOKENIZER_CLASS, "clean_up_tokenization_spaces": False, **tokenizer.named, **first}
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")


TOKENIZER_CLASS = "PreTrainedTokenizerFast"  # takes tokenizer.json as it is
