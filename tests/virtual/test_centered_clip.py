"""Centered clipping, and momenta of workers against wrong ranks that hide among the right ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import polytempo as pt
from helpers import CLUSTER, applied, bundles, normal
from laws.harness import Setting, run
from polytempo import compression as c
from polytempo import strategies as s
from polytempo.aggregation import Merge, centered_clip, median, merged
from polytempo.core import Bundle, Port, Strategy
from polytempo.worlds import VirtualWorld
from some_cases import examples

FromLast = Callable[[Sequence[Tensor], Tensor], Tensor]
"""A merge that begins at its last answer."""


def by_definition(rows: list[list[float]], center: list[float], tau: float, iterations: int) -> list[float]:
    for _ in range(iterations):
        total = [0.0] * len(center)
        for row in rows:
            moved = [x - y for x, y in zip(row, center, strict=True)]
            length = sum(each * each for each in moved) ** 0.5
            part = 1.0 if length <= tau else tau / length
            total = [a + part * b for a, b in zip(total, moved, strict=True)]
        center = [y + each / len(rows) for y, each in zip(center, total, strict=True)]
    return center


@settings(max_examples=examples(40))
@given(st.integers(1, 6), st.floats(0.01, 10), st.integers(1, 4), st.integers(0, 10**6))
def test_it_is_its_definition(num_ranks: int, tau: float, iterations: int, seed: int) -> None:
    rows = torch.randn(num_ranks + 1, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    clip = cast(FromLast, centered_clip(tau, iterations))
    expected = by_definition(rows[1:].tolist(), rows[0].tolist(), tau, iterations)
    torch.testing.assert_close(clip(list(rows[1:]), rows[0]).tolist(), expected)
    assert torch.equal(clip([rows[0]] * num_ranks, rows[0]), rows[0])


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_with_an_endless_radius_it_is_the_mean(optimizer: str) -> None:
    for ours, plain in (
        (s.robust_sgd(centered_clip(inf)), s.sync_sgd()),
        (s.robust_sgd(centered_clip(inf, 3)), s.sync_sgd()),
        (s.diloco(4, merge=centered_clip(inf)), s.diloco(4)),
    ):
        clipped, mean = run(ours, 3, 13, Setting(optimizer))[0], run(plain, 3, 13, Setting(optimizer))[0]
        torch.testing.assert_close(clipped[0].history, mean[0].history, rtol=1e-11, atol=1e-13)


@settings(max_examples=examples(60))
@given(st.integers(1, 5), st.integers(1, 5), st.floats(-3, 30), st.integers(1, 4), st.integers(0, 10**6))
def test_wrong_ranks_move_it_by_a_part_of_the_radius(
    wrong: int, right: int, power: float, iterations: int, seed: int
) -> None:
    """Ranks without numbers add nothing, and others at most f τ / n in each iteration."""
    random, tau = torch.Generator().manual_seed(seed), 0.7
    honest = list(torch.randn(right, 5, dtype=torch.float64, generator=random))
    lies = list(10**power * torch.randn(wrong, 5, dtype=torch.float64, generator=random))
    last = torch.randn(5, dtype=torch.float64, generator=random)
    clip = cast(FromLast, centered_clip(tau, iterations))
    without = clip([*honest, *[torch.full((5,), torch.nan, dtype=torch.float64)] * wrong], last)
    moved = (clip([*honest, *lies], last) - without).norm()
    assert without.isfinite().all()
    assert moved <= iterations * wrong * tau / (wrong + right) * (1 + 1e-9)
    if power > 1:
        far = clip([*honest, *[lies[0]] * wrong], last)
        assert (far - without).norm() > 0.3 * wrong * tau / (wrong + right)


# ---------------------------------------------------------------------- a little is enough

RANKS, WRONG, STEPS, SIZE = 10, 3, 400, 30
SPREAD = 1.5


def hidden(merge: FromLast) -> Merge:
    """The first ranks send the right ones' mean, less `SPREAD` of their deviations in each element.

    Source: G. Baruch, M. Baruch and Y. Goldberg, "A little is enough: circumventing defenses for distributed learning",
    2019.
    """

    def attacked(buffers: Sequence[Tensor], last: Tensor) -> Tensor:
        right = torch.stack(list(buffers[WRONG:]))
        lie = right.mean(0) - SPREAD * right.std(0)
        return merge([*[lie] * WRONG, *buffers[WRONG:]], last)

    attacked.coordinate_wise = False  # type: ignore[attr-defined]
    attacked.from_last = True  # type: ignore[attr-defined]
    return cast("Merge", attacked)


def distance(strategy: Strategy, seed: int) -> float:
    """The mean |θ| of the last half of the steps: SGD on θ² / 2 with gradients θ + noise of deviation 1."""

    async def program(port: Port) -> float:
        random = torch.Generator().manual_seed(100 * seed + port.rank)
        theta = torch.ones(SIZE, dtype=torch.float64)
        state, total = strategy.gradients.init(Bundle({"w": theta})), 0.0
        for step in range(STEPS):
            gradient = theta + torch.randn(SIZE, generator=random, dtype=torch.float64)
            answer, state = await strategy.gradients.apply(port, Bundle({"w": gradient}), state)
            assert answer is not None
            theta = theta - 0.05 * answer.flat
            total += float(theta.abs().mean()) if step >= STEPS // 2 else 0.0
        return total / (STEPS // 2)

    found, *others = VirtualWorld(CLUSTER, RANKS).run(program).results
    assert found is not None
    assert all(found == other for other in others)
    return found


def far_off(momentum: float, seed: int) -> tuple[float, float]:
    """The distance against hidden ranks, and with right ones alone."""
    clip = centered_clip(10.0)
    wrong = distance(s.robust_sgd(hidden(cast(FromLast, clip)), momentum), seed)
    right = distance(s.robust_sgd(clip, momentum), seed)
    print(f"seed {seed}, momentum {momentum}: {wrong:.4f} with hidden ranks, {right:.4f} without")
    return wrong, right


@pytest.mark.parametrize("seed", range(3))
def test_without_momentum_a_small_constant_error_wins(seed: int) -> None:
    wrong, right = far_off(0.0, seed)
    assert wrong > 0.35
    assert right < 0.06


@pytest.mark.parametrize("seed", range(3))
def test_with_momentum_it_does_not(seed: int) -> None:
    wrong, right = far_off(0.9, seed)
    assert wrong < 0.15
    assert right < 0.06


# ---------------------------------------------------------------------- its places


def test_it_goes_on_from_its_last_answer() -> None:
    """Three steps of at most 0.5 towards 2."""
    transform = merged(centered_clip(0.5))

    async def program(port: Port) -> list[float]:
        state, found = transform.init(Bundle({"w": torch.zeros(1)})), []
        for _ in range(3):
            answer, state = await transform.apply(port, Bundle({"w": torch.tensor([2.0])}), state)
            assert answer is not None
            found.append(float(answer.flat))
        return found

    assert VirtualWorld(CLUSTER, 2).run(program).results == [[0.5, 1.0, 1.5]] * 2


def test_it_is_refused_where_nothing_is_remembered() -> None:
    with pytest.raises(pt.errors.Incompatible, match=r"PT2803: centered_clip\(tau=10.0, iterations=1\) begins at"):
        s.diloco(4, codec=c.bf16(), merge=centered_clip())
    with pytest.raises(pt.errors.Incompatible, match="PT2544"):
        pt.federated.fed_robust(merge=centered_clip())


def test_wrong_numbers_are_refused() -> None:
    for tau, iterations in ((0.0, 1), (float("nan"), 1), (1.0, 0)):
        with pytest.raises(ValueError, match="centered_clip needs tau above 0 and at least 1 iteration"):
            centered_clip(tau, iterations)
    for tau, iterations, says in (
        (True, 1, "tau must be a number, got True"),
        ("1", 1, "tau must be a number, got '1'"),
        (1.0, 1.5, r"iterations must be a whole number, got 1\.5"),
    ):
        with pytest.raises(ValueError, match=says):
            centered_clip(tau, iterations)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"momentum is at least 0 and below 1, got 1\.5"):
        s.robust_sgd(median, momentum=1.5)


def test_a_merge_with_memory_costs_its_memory() -> None:
    cost = pt.explain(s.robust_sgd(centered_clip()), 4, {"w": torch.empty(100)})
    assert cost.memory_bytes == 400
    assert cost.at(1).bytes == 4 * 3 * 400
    assert len(applied(merged(centered_clip()), bundles(normal(4)))) == 4
