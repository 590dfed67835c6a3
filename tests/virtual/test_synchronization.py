"""The times of exchanges: each step's answer."""

from __future__ import annotations

from typing import Any

import pytest

from helpers import CLUSTER, bundle
from polytempo.aggregation import adasum, from_anchor, mean, median, merged, mix, nesterov, ring_graph
from polytempo.core import Bundle, Port, Promise, Transform, chain, identity, is_idle
from polytempo.synchronization import after, delayed, every, until
from polytempo.worlds import VirtualWorld


async def _times_ten(port: Port, given: Bundle, state: int) -> tuple[Bundle, int]:
    return given.map(lambda flat: flat * 10), state + 1


TEN = Transform(lambda parameters: 0, _times_ten)
WHOLE_MEAN = mean()._replace(promises=mean().promises & ~Promise.SEPARABLE)
"""Ten times as much; counts its calls."""


def handed_out(transform: Transform, num_steps: int) -> list[float | None]:
    """The answers of steps 1, 2, 3, … to 1.0, 2.0, 3.0, …, on one rank."""

    async def program(port: Port) -> list[float | None]:
        state, answers = transform.init(bundle(0.0)), []
        for step in range(1, num_steps + 1):
            answer, state = await transform.apply(port, bundle(float(step)), state)
            answers.append(None if answer is None else float(answer.flat))
        return answers

    result = VirtualWorld(CLUSTER, 1).run(program).results[0]
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("transform", "answers"),
    [
        (every(1, TEN), [10, 20, 30, 40, 50, 60, 70]),
        (every(2, TEN), [1, 20, 3, 40, 5, 60, 7]),
        (every(3, TEN), [1, 2, 30, 4, 5, 60, 7]),
        (until(0, TEN), [1, 2, 3, 4, 5, 6, 7]),
        (until(3, TEN), [10, 20, 30, 4, 5, 6, 7]),
        (after(0, TEN), [10, 20, 30, 40, 50, 60, 70]),
        (after(3, TEN), [1, 2, 3, 40, 50, 60, 70]),
        (after(2, every(2, TEN)), [1, 2, 3, 40, 5, 60, 7]),
        (every(2, after(1, TEN)), [1, 2, 3, 40, 5, 60, 7]),
        (chain(until(2, TEN), after(4, TEN)), [10, 20, 3, 4, 50, 60, 70]),
        (delayed(1, TEN), [None, 10, 20, 30, 40, 50, 60]),
        (delayed(2, TEN), [None, None, 10, 20, 30, 40, 50]),
        (delayed(3, TEN), [None, None, None, 10, 20, 30, 40]),
        (delayed(1, every(2, TEN)), [None, 1, 20, 3, 40, 5, 60]),
        (delayed(1, delayed(1, TEN)), [None, None, 10, 20, 30, 40, 50]),
        (delayed(2, identity()), [None, None, 1, 2, 3, 4, 5]),
    ],
)
def test_step_tables(transform: Transform, answers: list[float | None]) -> None:
    assert handed_out(transform, 7) == answers


def test_on_the_other_steps_nothing_is_done_at_all() -> None:
    async def program(port: Port) -> list[bool]:
        transform = every(2, mean())
        state, same = transform.init(bundle(0.0)), []
        for _ in range(4):
            given = bundle(1.0)
            answer, state = await transform.apply(port, given, state)
            same.append(answer is given and not given.packed)
        return same

    outcome = VirtualWorld(CLUSTER, 2).run(program)
    assert outcome.results == [[True, False, True, False]] * 2
    assert outcome.trace.messages[0, "all_reduce"] == 2


@pytest.mark.parametrize(
    ("transform", "separable", "idle_alone"),
    [
        (every(2, mean()), True, True),
        (after(2, nesterov()), True, False),
        (until(2, WHOLE_MEAN), False, True),
        (delayed(1, mean()), True, False),
        (delayed(1, WHOLE_MEAN), False, False),
    ],
)
def test_flags_are_those_of_what_is_inside(transform: Transform, separable: bool, idle_alone: bool) -> None:
    assert (Promise.SEPARABLE in transform.promises) is separable
    assert is_idle(transform, 1) is idle_alone


@pytest.mark.parametrize(
    ("transform", "weighs"),
    [
        (every(2, mean()), True),
        (every(2, adasum()), False),
        (after(2, nesterov()), True),
        (delayed(1, mean()), True),
        (delayed(1, merged(median)), False),
        (from_anchor(mean()), True),
        (from_anchor(mix(ring_graph)), False),
    ],
)
def test_what_weighs_by_share_does_so_inside_others(transform: Transform, weighs: bool) -> None:
    assert (Promise.WEIGHS in transform.promises) is weighs


@pytest.mark.parametrize("make", [every, delayed])
def test_at_least_one_step(make: Any) -> None:
    with pytest.raises(ValueError, match="must be at least 1 step, got 0"):
        make(0, TEN)


@pytest.mark.parametrize("make", [until, after])
def test_steps_are_not_negative(make: Any) -> None:
    with pytest.raises(ValueError, match="needs a step >= 0, got -1"):
        make(-1, TEN)
