import itertools

import numpy as np
import pytest

from minitf.data.datasets import DataConfig
from minitf.data.packing import PackedRows, best_fit, cut, documents, one_a_row
from minitf.data.pipeline import rows_of
from minitf.data.store import DataError, Store


def store_of(lengths, vocab_size=60000, mask=None):
    """Documents of these lengths; every token of the store has an id of its own."""
    ids = np.arange(sum(lengths), dtype=np.uint16)
    return Store("ids", ids, vocab_size, np.cumsum([0, *lengths]).astype(np.int64), mask=mask)


def random_lengths(seed, n=200, longest=40):
    return np.random.default_rng(seed).integers(0, longest, n).tolist()


def pairs_of(store):
    """All (token, next token) within documents."""
    bounds = store.offsets.tolist()
    return [(t, t + 1) for a, b in itertools.pairwise(bounds) for t in range(a, b - 1)]


def pairs_in(row):
    counted = row["weights"] > 0
    return list(zip(row["inputs"][counted].tolist(), row["targets"][counted].tolist(), strict=True))


@pytest.mark.parametrize("seq_len", [1, 2, 7, 16, 39, 64, 1000])
def test_best_fit_holds_each_pair_of_each_document_once(seq_len):
    for seed in range(4):
        store = store_of(random_lengths(seed))
        rows = rows_of(store, seq_len, DataConfig(packing="best_fit"))
        found = [pair for i in range(len(rows)) for pair in pairs_in(rows[i])]
        assert sorted(found) == pairs_of(store)


def test_best_fit_cuts_only_documents_longer_than_a_row():
    seq_len, lengths = 16, random_lengths(1, longest=60)
    store = store_of(lengths)
    plan = best_fit(documents(store), seq_len)
    pieces = dict.fromkeys(store.offsets.tolist(), 0)
    for start, n in plan.chunks.tolist():
        assert 1 <= n <= seq_len
        pieces[max(b for b in pieces if b <= start)] += 1
    for begin, length in zip(store.offsets.tolist(), lengths, strict=False):
        if length > 1:
            assert pieces[begin] == -(-(length - 1) // seq_len)


@pytest.mark.parametrize("seq_len", [16, 64])
def test_a_row_tells_its_chunks_apart_and_each_counts_its_positions_from_0(seq_len):
    store = store_of(random_lengths(2))
    rows = rows_of(store, seq_len, DataConfig(packing="best_fit"))
    several = 0
    for i in range(len(rows)):
        row, document = rows[i], None
        segments = row["segments"].tolist()
        for t, segment in enumerate(segments):
            if segment == 0:  # padding, at the end alone
                assert not any(segments[t:])
                assert not row["weights"][t:].any()
                break
            here = np.searchsorted(store.offsets, row["inputs"][t], side="right")
            if t == 0 or segment != segments[t - 1]:
                assert segment == (1 if t == 0 else segments[t - 1] + 1)
                assert row["positions"][t] == 0
                document = here
            else:
                assert row["positions"][t] == row["positions"][t - 1] + 1
            assert here == document
        several += max(segments) > 1
    assert several > 5


def test_best_fit_takes_the_fullest_row_that_has_room():
    # Pairs 9, 6, 4, 3: the 4 goes to the 6, the 3 cannot go to the 9 nor to them. Worst fit would give other rows.
    plan = best_fit(documents(store_of([10, 7, 5, 4])), 10)
    assert [sorted(plan.chunks[a:b, 1].tolist()) for a, b in itertools.pairwise(plan.begins.tolist())] == [
        [9],
        [4, 6],
        [3],
    ]


def test_best_fit_leaves_little_empty():
    lengths = np.random.default_rng(0).lognormal(5, 1, 3000).astype(int).tolist()
    store = store_of(lengths, vocab_size=2**16)
    for seq_len in (256, 1024):
        plan = best_fit(documents(store), seq_len)
        assert sum(max(n - 1, 0) for n in lengths) / (len(plan) * seq_len) > 0.99


def test_a_plan_is_the_same_each_time_and_its_rows_follow_the_store():
    store = store_of(random_lengths(3))
    a, b = (best_fit(documents(store), 32) for _ in range(2))
    np.testing.assert_array_equal(a.begins, b.begins)
    np.testing.assert_array_equal(a.chunks, b.chunks)
    first = a.chunks[a.begins[:-1], 0]
    assert (np.diff(first) > 0).all()


def test_one_document_a_row_holds_its_beginning():
    lengths = random_lengths(4)
    store = store_of(lengths)
    rows = rows_of(store, 16, DataConfig(packing="documents"))
    expected = [
        [(t, t + 1) for t in range(a, min(b - 1, a + 16))] for a, b in itertools.pairwise(store.offsets.tolist())
    ]
    assert [pairs_in(rows[i]) for i in range(len(rows))] == [pairs for pairs in expected if pairs]
    assert rows[0].keys() == {"inputs", "targets", "weights"}


@pytest.mark.parametrize("length", [1, 3, 100])
def test_cut_gives_whole_pieces_and_a_rest(length):
    spans = np.array([[5, 7], [20, 3], [30, 1], [40, 6]])
    expected = [(a + i, min(length, n - i)) for a, n in spans.tolist() for i in range(0, n, length)]
    assert list(map(tuple, cut(spans, length).tolist())) == expected


@pytest.mark.parametrize("packing", ["concat", "best_fit", "documents"])
def test_masked_tokens_are_no_targets_in_any_packing(packing):
    lengths = [9, 30, 4, 17, 12]
    mask = np.random.default_rng(0).integers(0, 2, sum(lengths)).astype(np.uint8)
    cfg = DataConfig(packing=packing)
    masked, plain = (rows_of(store_of(lengths, mask=m), 16, cfg) for m in (mask, None))
    assert len(masked) == len(plain)
    for i in range(len(plain)):
        a, b = masked[i], plain[i]
        np.testing.assert_array_equal(a["inputs"], b["inputs"])
        np.testing.assert_array_equal(a["weights"], b["weights"] * mask[b["targets"]])


@pytest.mark.parametrize("packing", ["best_fit", "documents"])
def test_packings_by_document_need_to_know_documents(packing):
    with pytest.raises(ValueError, match=f"ids: data.packing={packing} needs to know where documents end"):
        rows_of(Store("ids", np.arange(99), 100, eos=0), 16, DataConfig(packing=packing))
    with pytest.raises(ValueError, match="ids: no document has two tokens"):
        rows_of(store_of([1, 0, 1]), 16, DataConfig(packing=packing))


def test_a_stray_id_is_an_error_in_packed_rows():
    store = store_of([5, 5, 5], vocab_size=12)
    rows = PackedRows(store, one_a_row(documents(store), 8), 8, segments=False)
    rows[0], rows[1]
    with pytest.raises(DataError, match="ids: id 12 at token 12 is not below the vocabulary size 12"):
        rows[2]
    for i in (-1, 3):
        with pytest.raises(IndexError):
            rows[i]
