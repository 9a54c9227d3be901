import dataclasses
import os
import pickle

import numpy as np
import pytest

from minitf.data.store import DataError, OnDisk, Rows, Store, concatenated, open_tokens


def store_of(ids, vocab_size=64, dtype=np.uint16, **kw):
    return Store("ids", np.asarray(ids, dtype), vocab_size, **kw)


def random_store(seed, tokens, *, by_offsets):
    """Ids and documents at random, some of one token; and the document of each token as a plain list."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 5, tokens)
    if by_offsets:
        cuts = np.unique(rng.integers(0, tokens + 1, tokens // 4))
        offsets = np.unique(np.r_[0, cuts, tokens]).astype(np.int64)
        documents = [sum(o <= t for o in offsets.tolist()) for t in range(tokens)]
        return store_of(ids, offsets=offsets), documents
    documents, number = [], 1
    for i in ids.tolist():
        documents.append(number)
        number += i == 0
    return store_of(ids, eos=0), documents


def plain_row(ids, documents, seq_len, i, isolate):
    """A row as one loop over its positions."""
    row = {k: [] for k in ("inputs", "targets", "weights", "segments", "positions")}
    segment = position = 1
    for t in range(i * seq_len, (i + 1) * seq_len):
        if t + 1 >= len(ids):
            values = (0, 0, 0, 0, 0)
        else:
            begins = t > i * seq_len and documents[t] != documents[t - 1]
            segment, position = segment + begins, 1 if begins or t == i * seq_len else position + 1
            weight = documents[t] == documents[t + 1] if isolate else 1
            values = (ids[t], ids[t + 1], weight, segment, position - 1)
        for column, value in zip(row.values(), values, strict=True):
            column.append(value)
    return row if isolate else {k: row[k] for k in ("inputs", "targets", "weights")}


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("by_offsets", [False, True], ids=["eos", "offsets"])
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("seq_len", [1, 3, 8, 64])
def test_rows_equal_a_plain_loop(seq_len, tail, by_offsets, isolate):
    for seed in range(5):
        store, documents = random_store(seed, 97 + seed, by_offsets=by_offsets)
        rows = Rows(store, seq_len, isolate=isolate, tail=tail)
        assert len(rows) == (-(-(len(store) - 1) // seq_len) if tail else (len(store) - 1) // seq_len)
        for i in range(len(rows)):
            expected = plain_row(store.ids.tolist(), documents, seq_len, i, isolate)
            actual = rows[i]
            assert actual.keys() == expected.keys()
            for name, values in expected.items():
                np.testing.assert_array_equal(actual[name], values, err_msg=f"{name} of row {i}, seed {seed}")
                assert actual[name].dtype == (np.float32 if name == "weights" else np.int32)


@pytest.mark.parametrize("tokens", [2, 8, 9, 10, 16, 17, 18, 40])
def test_with_tail_each_token_but_the_first_is_a_target_once(tokens):
    ids = np.arange(tokens)
    rows = list(Rows(store_of(ids), 8, tail=True))
    targets = np.concatenate([row["targets"][row["weights"] > 0] for row in rows])
    inputs = np.concatenate([row["inputs"][row["weights"] > 0] for row in rows])
    np.testing.assert_array_equal(targets, ids[1:])
    np.testing.assert_array_equal(inputs, ids[:-1])


def test_padding_has_id_0_weight_0_and_segment_0():
    row = Rows(store_of([5, 6, 7], eos=0), 8, isolate=True, tail=True)[0]
    for values in row.values():
        assert not values[2:].any()
    assert row["segments"].tolist()[:2] == [1, 1]


def test_isolate_marks_documents_positions_and_the_border():
    store = store_of([1, 1, 1, 2, 2, 3, 3, 3, 3], offsets=np.array([0, 3, 5, 9]))
    row = Rows(store, 8, isolate=True)[0]
    assert row["segments"].tolist() == [1, 1, 1, 2, 2, 3, 3, 3]
    assert row["positions"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert row["weights"].tolist() == [1, 1, 0, 1, 0, 1, 1, 1]


def test_an_empty_document_in_the_offsets_changes_nothing():
    with_empty = store_of(range(9), offsets=np.array([0, 0, 3, 3, 3, 9, 9]))
    without = store_of(range(9), offsets=np.array([0, 3, 9]))
    for a, b in zip(Rows(with_empty, 4, isolate=True), Rows(without, 4, isolate=True), strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


def test_isolate_needs_to_know_where_documents_end():
    with pytest.raises(ValueError, match=r"ids: data.isolate_documents=True .* set data.eos_id"):
        Rows(store_of(range(9)), 8, isolate=True)


def test_nine_tokens_are_one_row_of_eight():
    rows = Rows(store_of(range(9)), 8)
    assert len(rows) == 1
    assert rows[0]["inputs"].tolist() == list(range(8))
    assert rows[0]["targets"].tolist() == list(range(1, 9))
    assert rows[0]["weights"].tolist() == [1.0] * 8


@pytest.mark.parametrize(
    ("tokens", "tail", "message"),
    [
        (8, False, "ids: needs at least 9 tokens, found 8"),
        (0, False, "ids: needs at least 9 tokens, found 0"),
        (1, True, "ids: needs at least 2 tokens, found 1"),
    ],
)
def test_too_few_tokens_are_refused_with_both_numbers(tokens, tail, message):
    with pytest.raises(ValueError, match=message):
        Rows(store_of(range(tokens)), 8, tail=tail)


@pytest.mark.parametrize("i", [2, 3, 10**6, -1])
def test_a_row_outside_is_an_index_error(i):
    with pytest.raises(IndexError):
        Rows(store_of(range(17)), 8)[i]


@pytest.mark.parametrize("dtype", ["int16", "int32", "int64"])
@pytest.mark.parametrize("bad", [-1, -100, 64])
@pytest.mark.parametrize("at", [0, 9, 16])
def test_a_bad_target_is_an_error_with_its_value_and_place(bad, at, dtype):
    ids = np.arange(17)
    ids[at] = bad
    rows = Rows(store_of(ids, dtype=dtype), 8)
    with pytest.raises(DataError, match=rf"^ids: id {bad} at token {at} is not below the vocabulary size 64$"):
        list(rows)


@pytest.mark.parametrize(
    ("bad", "dtype"), [(64, "uint8"), (70, "uint8"), (65535, "uint16"), (2**32 - 1, "uint32"), (2**64 - 1, "uint64")]
)
def test_a_stray_id_is_an_error_in_its_row_and_in_no_other(bad, dtype, tmp_path):
    ids = np.arange(33).astype(dtype)
    ids[18:20] = bad
    path = tmp_path / "train.bin"
    ids.tofile(path)
    rows = Rows(open_tokens(path, dtype, 64, None), 8)
    for i in (0, 1, 3):
        rows[i]
    with pytest.raises(DataError, match=f"{path}: id {bad} at token 18 is not below the vocabulary size 64"):
        rows[2]


def test_concatenated_closes_each_document_and_leaves_out_empty_ones():
    documents = [np.array(d, np.uint8) for d in ([], [1, 2], [], [3], [])]
    store = concatenated("text", documents, 10, np.dtype(np.uint16), eos=9)
    assert store.ids.tolist() == [1, 2, 9, 3, 9]
    assert store.ids.dtype == np.uint16
    assert store.offsets.tolist() == [0, 3, 5]
    without = concatenated("text", documents, 10, np.dtype(np.uint16), eos=None)
    assert without.ids.tolist() == [1, 2, 3]
    assert without.offsets.tolist() == [0, 2, 3]
    assert len(concatenated("text", documents[:1], 10, np.dtype(np.uint16), eos=9)) == 0


# ---- files


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "int32", "int64"])
def test_a_bin_file_is_little_endian(dtype, tmp_path):
    path = tmp_path / "ids.bin"
    np.arange(17).astype(np.dtype(dtype).newbyteorder("<")).tofile(path)
    store = open_tokens(path, dtype, 64, None)
    assert isinstance(store.ids, OnDisk)
    assert Rows(store, 16)[0]["targets"].tolist() == list(range(1, 17))


@pytest.mark.parametrize("dtype", ["uint8", "<u2", ">u2", "int64"])
def test_an_npy_file_is_read_in_its_own_type(dtype, tmp_path):
    path = tmp_path / "ids.npy"
    np.save(path, np.arange(17).astype(dtype))
    store = open_tokens(path, "uint16", 64, None)
    assert isinstance(store.ids, OnDisk)
    assert Rows(store, 16)[0]["targets"].tolist() == list(range(1, 17))


@pytest.mark.parametrize("size", [0, 1, 33])
def test_a_bin_file_of_a_wrong_size_is_refused(size, tmp_path):
    path = tmp_path / "ids.bin"
    path.write_bytes(bytes(size))
    with pytest.raises(ValueError, match=rf"{path}: {size} bytes are no whole number of uint16 ids"):
        open_tokens(path, "uint16", 64, None)


@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_a_file_that_becomes_shorter_is_an_error_and_not_the_end_of_the_process(suffix, tmp_path):
    path = tmp_path / f"ids{suffix}"
    ids = np.arange(3000, dtype="<u2")
    np.save(path, ids) if suffix == ".npy" else ids.tofile(path)
    store = open_tokens(path, "uint16", 3000, None)
    again = pickle.loads(pickle.dumps(store))
    os.truncate(path, path.stat().st_size - 4000)
    for found in (store, again, dataclasses.replace(store, ids=store.ids.part(500, 2500))):
        assert found.window(0, 400).tolist() == found.ids[0:400].tolist()
        with pytest.raises(DataError, match=rf"^{path}: has become shorter: \d+ bytes, not \d+$"):
            found.window(len(found) - 10, len(found))


class WritesWhenUnpickled:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def objects(path, marker):
    np.save(path, np.array([WritesWhenUnpickled(marker)] * 3, object), allow_pickle=True)


def bare_pickle(path, marker):
    path.write_bytes(pickle.dumps(WritesWhenUnpickled(marker)))


@pytest.mark.parametrize("write", [objects, bare_pickle])
def test_no_pickle_is_loaded(write, tmp_path):
    path, marker = tmp_path / "ids.npy", tmp_path / "unpickled"
    write(path, marker)
    with pytest.raises(ValueError, match=str(path)):
        open_tokens(path, "uint16", 64, None)
    assert not marker.exists()
    with pytest.raises(Exception):  # noqa: B017 - the files do what they should not when unpickled
        np.load(path, allow_pickle=True).sum()
    assert marker.exists()


NPY = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("1 2 3 4 5 6 7 8 9"),
    "archive": lambda path: np.savez(path.with_suffix(".npz"), np.arange(9)) or path.with_suffix(".npz").rename(path),
    "floats": lambda path: np.save(path, np.arange(9.0)),
    "table": lambda path: np.save(path, np.zeros((3, 3), np.int32)),
    "records": lambda path: np.save(path, np.zeros(9, "u2,u2")),
    "torn": lambda path: np.save(path, np.arange(9)) or os.truncate(path, 150),
    "header only": lambda path: np.save(path, np.arange(9)) or os.truncate(path, 60),
}


@pytest.mark.parametrize("write", NPY.values(), ids=NPY)
def test_an_npy_file_of_something_else_is_refused_by_name(write, tmp_path):
    path = tmp_path / "ids.npy"
    write(path)
    with pytest.raises(ValueError, match=str(path)):
        open_tokens(path, "uint16", 64, None)


# ---- more than 2^31 tokens

TOKENS = 3_000_000_000
PATTERN = (np.arange(1000) % 60 + 1).astype(np.uint8)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A sparse file: zeros, and a pattern in the last 1000 bytes."""
    path = tmp_path_factory.mktemp("large") / "ids.bin"
    with open(path, "wb") as f:
        f.truncate(TOKENS)
        f.seek(TOKENS - len(PATTERN))
        f.write(PATTERN.tobytes())
    yield path
    path.unlink()


def id_at(t):
    return np.where(t < TOKENS - 1000, 0, (t - (TOKENS - 1000)) % 60 + 1)


@pytest.mark.parametrize("seq_len", [1, 7, 16, 1000, 4096])
def test_counts_and_rows_beyond_2_31_are_exact(large, seq_len):
    store = open_tokens(large, "uint8", 64, None)
    assert len(store) == TOKENS
    rows, padded = Rows(store, seq_len), Rows(store, seq_len, tail=True)
    assert len(rows) == (TOKENS - 1) // seq_len
    assert len(padded) == -(-(TOKENS - 1) // seq_len)
    near = (TOKENS - 1000) // seq_len
    for i in {0, 2**31 // seq_len, *range(near - 1, min(near + 2, len(rows))), len(rows) - 2, len(rows) - 1}:
        t = i * seq_len + np.arange(seq_len, dtype=np.int64)
        np.testing.assert_array_equal(rows[i]["inputs"], id_at(t))
        np.testing.assert_array_equal(rows[i]["targets"], id_at(t + 1))
    last = padded[len(padded) - 1]
    assert last["targets"][last["weights"] > 0][-1] == PATTERN[-1]


def test_documents_beyond_2_31_begin_where_they_should(large):
    store = open_tokens(large, "uint8", 64, None)
    start = TOKENS - 17
    offsets = np.array([0, 5, start, start + 4, start + 9, TOKENS], np.int64)
    by_offsets = Rows(dataclasses.replace(store, offsets=offsets), 16, isolate=True)
    i = start // 16
    t = i * 16 + np.arange(17, dtype=np.int64)
    documents = np.searchsorted(offsets, t, side="right")
    np.testing.assert_array_equal(by_offsets[i]["weights"], documents[1:] == documents[:-1])
    np.testing.assert_array_equal(by_offsets[i]["segments"], documents[:-1] - documents[0] + 1)


def test_ids_that_are_halves_of_wider_ones_are_refused(tmp_path):
    ids = np.arange(5, 60)
    ids.astype("<u4").tofile(tmp_path / "x.bin")
    with pytest.raises(
        ValueError, match=r"x\.bin: every second id is 0: .* wider ids than uint16 \(data\.token_dtype\)"
    ):
        open_tokens(tmp_path / "x.bin", "uint16", 100, None)
    assert open_tokens(tmp_path / "x.bin", "uint32", 100, None).ids[:].tolist() == ids.tolist()
    np.zeros(64, "<u2").tofile(tmp_path / "zeros.bin")
    open_tokens(tmp_path / "zeros.bin", "uint16", 100, None)
