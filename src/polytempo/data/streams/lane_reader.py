"""Readers of lanes: one pass over each lane, in this process or in a loader's worker processes.

lane         places 40 ━━━━━━━━━━━━━━━━━━━ 95
shards       b.txt 17…60, a.txt 0…12          each is opened once
windows      ━━━━━━  ━━━━━━  ━━━━━━           one is held, in the order of its places
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from polytempo.data.plan import Pick
from polytempo.data.source import Chosen, Source, chosen_loader
from polytempo.data.spans import PlaceSpan
from polytempo.data.streams.lanes import Lanes
from polytempo.data.streams.order import StreamOrder
from polytempo.data.streams.sharded_data import ShardedData


def in_places(data: ShardedData, spans: Sequence[PlaceSpan], orders: Callable[[int], StreamOrder]) -> Iterator[Any]:
    """The raw samples at `spans`, in their order. `orders(epoch)`: the order of its places. Memory: a window of
    samples."""
    for span in spans:
        order = orders(span.epoch)
        samples = _in_line(data.of_epoch(span.epoch), order, span)
        for window in order.windows(span.start, span.stop):
            ranks = window.ranks
            if ranks is None:
                yield from samples
                continue
            held = list(islice(samples, len(ranks)))
            for rank in ranks:
                yield held[rank]
                held[rank] = None


def _in_line(data: ShardedData, order: StreamOrder, span: PlaceSpan) -> Iterator[Any]:
    """The raw samples of a span in the order of files. ValueError for a shard that has fewer than its count."""
    for shard, group in groupby(order.runs(span.start, span.stop), lambda each: each[0]):
        runs = [run for _, run in group]
        due = sum(map(len, runs))
        samples = iter(data.read(shard, runs))
        for number in range(due):
            sample = next(samples, _END)
            if sample is _END:
                raise ValueError(
                    f"shard {data.names[shard]} ended after {number} of {due} samples from {runs[0].start} to "
                    f"{runs[-1].stop - 1}, and its count is {data.counts[shard]}; count its samples again"
                )
            yield sample


_END = object()


class LaneRequest(NamedTuple):
    """An order to a reader: the next `samples` of a lane."""

    iteration: int
    lane: int
    spans: tuple[PlaceSpan, ...]
    """The whole lane, from the iteration's start on."""
    samples: int


class LaneData(Dataset[Any]):
    """The data set of a loader with a `LaneRequest` for each batch. Lanes are read in order, each once an iteration."""

    def __init__(self, data: ShardedData, seed: int, window: int) -> None:
        self._data, self._seed, self._window = data, seed, window
        self._orders: dict[int, StreamOrder] = {}
        self._iteration = -1
        self._open: dict[int, Iterator[Any]] = {}

    def __getitems__(self, take: LaneRequest) -> list[Any]:
        """The next samples of the lane."""
        if take.iteration != self._iteration:
            self._iteration, self._open, self._orders = take.iteration, {}, {}
        if take.lane not in self._open:
            self._open[take.lane] = in_places(self._data, take.spans, self._order)
        return [self._data.decode(raw) for raw in islice(self._open[take.lane], take.samples)]

    def _order(self, epoch: int) -> StreamOrder:
        if epoch not in self._orders:
            self._orders[epoch] = StreamOrder(self._data, self._seed, epoch, self._window)
        return self._orders[epoch]


class LaneLoaders:
    """A loader for each of the source's worker processes, or one in this process: each reads some of the lanes.

    Batches and their order do not depend on the number of processes. More than `interleave` of them read nothing.
    """

    def __init__(self, source: Source, seed: int) -> None:
        assert isinstance(source.dataset, ShardedData)
        workers = 0 if source.loader is None else source.loader.num_workers
        self._workers, self.interleave = workers, source.dataset.reading.interleave
        window = source.dataset.reading.window if source.shuffle else 0
        self.order = f"{source.dataset.fingerprint}/{window}"
        """The data, and the window of their order (0: not shuffled): places of another order are other samples."""
        self._source = source._replace(dataset=LaneData(source.dataset, seed, window))
        self._loaders: list[tuple[Chosen, DataLoader[Any]]] = []
        self._iteration = 0

    def batches(
        self, lanes: Lanes, own: Sequence[int], cuts: int, generator: torch.Generator
    ) -> Iterator[tuple[Pick, Any]]:
        """The batches of the parts `own`, step by step."""
        self._iteration += 1
        if not self._loaders:
            self._loaders = [self._loader(generator) for _ in range(self._processes(len(own)))]
        count = len(self._loaders)
        for number, (chosen, _) in enumerate(self._loaders):
            chosen.batches = self._takes(lanes, own, cuts, number, count)
        loaders = [iter(loader) for _, loader in self._loaders]
        for lane, pick in lanes.picks(own, cuts):
            yield pick, next(loaders[lane % count])

    def _processes(self, parts: int) -> int:
        return max(1, min(self._workers, self.interleave * parts))

    def _loader(self, generator: torch.Generator) -> tuple[Chosen, DataLoader[Any]]:
        chosen = Chosen()
        return chosen, chosen_loader(self._source, chosen, generator, at_most=1)

    def _takes(self, lanes: Lanes, own: Sequence[int], cuts: int, number: int, count: int) -> Iterator[LaneRequest]:
        spans: dict[int, tuple[PlaceSpan, ...]] = {}
        for lane, pick in lanes.picks(own, cuts):
            if lane % count == number:
                if lane not in spans:
                    spans[lane] = tuple(lanes.spans(lane))
                yield LaneRequest(self._iteration, lane, spans[lane], pick.num_samples)
