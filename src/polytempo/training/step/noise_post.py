"""Exchanges of the ranks' measurements of gradient noise: between processes, and in a virtual world."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch import Tensor

from polytempo.core import PolytempoError, Port, Strategy
from polytempo.core.calls.refusals import refuse
from polytempo.large_batch.noise_scale import NoiseProbe
from polytempo.training.step.noise_watch import NoiseWatch
from polytempo.training.step.replica import Replica
from polytempo.worlds import ProcessWorld, beside


class ProcessNoisePost:
    """An all-gather between processes, in a second world: begun after a look and received before the next one."""

    def __init__(self, world: ProcessWorld, data: Port) -> None:
        self._world, self._data = beside(world), data
        self._pending: Any = None

    def post(self, watch: NoiseWatch, row: Tensor) -> None:
        """See `NoisePost`."""
        self.finish(watch)
        self._pending = self._world.launch(_gathered(self._data, row))

    def finish(self, watch: NoiseWatch) -> None:
        """See `NoisePost`. The run's own exchanges name a rank that is lost."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with suppress(PolytempoError):
                watch.take(pending.wait())


class VirtualNoiseBoard:
    """A board in a virtual world that all ranks of a group read, without an op and without time."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._watches: dict[int, NoiseWatch] = {}
        self._rows: list[dict[int, Tensor]] = []
        self._posted: dict[int, int] = {}

    def of(self, rank: int) -> VirtualNoisePost:
        """One rank's post."""
        return VirtualNoisePost(self, rank)

    def put(self, rank: int, watch: NoiseWatch, row: Tensor) -> None:
        """Add a rank's next row; with the last rank's n-th row all watches take the n-th rows."""
        self._watches[rank] = watch
        number = self._posted.get(rank, 0)
        self._posted[rank] = number + 1
        while len(self._rows) <= number:
            self._rows.append({})
        found = self._rows[number]
        found[rank] = row
        if len(found) == self._size:
            rows = [found[each] for each in sorted(found)]
            self._rows[number] = {}
            for each in self._watches.values():
                each.take(rows)


class VirtualNoisePost:
    """One rank's end of a board."""

    def __init__(self, board: VirtualNoiseBoard, rank: int) -> None:
        self._board, self._rank = board, rank

    def post(self, watch: NoiseWatch, row: Tensor) -> None:
        """See `NoisePost`."""
        self._board.put(self._rank, watch, row)

    def finish(self, watch: NoiseWatch) -> None:
        """See `NoisePost`: nothing is under way."""


async def _gathered(port: Port, row: Tensor) -> list[Tensor]:
    rows: list[Tensor] = await port.all_gather(row)
    return rows


def check_measured(strategy: Strategy, workers: int, *more: str) -> None:
    """`Incompatible` for a run that cannot measure its noise scale. `more`: further features of it."""
    alone = {"one worker"} if strategy.server is None and workers // strategy.groups < 2 else set()
    refuse(strategy.features | {"noise scale", *more} | alone, strategy=strategy, option="noise_scale")


def watch_noise(world: ProcessWorld, data: Port, replica: Replica, probe: NoiseProbe | None) -> NoiseWatch | None:
    """The watch of an attached loop; None without a probe. Errors: ValueError for numbers below 1."""
    if probe is None:
        return None
    if probe.batch_size < 1 or probe.every < 1:
        raise ValueError(f"noise_scale and batch_size are at least 1, got {probe.every} and {probe.batch_size}")
    check_measured(replica.strategy, data.size, *(["divided layers"] if replica.splits or replica.own else []))
    post = ProcessNoisePost(world, data)
    return NoiseWatch(post, replica.strategy, replica.trainable, every=probe.every, samples=probe.batch_size)
