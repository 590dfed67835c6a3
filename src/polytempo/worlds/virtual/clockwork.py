"""A virtual world in the view of its parts: operations under way, the clock, and the heaps of events and deadlines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Any, Protocol

import msgspec

from polytempo.core import WAITING, Task
from polytempo.core.driver import Begin
from polytempo.worlds.trace import Line


class Asymmetric(Exception):
    """Acting ranks do something that not all ranks do alike."""


class Flight(msgspec.Struct, eq=False):
    """One operation, or one started coroutine, under way."""

    op: object
    rank: int
    step: int
    started_s: float
    done: bool = False
    value: Any = None
    error: Exception | None = None
    waiters: tuple[Callable[[Any, Exception | None], None], ...] = ()
    """Functions to call with the answer."""

    def __str__(self) -> str:
        return str(self.op)


@dataclass(slots=True, eq=False)
class VirtualStrand:
    """A coroutine of a rank: its program, or something that it started."""

    task: Task[Any]
    flight: Flight
    main: bool
    waits_for: Flight | None = None
    begin: Begin = lambda op: WAITING
    """Begins an operation of this coroutine; see `Task.resume`."""
    go_on: Callable[[Any, Exception | None], None] = lambda value, error: None
    """Resumes this coroutine with an answer."""


class Clockwork(Protocol):
    """The world, as its network, its messages and its collectives see it."""

    now_s: float
    lost: dict[int, float]
    """The time of death of each lost rank."""

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Do `action` at that time."""

    def at_deadline(self, time_s: float, flight: Flight, action: Callable[[], None]) -> None:
        """Do `action` at that time, if the operation `flight` is not over by then."""

    def end(
        self,
        flight: Flight,
        kind: str,
        sent_bytes: int,
        value: Any,
        peer: int = -1,
        error: Exception | None = None,
    ) -> None:
        """Land an operation now, and write its line in the trace."""

    def write(self, event: Line) -> None:
        """Write a line in the trace for an operation that nothing waits for, unless its rank is gone."""

    def land(self, flight: Flight, value: Any, error: Exception | None) -> None:
        """Deliver an operation's answer: resume its waiting coroutines."""

    def fail(self, flight: Flight, peer: int) -> None:
        """Let an operation fail that needs a rank which is gone."""


Entry = tuple[float, int, Callable[[], None]]
"""(time, number in the order of asking, action)."""
Deadline = tuple[float, int, Callable[[], None], Flight]
"""(time, number, action, operation with this deadline)."""


class Agenda:
    """Two heaps, by time and at one time in the order of asking: `events`, and `deadlines` of operations that may be
    over by then.

    Only the earliest of a rank's deadlines is in the heap. The others wait until it has passed: by then most operations
    are over. So both heaps stay small where each of many ranks waits often.
    """

    def __init__(self) -> None:
        self.events: list[Entry] = []
        self.deadlines: list[Deadline] = []
        self._asked = 0
        self._earliest_s: dict[int, float] = {}
        self._waiting: dict[int, list[Deadline]] = {}

    def add(self, time_s: float, action: Callable[[], None]) -> None:
        """Do `action` at that time."""
        self._asked += 1
        heappush(self.events, (time_s, self._asked, action))

    def add_deadline(self, time_s: float, flight: Flight, action: Callable[[], None]) -> None:
        """Do `action` at that time, if `flight` is not over by then."""
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
