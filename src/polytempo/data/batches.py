"""`Batches`: any batch of any epoch, by its number, for workers that get batches one by one."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from polytempo.data.mover import BatchMover
from polytempo.data.plan import Deals, Pick, dealt, num_batches, permutation
from polytempo.data.source import read_source, samples_at, tensors_of
from polytempo.data.streams.place_reader import PlaceReader
from polytempo.data.streams.sharded_data import ShardedData


class Samples(NamedTuple):
    """Some samples, one behind the other, and how a batch is made of any of them."""

    held: list[Any]
    """The samples; or tensors that hold one in each row, where there is nothing to collate."""
    collate: Callable[[list[Any]], Any] | None
    mover: BatchMover = BatchMover(None)

    def collated(self, begin: int = 0, end: int | None = None) -> Any:
        """A batch of the samples `begin … end-1`."""
        if self.collate is None:
            return self.mover.moved([tensor[begin:end] for tensor in self.held])
        return self.mover.moved(self.collate(self.held[begin:end]))


@final
class Batches:
    """The batches of a data set that is dealt to `size` workers in `batch_size`s; see `data.plan.dealt`.

    The order of an epoch is a permutation drawn from (seed, epoch), as in `DataShard`; windows of `ShardedData` have
    whole batches here. Batches are read when they are asked for, in this process. Raises ValueError for a
    stream: its samples have no numbers.
    """

    def __init__(
        self,
        source: Dataset[Any] | DataLoader[Any],
        *,
        size: int,
        batch_size: int | None = None,
        seed: int = 0,
        deals: Deals = "freely",
        shuffle: bool | None = None,
    ) -> None:
        """`batch_size` is per worker; it and `shuffle` (None: True for a data set) override a loader's."""
        self._source = read_source(source, batch_size, shuffle)
        dataset = self._source.dataset
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ValueError("a parameter server deals batches by number, so a job's data need a length and an order")
        self._tensors = tensors_of(self._source)
        self._mover = BatchMover(None)
        self.size, self.seed, self.deals = size, seed, deals
        self.batch_size, self.num_samples = self._source.batch_size, len(dataset)
        self._reader: PlaceReader | None = None
        self.run = 1
        """Batches in a row that one worker reads without reading anything twice."""
        if isinstance(dataset, ShardedData):  # windows of whole batches
            self.run = max(1, dataset.reading.window // self.batch_size)
            self._reader = PlaceReader(dataset, seed, self.run * self.batch_size if self._source.shuffle else 0)

    def on(self, device: torch.device | None) -> Batches:
        """The same batches, moved to `device`."""
        other = copy(self)
        other._mover = BatchMover(device)
        return other

    def __len__(self) -> int:
        """Batches of an epoch."""
        return num_batches(self.num_samples, self.size, self.batch_size, self.deals)

    def pick(self, batch: int) -> Pick:
        """The position of batch `batch` in its epoch's order."""
        return dealt(self.num_samples, self.size, self.batch_size, self.deals, batch)

    def samples_before(self, number: int) -> int:
        """The number of samples in the run's first `number` batches, epoch after epoch."""
        epochs, rest = divmod(number, len(self))
        return epochs * self.num_samples + (self.pick(rest - 1).stop if rest else 0)

    def at(self, epoch: int, batch: int) -> Any:
        """Batch number `batch` of `epoch`, collated."""
        return self.samples(epoch, batch).collated()

    def samples(self, epoch: int, batch: int) -> Samples:
        """The samples of batch number `batch` of `epoch`, read, but not made a batch of yet."""
        place = self.pick(batch)
        loader = self._source.loader
        collate = default_collate if loader is None else loader.collate_fn
        if self._reader is not None:
            return Samples(self._reader.samples(epoch, place.start, place.stop), collate, self._mover)
        indices = self._order(epoch)[place.start : place.stop]
        if self._tensors is not None:
            tensors, rows = self._tensors
            chosen = (indices if rows is None else rows[indices]).to(tensors[0].device)
            return Samples([tensor.index_select(0, chosen) for tensor in tensors], None, self._mover)
        return Samples(samples_at(self._source.dataset, indices.tolist()), collate, self._mover)

    def _order(self, epoch: int) -> Tensor:
        if not self._source.shuffle:
            return torch.arange(self.num_samples)
        return permutation(self.num_samples, self.seed, epoch)
