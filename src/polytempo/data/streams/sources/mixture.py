"""`mixture`: several sources in given proportions, as one.

weights 3 : 1    A A B A A A B A A A B A …        a shard of the mixture has a stretch of each source
stop="first"     the epoch ends with the first source that is used up; the others go on there in the next epoch
stop="all"       the others go on in their proportions, to the end of all
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from copy import copy
from fractions import Fraction
from functools import lru_cache
from itertools import groupby
from math import inf
from typing import Any, Literal, Self, final

import numpy as np
from numpy.typing import NDArray

from polytempo.data.streams.sharded_data import ShardedData, runs_of


@final
class Mixture(ShardedData):
    """The source that `mixture` makes."""

    def __init__(self, parts: Sequence[tuple[ShardedData, float]], stop: Literal["first", "all"]) -> None:
        self._sources = [source for source, _ in parts]
        self._weights = [str(weight) for _, weight in parts]
        self._stop, self._epoch = stop, 0
        self._stretches = [
            stretches
            for taken, done in phases([len(source) for source in self._sources], self._weights, stop)
            for stretches in self._cut(taken, done)
        ]
        self.counts = [sum(map(len, stretches)) for stretches in self._stretches]
        self.names = [f"mixture {number}" for number in range(len(self.counts))]
        self._used = [sum(len(stretches[place]) for stretches in self._stretches) for place in range(len(parts))]

    @property
    def identity(self) -> object:
        """The sources', their weights and `stop`."""
        return ["mixture", [source.fingerprint for source in self._sources], self._weights, self._stop]

    @property
    def content_mark(self) -> str | None:
        """The sources'."""
        marks = [source.content_mark for source in self._sources]
        return None if None in marks else "\n".join(map(str, marks))

    @property
    def blocks(self) -> float | None:
        """Equal blocks, each as large as a mean block of every source together: an end cuts all sources."""
        sizes = [len(source) / source.blocks for source in self._sources if source.blocks is not None]
        return None if not sizes else sum(self.counts) / sum(sizes) if any(sizes) else inf

    def of_epoch(self, epoch: int) -> Self:
        """The same mixture of the samples that have their turn in `epoch`."""
        other = copy(self)
        other._epoch = epoch
        return other

    def read(self, shard: int, runs: Sequence[range]) -> Iterator[tuple[int, Any]]:
        """The samples in `runs`, each with the number of its source."""
        stretches = self._stretches[shard]
        order, ranks = interleaved(tuple(map(len, stretches)))
        wanted = np.concatenate([np.arange(run.start, run.stop) for run in runs]) if runs else np.zeros(0, np.int64)
        chosen = order[wanted]
        readers = [
            self._samples(place, ranks[wanted[chosen == place]] + stretch.start)
            for place, stretch in enumerate(stretches)
        ]
        for place in chosen.tolist():
            yield place, next(readers[place])

    def decode(self, raw: tuple[int, Any]) -> Any:
        """The sample of its source."""
        return self._sources[raw[0]].decode(raw[1])

    def _cut(self, taken: list[int], done: list[int]) -> Iterator[list[range]]:
        """A phase in shards, each with a stretch of each source, which are about as long as shards of the sources."""
        needed = [
            -(-count * len(source.counts) // len(source))
            for count, source in zip(taken, self._sources, strict=True)
            if count
        ]
        number = max(needed)
        for piece in range(number):
            yield [
                range(begin + count * piece // number, begin + count * (piece + 1) // number)
                for count, begin in zip(taken, done, strict=True)
            ]

    def _samples(self, place: int, numbers: NDArray[np.int64]) -> Iterator[Any]:
        """Samples of a source by their numbers in the epoch, which begins where the epoch before it has ended."""
        source = self._sources[place]
        places = (numbers + self._epoch * self._used[place]) % len(source)
        cut = int(np.argmin(places)) if len(places) else 0  # the source begins again there
        for part in (places[:cut], places[cut:]):
            for shard, group in groupby(part.tolist(), key=lambda number: bisect_right(source.ends, number)):
                begin = source.ends[shard] - source.counts[shard]
                yield from source.read(shard, runs_of(number - begin for number in group))


def phases(
    sizes: Sequence[int], weights: Sequence[str], stop: Literal["first", "all"]
) -> Iterator[tuple[list[int], list[int]]]:
    """Samples that each source gives until one is used up, and the samples that it has given before.

    >>> list(phases([30, 50], ["3", "1"], "all"))
    [([30, 10], [0, 0]), ([0, 40], [30, 10])]
    """
    shares, done = [Fraction(weight) for weight in weights], [0] * len(sizes)
    while left := [place for place, size in enumerate(sizes) if size > done[place]]:
        time = min((sizes[place] - done[place]) / shares[place] for place in left)
        taken = [int(shares[place] * time) if place in left else 0 for place in range(len(sizes))]
        yield taken, list(done)
        done = [before + count for before, count in zip(done, taken, strict=True)]
        if stop == "first":
            return


@lru_cache(maxsize=64)
def interleaved(counts: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The source of each place of a shard, and the number of the place among that source's: evenly spread.

    Sample i of a source with c samples has its place at the time (i + 1/2) / c; equal times go by the source's number.
    Up to any time each source is half a sample off its part at most.

    >>> interleaved((3, 1))[0].tolist()
    [0, 0, 1, 0]
    """
    times = np.concatenate([(np.arange(count) + 0.5) / max(1, count) for count in counts])
    sources = np.repeat(np.arange(len(counts)), counts)
    ranks = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort(times, kind="stable")
    return sources[order], ranks[order]


def mixture(parts: Sequence[tuple[ShardedData, float]], *, stop: Literal["first", "all"] = "first") -> Mixture:
    """Samples of several sources in the proportions of their weights, each at most once an epoch.

        source = pt.data.mixture([(web, 0.7), (code, 0.2), (books, 0.1)])

    With `stop="first"` an epoch ends when the first source is used up: with weights w and sizes N it has ⌊wₛ · min N/w⌋
    samples of source s. The next epoch takes the following samples of the other sources, which begin again at their
    end, so over many epochs a source gives all its samples equally often. With `stop="all"` an epoch has every sample
    of every source once: a source that is used up drops out, and the others go on in the proportions of their weights.

    The sources' samples are spread evenly: each shard of the mixture has a stretch of every source, in proportion to
    one sample, and in a shard that is read in order every source is less than (1 + number of sources) / 2 samples off
    its part at every place. Weights are read as decimal numbers, and proportions computed exactly. The mixture is a
    function of the epoch's number alone; the seed shuffles it as any other source.

    A source's shards are read in as many parts as the mixture has shards; compressed files and long row groups are then
    read more than once, so give the sources shards of similar size.

    Errors: ValueError for fewer than two sources, a weight that is not a finite number above 0, and another `stop`.
    """
    if len(parts) < 2:
        raise ValueError(f"a mixture has at least two sources, and {len(parts)} are given")
    for _, weight in parts:
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise ValueError(f"the weight {weight!r} is not a finite number above 0; leave a source without weight out")
    if stop not in ("first", "all"):
        raise ValueError(f'stop={stop!r}; it is "first" or "all"')
    return Mixture(parts, stop)
