"""EF21: its definition, the strategy it reduces to, and a minimum that error feedback does not reach."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import polytempo as pt
from laws.harness import HOST, Setting, run
from polytempo import collectives
from polytempo import compression as c
from polytempo import strategies as s
from polytempo.core import Bundle, Codec, Port, Route, Transform
from polytempo.worlds import VirtualWorld

NUM_RANKS, NUMEL, LAST = 4, 20, 13
Gradient = Callable[[int, Tensor], Tensor]


def quadratics(rank: int, theta: Tensor) -> Tensor:
    """Gradients of worker `rank`: of its own curvatures and its own minimum."""
    random = torch.Generator().manual_seed(rank)
    curvature = 0.1 + 0.9 * torch.rand(NUMEL, generator=random, dtype=torch.float64)
    return curvature * (theta - 3 * torch.randn(NUMEL, generator=random, dtype=torch.float64))


def minimum() -> Tensor:
    """The minimum of the workers' mean."""
    zeros, ones = torch.zeros(NUMEL, dtype=torch.float64), torch.ones(NUMEL, dtype=torch.float64)
    offsets = sum(quadratics(rank, zeros) for rank in range(NUM_RANKS))
    slopes = sum(quadratics(rank, ones) for rank in range(NUM_RANKS)) - offsets
    return -offsets / slopes


def descended(
    transform: Transform, gradient: Gradient, steps: int, rate: float = 0.1, num_ranks: int = NUM_RANKS
) -> Tensor:
    """The weights after so many steps along the answers, equal on all ranks."""

    async def program(port: Port) -> Tensor:
        theta = torch.zeros(NUMEL, dtype=torch.float64)
        state = transform.init(Bundle({"w": theta}))
        for _ in range(steps):
            found, state = await transform.apply(port, Bundle({"w": gradient(port.rank, theta)}), state)
            assert found is not None
            theta = theta - rate * found.flat
        return theta

    first, *others = VirtualWorld(HOST, num_ranks).run(program).results
    assert all(torch.equal(first, other) for other in others)
    return first


def distance(transform: Transform, steps: int, rate: float = 0.1) -> float:
    return float((descended(transform, quadratics, steps, rate) - minimum()).norm())


def test_it_comes_to_the_minimum_where_feedback_stays_at_a_distance() -> None:
    codec = c.top_k(0.1)
    assert distance(c.differences(codec, exact_below=0), 900) < 1e-10
    assert distance(c.through(c.feedback(codec), exact_below=0), 500) > 0.01


@pytest.mark.parametrize(
    ("codec", "route"),
    [
        (c.exact(), None),
        (c.bf16(), None),
        (c.int8(block=4), None),
        (c.int8(block=4), c.all_gather),
        (c.one_bit(), None),
        (c.random_k(0.4), collectives.ring),
        (c.top_k(0.3), c.reduce_scatter),
        (c.chunk_top_k(0.4), None),
        (c.qsgd(levels=127, bucket=4), None),
    ],
    ids=lambda given: getattr(given, "__name__", str(given)),
)
def test_every_codec_and_route_comes_to_the_minimum(codec: Codec, route: object) -> None:
    """A rounding of a sum that no rank knows of would stay in the mean for ever."""
    assert distance(c.differences(codec, route, exact_below=0), 150, 0.3) < 1e-6  # type: ignore[arg-type]


def test_each_step_is_that_of_the_paper() -> None:
    """h ← h + C(g - h) on each worker, by plain torch; the step by the mean of h."""
    codec = c.top_k(0.1)
    theta, held = torch.zeros(NUMEL, dtype=torch.float64), []
    for step in range(30):
        gradients = [quadratics(rank, theta) for rank in range(NUM_RANKS)]
        if step == 0:
            held = gradients
        else:
            sent = [codec.encode(g - h)[0] for g, h in zip(gradients, held, strict=True)]
            held = [h + codec.decode(wire, h) for wire, h in zip(sent, held, strict=True)]
        theta = theta - 0.1 * torch.stack(held).mean(0)
    found = descended(c.differences(codec, exact_below=0), quadratics, 30)
    torch.testing.assert_close(found, theta, rtol=0, atol=1e-12)


def test_equal_workers_are_one() -> None:
    alike = c.differences(c.top_k(0.1), exact_below=0)
    two, five = (descended(alike, lambda _, theta: quadratics(0, theta), 40, num_ranks=n) for n in (2, 5))
    torch.testing.assert_close(two, five, rtol=0, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("uneven", [False, True])
def test_with_a_codec_that_loses_nothing_it_is_synchronous_sgd(optimizer: str, uneven: bool) -> None:
    found, same = (
        run(strategy, 3, LAST, Setting(optimizer), uneven=uneven)[0][0].history[-1]
        for strategy in (s.ef21(c.top_k(1.0), exact_below=0), s.sync_sgd())
    )
    torch.testing.assert_close(found, same, rtol=0, atol=1e-12)


@pytest.mark.parametrize("turns", [(4, 4, 2), (4, 1, 4)], ids=str)
def test_another_number_of_ranks_begins_again_with_gradients_in_full(turns: tuple[int, ...]) -> None:
    """The state of 4 ranks at 2 of them: an estimate of the others would stay in the sum.

    A resume gives rank r the state of the saved rank r mod N, so after 1 of them 4 would have one estimate.
    """
    transform = c.differences(c.top_k(0.1), exact_below=0)
    like = Bundle({"w": torch.zeros(NUMEL, dtype=torch.float64)})

    async def step(port: Port, states: list[object]) -> tuple[Tensor, object]:
        gradient = Bundle({"w": quadratics(port.rank, like.flat)})
        found, state = await transform.apply(port, gradient, states[port.rank])
        assert found is not None
        return found.flat, state

    states: list[object] = [transform.init(like)]
    for num_ranks in turns:
        resumed = [states[rank % len(states)] for rank in range(num_ranks)]
        results = VirtualWorld(HOST, num_ranks).run(partial(step, states=resumed)).results
        states = [state for _, state in results]
        expected = sum(quadratics(rank, like.flat) for rank in range(num_ranks)) / num_ranks
        torch.testing.assert_close(results[0][0], expected, rtol=0, atol=1e-12)


def test_16_bit_gradients_have_estimates_of_32_bits() -> None:
    """A large estimate in bfloat16 would lose a small difference."""
    transform = c.differences(c.random_k(0.5), exact_below=0)

    async def program(port: Port) -> Tensor:
        state = transform.init(Bundle({"w": torch.zeros(NUMEL, dtype=torch.bfloat16)}))
        for step in range(40):
            given = Bundle({"w": torch.full((NUMEL,), 1.0 if step == 0 else 1.0078125, dtype=torch.bfloat16)})
            _, state = await transform.apply(port, given, state)
        return state.total.flat  # type: ignore[no-any-return]

    for total in VirtualWorld(HOST, 3).run(program).results:
        assert total.dtype is torch.float32
        torch.testing.assert_close(total, torch.full((NUMEL,), 1.0078125), rtol=0, atol=0.003)


@pytest.mark.parametrize("codec", [c.feedback(c.top_k(0.1)), c.dgc(0.1), c.terngrad(), c.random_k(0.1, unbiased=True)])
def test_codecs_with_a_memory_or_large_errors_are_refused(codec: Codec) -> None:
    with pytest.raises(ValueError, match=r"use it without feedback"):
        s.ef21(codec)


@pytest.mark.parametrize("codec", [c.bf16(), c.fp16()], ids=str)
@pytest.mark.parametrize("route", [collectives.native, collectives.ring, collectives.tree])
def test_casts_over_routes_that_add_wires_are_refused(codec: Codec, route: Route) -> None:
    with pytest.raises(pt.errors.Incompatible, match=f"PT2804: route={route.__name__} adds"):  # type: ignore[attr-defined]
        s.ef21(codec, route)
    assert all(s.ef21(codec, remedy) for remedy in (None, c.reduce_scatter, c.all_gather))
    assert s.ef21(c.exact(), route)


def test_it_learns_digits_with_the_momentum_of_the_job() -> None:
    losses = [pt.simulate(pt.jobs.find("digits"), "ef21()", workers=4, steps=200, seed=seed).loss for seed in (0, 1)]
    print(losses)
    assert max(losses) < 0.3


def test_an_exchange_that_no_step_uses_changes_nothing() -> None:
    transform = c.differences(c.top_k(0.1), exact_below=0)

    async def program(port: Port) -> bool:
        like = torch.zeros(NUMEL, dtype=torch.float64)
        state = transform.init(Bundle({"w": like}))
        answers = []
        for step in range(4):
            for _ in range(2):
                found, after = await transform.apply(port, Bundle({"w": quadratics(port.rank, like + step)}), state)
                assert found is not None
                answers.append(found.flat.clone())
                found.flat.zero_()  # as an optimizer or a clip may change it
            state = after
        return all(torch.equal(a, b) for a, b in zip(answers[::2], answers[1::2], strict=True))

    assert all(VirtualWorld(HOST, 3).run(program).results)
