"""`ShardedData`: a data set in shards with known numbers of samples, read a stretch at a time."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, Self, final

from torch.utils.data import Dataset


class Reading(NamedTuple):
    """The order of reading, and the memory for it."""

    shuffle: bool | None = None
    """None: as the caller asks; without a wish, shuffled."""
    buffer: int = 10_000
    """Samples that one reader holds at most, and shuffles among each other."""
    interleave: int = 4
    """Stretches that one worker reads in turn, a batch from each; each has its part of the buffer."""

    @property
    def window(self) -> int:
        """Samples that are shuffled among each other."""
        return max(1, self.buffer // self.interleave)


class ShardedData(Dataset[Any], ABC):
    """A data set in shards: files, row groups, anything with a known number of samples that is read in order.

    Subclasses give `names` and `counts`, one for each shard, and `read`. All three stay the same for the whole run, on
    every rank. An object must be picklable for worker processes that are spawned.

    `pt.shard`, `pt.Data` and a `DataLoader` take it like a map-style data set of `len(shards)` samples, shard after
    shard. Where Polytempo deals it, workers read stretches of shards (`polytempo.data.streams.order`); elsewhere, as
    for a test set, samples are read by their numbers.

        class Lines(pt.data.ShardedData):
            names, counts = ["a.txt", "b.txt"], [1000, 800]

            def read(self, shard, runs):
                with open(self.names[shard]) as lines:
                    wanted = iter(runs)
                    …
    """

    names: Sequence[str]
    """A stable name of each shard, such as its URL."""
    counts: Sequence[int]
    """The number of samples in each shard."""
    reading: Reading = Reading()

    @abstractmethod
    def read(self, shard: int, runs: Sequence[range]) -> Iterator[Any]:
        """The samples of `shard` with the numbers in `runs`, in their order: ascending ranges without a step.

        One call reads all that a worker needs of a shard in one pass, and may be given up before its end. Read as few
        bytes beyond the wanted samples as the format allows. Yield samples in their raw form (bytes of an image, a
        row): a buffer holds them, and `decode` makes the final sample of each.
        """

    def of_epoch(self, epoch: int) -> Self:
        """The source that reads an epoch's samples: this one, unless it has more samples than an epoch."""
        return self

    def decode(self, raw: Any) -> Any:
        """Make the final sample. Called when it is handed out, so random transforms belong here."""
        return raw

    @property
    def identity(self) -> object:
        """Further plain data that tell this source from another one with equal names and counts."""
        return None

    @property
    def content_mark(self) -> str | None:
        """A text that changes with the samples, such as a hash of the files' times of change. Results of a pass over
        the source are kept under it; None: nothing tells a change, and nothing is kept."""
        return None

    @property
    def blocks(self) -> float | None:
        """Units of the data that are read from their beginning up to a sample, such as compressed files; `math.inf`
        where a reader begins anywhere and reads on. None: samples are read alone. It decides the note of a run that
        reads data twice."""
        return None

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of a hash of the names, the counts and `identity`; a saved position has them."""
        text = json.dumps([[*self.names], [*self.counts], self.identity], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def shuffled(self, *, buffer: int = 10_000, interleave: int = 4) -> Self:
        """The same data in an order that is drawn from (seed, epoch): shards, and samples of `buffer / interleave`
        neighbours among each other.

        A worker reads `interleave` stretches in turn, a batch from each, and holds `buffer` samples. ValueError for
        numbers below 1.
        """
        if min(buffer, interleave) < 1:
            raise ValueError(f"buffer={buffer}, interleave={interleave}: both count from 1")
        return self._with(Reading(True, buffer, interleave))

    def in_order(self) -> Self:
        """The same data, never shuffled: shard after shard, each from its first sample to its last."""
        return self._with(self.reading._replace(shuffle=False))

    def _with(self, reading: Reading) -> Self:
        other = copy(self)
        other.reading = reading
        return other

    @cached_property
    def ends(self) -> list[int]:
        """The number of samples up to the end of each shard."""
        return list(accumulate(self.counts))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __iter__(self) -> Iterator[Any]:
        """All samples, shard after shard."""
        for shard, count in enumerate(self.counts):
            yield from map(self.decode, self.read(shard, [range(count)]))

    def __getitem__(self, index: int) -> Any:
        """Sample number `index`, which is read alone."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples with these numbers; each shard that has any is read once."""
        wanted = sorted({int(each) for each in indices})
        if wanted and not 0 <= wanted[0] <= wanted[-1] < len(self):
            raise IndexError(f"samples are 0 to {len(self) - 1}, and {wanted[0]} to {wanted[-1]} were asked for")
        by_shard: dict[int, list[int]] = {}
        for each in wanted:
            shard = bisect_right(self.ends, each)
            by_shard.setdefault(shard, []).append(each - self.ends[shard] + self.counts[shard])
        found = (sample for shard, rows in by_shard.items() for sample in self.read(shard, runs_of(rows)))
        samples = dict(zip(wanted, map(self.decode, found), strict=True))
        return [samples[int(each)] for each in indices]


class DerivedData(ShardedData):
    """The base of sources that are made of another one, and change where it changes."""

    _source: ShardedData

    @property
    def content_mark(self) -> str | None:
        """The source's."""
        return self._source.content_mark

    @property
    def blocks(self) -> float | None:
        """The source's."""
        return self._source.blocks


def runs_of(rows: Iterable[int]) -> list[range]:
    """Ascending numbers as ranges.

    >>> runs_of([2, 3, 4, 7])
    [range(2, 5), range(7, 8)]
    """
    runs: list[range] = []
    for row in rows:
        if runs and runs[-1].stop == row:
            runs[-1] = range(runs[-1].start, row + 1)
        else:
            runs.append(range(row, row + 1))
    return runs


@final
class InMemoryShards(ShardedData):
    """Lists of samples as shards, for tests and small data."""

    def __init__(self, shards: Sequence[Sequence[Any]], names: Sequence[str] | None = None) -> None:
        self._shards = shards
        self.counts = [len(each) for each in shards]
        self.names = [f"shard-{number}" for number in range(len(shards))] if names is None else names

    def read(self, shard: int, runs: Sequence[range]) -> Iterator[Any]:
        """The samples with these numbers."""
        return (self._shards[shard][row] for run in runs for row in run)
