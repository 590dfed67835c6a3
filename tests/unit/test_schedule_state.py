"""A schedule that was saved as JSON and restored goes on as if it had never stopped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as schedules
from torch.optim.lr_scheduler import LRScheduler

from polytempo.training.checkpoint.optimizer_state import (
    optimizer_restore,
    optimizer_saved,
    schedule_restore,
    schedule_saved,
)

STEPS, CUT = 12, 4


class Slope:
    """A factor with settings of its own; PyTorch saves such an object's attributes."""

    def __init__(self) -> None:
        self.per_step = 0.05
        self.marks = (1, 2)

    def __call__(self, step: int) -> float:
        return 1 - self.per_step * step


def sequential(optimizer: Optimizer) -> LRScheduler:
    parts = [
        schedules.LinearLR(optimizer, start_factor=0.1, total_iters=3),
        schedules.MultiStepLR(optimizer, [3, 5], gamma=0.5),
    ]
    return schedules.SequentialLR(optimizer, parts, milestones=[3])


def chained(optimizer: Optimizer) -> LRScheduler:
    parts = [schedules.ExponentialLR(optimizer, 0.9), schedules.MultiStepLR(optimizer, [6, 6, 8], gamma=0.5)]
    return schedules.ChainedScheduler(parts, optimizer)


SCHEDULES: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "StepLR": lambda o: schedules.StepLR(o, step_size=3, gamma=0.5),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [2, 5, 7], gamma=0.1),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, max_lr=1.0, total_steps=STEPS + 1),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, T_max=STEPS),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, T_0=3),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
    "LambdaLR of an object": lambda o: schedules.LambdaLR(o, Slope()),
}


def optimizer(rate: float | Tensor) -> SGD:
    return SGD([nn.Parameter(torch.ones(2))], lr=rate, momentum=0.9)


def rates(made: Optimizer, schedule: LRScheduler, num_steps: int) -> list[float]:
    """The learning rate of each of the next steps."""
    seen = []
    for _ in range(num_steps):
        seen.append(float(made.param_groups[0]["lr"]))
        made.step()
        schedule.step()
    return seen


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_the_learning_rates_equal_never_having_stopped(make: Callable[[Optimizer], LRScheduler], tensor: bool) -> None:
    def begun() -> tuple[SGD, LRScheduler]:
        made = optimizer(torch.tensor(0.4) if tensor else 0.4)
        return made, make(made)

    straight = rates(*begun(), STEPS)
    first, second = begun(), begun()
    before = rates(*first, CUT)
    optimizer_restore(second[0], optimizer_saved(first[0]))
    schedule_restore(second[1], schedule_saved(first[1]))
    assert before + rates(*second, STEPS - CUT) == straight
    assert len(set(straight)) > 1


def test_what_json_cannot_hold_is_named() -> None:
    schedule = SCHEDULES["StepLR"](optimizer(0.1))
    schedule.rule = {"after": len}  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"StepLR: 'rule'\['after'\] is builtin_function_or_method, which JSON cannot"):
        schedule_saved(schedule)
