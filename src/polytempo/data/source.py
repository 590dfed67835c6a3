"""A shard's data, and batches of it by index: from tensors in memory, or through a `DataLoader`.

`Gathered` takes rows of tensors out in the order of an epoch, many at a time for all ranks of a process:

order of the epoch   │ 17 3 88 41 … │ 5 60 12 … │        blocks of rows, each gathered when a rank first needs it
a rank's batch            ╰───╯                         a window into one
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from polytempo.core.calls.refusals import refuse
from polytempo.data.plan import Pick
from polytempo.data.streams.sharded_data import ShardedData
from polytempo.device import accelerator_kind


class Source(NamedTuple):
    """The argument of `pt.shard`: a data set, the loader around it where there is one, and two settings."""

    dataset: Dataset[Any]
    loader: DataLoader[Any] | None
    batch_size: int
    shuffle: bool


def read_source(given: Dataset[Any] | DataLoader[Any], batch_size: int | None, shuffle: bool | None) -> Source:
    """The settings of a data set or loader. `batch_size` and `shuffle` override the loader's, where given; so does the
    order of `ShardedData`, which is a part of the value."""
    refuse_several(given)
    dataset = given.dataset if isinstance(given, DataLoader) else given
    if shuffle is None and isinstance(dataset, ShardedData):
        shuffle = dataset.reading.shuffle
    if not isinstance(given, DataLoader):
        if batch_size is None:
            raise ValueError(
                "a data set needs a batch_size (samples per worker and step): shard(dataset, batch_size=32)"
            )
        streams = isinstance(given, IterableDataset)
        return _checked(Source(given, None, batch_size, (not streams) if shuffle is None else shuffle))
    if given.batch_sampler is not None and not _is(given.batch_sampler, BatchSampler):
        raise ValueError(_remedy("batch_sampler", given.batch_sampler))
    batch_size = given.batch_size if batch_size is None else batch_size
    if batch_size is None:
        raise ValueError("the DataLoader has batch_size=None; give it a batch size, or shard(loader, batch_size=32)")
    found = False if isinstance(given.dataset, IterableDataset) else _shuffles(given)
    return _checked(Source(given.dataset, given, batch_size, found if shuffle is None else shuffle))


def refuse_several(given: object) -> None:
    """PT2611 for a tuple, list or dict of data sets or loaders."""
    each = given.values() if isinstance(given, Mapping) else given if isinstance(given, list | tuple) else ()
    if each and all(isinstance(one, Dataset | DataLoader) for one in each):
        refuse({"data source", "several"}, kind=f"a {type(given).__name__}")


def _checked(source: Source) -> Source:
    if source.batch_size < 1:
        raise ValueError(f"batch_size is {source.batch_size}; it must be at least 1")
    if source.shuffle and isinstance(source.dataset, IterableDataset):
        raise ValueError("a stream (IterableDataset) cannot be shuffled here; shuffle inside it, or leave shuffle out")
    return source


def _shuffles(loader: DataLoader[Any]) -> bool:
    sampler: Any = loader.sampler
    if type(sampler) is SequentialSampler:
        return False
    if _is(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return True
    if type(sampler) is DistributedSampler:  # it only deals the data set to ranks, which is done here
        return sampler.shuffle
    raise ValueError(_remedy("sampler", sampler))


def _is(sampler: object, kind: type) -> bool:
    """True for torch's own class, and for the class of that name behind a `StatefulDataLoader` of torchdata."""
    made = type(sampler)
    return made is kind or (
        made.__module__ == "torchdata.stateful_dataloader.sampler" and made.__name__ == kind.__name__
    )


def sampler_epoch(source: Source) -> int | None:
    """The epoch that `set_epoch` of the loader's `DistributedSampler` named last; None where it has none."""
    sampler = None if source.loader is None else source.loader.sampler
    return sampler.epoch if type(sampler) is DistributedSampler else None


def _remedy(what: str, found: object) -> str:
    return (
        f"the DataLoader's {what} is a {type(found).__name__}, and its order cannot be dealt to workers; every sample "
        "must come once an epoch. Make the DataLoader with shuffle=True or shuffle=False instead, "
        "or give the data set itself: shard(loader.dataset, batch_size=...)"
    )


def tensors_of(source: Source) -> tuple[tuple[Tensor, ...], Tensor | None] | None:
    """The tensors of a `TensorDataset` (and the rows that a `Subset` has of it), where plain collating will do."""
    loader = source.loader
    if loader is not None and (loader.collate_fn is not default_collate or loader.pin_memory):
        return None
    dataset, rows = source.dataset, None
    while type(dataset) is Subset:
        outer = torch.as_tensor(dataset.indices)
        rows = outer if rows is None else outer[rows]
        dataset = dataset.dataset
    return (dataset.tensors, rows) if type(dataset) is TensorDataset else None


def samples_at(dataset: Dataset[Any], numbers: Sequence[int]) -> list[Any]:
    """The samples with these numbers, as a `DataLoader` takes them: together, where the data set has a way."""
    if hasattr(dataset, "__getitems__"):
        return list(dataset.__getitems__(numbers))
    return [dataset[number] for number in numbers]


def from_tensors(
    tensors: tuple[Tensor, ...],
    order: Tensor,
    steps: Iterable[Pick],
    gathered: Gathered | None = None,
    epoch: int = 0,
) -> Iterator[tuple[Pick, list[Tensor]]]:
    """Whole batches by index: one operation a tensor. `order` (num_samples,) holds rows of the tensors.

    `gathered`: the tensors that hold them, if given, in the order of `epoch`.
    """
    order = order.to(tensors[0].device)
    for step in steps:
        if gathered is not None and step.local_samples:  # a stand-in is another rank's sample
            yield step, gathered.batch(tensors, order, epoch, step.start, step.stop)
            continue
        rows = order[step.start : step.stop]
        yield step, [tensor.index_select(0, rows) for tensor in tensors]


class Chosen:
    """The batch sampler of our loader: yields the lists of indices, or other keys, in `batches`. Set these before
    iterating."""

    def __init__(self) -> None:
        self.batches: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def chosen_loader(
    source: Source, chosen: Chosen, generator: torch.Generator, at_most: int | None = None
) -> DataLoader[Any]:
    """A loader like the source's that reads the chosen batches in order; a plain one where there is none. It has
    `at_most` so many worker processes.

    It draws its workers' seeds from `generator`, unless the source's loader brings one: not from torch's own, which
    draws the samples' noise.
    """
    like = source.loader
    if like is None:
        return DataLoader(source.dataset, batch_sampler=chosen, generator=generator)
    settings = worker_settings(like)
    settings["generator"] = like.generator or generator
    settings["num_workers"] = like.num_workers if at_most is None else min(at_most, like.num_workers)
    return DataLoader(source.dataset, batch_sampler=chosen, collate_fn=like.collate_fn, **settings)


def worker_settings(like: DataLoader[Any]) -> dict[str, Any]:
    """A loader's settings of worker processes and memory, to make another like it. Only an accelerator pins memory."""
    return {
        "num_workers": like.num_workers,
        "pin_memory": like.pin_memory and accelerator_kind() is not None,
        "timeout": like.timeout,
        "worker_init_fn": like.worker_init_fn,
        "multiprocessing_context": like.multiprocessing_context,
        "generator": like.generator,
        "prefetch_factor": like.prefetch_factor,
        "persistent_workers": like.persistent_workers,
    }


_BLOCK_ROWS = 4096
_MOST_BLOCKS = 4


class _Key(NamedTuple):
    epoch: int
    number: int
    data: int
    """The identity of the data's first tensor, which a block keeps alive."""


class _Block(NamedTuple):
    source: Tensor
    rows: list[Tensor]


class Gathered:
    """It suits ranks that see the same data in the same order. Batches are windows: no two ranks have a sample in
    common.

    Memory: the last four blocks of 4,096 rows.
    """

    def __init__(self) -> None:
        self._blocks: OrderedDict[_Key, _Block] = OrderedDict()

    def batch(self, tensors: tuple[Tensor, ...], order: Tensor, epoch: int, start: int, stop: int) -> list[Tensor]:
        """Rows `order[start:stop]` of each of the `tensors`, with `order` (num_samples,) of `epoch`."""
        number, begin = divmod(start, _BLOCK_ROWS)
        if begin + stop - start > _BLOCK_ROWS:
            rows = order[start:stop]
            return [tensor.index_select(0, rows) for tensor in tensors]
        key = _Key(epoch, number, id(tensors[0]))
        block = self._blocks.get(key)
        if block is None:
            rows = order[number * _BLOCK_ROWS : (number + 1) * _BLOCK_ROWS]
            block = self._blocks[key] = _Block(tensors[0], [tensor.index_select(0, rows) for tensor in tensors])
            if len(self._blocks) > _MOST_BLOCKS:
                self._blocks.popitem(last=False)
        return [gathered[begin : begin + stop - start] for gathered in block.rows]
