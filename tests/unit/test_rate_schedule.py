"""A schedule by the place of a batch in the run: every schedule of torch, asked for steps in any order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim import lr_scheduler as schedules
from torch.optim.lr_scheduler import LRScheduler

from polytempo.core.calls.refusals import Incompatible
from polytempo.training.served.rate_schedule import RateSchedule, check_schedule

STEPS = 12
SCHEDULES: dict[str, Callable[[Optimizer, int], LRScheduler]] = {
    "lambda": lambda o, steps: schedules.LambdaLR(o, [lambda step: 0.9**step, lambda step: 1 / (1 + step)]),
    "multiplicative": lambda o, steps: schedules.MultiplicativeLR(o, lambda step: 0.7),
    "step": lambda o, steps: schedules.StepLR(o, 3, 0.1),
    "exponential": lambda o, steps: schedules.ExponentialLR(o, 0.9),
    "cosine": lambda o, steps: schedules.CosineAnnealingLR(o, STEPS),
    "restarts": lambda o, steps: schedules.CosineAnnealingWarmRestarts(o, 3),
    "linear": lambda o, steps: schedules.LinearLR(o, 0.1, 0.0, STEPS),
    "polynomial": lambda o, steps: schedules.PolynomialLR(o, STEPS, 2.0),
    "one cycle": lambda o, steps: schedules.OneCycleLR(o, 0.5, total_steps=STEPS),
    "cyclic": lambda o, steps: schedules.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "sequential": lambda o, steps: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, 1.0, 4), schedules.ExponentialLR(o, 0.8)], [4]
    ),
    "chained": lambda o, steps: schedules.ChainedScheduler(
        [schedules.ConstantLR(o, 0.5, 3), schedules.ExponentialLR(o, 0.9)]
    ),
}


def optimizer(kind: Any = SGD) -> Optimizer:
    """Two parameter groups."""
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": lr} for lr in (0.1, 0.3)]
    return SGD(groups, momentum=0.9) if kind is SGD else Adam(groups)


def options(of: Optimizer) -> list[tuple[Any, ...]]:
    return [(group["lr"], group.get("momentum"), group.get("betas")) for group in of.param_groups]


def plain(make: Callable[[Optimizer, int], LRScheduler], kind: Any) -> list[list[tuple[Any, ...]]]:
    """The usual loop's rate in each step."""
    own = optimizer(kind)
    schedule, found = make(own, STEPS), []
    for step in range(STEPS):
        found.append(options(own))
        own.step()
        if step < STEPS - 1:
            schedule.step()
    return found


@pytest.mark.parametrize("kind", [SGD, Adam])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_step_has_the_rates_of_the_plain_loop_in_any_order(name: str, kind: Any) -> None:
    expected, own = plain(SCHEDULES[name], kind), optimizer(kind)
    schedule = RateSchedule(own, SCHEDULES[name], steps_per_epoch=STEPS, batches=STEPS)
    for step in (0, 1, 5, 2, 5, 6, 0, 11, 10, 3, 11):
        schedule.go_to(step)
        assert options(own) == expected[step]
    late = optimizer(kind)
    RateSchedule(late, SCHEDULES[name], steps_per_epoch=STEPS, batches=STEPS).go_to(7)
    assert options(late) == expected[7], "a worker that begins late"


@pytest.mark.parametrize(
    ("steps", "batches", "expected"),
    [
        (3, 3, [0, 1, 2, 3, 4, 5]),  # one worker
        (2, 4, [0, 0, 1, 1, 2, 2, 3, 3]),  # two
        (1, 4, [0, 0, 0, 0, 1, 1, 1, 1]),  # three; an epoch has a whole number of steps
        (2, 5, [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]),
        (1, 1, [0, 1, 2]),  # more workers than batches
    ],
)
def test_the_step_of_each_batch(steps: int, batches: int, expected: list[int]) -> None:
    own = RateSchedule(optimizer(), SCHEDULES["step"], steps_per_epoch=steps, batches=batches)
    assert [own.step_of(*divmod(ticket, batches)) for ticket in range(len(expected))] == expected


def test_learning_rates_that_are_tensors_change_in_place() -> None:
    rate = torch.tensor(0.1)
    own = SGD([nn.Parameter(torch.ones(2))], lr=rate, foreach=False)
    schedule = RateSchedule(own, SCHEDULES["exponential"], steps_per_epoch=STEPS, batches=STEPS)
    schedule.go_to(4)
    schedule.go_to(2)
    assert own.param_groups[0]["lr"] is rate
    assert math.isclose(rate.item(), 0.081, rel_tol=1e-6)


@pytest.mark.parametrize(("name", "kind"), [("one cycle", SGD), ("cyclic", SGD), ("one cycle", Adam)])
def test_what_the_shards_would_not_hear_of_is_refused(name: str, kind: Any) -> None:
    with pytest.raises(ValueError, match=r"LR moves more than lr, .*; use cycle_momentum=False, or easgd"):
        check_schedule(optimizer(kind), SCHEDULES[name], STEPS, ("lr",))
    check_schedule(optimizer(kind), SCHEDULES[name], STEPS, ("lr", "momentum", "betas"))
    check_schedule(optimizer(kind), SCHEDULES[name], STEPS, None)


def test_a_schedule_that_waits_for_a_score_is_refused() -> None:
    with pytest.raises(Incompatible, match="PT1551"):
        check_schedule(optimizer(), lambda o, steps: schedules.ReduceLROnPlateau(o), STEPS, None)


@pytest.mark.parametrize(
    "make",
    [
        lambda o, steps: schedules.LambdaLR(o, lambda step: min(1.0, step / (steps // 4))),
        lambda o, steps: schedules.OneCycleLR(o, 0.1, total_steps=steps, pct_start=0.5, cycle_momentum=False),
    ],
    ids=["warm-up for a quarter of an epoch", "one cycle, up for half of an epoch"],
)
def test_a_schedule_is_checked_with_the_steps_of_the_run(make: Any) -> None:
    """Both divide by zero where an epoch has two steps, and only there."""
    check_schedule(optimizer(), make, STEPS, ("lr",))
