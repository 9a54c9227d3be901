"""From documents to rows to global batches: the rows of a batch are a function of (seed, batch number) alone."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain
import jax

from minitf.data import frame as frames
from minitf.data.datasets import Corpus, DataConfig
from minitf.data.frame import Frame
from minitf.data.loader import Loader
from minitf.data.mixture import Mixture, Phase
from minitf.data.packing import PACKINGS
from minitf.data.store import Row, Store, blank


def rows_of(store: Store, seq_len: int, cfg: DataConfig, tail: bool = False) -> Any:
    """The store's rows, packed by cfg.packing: dicts as in `store.filled_row`. `tail`: every token once, the last row padded."""
    return PACKINGS[cfg.packing].rows(store, seq_len, cfg.isolate_documents, tail)


def has_segments(cfg: DataConfig) -> bool:
    """Whether rows have segments: documents of a row that do not see each other."""
    return cfg.isolate_documents or cfg.packing == "best_fit"


def frame_of_data(corpora: Sequence[Corpus], cfg: DataConfig) -> Frame:
    """The frame of texts that a model trains on with these corpora and this packing."""
    frame = frames.joined({c.name: c.frame for c in corpora})
    return frames.in_rows(frame, follow=cfg.packing == "concat" and not cfg.isolate_documents)


# ---- rows to batches


def training_rows(store: Store, seq_len: int, cfg: DataConfig, seed: int) -> grain.MapDataset:
    """An endless dataset of rows; each epoch has every row once, reshuffled if cfg.shuffle."""
    rows = rows_of(store, seq_len, cfg)
    order = grain.MapDataset.range(len(rows)).seed(seed if cfg.seed is None else cfg.seed)
    return Looked(rows, (order.shuffle() if cfg.shuffle else order).repeat(None))


PADDING = -1  # as the index of a row: a blank row


class Looked(grain.MapDataset):
    """The rows at the indices in the parent dataset. A `map` would do, but Grain's statistics cost more than reading a row."""

    def __init__(self, rows: Any, order: grain.MapDataset):
        super().__init__(order)
        self.rows = rows

    def __len__(self) -> int:
        return len(self._parent)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        rows, place = self.find(index)
        return blank(rows.fields, rows.seq_len) if place == PADDING else rows[place]

    def find(self, index: int) -> tuple[Any, int]:
        """(rows, index in them or PADDING) of an element."""
        return self.rows, self._parent[index]


def mixed_rows(stores: list[Store], phases: list[Phase], seq_len: int, cfg: DataConfig, seed: int) -> grain.MapDataset:
    """An endless dataset of the rows of one store, or of several mixed by the weights of the phases, each with its own epochs."""
    each = [training_rows(store, seq_len, cfg, seed) for store in stores]
    return each[0] if len(each) == 1 else Mixture(each, phases)


def evaluation_rows(
    store: Store, seq_len: int, cfg: DataConfig, batch_size: int, batches: int | None
) -> grain.MapDataset:
    """At most batches x batch_size rows (None: all), evenly spaced in the store, padded with rows of weight 0 to whole batches."""
    return spread_rows(rows_of(store, seq_len, cfg, tail=True), batch_size, batches)


CHECKED, CHUNK = 2**28, 2**22  # tokens: the largest split that is checked whole, and those checked at a time


def check_ids(store: Store, seq_len: int, cfg: DataConfig, batch_size: int, batches: int | None) -> None:
    """Raises DataError if a validation split has an id outside the model's vocabulary. Of a split above CHECKED tokens, only the rows
    that evaluations of this many batches read are checked."""
    if batches is None or len(store) <= CHECKED:
        for start in range(0, len(store), CHUNK):
            store.window(start, min(start + CHUNK, len(store)))
    else:
        rows = evaluation_rows(store, seq_len, cfg, batch_size, batches)
        for i in range(len(rows)):
            rows[i]


def spread_rows(rows: Any, batch_size: int, batches: int | None) -> grain.MapDataset:
    n = len(rows) if batches is None else min(len(rows), batches * batch_size)
    padded = -(-n // batch_size) * batch_size
    return Looked(rows, grain.MapDataset.range(padded).map(lambda i: i * len(rows) // n if i < n else PADDING))


class HostBatches(grain.MapDataset):
    """This process's rows of every global batch: row r of batch k is row k * batch_size + r of the parent, in any process."""

    def __init__(self, parent: grain.MapDataset, batch_size: int, rows: list[int]):
        super().__init__(parent)
        self._batch_size, self._rows = batch_size, rows

    def __len__(self) -> int:
        return len(self._parent) // self._batch_size

    def __getitem__(self, k: Any) -> Any:
        if isinstance(k, slice):
            return self.slice(k)
        # Rows are written in place: reading them separately and stacking them takes twice the time.
        found = [self._parent.find(k * self._batch_size + r) for r in self._rows]
        batch = blank(found[0][0].fields, len(found), found[0][0].seq_len)
        for r, (rows, i) in enumerate(found):
            if i != PADDING:
                rows.fill(i, {name: values[r] for name, values in batch.items()})
        return batch


def host_rows(sharding: jax.sharding.Sharding, batch_size: int) -> list[int]:
    """Indices of the rows of a global batch that this process's devices hold."""
    slices = [index[0] for index in sharding.addressable_devices_indices_map((batch_size,)).values()]
    return sorted({r for s in slices for r in range(*s.indices(batch_size))})


def batches(
    rows: grain.MapDataset,
    batch_size: int,
    sharding: jax.sharding.Sharding,
    cfg: DataConfig,
    start: int = 0,
    until: Callable[[], bool] = lambda: False,
) -> Iterator[dict[str, jax.Array]]:
    """Global batches from number `start` on, as arrays [batch_size, ...] with this sharding, prefetched to the devices on threads.
    Ends early if `until` returns True while a batch is awaited."""

    def put(batch: Row) -> dict[str, jax.Array]:
        if sharding.is_fully_addressable:
            return jax.device_put(batch, sharding)
        return {
            k: jax.make_array_from_process_local_data(sharding, v, (batch_size, *v.shape[1:])) for k, v in batch.items()
        }

    mine = HostBatches(rows, batch_size, host_rows(sharding, batch_size))[start:]
    read = dict(threads=cfg.threads, prefetch=cfg.prefetch, workers=cfg.workers, timeout=cfg.timeout)
    with contextlib.closing(Loader(mine, put, **read, until=until)) as loader:
        yield from loader
