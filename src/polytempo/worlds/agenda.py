"""`Agenda`: what a virtual world does next, and the deadlines of operations, which are nearly all kept."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush
from math import inf

from polytempo.worlds.operations import Flight

Entry = tuple[float, int, Flight | None, Callable[[], None]]
"""When, in which order of asking, the operation whose deadline it is (None: it is none), and what to do."""


class Agenda:
    """`heap`: what is done, by time, and at one time in the order of asking.

    Of a rank's deadlines only the earliest is in the heap. The others wait until that has passed: by then most
    operations are over, and the heap stays small where each of many ranks waits often.
    """

    def __init__(self) -> None:
        self.heap: list[Entry] = []
        self._asked = 0
        self._earliest_s: dict[int, float] = {}
        self._waiting: dict[int, list[Entry]] = {}

    def add(self, time_s: float, action: Callable[[], None], deadline_of: Flight | None = None) -> None:
        """Do `action` then; not if it is the deadline of an operation that is over by then."""
        self._asked += 1
        entry = (time_s, self._asked, deadline_of, action)
        if deadline_of is None:
            return heappush(self.heap, entry)
        rank = deadline_of.rank
        if time_s < self._earliest_s.get(rank, inf):
            self._earliest_s[rank] = time_s
            return heappush(self.heap, entry)
        waiting = self._waiting.setdefault(rank, [])
        while waiting and _is_kept(waiting[-1]):
            waiting.pop()
        waiting.append(entry)

    def passed(self, rank: int) -> None:
        """A deadline of `rank` has left the heap. Those that wait go there now, in the order in which they were."""
        self._earliest_s.pop(rank, None)
        for entry in self._waiting.pop(rank, ()):
            if not _is_kept(entry):
                self._earliest_s[rank] = min(entry[0], self._earliest_s.get(rank, inf))
                heappush(self.heap, entry)


def _is_kept(entry: Entry) -> bool:
    return entry[2] is not None and entry[2].done
