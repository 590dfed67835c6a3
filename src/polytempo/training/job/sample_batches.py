"""`SampleBatches`: a data set with a length, read batch by batch in its own order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from polytempo.data.source import samples_at

_BATCH = 512


class SampleBatches:
    """The samples of `data`, as batches that `collate` makes (None: a loader's own function, or torch's).

    Raises ValueError for data without a length; `what` names them there.
    """

    def __init__(self, data: Any, collate: Callable[[list[Any]], Any] | None, what: str) -> None:
        self._collate: Any = collate or default_collate
        if isinstance(data, DataLoader):
            self._collate = collate or data.collate_fn
            data = data.dataset
        if not hasattr(data, "__len__"):
            raise ValueError(f"{what} needs a length, and {type(data).__name__} has none; make it a map-style one")
        self._data: Dataset[Any] = data
        self.length = len(data)

    def between(self, start: int, stop: int, batch: int = _BATCH) -> Iterator[tuple[Any, int]]:
        """The samples from `start` to `stop`: each batch, and how many it has."""
        for first in range(start, stop, batch):
            last = min(first + batch, stop)
            if isinstance(self._data, TensorDataset) and self._collate is default_collate:
                yield [tensor[first:last] for tensor in self._data.tensors], last - first
            else:
                yield self.taken(range(first, last)), last - first

    def taken(self, numbers: Any) -> Any:
        """The samples of these numbers as one batch."""
        return self._collate(samples_at(self._data, numbers))
