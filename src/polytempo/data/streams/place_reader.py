"""`PlaceReader`: samples at any places of an order, for batches that are dealt by number."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import Any

from polytempo.data.spans import PlaceSpan
from polytempo.data.streams.lane_reader import in_places
from polytempo.data.streams.order import StreamOrder
from polytempo.data.streams.sharded_data import ShardedData

_MOST_HELD = 2


class PlaceReader:
    """Reads a window of the order when one of its places is asked for, and holds the last two.

    Neighbouring places one after the other cost one pass over the data; a jump costs a window. Not shuffled, the data
    are read on from place to place.
    """

    def __init__(self, data: ShardedData, seed: int, window: int) -> None:
        """`window`: the samples that are shuffled among each other; 0: none."""
        self._data, self._seed, self._window = data, seed, window
        self._held: OrderedDict[PlaceSpan, list[Any]] = OrderedDict()
        self._next: tuple[int, int] | None = None

    def samples(self, epoch: int, start: int, stop: int) -> list[Any]:
        """The samples at the places `start` to `stop` of `epoch`."""
        raw = self._shuffled(epoch, start, stop) if self._window else self._in_line(epoch, start, stop)
        return [self._data.decode(each) for each in raw]

    def _shuffled(self, epoch: int, start: int, stop: int) -> list[Any]:
        found: list[Any] = []
        while start < stop:
            first = start // self._window * self._window
            window = PlaceSpan(epoch, first, min(first + self._window, len(self._data)))
            found += self._read(window)[start - first : stop - first]
            start = window.stop
        return found

    def _read(self, window: PlaceSpan) -> list[Any]:
        if window not in self._held:
            self._held[window] = list(in_places(self._data, [window], self._order))
            if len(self._held) > _MOST_HELD:
                self._held.popitem(last=False)
        return self._held[window]

    def _in_line(self, epoch: int, start: int, stop: int) -> list[Any]:
        if self._next != (epoch, start):
            self._ahead = in_places(self._data, [PlaceSpan(epoch, start, len(self._data))], self._order)
        self._next = epoch, stop
        return list(islice(self._ahead, stop - start))

    def _order(self, epoch: int) -> StreamOrder:
        return StreamOrder(self._data, self._seed, epoch, self._window)
