"""Rows whose reading can be watched, or made to fail, on the way that production goes."""

from collections.abc import Callable
from typing import Any

import grain

from minitf.data.pipeline import Looked


class Watched(Looked):
    """Rows as the parent finds them; watch(index) is called before one is read."""

    def __init__(self, parent: grain.MapDataset, watch: Callable[[int], None]):
        super().__init__(None, parent)
        self._watch = watch

    def find(self, index: int) -> tuple[Any, int]:
        self._watch(index)
        return self._parent.find(index)
