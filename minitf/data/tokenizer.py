"""Text to ids and back, byte for byte. A tokenizer maps bytes (UTF-8 text) to ids; special ids never come out of text."""

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from typing import Protocol

import numpy as np

# The roles of special ids and the spellings that the field uses for them, the likelier first.
SPELLINGS = {
    "eos": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]"),  # ends a document
    "bos": ("<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "[BOS]"),
    "pad": ("<|pad|>", "<pad>", "<|padding|>", "<|finetune_right_pad_id|>", "[PAD]"),
    "turn_start": ("<|im_start|>",),  # of a turn in a conversation, before the role's name (ChatML)
    "turn_end": ("<|im_end|>",),
}


class Tokenizer(Protocol):
    name: str
    specials: Mapping[str, int]  # role (see SPELLINGS) -> id
    prefix: tuple[int, ...]  # ids that it puts before each text by itself; frame.py decides what begins a text

    @property
    def spelled(self) -> Mapping[str, int]:
        """Special ids by their spelling."""
        ...

    @property
    def named(self) -> Mapping[str, str]:
        """Spellings of special tokens by the names that templates have for them: bos_token, eos_token, ..."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """sha256 of everything that decides the ids."""
        ...

    @property
    def byte_lengths(self) -> np.ndarray | None:
        """int32 [vocab_size]: bytes of text that each id stands for, 0 for special ids; None where that depends on its place."""
        ...

    def encode(self, text: bytes, source: str = "text", *, specials: bool = False) -> np.ndarray:
        """Ids of one document, in the narrowest unsigned type. `specials`: what spells a special token is one; else it is text.
        Raises ValueError naming `source`."""
        ...

    def decode(self, ids: np.ndarray) -> bytes:
        """The text of ids; special ids give nothing."""
        ...

    def lost(self, text: str) -> str:
        """The characters of a text that its ids do not hold: left out, or all written as one unknown token."""
        ...


def by_role(specials: Mapping[str, int]) -> dict[str, int]:
    """Our own tokenizers' special ids by the spelling that is the usual one for their role."""
    return {SPELLINGS[role][0]: i for role, i in specials.items()}


def split_specials(text: bytes, spelled: Mapping[str, int]) -> list[bytes | int]:
    """The text cut at what spells a special token: pieces of text, and ids."""
    if not spelled:
        return [text]
    longest_first = sorted(spelled, key=len, reverse=True)
    parts = re.split(b"(" + b"|".join(re.escape(token.encode()) for token in longest_first) + b")", text)
    return [spelled[part.decode()] if i % 2 else part for i, part in enumerate(parts) if part]


def id_dtype(vocab_size: int) -> np.dtype:
    """The narrowest unsigned type that holds every id below vocab_size."""
    return np.min_scalar_type(max(vocab_size - 1, 0))


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """256 bytes, then three special ids. Every file round-trips, whatever its encoding, line ends or byte-order mark."""

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
    """UTF-8 text. Raises ValueError naming the source and the first bad byte."""
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
    """One id for each character of an alphabet, in the order of their code points; no special ids."""

    alphabet: str
    name: str = "chars"
    specials: dict[str, int] = dataclasses.field(default_factory=dict)
    prefix = ()

    @classmethod
    def of(cls, documents: list[tuple[str, bytes]]) -> "CharTokenizer":
        """The characters of (source, text) documents."""
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
        return ""  # `encode` refuses what it does not know
