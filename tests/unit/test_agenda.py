"""The agenda of a virtual world has the order of a plain heap, although most deadlines wait outside of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from heapq import heappop
from random import Random

import pytest

from polytempo.worlds.virtual.clockwork import Agenda, Flight

RANKS, ASKED = 5, 300


class PlainAgenda(Agenda):
    """One heap for all deadlines, done or not."""

    def add_deadline(self, time_s: float, flight: Flight, action: Callable[[], None]) -> None:
        self.add(time_s, lambda: None if flight.done else action())


def played(seed: int, agenda: Agenda) -> tuple[list[tuple[float, int]], int]:
    """The times of completion, and the most entries in the heaps."""
    random, done = Random(seed), list[tuple[float, int]]()
    flights = list[Flight]()
    asked, longest, now_s = 0, 0, 0.0

    def act(number: int) -> None:
        done.append((now_s, number))
        for _ in range(2 if asked < ASKED else 0):
            ask()
        for kept in random.sample(flights, len(flights) // 2):
            kept.done = True
        flights[:] = [flight for flight in flights if not flight.done]

    def ask() -> None:
        nonlocal asked
        number, asked = asked, asked + 1
        time_s = now_s + random.choice([0.0, 1.0, 1.0, 2.0, 50.0])  # many at one time
        if random.random() < 0.5:
            flights.append(Flight("take", random.randrange(RANKS), 0, now_s))
            agenda.add_deadline(time_s, flights[-1], partial(act, number))
        else:
            agenda.add(time_s, partial(act, number))

    for _ in range(5):
        ask()
    while agenda.events or agenda.deadlines:
        longest = max(longest, len(agenda.events) + len(agenda.deadlines))
        late = agenda.deadlines and not (agenda.events and agenda.events[0] < agenda.deadlines[0])
        entry = agenda.earliest_deadline() if late else heappop(agenda.events)
        if entry is not None:
            now_s, _, action = entry
            action()
    return done, longest


@pytest.mark.parametrize("seed", range(20))
def test_deadlines_that_wait_outside_change_no_order(seed: int) -> None:
    done, longest = played(seed, Agenda())
    expected, longest_plain = played(seed, PlainAgenda())
    assert done == expected
    assert longest <= longest_plain
