"""Tokenizer files: Hugging Face's tokenizer.json, minitf's own kinds in the same file name, and the lookup of data.tokenizer."""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from minitf.data.tokenizer import SPELLINGS, ByteTokenizer, CharTokenizer, Tokenizer, as_unicode, id_dtype
from minitf.paths import given
from minitf.tables import pick


@functools.cache
def bytes_of_letters() -> dict[str, int]:
    """Printable character that byte-level BPE writes for a byte -> that byte: GPT-2's bytes_to_unicode
    (https://github.com/openai/gpt-2, src/encoder.py). Printable bytes map to themselves, the others to 256, 257, ..."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class HuggingFaceTokenizer:
    """A `tokenizer.json`, through Hugging Face's `tokenizers`. Text that spells a special token stays text."""

    def __init__(self, path: Path):
        """Loads the file. Special ids come from tokenizer_config.json beside it, or else from the usual spellings."""
        try:
            import tokenizers
        except ImportError:
            raise ValueError(f"{path}: needs the package tokenizers: pip install '.[data]'") from None
        self.path, self.name = path, str(path)
        try:
            self.contents = path.read_bytes()
            self.library = tokenizers.Tokenizer.from_buffer(self.contents)
        except OSError as e:
            raise ValueError(f"{path}: {e.strerror}") from None
        except Exception as e:  # tokenizers raises nothing narrower
            raise ValueError(f"{path}: no tokenizer.json of Hugging Face's tokenizers: {e}") from None
        self.library.no_padding()
        self.library.no_truncation()
        # A document that mentions <|endoftext|> must not end there.
        self.library.encode_special_tokens = True
        self._vocabulary = self.library.get_vocab(with_added_tokens=True)
        self.specials = self._named_specials()
        # What its post-processor puts before a text: <s>, <|begin_of_text|>, or nothing. An empty text would not show which
        # tokens come before and which after.
        around = self.library.encode("a", add_special_tokens=True).ids
        text = self.library.encode("a", add_special_tokens=False).ids
        at = next((i for i in range(len(around)) if text and around[i : i + len(text)] == text), None)
        self.prefix = tuple(i for i in around if i == self.specials.get("bos")) if at is None else tuple(around[:at])

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """special_tokens_map.json overridden by tokenizer_config.json, both beside the file; {} if neither exists."""
        tree: dict[str, Any] = {}
        for path in map(self.path.with_name, (SPECIALS_FILE, TOKENIZER_CONFIG)):
            try:
                tree |= json.loads(path.read_text()) if path.is_file() else {}
            except (ValueError, TypeError) as e:
                raise ValueError(f"{path}: {e}") from None
        return tree

    def _named_specials(self) -> dict[str, int]:
        specials = {}
        added = {t.content for t in self.library.get_added_tokens_decoder().values() if t.special}
        for role, spellings in SPELLINGS.items():
            named = self._token(f"{role}_token")
            # A usual spelling counts only if it is marked as special: it may also be an ordinary entry, learnt from text.
            known = [t for t in ([named] if named in self._vocabulary else spellings) if t == named or t in added]
            if known:
                specials[role] = self._vocabulary[known[0]]
        return specials

    def _token(self, key: str) -> Any:
        """Spelling of the token under this key of the configuration; None if absent."""
        token = self.config.get(key)
        return token.get("content") if isinstance(token, dict) else token

    @functools.cached_property
    def spelled(self) -> dict[str, int]:
        added = {t.content: i for i, t in self.library.get_added_tokens_decoder().items() if t.special}
        spelling = {i: token for token, i in self._vocabulary.items()}
        return added | {spelling[i]: i for i in (*self.specials.values(), *self.prefix)}

    @property
    def named(self) -> dict[str, str]:
        values = {key: self._token(key) for key in self.config if key.endswith("_token")}
        return {key: token for key, token in values.items() if isinstance(token, str)}

    @functools.cached_property
    def vocab_size(self) -> int:
        return max(self._vocabulary.values(), default=-1) + 1

    @functools.cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.contents).hexdigest()

    @functools.cached_property
    def _pieces(self) -> list[bytes] | None:
        """The bytes of each id, for byte-level BPE; None for other tokenizers, where the text of an id depends on context."""
        decoder, _ = self._read
        kinds = {d["type"] for d in decoder.get("decoders", [decoder]) if "type" in d}
        if kinds != {"ByteLevel"}:
            return None
        added = self.library.get_added_tokens_decoder()
        letters, pieces = bytes_of_letters(), [b""] * self.vocab_size
        for token, i in self._vocabulary.items():
            if i in added:  # added tokens are stored as plain text
                pieces[i] = b"" if added[i].special else token.encode()
            elif all(c in letters for c in token):
                pieces[i] = bytes(letters[c] for c in token)
            else:  # an entry with other characters is its own text, as in the library's decoder
                pieces[i] = token.encode()
        return pieces

    @functools.cached_property
    def byte_lengths(self) -> np.ndarray | None:
        return None if self._pieces is None else np.array([len(p) for p in self._pieces], np.int32)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of each text, encoded on the library's own threads (RAYON_NUM_THREADS)."""
        found = self.library.encode_batch_fast(texts, add_special_tokens=False)
        dtype = id_dtype(self.vocab_size)
        return [np.array(e.ids, dtype) for e in found]

    @functools.cached_property
    def _reading_specials(self) -> Any:
        """The library's tokenizer, which encodes spellings of special tokens to their ids."""
        found = type(self.library).from_buffer(self.contents)
        found.no_padding()
        found.no_truncation()
        return found

    def encode(self, text: bytes, source: str = "text", *, specials: bool = False) -> np.ndarray:
        if specials:
            found = self._reading_specials.encode(as_unicode(text, source), add_special_tokens=False)
            return np.array(found.ids, id_dtype(self.vocab_size))
        return self.encode_batch([as_unicode(text, source)])[0]

    def decode(self, ids: np.ndarray) -> bytes:
        ids = np.asarray(ids)
        if self._pieces is not None:
            return b"".join(self._pieces[i] for i in ids)
        return self.library.decode(ids.tolist(), skip_special_tokens=True).encode()

    @functools.cached_property
    def _read(self) -> tuple[dict[str, Any], int | None]:
        """(decoder configuration, id of the unknown token or None). Cached: the file may be large."""
        tree = json.loads(self.contents)
        token = tree["model"].get("unk_token")
        return tree.get("decoder") or {}, self._vocabulary.get(token) if token else tree["model"].get("unk_id")

    def lost(self, text: str) -> str:
        characters = [c for c in sorted(set(text)) if not c.isspace()]
        # Between letters: a normaliser may strip the ends of a text. An accent combines with the letter before it.
        nothing, *found = self.encode_batch(["aa", *(f"a{c}a" for c in characters)])
        without = self.decode(nothing)
        gone = lambda ids: self._read[1] in ids.tolist() or self.decode(ids) == without
        return "".join(c for c, ids in zip(characters, found, strict=True) if gone(ids))


def lost_note(tokenizer: Tokenizer, text: str, where: str) -> str | None:
    """A warning that lists the characters of a text that encoding loses; None if it loses none."""
    lost = tokenizer.lost(text)
    if not lost:
        return None
    shown = ", ".join(map(repr, lost[:10])) + (f" and {len(lost) - 10} others" if len(lost) > 10 else "")
    return f"warning: the tokenizer does not know {shown}: left out of {where}, or written as its unknown token"


TOKENIZERS = {  # name -> tokenizer for these (source, text) documents
    "bytes": lambda documents: ByteTokenizer(),
    "chars": CharTokenizer.of,
}


def is_file_name(name: str) -> bool:
    """Whether data.tokenizer is the path of a tokenizer.json or of its directory, not one of TOKENIZERS."""
    return name not in TOKENIZERS and (name.endswith(".json") or "/" in name or Path(name).is_dir())


def find_file(name: str, setting: str = "data.tokenizer") -> Path:
    path = given(name, setting)
    return path / TOKENIZER_FILE if path.is_dir() else path


def check_name(name: str, setting: str = "data.tokenizer") -> None:
    """Raises ValueError if the setting names no tokenizer."""
    if not is_file_name(name):
        pick(setting, {**TOKENIZERS, "PATH/tokenizer.json": None}, name)
    elif not find_file(name, setting).is_file():
        raise ValueError(f"{setting}={name}: no such file, and no {TOKENIZER_FILE} in such a directory")


def make_tokenizer(name: str, documents: list[tuple[str, bytes]], setting: str = "data.tokenizer") -> Tokenizer:
    """The tokenizer that a setting names: one of TOKENIZERS, made for these (source, text) documents, or a tokenizer.json by its path
    or its directory's. Raises ValueError if there is none."""
    check_name(name, setting)
    return load_tokenizer(find_file(name, setting)) if is_file_name(name) else TOKENIZERS[name](documents)


# Hugging Face's names, used for minitf's own kinds too.
TOKENIZER_FILE, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIALS_FILE = "special_tokens_map.json"  # Hugging Face's older file for the roles of special tokens


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Writes what `load_tokenizer` reads. A Hugging Face tokenizer.json is copied byte for byte."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        (directory / TOKENIZER_FILE).write_bytes(tokenizer.contents)
        (directory / TOKENIZER_CONFIG).write_text(json.dumps(tokenizer.config, indent=2) + "\n")
    else:
        alphabet = {"alphabet": tokenizer.alphabet} if isinstance(tokenizer, CharTokenizer) else {}
        (directory / TOKENIZER_FILE).write_text(json.dumps({"type": tokenizer.name, **alphabet}) + "\n")


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a file from `save_tokenizer`, or in any Hugging Face tokenizer.json. Raises ValueError naming the file."""
    try:
        tree = json.loads(path.read_text())
    except OSError as e:
        raise ValueError(f"{path}: {e.strerror}") from None
    except ValueError as e:
        raise ValueError(f"{path}: no JSON: {e}") from None
    kind = tree.get("type") if isinstance(tree, dict) else None
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "chars":
        return CharTokenizer(tree["alphabet"])
    return HuggingFaceTokenizer(path)
