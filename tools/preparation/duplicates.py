"""Finds duplicate documents: exact ones by the hash of their text, near ones by MinHash signatures of their words."""

import codecs
import re
import zlib
from pathlib import Path

import numpy as np

PERMUTATIONS, SHINGLE = 128, 5  # permutations of MinHash; words of a shingle
NEIGHBOURS = 16  # following documents of equal band hash that each document is compared with


# Scripts without spaces between words: Thai, Lao, Myanmar, Khmer, kana, Chinese characters. Each letter counts as a word.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
LETTER = re.compile(f"[{UNSPACED}]")
WORD = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")
LONGEST = 64  # letters of a word; a longer run without spaces (minified code, tables) is split into letters


class Words:
    """Incremental splitter of a text into words; the text's pieces may be cut anywhere."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""  # beginning of a word that may continue in the next piece
        self._in_letters = False  # the unfinished word is longer than LONGEST

    def add(self, piece: bytes, last: bool = False) -> list[bytes]:
        """The words that this piece completes. `last`: the text ends here."""
        text, found = self._rest + self._decoder.decode(piece, last), []
        self._rest = ""
        for match in WORD.finditer(text):
            word = match[0]
            goes_on = match.end() == len(text) and not last and not LETTER.match(word)
            in_letters = len(word) > LONGEST or (self._in_letters and match.start() == 0)
            self._in_letters = in_letters and goes_on
            if in_letters:
                found += word
            elif goes_on:
                self._rest = word
            else:
                found.append(word)
        if text and text[-1].isspace():
            self._in_letters = False
        return [word.encode() for word in found]


class Shingles:
    """Incremental MinHash signature of a document's shingles of SHINGLE words."""

    def __init__(self) -> None:
        try:
            from datasketch import MinHash
        except ImportError:
            raise ValueError("--dedup near needs the package datasketch: pip install '.[data]'") from None
        self._hash = MinHash(PERMUTATIONS, hashfunc=zlib.crc32)
        self._words, self._last = Words(), list[bytes]()  # _last: the last SHINGLE - 1 words
        self._any = False

    def add(self, piece: bytes) -> None:
        self._update(self._words.add(piece))

    def _update(self, words: list[bytes]) -> None:
        words = self._last + words
        for first in range(0, len(words) - SHINGLE + 1, 1 << 13):  # update_batch holds a row per shingle
            last = min(first + (1 << 13), len(words) - SHINGLE + 1)
            self._hash.update_batch([b" ".join(words[i : i + SHINGLE]) for i in range(first, last)])
            self._any = True
        self._last = words[-(SHINGLE - 1) :]

    def signature(self) -> np.ndarray:
        self._update(self._words.add(b"", last=True))
        if not self._any:  # the document has fewer than SHINGLE words
            self._hash.update(b" ".join(self._last))
        return self._hash.hashvalues.astype("<u4")


def repeated(shas: np.ndarray) -> np.ndarray:
    """bool [documents]: whether an earlier document has the same hash [documents, 2]."""
    order = np.lexsort((shas[:, 1], shas[:, 0]))  # stable: equal hashes stay in document order
    out = np.zeros(len(shas), bool)
    out[order[1:]] = (shas[order[1:]] == shas[order[:-1]]).all(axis=1)
    return out


class Signatures:
    """Signatures of all documents, uint32 [documents, PERMUTATIONS], on disk."""

    def __init__(self, files: list[Path], lengths: list[int]):
        self.parts = [
            np.memmap(file, "<u4", "r", shape=(n, PERMUTATIONS)) if n else np.zeros((0, PERMUTATIONS), "<u4")
            for file, n in zip(files, lengths, strict=True)
        ]
        self.starts = np.cumsum([0, *lengths])

    def band(self, first: int, rows: int) -> np.ndarray:
        """uint64 [documents]: a hash of columns first .. first + rows."""
        keys = np.zeros(self.starts[-1], np.uint64)
        for part, start in zip(self.parts, self.starts, strict=False):
            here = keys[start : start + len(part)]
            for column in range(first, first + rows):
                here ^= part[:, column]
                here *= np.uint64(0x9E3779B97F4A7C15)
                here ^= here >> np.uint64(32)
        return keys

    def of(self, which: np.ndarray) -> np.ndarray:
        out = np.empty((len(which), PERMUTATIONS), np.uint32)
        units = np.searchsorted(self.starts, which, side="right") - 1
        for unit in np.unique(units):
            here = units == unit
            out[here] = self.parts[unit][which[here] - self.starts[unit]]
        return out


def nearly_repeated(signatures: Signatures, among: np.ndarray, threshold: float) -> np.ndarray:
    """Those of the documents `among` (ascending) that are near duplicates of an earlier one: documents with an equal band of their
    signatures are compared, pairs equal in a share `threshold` of the signature are connected; the first of a component stays."""
    from datasketch import MinHashLSH
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    lsh = MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS)
    n = len(among)
    group = np.arange(n)
    for band in range(lsh.b):
        keys = signatures.band(band * lsh.r, lsh.r)[among]
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        pairs = []
        for distance in range(1, NEIGHBOURS + 1):
            at = np.flatnonzero(keys[distance:] == keys[:-distance])
            if not len(at):
                break
            a, b = order[at], order[at + distance]
            apart = group[a] != group[b]
            a, b = a[apart], b[apart]
            for i in range(0, len(a), 1 << 14):
                x, y = a[i : i + (1 << 14)], b[i : i + (1 << 14)]
                alike = (signatures.of(among[x]) == signatures.of(among[y])).mean(axis=1) >= threshold
                pairs.append((x[alike], y[alike]))
        if pairs:
            a, b = (group[np.concatenate(x)] for x in zip(*pairs, strict=True))
            _, joined = connected_components(coo_array((np.ones(len(a), bool), (a, b)), shape=(n, n)), directed=False)
            group = joined[group]
    _, first = np.unique(group, return_index=True)
    return np.delete(among, first)
