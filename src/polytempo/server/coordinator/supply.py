"""The order in which tickets are dealt for the first time, and the next ticket of each worker.

freely    0 1 2 3 4 5 …           the next one to any worker that asks
in runs   worker 0:  0 1 2 9 …      runs of consecutive tickets, here 3; at the end of an epoch a worker without a run
          worker 1:  3 4 5 …        takes the second half of the longest one
          worker 2:  6 7 8 …
evenly    place 0:  0 3 6 …       W places, here 3; place i has the tickets step · W + i, in order
          place 1:  1 4 7 …
          place 2:  2 5 8 …       the tickets of an empty place go to the others, marked `reassigned`
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Fresh(NamedTuple):
    """A ticket that no worker has had. `reassigned`: the worker that it was meant for is lost."""

    number: int
    reassigned: bool = False


class Supply(Protocol):
    """Tickets in the order of their first deals."""

    @property
    def frontier(self) -> int:
        """No ticket from this one on has been dealt."""

    @property
    def uneven(self) -> bool:
        """True if workers get unequal numbers of tickets although tickets are dealt evenly."""

    def join(self, worker: int) -> None:
        """`worker` takes part from now on."""

    def lose(self, worker: int) -> None:
        """`worker` takes part no more."""

    def take(self, worker: int, end: int) -> Fresh | None:
        """The next ticket below `end` for `worker`, which is dealt with this; None if there is none for it."""

    def skip_to(self, frontier: int) -> list[int]:
        """Deal no ticket below `frontier`, or below the next that can be begun with. Returns the tickets in between."""


class Freely:
    """The next ticket to any worker that asks."""

    uneven = False

    def __init__(self) -> None:
        self.frontier = 0

    def join(self, worker: int) -> None:
        """Changes nothing: workers have no places."""

    def lose(self, worker: int) -> None:
        """Changes nothing: workers have no places."""

    def take(self, worker: int, end: int) -> Fresh | None:
        """The next of all tickets."""
        if self.frontier >= end:
            return None
        self.frontier += 1
        return Fresh(self.frontier - 1)

    def skip_to(self, frontier: int) -> list[int]:
        """Go on from `frontier`."""
        self.frontier = frontier
        return []


class InRuns:
    """Runs of consecutive tickets, one for each worker at a time, for data that are read in stretches.

    All tickets of an epoch (`epoch` tickets) are dealt before the next epoch begins, and no run is in two epochs.
    """

    uneven = False

    def __init__(self, length: int, epoch: int) -> None:
        self.frontier = 0
        self._length, self._epoch = length, epoch
        self._runs: dict[int, range] = {}  # of each worker: the tickets that it has not had yet
        self._left: list[range] = []  # of workers that are lost

    def join(self, worker: int) -> None:
        """Changes nothing: a worker has a run from its first ticket on."""

    def lose(self, worker: int) -> None:
        """The rest of the worker's run goes to another one."""
        if run := self._runs.pop(worker, None):
            self._left.append(run)

    def take(self, worker: int, end: int) -> Fresh | None:
        """The next ticket of its run, or of another one."""
        run = self._runs.pop(worker, None) or self._next(end)
        if not run:
            return None
        self._runs[worker] = run[1:] if run[0] < end else run
        return Fresh(run[0]) if run[0] < end else None

    def _next(self, end: int) -> range:
        """A lost worker's run, fresh tickets of this epoch, the half of a run, or fresh ones of the next epoch."""
        if first := min((run for run in self._left if run[0] < end), key=lambda run: run[0], default=None):
            self._left.remove(first)
            return first
        ends = self.frontier % self._epoch == 0 or self.frontier >= end
        if ends and (half := self._half(end)):
            return half
        stop = min(self.frontier + self._length, (self.frontier // self._epoch + 1) * self._epoch, end)
        fresh = range(self.frontier, max(self.frontier, stop))
        self.frontier = fresh.stop
        return fresh

    def _half(self, end: int) -> range:
        """The second half of the longest run below `end`, which its worker loses."""
        there = {worker: run for worker, run in self._runs.items() if run and run[-1] < end}
        worker = max(there, key=lambda each: len(there[each]), default=None)
        if worker is None:
            return range(0)
        run = there[worker]
        self._runs[worker] = run[: len(run) // 2]
        return run[len(run) // 2 :]

    def skip_to(self, frontier: int) -> list[int]:
        """Go on from `frontier`."""
        self.frontier = frontier
        return []


class Evenly:
    """One ticket to each of `num_places` workers in each step; worker i has place i at first."""

    def __init__(self, num_places: int) -> None:
        self._place = {worker: worker for worker in range(num_places)}  # of each worker that has one
        self._empty: set[int] = set()
        self._spare: set[int] = set()
        self._next = list(range(num_places))

    @property
    def frontier(self) -> int:
        """No ticket from this one on has been dealt."""
        return max(self._next) - len(self._next) + 1

    @property
    def uneven(self) -> bool:
        """True if a place is empty, or a worker has none."""
        return bool(self._empty or self._spare)

    def join(self, worker: int) -> None:
        """The worker takes its own place, or the first empty one; where none is empty, it is a spare worker."""
        if worker in self._place:
            return
        if not self._empty:
            self._spare.add(worker)
            return
        place = worker if worker in self._empty else min(self._empty)
        self._empty.remove(place)
        self._place[worker] = place

    def lose(self, worker: int) -> None:
        """A worker without a place takes its place, or the place is empty."""
        self._spare.discard(worker)
        place = self._place.pop(worker, None)
        if place is None:
            return
        self._empty.add(place)
        if self._spare:
            spare = min(self._spare)
            self._spare.remove(spare)
            self.join(spare)

    def take(self, worker: int, end: int) -> Fresh | None:
        """The lowest ticket of its place and the empty places."""
        own = [self._place[worker]] if worker in self._place else []
        place = min([*own, *self._empty], key=self._next.__getitem__, default=None)
        if place is None or self._next[place] >= end:
            return None
        number = self._next[place]
        self._next[place] += len(self._next)
        return Fresh(number, reassigned=place in self._empty)

    def skip_to(self, frontier: int) -> list[int]:
        """Go on with the first whole step from `frontier` on."""
        places = len(self._next)
        first = -(-frontier // places) * places
        self._next = list(range(first, first + places))
        return list(range(frontier, first))
