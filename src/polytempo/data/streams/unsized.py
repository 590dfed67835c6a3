"""Batches of a stream without a length: every rank reads all of it and keeps its part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, default_collate

from polytempo.data.plan import Pick, check_enough, cut, micro_batches, pick
from polytempo.data.source import Source, worker_settings


def groups(samples: Iterator[Any], size: int, batch_size: int) -> Iterator[list[Any]]:
    """A stream's samples in global batches of `plan`'s sizes. Reads one group ahead."""
    held = list(islice(samples, size * batch_size))
    while held:
        following = list(islice(samples, size * batch_size))
        if len(following) < size:
            yield held + following
            return
        yield held
        held = following


def from_stream(source: Source, consumed: int, size: int, rank: int, cuts: int = 1) -> Iterator[tuple[Pick, Any]]:
    """One rank's batches of a stream that every rank reads in full, after `consumed` samples, each in at most `cuts`
    micro-batches."""
    collate = default_collate if source.loader is None else source.loader.collate_fn
    samples = islice(iter(_samples(source)), consumed, None)
    start = consumed
    for group in groups(samples, size, source.batch_size):
        if start == 0:
            check_enough(len(group), size)
        for step in cut(pick(start, len(group), size, rank), micro_batches(cuts, len(group), size)):
            yield step, collate(group[step.start - start : step.stop - start])
        start += len(group)
    if start == 0:
        check_enough(0, size)


def _samples(source: Source) -> Iterable[Any]:
    """The samples of a stream one by one, through the loader's worker processes where it has some."""
    if source.loader is None:
        return source.dataset  # type: ignore[return-value]  # an IterableDataset
    return DataLoader(source.dataset, batch_size=None, collate_fn=_as_it_is, **worker_settings(source.loader))


def _as_it_is(sample: Any) -> Any:
    return sample
