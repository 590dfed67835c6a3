"""When workers talk: step tables; delayed answers, their overlap in virtual time, and their saved state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers import CLUSTER, bundle
from polytempo.aggregation import mean, nesterov
from polytempo.collectives import ring
from polytempo.core import Bundle, Port, State, Transform, chain, identity, is_idle
from polytempo.core.state import restored, saved, settled
from polytempo.synchronization import after, delayed, every, until
from polytempo.worlds import VirtualWorld


async def _times_ten(port: Port, given: Bundle, state: int) -> tuple[Bundle, int]:
    return given.map(lambda flat: flat * 10), state + 1


TEN = Transform(lambda parameters: 0, _times_ten)
"""Ten times as much; counts its calls."""


def handed_out(transform: Transform, num_steps: int) -> list[float | None]:
    """What steps 1, 2, 3, … are given back for 1.0, 2.0, 3.0, …, on one rank."""

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
        (until(2, mean()._replace(separable=False)), False, True),
        (delayed(1, mean()), True, False),
        (delayed(1, mean()._replace(separable=False)), False, False),
    ],
)
def test_flags_are_those_of_what_is_inside(transform: Transform, separable: bool, idle_alone: bool) -> None:
    assert transform.separable is separable
    assert is_idle(transform, 1) is idle_alone


@pytest.mark.parametrize("make", [every, delayed])
def test_at_least_one_step(make: Any) -> None:
    with pytest.raises(ValueError, match="must be at least 1 step, got 0"):
        make(0, TEN)


@pytest.mark.parametrize("make", [until, after])
def test_steps_are_not_negative(make: Any) -> None:
    with pytest.raises(ValueError, match="needs a step >= 0, got -1"):
        make(-1, TEN)


# ---------------------------------------------------------------------- overlap

STATEFUL_MEAN = chain(mean(ring), nesterov(1.0, 0.0))


def seconds_for_five_steps(transform: Transform, compute_s: float) -> float:
    """5 steps of computing, then exchanging 100 bytes between two ranks: 2 · (0.25 + 0.5) = 1.5 s."""

    async def program(port: Port) -> None:
        state = transform.init(Bundle({"w": torch.zeros(50, dtype=torch.float16)}))
        for _ in range(5):
            await port.compute(lambda: None, flops=1000.0 * compute_s)
            _, state = await transform.apply(port, Bundle({"w": torch.zeros(50, dtype=torch.float16)}), state)
        await settled(state)

    return VirtualWorld(CLUSTER, 2).run(program).seconds


@pytest.mark.parametrize(
    ("transform", "compute_s", "seconds"),
    [
        (mean(ring), 2.0, 5 * (2.0 + 1.5)),
        (delayed(1, mean(ring)), 2.0, 5 * 2.0 + 1.5),  # hidden but for the last
        (delayed(1, mean(ring)), 1.5, 5 * 1.5 + 1.5),
        (delayed(1, mean(ring)), 1.0, 1.0 + 5 * 1.5),  # the exchange is slower: its time counts
        (delayed(1, STATEFUL_MEAN), 2.0, 5 * 2.0 + 1.5),
        (delayed(2, STATEFUL_MEAN), 2.0, 5 * 2.0 + 1.5),
        (delayed(2, mean(ring)), 1.0, 5 * 1.0 + 1.5),  # two exchanges share the link, which is idle half the time
    ],
)
def test_a_delay_hides_the_exchange_behind_computing(transform: Transform, compute_s: float, seconds: float) -> None:
    assert seconds_for_five_steps(transform, compute_s) == pytest.approx(seconds)


def test_a_longer_delay_hides_a_latency_that_is_longer_than_a_step() -> None:
    """Latency 3 s, steps of 1 s: an exchange between two takes 6 s, and 6 of them may be under way."""

    async def program(port: Port, delay: int) -> None:
        transform = delayed(delay, mean(ring))
        state = transform.init(bundle(0.0, 0.0))
        for _ in range(20):
            await port.compute(lambda: None, flops=1000.0)
            _, state = await transform.apply(port, bundle(0.0, 0.0), state)
        await settled(state)

    cluster = replace(CLUSTER, network=replace(CLUSTER.network, latency_s=3.0, bytes_per_s=1e9))
    seconds = [VirtualWorld(cluster, 2).run(lambda port, d=d: program(port, d)).seconds for d in (1, 6)]  # type: ignore[misc]
    assert seconds == pytest.approx([1 + 20 * 6, 20 + 6], abs=1e-6)


def test_a_bundle_that_waits_for_its_turn_is_not_touched_by_what_happens_to_its_tensors() -> None:
    """Gradients are overwritten by the next backward pass while an earlier exchange is still under way."""

    async def program(port: Port) -> list[float]:
        transform = delayed(2, STATEFUL_MEAN)
        gradient = torch.zeros(1)
        state, answers = transform.init(Bundle({"w": gradient})), []
        for step in range(6):
            gradient.fill_(step)
            answer, state = await transform.apply(port, Bundle({"w": gradient}), state)
            answers.append(-1.0 if answer is None else float(answer.flat))
        return answers

    assert VirtualWorld(CLUSTER, 2).run(program).results == [[-1, -1, 0, 1, 2, 3]] * 2


# ---------------------------------------------------------------------- saved in mid-flight


@pytest.mark.parametrize("inner", [mean(ring), STATEFUL_MEAN, chain(mean(), nesterov(0.5, 0.9))], ids=["0", "1", "2"])
@pytest.mark.parametrize("delay", [1, 2, 3])
@pytest.mark.parametrize("stop_after", [0, 1, 2, 5])
def test_saved_and_restored_in_mid_flight_equals_never_having_stopped(
    inner: Transform, delay: int, stop_after: int
) -> None:
    transform = delayed(delay, inner)

    def gradient(rank: int, step: int) -> Bundle:
        return Bundle({"u": torch.tensor([1.0 * step, rank]), "v": torch.tensor([[step * step + 10.0 * rank]])})

    async def steps(port: Port, state: State, first: int, last: int) -> tuple[list[list[float]], State]:
        answers = []
        for step in range(first, last):
            answer, state = await transform.apply(port, gradient(port.rank, step), state)
            answers.append([] if answer is None else answer.flat.tolist())
        return answers, state

    async def straight_on(port: Port) -> list[list[float]]:
        return (await steps(port, transform.init(gradient(0, 0)), 0, 9))[0]

    async def with_a_stop(port: Port) -> list[list[float]]:
        before, state = await steps(port, transform.init(gradient(0, 0)), 0, stop_after)
        source = saved(await settled(state), "state")
        layout = gradient(0, 0)
        fresh = restored(transform.init(layout), source, "state", layout)
        return before + (await steps(port, fresh, stop_after, 9))[0]

    whole, parts = (VirtualWorld(CLUSTER, 3).run(program).results for program in (straight_on, with_a_stop))
    assert whole == parts
    assert whole[0] is not None
    assert [not answer for answer in whole[0]] == [True] * delay + [False] * (9 - delay)
