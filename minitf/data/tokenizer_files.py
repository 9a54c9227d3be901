"""Tokenizers in files: Hugging Face's tokenizer.json, ours beside it, and the tokenizer that a setting names."""

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
    """The printable character that byte-level BPE writes for each byte, and the byte: GPT-2's bytes_to_unicode
    (https://github.com/openai/gpt-2, src/encoder.py). Printable bytes stand for themselves, the others for 256, 257, ..."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class HuggingFaceTokenizer:
    """A `tokenizer.json`, through Hugging Face's `tokenizers`. Text that spells a special token stays text."""

    def __init__(self, path: Path):
        """The file; special ids are those that tokenizer_config.json beside it names, else by their usual spellings."""
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
        except Exception as e:  # it raises nothing narrower
            raise ValueError(f"{path}: no tokenizer.json of Hugging Face's tokenizers: {e}") from None
        self.library.no_padding()
        self.library.no_truncation()
        # A document that mentions <|endoftext|> must not end there.
        self.library.encode_special_tokens = True
        self._vocabulary = self.library.get_vocab(with_added_tokens=True)
        self.specials = self._named_specials()
        # What its own post-processor puts there: <s>, <|begin_of_text|>, or nothing. Of an empty text it would not tell what
        # stands before from what stands behind.
        around = self.library.encode("a", add_special_tokens=True).ids
        text = self.library.encode("a", add_special_tokens=False).ids
        at = next((i for i in range(len(around)) if text and around[i : i + len(text)] == text), None)
        self.prefix = tuple(i for i in around if i == self.specials.get("bos")) if at is None else tuple(around[:at])

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """tokenizer_config.json beside the file, and what special_tokens_map.json alone says; {} where there is neither."""
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
            # A usual spelling may also be a plain entry, learnt from text.
            known = [t for t in ([named] if named in self._vocabulary else spellings) if t == named or t in added]
            if known:
                specials[role] = self._vocabulary[known[0]]
        return specials

    def _token(self, key: str) -> Any:
        """The spelling of a token that the configuration names."""
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
        """The bytes of each id, for byte-level BPE; None for others, whose text depends on an id's place."""
        decoder, _ = self._read
        kinds = {d["type"] for d in decoder.get("decoders", [decoder]) if "type" in d}
        if kinds != {"ByteLevel"}:
            return None
        added = self.library.get_added_tokens_decoder()
        letters, pieces = bytes_of_letters(), [b""] * self.vocab_size
        for token, i in self._vocabulary.items():
            if i in added:  # spelt as text
                pieces[i] = b"" if added[i].special else token.encode()
            elif all(c in letters for c in token):
                pieces[i] = bytes(letters[c] for c in token)
            else:  # an entry that is not made of bytes stands for its own text, as in the library's decoder
                pieces[i] = token.encode()
        return pieces

    @functools.cached_property
    def byte_lengths(self) -> np.ndarray | None:
        return None if self._pieces is None else np.array([len(p) for p in self._pieces], np.int32)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of each text, encoded on as many threads as the library takes (RAYON_NUM_THREADS)."""
        found = self.library.encode_batch_fast(texts, add_special_tokens=False)
        dtype = id_dtype(self.vocab_size)
        return [np.array(e.ids, dtype) for e in found]

    @functools.cached_property
    def _reading_specials(self) -> Any:
        """The library, told that what spells a special token is one."""
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
        """Of the file, which may be long: its decoder; the id of what the vocabulary does not hold."""
        tree = json.loads(self.contents)
        token = tree["model"].get("unk_token")
        return tree.get("decoder") or {}, self._vocabulary.get(token) if token else tree["model"].get("unk_id")

    def lost(self, text: str) -> str:
        characters = [c for c in sorted(set(text)) if not c.isspace()]
        # Between others: a normaliser may take away what stands at an end. An accent becomes one letter with the one before.
        nothing, *found = self.encode_batch(["aa", *(f"a{c}a" for c in characters)])
        without = self.decode(nothing)
        gone = lambda ids: self._read[1] in ids.tolist() or self.decode(ids) == without
        return "".join(c for c, ids in zip(characters, found, strict=True) if gone(ids))


def lost_note(tokenizer: Tokenizer, text: str, where: str) -> str | None:
    """What to say of the characters of a text that its ids do not hold; None: they hold all."""
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
    """Whether data.tokenizer names a tokenizer.json, or a directory that holds one, and not one of TOKENIZERS."""
    return name not in TOKENIZERS and (name.endswith(".json") or "/" in name or Path(name).is_dir())


def find_file(name: str, setting: str = "data.tokenizer") -> Path:
    path = given(name, setting)
    return path / TOKENIZER_FILE if path.is_dir() else path


def check_name(name: str, setting: str = "data.tokenizer") -> None:
    """Raises ValueError where the setting names no tokenizer."""
    if not is_file_name(name):
        pick(setting, {**TOKENIZERS, "PATH/tokenizer.json": None}, name)
    elif not find_file(name, setting).is_file():
        raise ValueError(f"{setting}={name}: no such file, and no {TOKENIZER_FILE} in such a directory")


def make_tokenizer(name: str, documents: list[tuple[str, bytes]], setting: str = "data.tokenizer") -> Tokenizer:
    """The tokenizer that a setting names, for these (source, text) documents: one of TOKENIZERS, or a tokenizer.json by its
    path or its directory's. Raises ValueError where there is none."""
    check_name(name, setting)
    return load_tokenizer(find_file(name, setting)) if is_file_name(name) else TOKENIZERS[name](documents)


TOKENIZER_FILE, TOKENIZER_CONFIG = (
    "tokenizer.json",
    "tokenizer_config.json",
)  # Hugging Face's names, for our own kinds too
SPECIALS_FILE = "special_tokens_map.json"  # its older file for the roles of special tokens


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """What `load_tokenizer` reads. A Hugging Face tokenizer stays its own file, byte for byte."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        (directory / TOKENIZER_FILE).write_bytes(tokenizer.contents)
        (directory / TOKENIZER_CONFIG).write_text(json.dumps(tokenizer.config, indent=2) + "\n")
    else:
        alphabet = {"alphabet": tokenizer.alphabet} if isinstance(tokenizer, CharTokenizer) else {}
        (directory / TOKENIZER_FILE).write_text(json.dumps({"type": tokenizer.name, **alphabet}) + "\n")


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a file that `save_tokenizer` wrote, or of any Hugging Face tokenizer.json. Raises ValueError naming it."""
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
