"""The outer optimizer: torch.optim.SGD's Nesterov, on the movement since the anchor."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers import after_steps, bundle, bundles, flats, normal
from polytempo.aggregation import from_anchor, mean, nesterov
from polytempo.core import Bundle, Port, Transform, chain, stateless
from polytempo.synchronization import every


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.1, 0.5), (1.0, 0.99), (0.3, 0.0)])
def test_nesterov_equals_torch_step_by_step(lr: float, momentum: float) -> None:
    """The same gradients for ten steps."""
    gradients = normal(10)
    parameter = nn.Parameter(torch.zeros(6, dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=lr, momentum=momentum, nesterov=momentum > 0)
    expected = []
    for gradient in gradients:
        before = parameter.detach().clone()
        parameter.grad = gradient.clone()
        optimizer.step()
        expected.append(before - parameter.detach())
    supply = iter(gradients)

    async def next_gradient(port: Port, given: Bundle, state: None) -> tuple[Bundle, None]:
        return given.with_flat(next(supply).clone()), None

    steps = chain(Transform(lambda parameters: None, next_gradient), nesterov(lr, momentum))
    for update, reference in zip(after_steps(steps, 10, bundles(gradients[:1]))[0], expected, strict=True):
        torch.testing.assert_close(update, reference, rtol=1e-13, atol=1e-15)


def test_lr_1_and_momentum_0_hand_the_gradient_on() -> None:
    assert [flat.tolist() for flat in flats(nesterov(1.0, 0.0), [bundle(3.0, -7.0)])] == [[3.0, -7.0]]


def test_from_anchor_shows_what_moved_and_moves_the_anchor() -> None:
    """One parameter that grows by 1 a step; the inner transform doubles the movement it sees."""
    seen: list[float] = []

    async def move(port: Port, given: Bundle, state: None) -> tuple[Bundle, None]:
        return given.map(lambda flat: flat + 1), None

    async def look_and_double(port: Port, given: Bundle, state: None) -> tuple[Bundle, None]:
        seen.append(float(given.flat))
        return given.map(lambda flat: flat * 2), None

    training = chain(
        Transform(lambda parameters: None, move),
        every(2, from_anchor(Transform(lambda parameters: None, look_and_double))),
    )
    # anchor 10; steps to 11, 12: moved 10 - 12 = -2, so θ = 10 + 4 = 14 and anchor 14; to 15, 16: θ = 18; ...
    assert [float(values) for values in after_steps(training, 6, [bundle(10.0)])[0]] == [11, 14, 15, 18, 19, 22]
    assert seen == [-2.0, -2.0, -2.0]


def test_the_anchor_is_memory_of_its_own() -> None:
    """Whoever is given the answer may overwrite it; the next movement is still measured from the anchor."""

    async def spoil(port: Port, given: Bundle, state: None) -> tuple[Bundle, None]:
        given.flat.add_(1)
        return given, None

    in_place = chain(from_anchor(nesterov(0.5, 0.0)), Transform(lambda parameters: None, spoil))
    # half of the movement counts, then +1 by the spoiler: 5 moved 0 -> 5, spoiled 6; from anchor 5 moved 1 -> 5.5,
    # spoiled 6.5; from anchor 5.5 moved 1 -> 6, spoiled 7
    assert [float(values) for values in after_steps(in_place, 3, [bundle(5.0)])[0]] == [6, 6.5, 7]


def test_from_anchor_hands_the_share_on_to_the_mean() -> None:
    given = [bundle(0.0, share=0.75), bundle(0.0, share=0.25)]

    async def move_by_rank(port: Port, moving: Bundle) -> Bundle:
        return moving.map(lambda flat: flat + 4.0 * (port.rank + 1))

    moved_and_met = chain(stateless(move_by_rank), from_anchor(mean()))
    assert [float(flat) for flat in flats(moved_and_met, given)] == [5.0, 5.0]


def test_where_an_answer_is_late_the_parameters_return_to_the_anchor() -> None:
    async def not_at_first(port: Port, given: Bundle, state: int) -> tuple[Bundle | None, int]:
        return (None if state < 1 else given), state + 1

    async def move(port: Port, given: Bundle, state: None) -> tuple[Bundle, None]:
        return given.map(lambda flat: flat + 1), None

    skipping = chain(Transform(lambda parameters: 0, not_at_first), nesterov(0.5, 0.0))
    transform = chain(Transform(lambda parameters: None, move), from_anchor(skipping))
    # step 0: 1, no answer, back to the anchor 0. step 1: 1, moved -1, half of it: θ = 0.5.
    assert [float(values) for values in after_steps(transform, 2, [bundle(0.0)])[0]] == [0.0, 0.5]


@pytest.mark.parametrize(("lr", "momentum"), [(0.0, 0.9), (-1.0, 0.9), (0.7, 1.0), (0.7, -0.1)])
def test_impossible_constants_are_refused(lr: float, momentum: float) -> None:
    expected = rf"lr > 0 and momentum in \[0, 1\), got {lr} and {momentum}"
    with pytest.raises(ValueError, match=expected):
        nesterov(lr, momentum)
