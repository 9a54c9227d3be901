"""Tokenizers: UTF-8 bytes to ids and back, byte for byte. Text encodes to special ids only on request (`specials=True`)."""

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from typing import Protocol

import numpy as np

# Roles of special tokens and their usual spellings, the most common first.
SPELLINGS = {
    "eos": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]"),  # ends a document
    "bos": ("<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "[BOS]"),
    "pad": ("<|pad|>", "<pad>", "<|padding|>", "<|finetune_right_pad_id|>", "[PAD]"),
    "turn_start": ("<|im_start|>",),  # starts a turn of a conversation, before the name of its role (ChatML)
    "turn_end": ("<|im_end|>",),
}


class Tokenizer(Protocol):
    name: str
    specials: Mapping[str, int]  # role (see SPELLINGS) -> id
    prefix: tuple[int, ...]  # ids that its post-processor puts before each text; `encode` does not: see frame.py

    @property
    def spelled(self) -> Mapping[str, int]:
        """Spelling -> special id."""
        ...

    @property
    def named(self) -> Mapping[str, str]:
        """Name in chat templates (bos_token, eos_token, ...) -> spelling of the special token."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """sha256 of everything that determines the ids."""
        ...

    @property
    def byte_lengths(self) -> np.ndarray | None:
        """int32 [vocab_size]: bytes of text that each id decodes to, 0 for special ids; None if that depends on context."""
        ...

    def encode(self, text: bytes, source: str = "text", *, specials: bool = False) -> np.ndarray:
        """Ids of one document, in the narrowest unsigned dtype. `specials`: text that spells a special token becomes its id; otherwise
        it stays text. Raises ValueError naming `source`."""
        ...

    def decode(self, ids: np.ndarray) -> bytes:
        """The text of ids; special ids decode to nothing."""
        ...

    def lost(self, text: str) -> str:
        """The characters of a text that encoding loses: dropped, or mapped to the unknown token."""
        ...


def by_role(specials: Mapping[str, int]) -> dict[str, int]:
    """Usual spelling -> special id, for minitf's own tokenizers."""
    return {SPELLINGS[role][0]: i for role, i in specials.items()}


def split_specials(text: bytes, spelled: Mapping[str, int]) -> list[bytes | int]:
    """The text split at spellings of special tokens: pieces of text, and the tokens' ids."""
    if not spelled:
        return [text]
    longest_first = sorted(spelled, key=len, reverse=True)
    parts = re.split(b"(" + b"|".join(re.escape(token.encode()) for token in longest_first) + b")", text)
    return [spelled[part.decode()] if i % 2 else part for i, part in enumerate(parts) if part]


def id_dtype(vocab_size: int) -> np.dtype:
    """The narrowest unsigned dtype that holds every id below vocab_size."""
    return np.min_scalar_type(max(vocab_size - 1, 0))


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """256 byte ids, then three special ids. Every file round-trips, whatever its encoding, line ends or byte-order mark."""

    name: str = "bytes"
    specials: dict[str, int] = dataclasses.field(default_factory=lambda: {"eos": 256, "bos": 257, "pad": 258})
    prefix = ()

    @property
    def vocab_size(self) -> int:
        return 256 + len(self.specials)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"bytes:{self.specials}".encode()).hexdigest()

    @property
    def byte_lengths(self) -> np.ndarray:
        return np.r_[np.ones(256, np.int32), np.zeros(len(self.specials), np.int32)]

    @property
    def spelled(self) -> dict[str, int]:
        return by_role(self.specials)

    @property
    def named(self) -> dict[str, str]:
        return {f"{role}_token": SPELLINGS[role][0] for role in self.specials}

    def encode(self, text: bytes, source: str = "text", *, specials: bool = False) -> np.ndarray:
        dtype = id_dtype(self.vocab_size)
        parts = split_specials(text, self.spelled) if specials else [text]
        ids = [np.array([x], dtype) if isinstance(x, int) else np.frombuffer(x, np.uint8).astype(dtype) for x in parts]
        return ids[0] if len(ids) == 1 else np.concatenate([np.zeros(0, dtype), *ids])

    def decode(self, ids: np.ndarray) -> bytes:
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes()

    def lost(self, text: str) -> str:
        return ""


def as_unicode(text: bytes, source: str) -> str:
    """UTF-8 bytes as a string. Raises ValueError naming the source and the first bad byte."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(
            f"{source}: not UTF-8 at byte {e.start} ({text[e.start]:#04x}); data.tokenizer=bytes takes any file"
        ) from None


def code_points(text: bytes, source: str) -> np.ndarray:
    """uint32 Unicode code points of UTF-8 text."""
    return np.frombuffer(as_unicode(text, source).encode("utf-32-le"), np.uint32)


@dataclasses.dataclass(frozen=True)
class CharTokenizer:
    """One id for each character of an alphabet, in code point order; no special ids."""

    alphabet: str
    name: str = "chars"
    specials: dict[str, int] = dataclasses.field(default_factory=dict)
    prefix = ()

    @classmethod
    def of(cls, documents: list[tuple[str, bytes]]) -> "CharTokenizer":
        """The tokenizer whose alphabet is the characters of (source, text) documents."""
        points = [np.unique(code_points(text, source)) for source, text in documents]
        return cls("".join(map(chr, np.unique(np.concatenate(points)))) if points else "")

    @property
    def vocab_size(self) -> int:
        return len(self.alphabet)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"chars:{self.alphabet}".encode()).hexdigest()

    @property
    def byte_lengths(self) -> np.ndarray:
        return np.array([len(c.encode()) for c in self.alphabet], np.int32)

    @property
    def spelled(self) -> dict[str, int]:
        return {}

    @property
    def named(self) -> dict[str, str]:
        return {}

    def encode(self, text: bytes, source: str = "text", *, specials: bool = False) -> np.ndarray:
        points = code_points(text, source)
        known = np.array([ord(c) for c in self.alphabet], np.uint32)
        ids = np.searchsorted(known, points)
        unknown = known[np.minimum(ids, len(known) - 1)] != points
        if unknown.any():
            at = int(unknown.argmax())
            raise ValueError(
                f"{source}: character {chr(points[at])!r} at {at} is not one of the {len(known)} of the training text"
            )
        return ids.astype(id_dtype(self.vocab_size))

    def decode(self, ids: np.ndarray) -> bytes:
        return "".join(self.alphabet[i] for i in np.asarray(ids)).encode()

    def lost(self, text: str) -> str:
        return ""  # `encode` raises on unknown characters
