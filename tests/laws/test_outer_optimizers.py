"""Outer optimizers: torch's and the papers' recursions, and their reductions to simpler optimizers."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

import polytempo as pt
from laws.harness import HOST, Setting, run
from polytempo import strategies as s
from polytempo.aggregation import adam, delayed_nesterov, heavy_ball, nesterov, schedule_free
from polytempo.core import Bundle, Port, Strategy, Transform
from polytempo.worlds import VirtualWorld

ROUNDS = 9


def movements(seed: int = 0) -> list[Tensor]:
    print(f"seed {seed}")
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(11, generator=random, dtype=torch.float64) for _ in range(ROUNDS)]


def updates(transform: Transform, moved: list[Tensor]) -> list[Tensor]:
    """The answers to movements, one after the other."""

    async def program(port: Port) -> list[Tensor]:
        state, found = transform.init(Bundle({"w": torch.zeros_like(moved[0])})), []
        for each in moved:
            answer, state = await transform.apply(port, Bundle({"w": each.clone()}), state)
            assert answer is not None
            found.append(answer.flat.clone())
        return found

    return VirtualWorld(HOST, 1).run(program).results[0]


def same(one: Strategy, other: Strategy) -> None:
    """Both strategies end with the same bits on all ranks."""
    pairs = zip(run(one, 3, 13, Setting("adam"))[0], run(other, 3, 13, Setting("adam"))[0], strict=True)
    assert all(torch.equal(a.history[-1], b.history[-1]) for a, b in pairs)


def test_adam_is_torch_s() -> None:
    moved = movements()
    point = torch.nn.Parameter(torch.zeros_like(moved[0]))
    optimizer = torch.optim.Adam([point], lr=0.02, betas=(0.85, 0.97), eps=1e-4)
    ours = torch.zeros_like(moved[0])
    for each, update in zip(moved, updates(adam(0.02, 0.85, 0.97, 1e-4), moved), strict=True):
        point.grad = each
        optimizer.step()
        ours -= update
        torch.testing.assert_close(ours, point.detach(), rtol=0, atol=1e-14)


def test_adam_without_memory_and_a_large_epsilon_is_a_plain_step() -> None:
    moved = movements()
    for each, update in zip(moved, updates(adam(0.7e9, 0.0, 0.0, 1e9), moved), strict=True):
        torch.testing.assert_close(update, 0.7 * each, rtol=1e-8, atol=0)


def test_schedule_free_is_the_paper_s_recursion() -> None:
    moved = movements()
    z = x = y = torch.zeros_like(moved[0])
    ours = torch.zeros_like(moved[0])
    for t, (each, update) in enumerate(zip(moved, updates(schedule_free(1.3, 0.9), moved), strict=True), 1):
        z = z - 1.3 * each
        x = (1 - 1 / t) * x + z / t
        y = (1 - 0.9) * z + 0.9 * x
        ours -= update
        torch.testing.assert_close(ours, y, rtol=0, atol=1e-13)


def test_a_movement_that_repeats_takes_schedule_free_steps_of_half_the_rate() -> None:
    found = updates(schedule_free(1.0, 0.9), [torch.ones(1, dtype=torch.float64)] * 4)
    assert [float(each) for each in found] == pytest.approx([1.0, 0.55, 0.55, 0.55])


def test_schedule_free_without_a_mean_is_a_plain_step() -> None:
    same(s.diloco(4, outer_optimizer=schedule_free(0.7, 0.0)), s.diloco(4, 0.7, 0.0))


@pytest.mark.parametrize("immediate", [0.0, 1.0])
def test_a_momentum_that_moves_in_every_round_is_nesterov(immediate: float) -> None:
    same(s.diloco(4, outer_optimizer=delayed_nesterov(0.6, 0.8, 1, immediate)), s.diloco(4, 0.6, 0.8))


def test_several_rounds_of_delayed_nesterov_are_a_step_on_their_mean() -> None:
    moved = movements()
    delayed = updates(delayed_nesterov(0.7, 0.9, 3), moved)
    means = [torch.stack(moved[i : i + 3]).mean(0) for i in range(0, ROUNDS, 3)]
    for i, whole in enumerate(updates(nesterov(0.7, 0.9), means)):
        torch.testing.assert_close(torch.stack(delayed[3 * i : 3 * i + 3]).sum(0), whole, rtol=0, atol=1e-14)


def test_a_part_of_the_momentum_is_taken_in_advance() -> None:
    """The table: μ = 0.5, N = 2, c = 1, movements of 1. v is 0, 1, 1, 1.5, …; c μ v / N is taken in rounds between."""
    found = updates(delayed_nesterov(1.0, 0.5, 2, immediate=1.0), [torch.ones(1, dtype=torch.float64)] * 4)
    assert [float(each) for each in found] == pytest.approx([0.5, 0.5 + 0.25 * 1, 0.5 + 0.25 * 1, 0.5 + 0.25 * 1.5])


def test_a_given_nesterov_is_the_usual_one() -> None:
    same(s.diloco(4, outer_optimizer=nesterov(0.6, 0.8)), s.diloco(4, 0.6, 0.8))
    same(s.diloco(4, outer_optimizer=heavy_ball(0.6, 0.8)), s.slowmo(4, 0.6, 0.8))
    same(s.diloco(4, outer_optimizer=nesterov(1.0, 0.0)), s.diloco(4, 1.0, 0.0))
    same(s.streaming_diloco(5, 1, 0, 0.0, outer_optimizer=adam()), s.diloco(5, outer_optimizer=adam()))


@pytest.mark.parametrize("name", ["adam", "schedule_free(lr=2)", "delayed_nesterov", "heavy_ball", "nesterov(lr=1)"])
def test_outer_optimizers_have_names(name: str) -> None:
    made = pt.parse_strategy(f"diloco(outer_optimizer={name})")
    assert str(pt.parse_strategy(str(made))) == str(made)
    assert f"outer_optimizer={name.split('(')[0]}(" in str(made)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: adam(eps=0.0), "eps over 0"),
        (lambda: schedule_free(beta=1.0), "beta in [0, 1)"),
        (lambda: delayed_nesterov(momentum_every=0), "momentum_every >= 1"),
        (lambda: s.diloco(outer_lr=0.4, outer_optimizer=adam()), "one or the other"),
        (lambda: pt.parse_strategy("diloco(outer_optimizer=sgd)"), "there is no outer_optimizer 'sgd'"),
    ],
)
def test_impossible_outer_optimizers_are_refused(make: object, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        make()  # type: ignore[operator]
