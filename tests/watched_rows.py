"""A dataset whose reading can be watched, or made to fail, on the way that production goes."""

from collections.abc import Callable
from typing import Any

import grain


class Watched(grain.MapDataset):
    """A dataset of rows; watch(index) is called before one is read."""

    def __init__(self, parent: grain.MapDataset, watch: Callable[[int], None]):
        super().__init__(parent)
        self._watch = watch

    def __len__(self) -> int:
        return len(self._parent)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        self._watch(index)
        return self._parent[index]

    def find(self, index: int) -> tuple[Any, int]:
        self._watch(index)
        return self._parent.find(index)
