import itertools

import numpy as np
import pytest

from minitf.data import pipeline
from minitf.data.datasets import DataConfig
from minitf.data.mixture import PERIOD, Mixture, Phase, counted, order, shares, with_weights
from minitf.data.pipeline import mixed_rows
from minitf.data.store import Store

WEIGHTS = [
    (1.0,),
    (0.7, 0.3),
    (1.0, 1.0, 1.0),
    (90.0, 4.0, 3.0, 2.0, 1.0),
    tuple(np.random.default_rng(0).random(20) + 0.01),
]


def stores(*rows, seq_len=4):
    """Stores of so many rows, whose ids say the store (thousands) and the row."""
    return [
        Store(
            f"store {s}", (1000 * s + np.minimum(np.arange(n * seq_len + 1) // seq_len, n - 1)).astype(np.uint16), 2**16
        )
        for s, n in enumerate(rows)
    ]


def drawn(dataset, start, stop):
    """(store, row) at these places."""
    return [divmod(int(dataset[i]["inputs"][0]), 1000) for i in range(start, stop)]


@pytest.mark.parametrize("weights", WEIGHTS, ids=len)
def test_any_window_of_1000_rows_is_within_2_of_the_proportion(weights):
    chosen, _, _ = order(weights)
    twice = np.concatenate([chosen, chosen])  # across the border of two periods, too
    for d, weight in enumerate(weights):
        n = np.concatenate([[0], np.cumsum(twice == d)])
        ahead = n - np.arange(len(n)) * weight / sum(weights)
        for window in (1, 10, 999, 1000):
            assert np.abs(ahead[window:] - ahead[:-window]).max() < 2


@pytest.mark.parametrize("weights", WEIGHTS, ids=len)
def test_rows_are_counted_without_walking(weights):
    chosen, before, counts = order(weights)
    assert counts.sum() == PERIOD
    seen = [0] * len(weights)
    for t, d in enumerate(chosen[:500].tolist()):
        assert counted(weights, t).tolist() == seen
        assert before[t] == seen[d]
        seen[d] += 1
    for periods in (1, 3):
        np.testing.assert_array_equal(counted(weights, periods * PERIOD + 500), periods * counts + seen)


def test_each_store_has_its_own_epochs():
    sizes = (7, 30)
    rows = mixed_rows(stores(*sizes), [Phase(0, (0.5, 0.5), (0, 0))], 4, DataConfig(), seed=1)
    found = drawn(rows, 0, 240)
    for s, n in enumerate(sizes):
        mine = [row for store, row in found if store == s]
        assert len(mine) == 120
        epochs = [mine[i : i + n] for i in range(0, len(mine) - n + 1, n)]
        assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
        assert len(set(map(tuple, epochs))) == len(epochs)  # each in another order


def test_a_mixture_of_one_is_the_store_itself():
    (store,) = stores(20)
    alone = pipeline.training_rows(store, 4, DataConfig(), 3)
    mixed = Mixture([alone], [Phase(0, (2.0,), (0,))])
    assert drawn(alone, 0, 50) == drawn(mixed, 0, 50)


def test_new_weights_hold_from_their_row_on_and_no_row_is_left_out_or_repeated():
    sizes, weights = (50, 60, 70), [(0.6, 0.3, 0.1), (0.1, 0.1, 0.8), (1.0, 2.0, 1.0)]
    phases: list[Phase] = []
    for row, w in zip((0, 96, 160), weights, strict=True):
        phases = with_weights(phases, w, row)
    assert [p.row for p in phases] == [0, 96, 160]
    rows = mixed_rows(stores(*sizes), phases, 4, DataConfig(), seed=1)
    found = drawn(rows, 0, 400)
    assert found[:96] == drawn(mixed_rows(stores(*sizes), phases[:1], 4, DataConfig(), seed=1), 0, 96)
    for (a, b), w in zip(((0, 96), (96, 160), (160, 400)), weights, strict=True):
        for s in range(3):
            taken = sum(store == s for store, _ in found[a:b])
            assert abs(taken - (b - a) * w[s] / sum(w)) < 2
    # Each store's rows come in the order of that store alone, whatever stands between them.
    for s, store in enumerate(stores(*sizes)):
        mine = [pair for pair in found if pair[0] == s]
        assert mine == drawn(pipeline.training_rows(store, 4, DataConfig(), 1), 0, len(mine))
    assert [sum(p.taken) for p in phases] == [0, 96, 160]


def test_the_same_weights_are_no_new_phase_and_a_phase_that_never_began_is_replaced():
    phases = with_weights([], (1.0, 1.0), 0)
    assert with_weights(phases, (1.0, 1.0), 64) == phases
    later = with_weights(phases, (1.0, 3.0), 64)
    assert with_weights(later, (3.0, 1.0), 64) == [phases[0], Phase(64, (3.0, 1.0), (32, 32))]
    with pytest.raises(ValueError, match=r"data.mixture: weight 1e-06 is below 1/65536 of their sum"):
        shares((1.0, 1e-6))


def test_shares_are_the_nearest_whole_parts():
    for weights in WEIGHTS:
        exact = np.array(weights) / sum(weights) * PERIOD
        assert np.abs(shares(weights) - exact).max() < 1
    assert shares((1.0, 3.0)).tolist() == [PERIOD // 4, 3 * PERIOD // 4]


def test_a_mixture_is_reached_by_index_from_any_place():
    rows = mixed_rows(stores(11, 13), [Phase(0, (0.4, 0.6), (0, 0))], 4, DataConfig(), seed=5)
    assert drawn(rows[37:], 0, 20) == drawn(rows, 37, 57)
    far = 3 * PERIOD + 5
    assert len(list(itertools.islice(iter(rows[far:]), 3))) == 3


def test_beyond_a_period_each_store_goes_on_where_it_was():
    weights = (0.4, 0.6)
    rows = mixed_rows(stores(11, 13), [Phase(8, weights, (3, 5))], 4, DataConfig(), seed=5)
    alone = [pipeline.training_rows(s, 4, DataConfig(), 5) for s in stores(11, 13)]
    chosen, _, _ = order(weights)
    for n in (0, 7, PERIOD - 1, PERIOD, PERIOD + 9, 3 * PERIOD + 5):
        d = int(chosen[n % PERIOD])
        place = (3, 5)[d] + int(counted(weights, n)[d])
        assert drawn(rows, 8 + n, 9 + n) == drawn(alone[d], place, place + 1)
