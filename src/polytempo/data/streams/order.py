"""`StreamOrder`: the order of an epoch of data in shards, by arithmetic: nothing of an epoch's size is held.

    shards           a │ b │ c │ d              permuted: by (seed, epoch)
    rows in line     c c c c a a a d d b b b    one shard behind the other
    windows          └──────┘└──────┘└──────┘   permuted inside, each by (seed, epoch, number)
    places           0 1 2 3 4 5 6 7 8 9 10 11

A reader of neighbouring places reads neighbouring rows, and holds one window. Neither depends on the number of workers.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.data.plan import permutation
from polytempo.data.streams.sharded_data import ShardedData, runs_of


class OrderWindow(NamedTuple):
    """Places `start` to `stop` (exclusive), which are of one window, and their rows."""

    start: int
    stop: int
    rows: range | Tensor
    """Rows in line, in the order of places: (stop - start,), int64."""

    @property
    def runs(self) -> list[range]:
        """The rows as ascending ranges."""
        if isinstance(self.rows, range):
            return [self.rows]
        return runs_of(self.rows.sort().values.tolist())

    @property
    def ranks(self) -> list[int] | None:
        """Numbers of the rows among the ascending ones, place after place; None: they ascend."""
        return None if isinstance(self.rows, range) else self.rows.argsort().argsort().tolist()


class StreamOrder:
    """The places of one epoch. `window`: the samples that are shuffled among each other; 0: shards, and rows in them,
    come as they are.

    Memory: a number for each shard, and a few windows. A row costs a search among the shards.
    """

    def __init__(self, data: ShardedData, seed: int, epoch: int, window: int) -> None:
        shards = permutation(len(data.counts), seed, epoch).tolist() if window else range(len(data.counts))
        self._shards = [shard for shard in shards if data.counts[shard]]
        self._begins = list(accumulate((data.counts[shard] for shard in self._shards), initial=0))
        self._seed, self._epoch, self._window = seed, epoch, window

    def windows(self, start: int, stop: int) -> Iterator[OrderWindow]:
        """The places `start` to `stop` by windows. Not shuffled, all are one."""
        if not self._window:
            yield OrderWindow(start, stop, range(start, stop))
            return
        while start < stop:
            first = start // self._window * self._window
            last = min(first + self._window, self._begins[-1])
            end = min(stop, last)
            drawn = _drawn(last - first, self._seed, self._epoch, first)
            yield OrderWindow(start, end, first + drawn[start - first : end - first])
            start = end

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, range]]:
        """The rows at these places as (shard, ascending numbers in it), in line; neighbours are joined."""
        held: range | None = None
        for run in self._runs_in_line(start, stop):
            if held is not None and held.stop == run.start:
                held = range(held.start, run.stop)
                continue
            if held is not None:
                yield from self._in_shards(held)
            held = run
        if held is not None:
            yield from self._in_shards(held)

    def _runs_in_line(self, start: int, stop: int) -> Iterator[range]:
        """Whole windows without their permutation."""
        if not self._window:
            yield range(start, stop)
            return
        while start < stop:
            first = start // self._window * self._window
            last = min(first + self._window, self._begins[-1])
            end = min(stop, last)
            if (start, end) == (first, last):
                yield range(first, last)
            else:
                yield from next(self.windows(start, end)).runs
            start = end

    def _in_shards(self, rows: range) -> Iterator[tuple[int, range]]:
        start = rows.start
        while start < rows.stop:
            number = bisect_right(self._begins, start) - 1
            begin, end = self._begins[number], min(self._begins[number + 1], rows.stop)
            yield self._shards[number], range(start - begin, end - begin)
            start = end


@lru_cache(maxsize=16)
def _drawn(num_samples: int, seed: int, epoch: int, first: int) -> Tensor:
    """The permutation of the window that begins at place `first`, shape (num_samples,). Do not write to it."""
    digest = hashlib.sha256(f"polytempo,{seed},{epoch},window,{first}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.randperm(num_samples, generator=generator)
