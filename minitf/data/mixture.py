"""Several endless datasets as one, in the proportion of their weights: which row of which dataset stands at a place is a function
of the place."""

import bisect
import functools
import math
from typing import Any, NamedTuple

import grain
import numpy as np

PERIOD = 2**16  # rows after which the order of the datasets repeats; weights are counted in parts of it


class Phase(NamedTuple):
    """From `row` on the datasets are mixed by these weights; so many rows of each stand before."""

    row: int
    weights: tuple[float, ...]
    taken: tuple[int, ...]


def shares(weights: tuple[float, ...]) -> np.ndarray:
    """Weights as whole numbers that add up to PERIOD, by the largest remainders. Raises ValueError where one is too small."""
    exact = np.array(weights) / math.fsum(weights) * PERIOD
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: PERIOD - counts.sum()]] += 1
    if counts.min() == 0:
        raise ValueError(f"data.mixture: weight {weights[int(counts.argmin())]} is below 1/{PERIOD} of their sum")
    return counts


def check_mixture(name: str, mixture: tuple[tuple[str, float], ...]) -> None:
    """Raises ValueError for a weight too small for PERIOD, and for a store that is named twice."""
    shares(tuple(weight for _, weight in mixture))
    if len({path for path, _ in mixture}) < len(mixture):
        raise ValueError(f"{name}={mixture}: names a store twice")


@functools.cache
def order(weights: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dataset [PERIOD], how many of its rows stand before [PERIOD], rows of each dataset in a period).

    Among the first n rows, each dataset's number differs from n times its share by less than 1, so in any window by less than 2:
    Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980). Of the datasets that may take a row without
    running ahead, the one takes it that would fall behind first."""
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
    """How many of the first rows belong to each dataset."""
    chosen, _, counts = order(weights)
    periods, rest = divmod(rows, PERIOD)
    return periods * counts + np.bincount(chosen[:rest], minlength=len(counts))


def with_weights(phases: list[Phase], weights: tuple[float, ...], row: int) -> list[Phase]:
    """The phases, with one more where the weights differ from the last one's from this row on."""
    if not phases:
        return [Phase(row, weights, (0,) * len(weights))]
    last = phases[-1]
    if last.weights == weights:
        return phases
    taken = np.array(last.taken) + counted(last.weights, row - last.row)
    # A phase that has not begun is replaced.
    return [*(p for p in phases if p.row < row), Phase(row, weights, tuple(taken.tolist()))]


class Mixture(grain.MapDataset):
    """Row i of the mixture."""

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
        """What its dataset finds for an element."""
        dataset, place = self._at(index)
        return dataset.find(place)

    def _at(self, index: int) -> tuple[Any, int]:
        phase = self._phases[bisect.bisect_right(self._rows, index) - 1]
        chosen, before, counts = order(phase.weights)
        period, at = divmod(index - phase.row, PERIOD)
        d = chosen[at]
        return self._parents[d], int(phase.taken[d] + period * counts[d] + before[at])
