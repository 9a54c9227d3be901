import functools
import itertools
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from minitf.data import datasets
from minitf.data.tokenizer import ByteTokenizer, CharTokenizer, id_dtype
from minitf.data.tokenizer_files import (
    TOKENIZERS,
    HuggingFaceTokenizer,
    check_name,
    load_tokenizer,
    lost_note,
    make_tokenizer,
    save_tokenizer,
)
from tools import train_tokenizer

KINDS = [*TOKENIZERS, "bpe"]

TEXTS = {
    "P44": b"\xef\xbb\xbfa\r\nb\n\n\tc",  # mark, a, CR LF, b, LF, LF, tab, c, no final newline
    "empty": b"",
    "line ends": b"\r\r\n\n\n\r",
    "nul and controls": bytes(range(128)),
    "one to four bytes": "aé€😀".encode() * 3,
    "combining": "e\u0301\u200d\ufeff\U0010ffff".encode(),
    "special looking": b"<|endoftext|></s><pad>",
}


@functools.cache
def bpe():
    """A byte-level BPE of 400 ids; a file is there while it is made."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text("the cat, the hat: a rat\n\n\tthat sat at the mat 123\r\n" * 9)
        arguments = ["--input", str(text), "--output", folder, "--vocab_size", "300", "--special", "<|x|>"]
        assert train_tokenizer.main(arguments) == 0
        return load_tokenizer(Path(folder, "tokenizer.json"))


def trained(kind, *texts):
    if kind == "bpe":
        return bpe()
    return TOKENIZERS[kind]([(f"text {i}", t) for i, t in enumerate(texts)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_decode_of_encode_is_the_text_byte_for_byte(kind, text):
    tokenizer = trained(kind, text)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids.dtype == id_dtype(tokenizer.vocab_size)
    assert ids.max(initial=0) < max(tokenizer.vocab_size, 1)


def test_bytes_round_trip_any_file_whatever_its_encoding():
    text = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8).tobytes() + "ü".encode("utf-16")
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_byte_lengths_add_up_to_the_text_and_special_ids_have_none(kind, text):
    tokenizer = trained(kind, text)
    assert tokenizer.byte_lengths.shape == (tokenizer.vocab_size,)
    assert tokenizer.byte_lengths[tokenizer.encode(text)].sum() == len(text)
    assert all(tokenizer.byte_lengths[i] == 0 for i in tokenizer.specials.values())


@pytest.mark.parametrize("kind", KINDS)
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


# ---- Hugging Face's tokenizer.json


def test_a_document_that_spells_special_tokens_does_not_hold_them():
    tokenizer = bpe()
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    for token in ("<|endoftext|>", "<|im_start|>", "<|x|>"):
        text = f"one {token} two{token}".encode()
        ids = tokenizer.encode(text)
        assert len(ids) > 6
        assert not set(ids.tolist()) & set(range(4))
        assert tokenizer.decode(ids) == text


def test_batches_of_texts_encode_as_each_alone():
    texts = [t.decode() for t in TEXTS.values()]
    for ids, text in zip(bpe().encode_batch(texts), texts, strict=True):
        np.testing.assert_array_equal(ids, bpe().encode(text.encode()))


@pytest.mark.parametrize("unknown", [None, "<unk>"])
def test_characters_that_a_tokenizer_does_not_know_are_told(unknown, tmp_path):
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {c: i for i, c in enumerate(["<unk>", "a", "b", "aa", "é"])}
    library = Tokenizer(models.BPE(vocabulary, [("a", "a")], unk_token=unknown))
    library.decoder = decoders.Fuse()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.lost("ab é\n\u4e2dZa") == "Z\u4e2d"
    assert lost_note(tokenizer, "abé", "x") is None
    assert lost_note(tokenizer, "aZ", "the prompt").startswith(
        "warning: the tokenizer does not know 'Z': left out of the prompt"
    )
    assert trained("bpe").lost("Zé\u4e2d\0") == ""  # of bytes: there is nothing that it does not know
    # And a run says so.
    (tmp_path / "x.txt").write_text("abZé" * 30)
    corpus = datasets.load(
        datasets.DataConfig(kind="text", path=str(tmp_path / "x.txt"), tokenizer=str(tmp_path)), None
    )
    assert corpus.note == lost_note(tokenizer, "Z", "the texts")


@pytest.fixture
def file(tmp_path):
    save_tokenizer(bpe(), tmp_path)
    return tmp_path / "tokenizer.json"


def test_special_tokens_are_found_by_their_names_and_the_config_beside_goes_first(file):
    assert load_tokenizer(file).specials == {"eos": 0, "turn_start": 1, "turn_end": 2}
    for said in ("<|im_end|>", {"content": "<|im_end|>"}):
        file.with_name("tokenizer_config.json").write_text(json.dumps({"eos_token": said, "pad_token": "<|x|>"}))
        assert load_tokenizer(file).specials == {"eos": 2, "pad": 3, "turn_start": 1, "turn_end": 2}
    file.with_name("tokenizer_config.json").unlink()
    assert load_tokenizer(file).specials["eos"] == 0


def test_padding_and_truncation_of_the_file_do_not_touch_the_ids(file):
    tree = json.loads(file.read_text())
    tree["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    tree["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 3, "pad_type_id": 0,
        "pad_token": "<|x|>",
    }  # fmt: skip
    text = b"the cat sat at the mat"
    expected = bpe().encode(text).tolist()
    file.write_text(json.dumps(tree))
    assert load_tokenizer(file).encode(text).tolist() == expected


def sentencepiece_like(path):
    """A tokenizer whose pieces mean different bytes in different places, as Llama 2's do."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a", "ab"]
    model = models.BPE(
        {p: i for i, p in enumerate(pieces)}, [("▁", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=True
    )
    found = tokenizers.Tokenizer(model)
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    found.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    found.add_special_tokens(["<unk>", "<s>", "</s>"])
    found.save(str(path))
    return load_tokenizer(path)


def test_a_tokenizer_whose_bytes_depend_on_the_place_decodes_through_its_library(tmp_path):
    tokenizer = sentencepiece_like(tmp_path / "tokenizer.json")
    assert tokenizer.specials == {"eos": 2, "bos": 1}
    assert tokenizer.byte_lengths is None
    for text in ("ab a b", "é 😀 ab", " a"):
        assert tokenizer.decode(tokenizer.encode(text.encode())) == text.encode()
    assert tokenizer.encode(b"a </s> b").tolist().count(2) == 0


def test_the_token_that_begins_a_text_is_the_post_processors(tmp_path):
    import tokenizers

    path = tmp_path / "tokenizer.json"
    sentencepiece_like(path)
    library = tokenizers.Tokenizer.from_file(str(path))
    library.add_special_tokens(["<s>", "</s>"])
    bos, eos = (library.token_to_id(t) for t in ("<s>", "</s>"))
    library.save(str(path))
    assert HuggingFaceTokenizer(path).prefix == ()
    processor = tokenizers.processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", bos), ("</s>", eos)])
    library.post_processor = processor
    library.save(str(path))
    found = HuggingFaceTokenizer(path)
    assert found.prefix == (bos,)
    assert bos not in found.encode(b"abc")  # what stands before a document in training is not its business


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_tokenizer_is_read_as_it_was(kind, tmp_path):
    before = trained(kind, "añb€".encode())
    save_tokenizer(before, tmp_path)
    for name in (str(tmp_path), str(tmp_path / "tokenizer.json")):
        check_name(name)
        after = make_tokenizer(name, [])
        assert type(after) is type(before)
        assert after.fingerprint == before.fingerprint
        assert after.specials == before.specials
        assert after.vocab_size == before.vocab_size
        np.testing.assert_array_equal(after.encode(b"ab"), before.encode(b"ab"))


@pytest.mark.parametrize(
    ("contents", "message"),
    [("{", "no JSON"), ("[]", "no tokenizer.json of Hugging Face's tokenizers"), ('{"a": 1}', "no tokenizer.json of")],
)
def test_a_file_that_is_no_tokenizer_is_refused_by_name(contents, message, tmp_path):
    (tmp_path / "tokenizer.json").write_text(contents)
    with pytest.raises(ValueError, match=f"{tmp_path}/tokenizer.json: {message}"):
        make_tokenizer(str(tmp_path), [])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("byte", "data.tokenizer: unknown kind 'byte'; known: bytes, chars, PATH/tokenizer.json"),
        ("no/such/tokenizer.json", "data.tokenizer=no/such/tokenizer.json: no such file"),
        ("gone.json", "data.tokenizer=gone.json: no such file"),
    ],
)
def test_a_name_of_no_tokenizer_is_refused(name, message):
    with pytest.raises(ValueError) as raised:
        check_name(name)
    assert message in str(raised.value)


def test_without_its_package_a_tokenizer_file_names_what_to_install(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"needs the package tokenizers: pip install '.\[data\]'"):
        load_tokenizer(file)


def test_an_entry_that_is_not_made_of_bytes_stands_for_its_text(tmp_path):
    import tokenizers

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({c: i for i, c in enumerate([*letters, "，"])}, [])
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    ids = [*tokenizer.encode("a，".encode()), 256]
    assert tokenizer.decode(np.array(ids)).decode() == library.decode(ids) == "a，，"
    assert tokenizer.byte_lengths[256] == 3


def test_a_plain_entry_that_is_spelt_like_a_special_token_is_none(tmp_path):
    import tokenizers

    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "<s>": 1, "</s>": 2, "<unk>": 3}, unk_token="<unk>")
    )
    library.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path / "tokenizer.json").specials == {}
    library.add_special_tokens(["</s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path / "tokenizer.json").specials == {"eos": 2}
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')  # named, it is one
    assert load_tokenizer(tmp_path / "tokenizer.json").specials == {"eos": 2, "bos": 1}
