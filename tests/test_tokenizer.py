import itertools

import numpy as np
import pytest

from minitf.data.tokenizer import TOKENIZERS, ByteTokenizer, CharTokenizer, id_dtype

TEXTS = {
    "P44": b"\xef\xbb\xbfa\r\nb\n\n\tc",  # mark, a, CR LF, b, LF, LF, tab, c, no final newline
    "empty": b"",
    "line ends": b"\r\r\n\n\n\r",
    "nul and controls": bytes(range(128)),
    "one to four bytes": "aé€😀".encode() * 3,
    "combining": "e\u0301\u200d\ufeff\U0010ffff".encode(),
    "special looking": b"<|endoftext|></s><pad>",
}


def trained(kind, *texts):
    return TOKENIZERS[kind]([(f"text {i}", t) for i, t in enumerate(texts)])


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_P44_decode_of_encode_is_the_text_byte_for_byte(kind, text):
    tokenizer = trained(kind, text)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids.dtype == id_dtype(tokenizer.vocab_size)
    assert ids.max(initial=0) < max(tokenizer.vocab_size, 1)


def test_bytes_round_trip_any_file_whatever_its_encoding():
    text = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8).tobytes() + "ü".encode("utf-16")
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_byte_lengths_add_up_to_the_text_and_special_ids_have_none(kind, text):
    tokenizer = trained(kind, text)
    assert tokenizer.byte_lengths.shape == (tokenizer.vocab_size,)
    assert tokenizer.byte_lengths[tokenizer.encode(text)].sum() == len(text)
    assert all(tokenizer.byte_lengths[i] == 0 for i in tokenizer.specials.values())


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_special_ids_never_come_out_of_text_and_decode_to_nothing(kind):
    text = bytes(range(128)) + "é😀".encode()
    tokenizer = trained(kind, text)
    specials = np.array(list(tokenizer.specials.values()), np.int64)
    assert not np.isin(tokenizer.encode(text), specials).any()
    assert np.all(specials < tokenizer.vocab_size)
    assert tokenizer.decode(np.r_[specials, tokenizer.encode(b"a"), specials]) == b"a"


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32"), (2**32 + 1, "uint64")],
)
def test_id_dtype_is_the_narrowest_that_holds_every_id(vocab_size, dtype):
    assert id_dtype(vocab_size) == np.dtype(dtype)


def test_chars_number_the_alphabet_of_all_documents_by_code_point():
    tokenizer = trained("chars", b"ca", "bé".encode(), b"")
    assert tokenizer.alphabet == "abcé"
    assert tokenizer.encode("éab".encode()).tolist() == [3, 0, 1]


@pytest.mark.parametrize(("text", "char", "at"), [(b"abz", "'z'", 2), (b"Aab", "'A'", 0), ("ab😀".encode(), "'😀'", 2)])
def test_an_unknown_character_is_refused_with_its_place(text, char, at):
    with pytest.raises(ValueError, match=rf"notes.txt: character {char} at {at} is not one of the 3"):
        CharTokenizer("abc").encode(text, "notes.txt")


def test_chars_refuse_what_is_not_utf8_with_its_place():
    with pytest.raises(ValueError, match=r"notes.txt: not UTF-8 at byte 3 \(0xff\); data.tokenizer=bytes"):
        CharTokenizer.of([("notes.txt", "aé".encode() + b"\xff")])


def test_fingerprints_are_equal_for_equal_ids_and_differ_otherwise():
    same = [trained("chars", b"abc"), trained("chars", b"cab", b"b"), CharTokenizer("abc")]
    assert len({t.fingerprint for t in same}) == 1
    assert ByteTokenizer().fingerprint == ByteTokenizer().fingerprint
    others = [ByteTokenizer(), ByteTokenizer(specials={"eos": 256}), *map(CharTokenizer, ("abc", "abd", "ab", ""))]
    for a, b in itertools.combinations(others, 2):
        assert a.fingerprint != b.fingerprint
