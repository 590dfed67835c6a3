"""Delayed answers: the virtual time that they hide, and their state when it is saved in mid-flight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers import CLUSTER, bundle
from polytempo.aggregation import mean, nesterov
from polytempo.cluster import lognormal
from polytempo.collectives import ring
from polytempo.core import Bundle, Port, State, Transform, chain
from polytempo.core.state import restored, saved, settled
from polytempo.synchronization import delayed
from polytempo.worlds import VirtualWorld

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
        (delayed(2, mean(ring)), 1.0, 5 * 1.0 + 1.5 + 0.5),  # nothing waits; the last one queues behind the one before
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


def test_exchanges_under_way_at_once_do_not_mix_up_their_messages() -> None:
    """Four rings among five ranks that compute for very different times."""

    async def program(port: Port) -> list[list[float]]:
        transform = delayed(4, mean(ring))
        state, answers = transform.init(bundle(0.0)), []
        for step in range(30):
            await port.compute(lambda: None, flops=1000.0)
            answer, state = await transform.apply(port, bundle(*[float(step)] * 7), state)
            answers.append([] if answer is None else answer.flat.tolist())
        return answers

    cluster = replace(CLUSTER, network=replace(CLUSTER.network, bytes_per_s=1e9), stragglers=lognormal(1.0))
    outcome = VirtualWorld(cluster, 5).run(program)
    assert outcome.results[0] is not None
    assert outcome.results[0][4:] == [pytest.approx([step] * 7) for step in range(26)]
    assert outcome.results == [outcome.results[0]] * 5


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
