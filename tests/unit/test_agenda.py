"""What a virtual world does next: the order of a plain heap, although most deadlines wait outside of it."""

from __future__ import annotations

from heapq import heappop, heappush
from random import Random

import pytest

from polytempo.worlds.agenda import Agenda
from polytempo.worlds.operations import Flight

RANKS, ASKED = 5, 300


def played(seed: int, *, plain: bool) -> tuple[list[tuple[float, int]], int]:
    """When what was done, and the most that stood in the heap. `plain`: every deadline goes there at once."""
    random, agenda, done = Random(seed), Agenda(), list[tuple[float, int]]()
    flights = list[Flight]()
    asked, longest, now_s = 0, 0, 0.0

    def ask() -> None:
        nonlocal asked
        number, asked = asked, asked + 1
        time_s = now_s + random.choice([0.0, 1.0, 1.0, 2.0, 50.0])  # many at one time
        deadline_of = None
        if random.random() < 0.5:
            deadline_of = Flight("take", random.randrange(RANKS), 0, now_s)
            flights.append(deadline_of)
        if plain:
            heappush(agenda.heap, (time_s, number, deadline_of, lambda: done.append((time_s, number))))
        else:
            agenda.add(time_s, lambda: done.append((time_s, number)), deadline_of)

    for _ in range(5):
        ask()
    while agenda.heap:
        longest = max(longest, len(agenda.heap))
        time_s, _, flight, action = heappop(agenda.heap)
        if flight is not None:
            agenda.passed(flight.rank)
        if flight is not None and flight.done:
            continue
        now_s = time_s
        action()
        for _ in range(2 if asked < ASKED else 0):
            ask()
        for kept in random.sample(flights, len(flights) // 2):
            kept.done = True
        flights[:] = [flight for flight in flights if not flight.done]
    return done, longest


@pytest.mark.parametrize("seed", range(20))
def test_deadlines_that_wait_outside_change_no_order(seed: int) -> None:
    done, longest = played(seed, plain=False)
    expected, longest_plain = played(seed, plain=True)
    assert done == expected
    assert longest <= longest_plain
