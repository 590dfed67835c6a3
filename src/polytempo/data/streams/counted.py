"""`counted`: streams without a length as data in shards, each read once to count its samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, final

from torch.utils.data import IterableDataset

from polytempo.data.streams.sharded_data import ShardedData


def counted(
    source: Any, counts: Sequence[int] | None = None, *, shards: int | None = None, name: str = "stream"
) -> ShardedData:
    """Data in shards of a stream: a list of iterables, one iterable, or an object with `num_shards` and
    `shard(num_shards=, index=)`, such as a streaming data set of Hugging Face.

        source = pt.data.counted([lines("a.txt"), lines("b.txt")])
        source = pt.data.counted(streaming, counts=[1000, 800])     # known: nothing is read before the training

    Each `iter()` must begin at the first sample and yield the same samples in the same order; iterators are refused.
    Cost: without `counts` every process reads all of the source once, here; `list(source.counts)` is the value to keep.
    A worker reads a shard from its beginning up to the samples that it needs, so workers share a shard at the price of
    reading it twice: have at least as many shards as workers. `shards`: the pieces to ask `shard` for, at most
    `num_shards`, which is the default. `name`: a part of the names in a saved position.

    Raises ValueError for an iterator, for counts of another number of shards, and for a source that has no samples.
    """
    pieces = _pieces(source, shards)
    for piece in pieces:
        if isinstance(piece, Iterator):
            raise ValueError(
                f"a {type(piece).__name__} can be read only once, and an epoch reads its shards again; give a list or "
                "an IterableDataset, which begin at their first sample"
            )
    found = [sum(1 for _ in piece) for piece in pieces] if counts is None else [*counts]
    if len(found) != len(pieces):
        raise ValueError(f"{len(found)} counts were given for {len(pieces)} shards; give one for each")
    if not sum(found):
        raise ValueError(f"the source has no samples in its {len(pieces)} shards")
    return CountedStream(pieces, found, name)


def _pieces(source: Any, shards: int | None) -> list[Iterable[Any]]:
    most = getattr(source, "num_shards", None)
    if isinstance(most, int) and hasattr(source, "shard"):
        number = min(most, most if shards is None else shards)
        return [source.shard(num_shards=number, index=index) for index in range(number)]
    alone = isinstance(source, IterableDataset) or not isinstance(source, Sequence)
    return [source] if alone else list(source)


@final
class CountedStream(ShardedData):
    """See `counted`."""

    def __init__(self, pieces: Sequence[Iterable[Any]], counts: Sequence[int], name: str) -> None:
        self._pieces, self.counts = list(pieces), counts
        self.names = [f"{name}-{number}" for number in range(len(self._pieces))]

    @property
    def blocks(self) -> float:
        """The number of shards; each is read from its beginning."""
        return len(self.counts)

    def read(self, shard: int, runs: Sequence[range]) -> Iterator[Any]:
        """The samples of the runs; all before them are read and left out."""
        samples, at = iter(self._pieces[shard]), 0
        for run in runs:
            yield from islice(samples, run.start - at, run.stop - at)
            at = run.stop
