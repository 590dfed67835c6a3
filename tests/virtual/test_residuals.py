"""Nothing of a gradient is lost when a run is saved, crashes, grows or shrinks: each residual goes to one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import CLUSTER
from polytempo import aggregation, compression
from polytempo.core import Bundle, Port, Residual, State, Transform
from polytempo.core.state import Saved, restored, saved
from polytempo.worlds import VirtualWorld

c = compression
SHAPES = {"w": (13, 7), "b": (5,), "t": (3, 4, 2)}

TRANSFORMS: dict[str, Transform] = {
    "two-sided codes": c.through(c.feedback(c.one_bit()), exact_below=4),
    "codes everywhere": c.through(c.feedback(c.int8()), route=c.all_gather, exact_below=4),
    "a few entries": c.through(c.feedback(c.top_k(0.1)), exact_below=4),
    "entries above a threshold": c.through(c.feedback(c.threshold(0.5)), exact_below=4),
    "momentum corrected": c.through(c.dgc(0.1, momentum=0.0, dense_below=0), exact_below=4),
    "low rank": aggregation.low_rank(1, exact_below=4),
}


def gradient(rank: int, step: int, dtype: torch.dtype = torch.float64) -> Bundle:
    random = torch.Generator().manual_seed(100 * step + rank)
    return Bundle(
        {name: torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype) for name, shape in SHAPES.items()}
    )


MOMENTUM = 0.75
HEAVY = c.through(c.dgc(0.1, momentum=MOMENTUM, dense_below=0), exact_below=0)


def run(
    transform: Transform, steps: range, states: list[State], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, list[State]]:
    """The sum of the steps' answers, which all ranks have alike, and the ranks' states afterwards."""

    async def program(port: Port) -> tuple[Tensor, State]:
        total, state = torch.zeros_like(gradient(0, 0).flat), states[port.rank]
        for step in steps:
            answer, state = await transform.apply(port, gradient(port.rank, step, dtype), state)
            assert answer is not None
            total += answer.flat
        return total, state

    results = [result for result in VirtualWorld(CLUSTER, len(states)).run(program).results if result is not None]
    assert all(torch.equal(total, results[0][0]) for total, _ in results)
    return results[0][0], [state for _, state in results]


def mean_gradients(steps: range, num_ranks: int) -> Tensor:
    return torch.stack([gradient(r, step).flat / num_ranks for step in steps for r in range(num_ranks)]).sum(0)


def residuals(state: Any) -> dict[str, Tensor]:
    """The residual of each parameter that has one."""
    if isinstance(state, dict):
        return {
            name: value.residual for name, part in state.items() for value in leaves(part) if value.residual is not None
        }
    return {k: v for part in state for k, v in residuals(part).items()} if isinstance(state, tuple) else {}


def leaves(state: Any) -> list[Residual]:
    if isinstance(state, Residual):
        return [state]
    return [leaf for part in state for leaf in leaves(part)] if isinstance(state, tuple) else []


def total_residual(states: list[State]) -> Tensor:
    """The total of all ranks' residuals, over all parameters."""
    total = gradient(0, 0)
    total.flat.zero_()
    for state in states:
        for name, residual in residuals(state).items():
            total.views[name].add_(residual)
    return total.flat


def resumed(
    transform: Transform, states: list[State], num_ranks: int, dtype: torch.dtype = torch.float64
) -> list[State]:
    """The rule of `training.observe.resumption.load`: leaves of rank r mod N, and the residuals of ranks r, r + N',
    r + 2N', …"""
    layout = gradient(0, 0, dtype)
    written = [saved(state, "gradients") for state in states]
    through_disk = [Saved({k: t.clone() for k, t in one.tensors.items()}, dict(one.scalars)) for one in written]
    return [
        restored(
            transform.init(layout),
            through_disk[rank % len(states)],
            "gradients",
            layout,
            [through_disk[s] for s in range(rank, len(states), num_ranks)],
        )
        for rank in range(num_ranks)
    ]


def memories(states: list[State]) -> tuple[Tensor, Tensor]:
    """Σ u and Σ v of `dgc` over all ranks."""
    sums = gradient(0, 0), gradient(0, 0)
    for total, which in zip(sums, ("u", "v"), strict=True):
        total.flat.zero_()
        for state in states:
            for name, memory in state.codecs.items():  # type: ignore[union-attr]
                residual = getattr(memory, which).residual
                if residual is not None:
                    total.views[name].add_(residual)
    return sums[0].flat, sums[1].flat


@pytest.mark.parametrize("numbers", [(4, 4), (2, 4), (4, 2), (3, 1), (2, 5, 3)], ids=str)
def test_momentum_is_neither_copied_nor_dropped_when_ranks_come_or_go(numbers: tuple[int, ...]) -> None:
    states = [HEAVY.init(gradient(0, 0)) for _ in range(numbers[0])]
    for life, num_ranks in enumerate(numbers[1:]):
        _, states = run(HEAVY, range(3 * life, 3 * life + 3), states)
        before = memories(states)
        assert all(total.norm() > 0.1 for total in before)
        states = resumed(HEAVY, states, num_ranks)
        torch.testing.assert_close(memories(states), before, rtol=1e-12, atol=1e-12)


def test_what_is_still_to_come_after_growth_is_what_was_to_come_before() -> None:
    """Every step at ratio 1 sends Σ u, so zeros as gradients show it: m · Σ u, m² · Σ u, …"""
    transform = c.through(c.dgc(1.0, momentum=MOMENTUM), exact_below=0)
    _, states = run(transform, range(3), [transform.init(gradient(0, 0)) for _ in range(2)])
    expected = memories(states)[0] * (MOMENTUM + MOMENTUM**2)
    for num_ranks in (4, 2):
        states = resumed(transform, states, num_ranks)

    async def program(port: Port) -> Tensor:
        total, state = torch.zeros_like(expected), states[port.rank]
        for _ in range(2):
            nothing = gradient(0, 0)
            nothing.flat.zero_()
            answer, state = await transform.apply(port, nothing, state)
            assert answer is not None
            total += answer.flat
        return total

    first, *_ = VirtualWorld(CLUSTER, 2).run(program).results
    torch.testing.assert_close(first, expected, rtol=1e-12, atol=1e-12)


def test_alone_what_was_not_sent_is_given_once_and_its_momentum_stops() -> None:
    _, states = run(HEAVY, range(3), [HEAVY.init(gradient(0, 0)) for _ in range(3)])
    held_v = memories(states)[1]
    answers, after = run(HEAVY, range(3, 5), resumed(HEAVY, states, 1))
    torch.testing.assert_close(answers, mean_gradients(range(3, 5), 1) + held_v, rtol=1e-12, atol=1e-12)
    assert not any(total.any() for total in memories(after))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_alone_what_is_given_to_a_large_gradient_leaves_it_finite(name: str) -> None:
    """The largest float16 is 65504: with more of the same sign that is the answer."""
    transform, dtype = TRANSFORMS[name], torch.float16
    _, states = run(transform, range(3), [transform.init(gradient(0, 0, dtype)) for _ in range(2)], dtype)
    (heir,) = resumed(transform, states, 1, dtype)
    for residual in residuals(heir).values():
        residual.mul_(1e6)
    left = total_residual([heir])
    assert left.abs().max() > 1000
    given = 65504 * left.sign().to(dtype)

    async def program(port: Port) -> Tensor:
        answer, _ = await transform.apply(port, gradient(0, 0, dtype).with_flat(given.clone()), heir)
        assert answer is not None
        return answer.flat

    (answer,) = VirtualWorld(CLUSTER, 1).run(program).results
    assert answer is not None
    assert torch.equal(answer, given)


@pytest.mark.parametrize("numbers", [(4, 4), (2, 5), (2, 4, 3, 1)], ids=str)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_what_is_applied_and_the_residuals_are_the_sum_of_all_gradients(name: str, numbers: tuple[int, ...]) -> None:
    transform = TRANSFORMS[name]
    states = [transform.init(gradient(0, 0)) for _ in range(numbers[0])]
    applied = expected = torch.zeros_like(gradient(0, 0).flat)
    for life, num_ranks in enumerate(numbers):
        before = total_residual(states)
        states = resumed(transform, states, num_ranks)
        torch.testing.assert_close(total_residual(states), before, rtol=1e-12, atol=1e-12)
        steps = range(5 * life, 5 * life + 5)
        answers, states = run(transform, steps, states)
        applied, expected = applied + answers, expected + mean_gradients(steps, num_ranks)
        torch.testing.assert_close(applied + total_residual(states), expected, rtol=1e-12, atol=1e-12)
    if numbers[-1] == 1:  # alone, nothing is held back
        torch.testing.assert_close(applied, expected, rtol=1e-12, atol=1e-12)


HELD_IN = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


@pytest.mark.parametrize(("before", "after"), [(a, b) for a in HELD_IN for b in HELD_IN if a is not b], ids=str)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_run_goes_on_in_another_dtype(name: str, before: torch.dtype, after: torch.dtype) -> None:
    """Residuals stay the same, in a dtype for sums with gradients, and wires fit their destination."""
    transform = TRANSFORMS[name]
    _, states = run(transform, range(3), [transform.init(gradient(0, 0, before)) for _ in range(2)], before)
    left = total_residual(states)
    states = resumed(transform, states, 2, after)
    assert {residual.dtype for state in states for residual in residuals(state).values()} == {HELD_IN[after]}
    torch.testing.assert_close(total_residual(states), left, rtol=1e-6, atol=1e-6)
    answers, states = run(transform, range(3, 6), states, after)
    expected = torch.stack([gradient(r, step, after).flat.double() / 2 for step in range(3, 6) for r in range(2)]).sum(
        0
    )
    rounding = 6 * 4 * torch.finfo(after).eps  # of answers, and of shares
    torch.testing.assert_close(answers + total_residual(states), left + expected, rtol=0, atol=max(rounding, 1e-5))
