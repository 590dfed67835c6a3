"""`Agenda`: what a virtual world does next, and the deadlines of operations, which are nearly all kept."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf

from polytempo.worlds.virtual.virtual_operations import Flight

Entry = tuple[float, int, Callable[[], None]]
"""When, in which order of asking, and what to do."""
Deadline = tuple[float, int, Callable[[], None], Flight]
"""The same for the deadline of an operation."""


class Agenda:
    """`events`: what is done, and `deadlines`: what is done if an operation is not over by then. Both are heaps, by
    time and at one time in the order of asking.

    Of a rank's deadlines only the earliest is in the heap. The others wait until that has passed: by then most
    operations are over. So both heaps stay small where each of many ranks waits often.
    """

    def __init__(self) -> None:
        self.events: list[Entry] = []
        self.deadlines: list[Deadline] = []
        self._asked = 0
        self._earliest_s: dict[int, float] = {}
        self._waiting: dict[int, list[Deadline]] = {}

    def add(self, time_s: float, action: Callable[[], None]) -> None:
        """Do `action` then."""
        self._asked += 1
        heappush(self.events, (time_s, self._asked, action))

    def add_deadline(self, time_s: float, flight: Flight, action: Callable[[], None]) -> None:
        """Do `action` then, if `flight` is not over by then."""
        self._asked += 1
        deadline, rank = (time_s, self._asked, action, flight), flight.rank
        if time_s < self._earliest_s.get(rank, inf):
            self._earliest_s[rank] = time_s
            return heappush(self.deadlines, deadline)
        waiting = self._waiting.get(rank)
        if waiting is None:
            self._waiting[rank] = [deadline]
            return
        while waiting and waiting[-1][3].done:
            waiting.pop()
        waiting.append(deadline)

    def earliest_deadline(self) -> Entry | None:
        """Take out the earliest deadline; None where its operation is over. The rank's others go to the heap now."""
        time_s, asked, action, flight = heappop(self.deadlines)
        rank = flight.rank
        self._earliest_s.pop(rank, None)
        for deadline in self._waiting.pop(rank, ()):
            if not deadline[3].done:
                self._earliest_s[rank] = min(deadline[0], self._earliest_s.get(rank, inf))
                heappush(self.deadlines, deadline)
        return None if flight.done else (time_s, asked, action)
