"""`Roster`: the workers that a shard serves, and the workers that its rule counts.

members   0 1 2 3         known to the shard, each in one of its lives
counted   0 1   3         the rule waits for these
resting       2           has no work for now; to the rule it is as a worker that has left
"""

from __future__ import annotations

from bisect import bisect, bisect_left
from collections.abc import Collection, Iterator, Mapping
from typing import Literal

Change = Literal["removed", "added", "counted", "uncounted"]


class Roster:
    """`members`: worker -> its life. `counted`: the workers that the rule counts, ascending."""

    def __init__(self, members: Mapping[int, int] | None = None, counted: tuple[int, ...] = ()) -> None:
        self.members = dict(members or {})
        self.counted = counted
        self.resting = frozenset(self.members) - frozenset(counted)
        self._listed: tuple[tuple[int, int], ...] | None = None  # the last message's members

    def change(self, members: tuple[tuple[int, int], ...], resting: Collection[int]) -> Iterator[tuple[Change, int]]:
        """Set the members, and the `resting` ones; yield (change, worker) after each single change.

        First the workers go that are members no more, or rest, then the others come.
        """
        resting, present = frozenset(resting), self.members
        gone, new = list[int](), list[int]()
        if members != self._listed:  # nearly always they are the same, and one more rests
            present = dict(members)
            gone = sorted(worker for worker, life in self.members.items() if present.get(worker) != life)
            new = sorted(worker for worker, life in present.items() if self.members.get(worker) != life)
        for worker in gone:
            del self.members[worker]
            yield "removed", worker
            yield from self._uncount(worker)
        for worker in sorted(resting - self.resting):
            yield from self._uncount(worker)
        for worker in new:
            is_last = worker > next(reversed(self.members), -1)
            self.members[worker] = present[worker]
            if not is_last:
                self.members = dict(sorted(self.members.items()))
            yield "added", worker
        for worker in sorted({*new, *(self.resting - resting)}):
            if worker in self.members and worker not in resting:
                place = bisect(self.counted, worker)
                self.counted = (*self.counted[:place], worker, *self.counted[place:])
                yield "counted", worker
        self.resting, self._listed = resting, members

    def _uncount(self, worker: int) -> Iterator[tuple[Change, int]]:
        place = bisect_left(self.counted, worker)
        if self.counted[place : place + 1] == (worker,):
            self.counted = (*self.counted[:place], *self.counted[place + 1 :])
            yield "uncounted", worker
