"""Mixes several endless datasets in proportion to weights: row i of the mixture is a function of i."""

import bisect
import functools
import math
from typing import Any, NamedTuple

import grain
import numpy as np

PERIOD = 2**16  # rows after which the order of datasets repeats; weights are rounded to multiples of 1/PERIOD


class Phase(NamedTuple):
    """Weights that apply from row number `row` on; `taken`: rows of each dataset before it."""

    row: int
    weights: tuple[float, ...]
    taken: tuple[int, ...]


def shares(weights: tuple[float, ...]) -> np.ndarray:
    """Weights as integers that sum to PERIOD, by largest remainders. Raises ValueError if one rounds to 0."""
    exact = np.array(weights) / math.fsum(weights) * PERIOD
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: PERIOD - counts.sum()]] += 1
    if counts.min() == 0:
        raise ValueError(f"data.mixture: weight {weights[int(counts.argmin())]} is below 1/{PERIOD} of their sum")
    return counts


def check_mixture(name: str, mixture: tuple[tuple[str, float], ...]) -> None:
    """Raises ValueError if a weight is too small for PERIOD or a store is named twice."""
    shares(tuple(weight for _, weight in mixture))
    if len({path for path, _ in mixture}) < len(mixture):
        raise ValueError(f"{name}={mixture}: names a store twice")


@functools.cache
def order(weights: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dataset of each row [PERIOD], number of earlier rows of that dataset [PERIOD], rows of each dataset per period).

    Among the first n rows, each dataset's count differs from n times its share by less than 1, so in any window by less than 2:
    Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980). Each row goes, among the datasets that would not
    run ahead of their share, to the one that would fall behind first."""
    counts = shares(weights)
    n = len(counts)
    slack = 1 / (2 * n - 2) if n > 1 else 0.0
    share = (counts / PERIOD).tolist()
    chosen, before, seen = np.zeros(PERIOD, np.int64), np.zeros(PERIOD, np.int64), [0] * n
    for t in range(PERIOD):
        may = [d for d in range(n) if share[d] * (t + 1) - seen[d] >= slack]
        d = min(may, key=lambda d: (1 - slack + seen[d]) / share[d])
        chosen[t], before[t] = d, seen[d]
        seen[d] += 1
    assert seen == counts.tolist()
    return chosen, before, counts


def counted(weights: tuple[float, ...], rows: int) -> np.ndarray:
    """Number of rows of each dataset among the first `rows`."""
    chosen, _, counts = order(weights)
    periods, rest = divmod(rows, PERIOD)
    return periods * counts + np.bincount(chosen[:rest], minlength=len(counts))


def with_weights(phases: list[Phase], weights: tuple[float, ...], row: int) -> list[Phase]:
    """The phases, plus one from `row` on if these weights differ from the last phase's."""
    if not phases:
        return [Phase(row, weights, (0,) * len(weights))]
    last = phases[-1]
    if last.weights == weights:
        return phases
    taken = np.array(last.taken) + counted(last.weights, row - last.row)
    # A phase that begins at or after this row never applied: it is replaced.
    return [*(p for p in phases if p.row < row), Phase(row, weights, tuple(taken.tolist()))]


class Mixture(grain.MapDataset):
    """The rows of a mixture whose weights may change between phases."""

    def __init__(self, datasets: list[grain.MapDataset], phases: list[Phase]):
        super().__init__(datasets)
        self._phases, self._rows = phases, [p.row for p in phases]

    def __len__(self) -> int:
        return len(self._parents[0])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        dataset, place = self._at(index)
        return dataset[place]

    def find(self, index: int) -> tuple[Any, int]:
        """(rows, index in them or PADDING) of an element, from its dataset's `find`."""
        dataset, place = self._at(index)
        return dataset.find(place)

    def _at(self, index: int) -> tuple[Any, int]:
        phase = self._phases[bisect.bisect_right(self._rows, index) - 1]
        chosen, before, counts = order(phase.weights)
        period, at = divmod(index - phase.row, PERIOD)
        d = chosen[at]
        return self._parents[d], int(phase.taken[d] + period * counts[d] + before[at])
