"""Tokenizers that travel with a model: Hugging Face's stay their own files, ours are written as theirs."""

import json
from pathlib import Path
from typing import Any

from minitf.data.tokenizer import (
    CONFIG,
    FILE,
    SPELLINGS,
    ByteTokenizer,
    CharTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
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


def characters(tokenizer: CharTokenizer) -> Any:
    """A word is a character; one that is not in the alphabet is an error, as with ours."""
    t = library()
    out = t.Tokenizer(t.models.WordLevel(vocab={c: i for i, c in enumerate(tokenizer.alphabet)}))
    out.pre_tokenizer = t.pre_tokenizers.Split(t.Regex(r"(?m:.)"), "isolated")
    out.decoder = t.decoders.Fuse()
    return out


def write_tokenizer(tokenizer: Tokenizer, source: Path, folder: Path) -> None:
    """Writes a run's tokenizer, whose files lie in `source`, to a model folder."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        for name in (FILE, CONFIG):
            if (source / name).is_file():
                (folder / name).write_bytes((source / name).read_bytes())
        return
    made = byte_level(tokenizer) if isinstance(tokenizer, ByteTokenizer) else characters(tokenizer)
    made.save(str(folder / FILE))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # take tokenizer.json as it is
        "clean_up_tokenization_spaces": False,  # decode to the very text
        **{f"{role}_token": SPELLINGS[role][0] for role in tokenizer.specials},
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
