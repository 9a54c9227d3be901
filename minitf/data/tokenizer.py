"""Text to ids and back, byte for byte. A tokenizer maps bytes (UTF-8 text) to ids; special ids never come out of text."""

import dataclasses
import hashlib
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    name: str
    specials: dict[str, int]  # role -> id: "eos" ends a document; "bos" and "pad" are there for later use

    @property
    def vocab_size(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """sha256 of everything that decides the ids."""
        ...

    @property
    def byte_lengths(self) -> np.ndarray:
        """int32 [vocab_size]: bytes of text that each id stands for; 0 for special ids."""
        ...

    def encode(self, text: bytes, source: str = "text") -> np.ndarray:
        """Ids of one document, in the narrowest unsigned type. Raises ValueError naming `source`."""
        ...

    def decode(self, ids: np.ndarray) -> bytes:
        """The text of ids; special ids give nothing."""
        ...


def id_dtype(vocab_size: int) -> np.dtype:
    """The narrowest unsigned type that holds every id below vocab_size."""
    return np.min_scalar_type(max(vocab_size - 1, 0))


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """256 bytes, then three special ids. Every file round-trips, whatever its encoding, line ends or byte-order mark."""

    name: str = "bytes"
    specials: dict[str, int] = dataclasses.field(default_factory=lambda: {"eos": 256, "bos": 257, "pad": 258})

    @property
    def vocab_size(self) -> int:
        return 256 + len(self.specials)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"bytes:{self.specials}".encode()).hexdigest()

    @property
    def byte_lengths(self) -> np.ndarray:
        return np.r_[np.ones(256, np.int32), np.zeros(len(self.specials), np.int32)]

    def encode(self, text: bytes, source: str = "text") -> np.ndarray:
        return np.frombuffer(text, np.uint8).astype(id_dtype(self.vocab_size))

    def decode(self, ids: np.ndarray) -> bytes:
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes()


def code_points(text: bytes, source: str) -> np.ndarray:
    """uint32 Unicode code points of UTF-8 text. Raises ValueError naming the source and the first bad byte."""
    try:
        return np.frombuffer(text.decode("utf-8").encode("utf-32-le", "surrogatepass"), np.uint32)
    except UnicodeDecodeError as e:
        raise ValueError(
            f"{source}: not UTF-8 at byte {e.start} ({text[e.start]:#04x}); data.tokenizer=bytes takes any file"
        ) from None


@dataclasses.dataclass(frozen=True)
class CharTokenizer:
    """One id for each character of an alphabet, in the order of their code points; no special ids."""

    alphabet: str
    name: str = "chars"
    specials: dict[str, int] = dataclasses.field(default_factory=dict)

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

    def encode(self, text: bytes, source: str = "text") -> np.ndarray:
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


TOKENIZERS = {  # name -> tokenizer for these (source, text) documents
    "bytes": lambda documents: ByteTokenizer(),
    "chars": CharTokenizer.of,
}
