"""`Roster`: the workers that a shard serves, and those of them that its rule counts.

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

    def change(self, members: Mapping[int, int], resting: Collection[int]) -> Iterator[tuple[Change, int]]:
        """Make the roster that of `members`, of which `resting` rest; one (change, worker) after each single change.

        First the workers go that are members no more, or rest, then the others come.
        """
        before, resting = self.members, frozenset(resting)
        for worker in [worker for worker in sorted(before) if members.get(worker) != before[worker]]:
            del self.members[worker]
            yield "removed", worker
            yield from self._uncount(worker)
        for worker in self.counted:
            if worker in resting:
                yield from self._uncount(worker)
        for worker in [worker for worker in sorted(members) if worker not in self.members]:
            is_last = worker > next(reversed(self.members), -1)
            self.members[worker] = members[worker]
            if not is_last:
                self.members = dict(sorted(self.members.items()))
            yield "added", worker
        counted = set(self.counted)
        for worker in [worker for worker in self.members if worker not in resting and worker not in counted]:
            place = bisect(self.counted, worker)
            self.counted = (*self.counted[:place], worker, *self.counted[place:])
            yield "counted", worker
        self.resting = resting

    def _uncount(self, worker: int) -> Iterator[tuple[Change, int]]:
        place = bisect_left(self.counted, worker)
        if self.counted[place : place + 1] == (worker,):
            self.counted = (*self.counted[:place], *self.counted[place + 1 :])
            yield "uncounted", worker
