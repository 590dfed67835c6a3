"""Learning rates of a larger batch, and how they go as epochs go by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import polytempo as pt
from polytempo.training.checkpoint.optimizer_state import schedule_restore, schedule_saved
from polytempo.training.served.rate_schedule import RateSchedule

lb = pt.large_batch


def test_rates_grow_with_the_batch() -> None:
    assert (lb.linear(8), lb.square_root(16)) == (8, 4)
    assert lb.adam(4, 0.001, (0.9, 0.999), 1e-8) == {
        "lr": 0.002,
        "betas": (pytest.approx(0.6), pytest.approx(0.996)),
        "eps": 5e-9,
    }
    with pytest.raises(ValueError, match="can be 10 times as large at most, got 11"):
        lb.adam(11, 0.001)
    with pytest.raises(ValueError, match="times must be a positive number, got 0"):
        lb.linear(0)


def rates(*factors: Any, steps: int, steps_per_epoch: int = 2) -> list[float]:
    """The learning rates of the first steps, of 1."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = lb.schedule(*factors)(optimizer, steps_per_epoch)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_rates_warm_up_and_fall_step_by_step() -> None:
    """Goyal: from η to kη in equal increments; falls count from the beginning of the run."""
    assert rates(lb.warm_up(2, start=0.2), steps=6) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])
    assert rates(lb.warm_up(1, start=0.2, constant=True), lb.falling([1.5]), steps=5) == pytest.approx(
        [0.2, 0.2, 1, 0.1, 0.1]
    )
    assert rates(lb.polynomial(2, 0.5), steps=6) == pytest.approx([1, 0.75**0.5, 0.5**0.5, 0.5, 0, 0])
    assert rates(lb.cosine(2, end=0.1), steps=6) == pytest.approx(
        [1, 0.1 + 0.45 * (1 + 0.5**0.5), 0.55, 0.1 + 0.45 * (1 - 0.5**0.5), 0.1, 0.1]
    )


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: lb.warm_up(float("nan")), "takes 0 epochs or more, from 0 to 1 times the rate; got nan from 0"),
        (lambda: lb.warm_up(5, start=2), "got 5 from 2"),
        (lambda: lb.cosine(9, end=-0.1), "a cosine ends at a part of the rate, 0 or more, got end=-0.1"),
        (lambda: lb.cosine(0), "epochs must be a positive number, got 0"),
        (lambda: lb.falling([30], factor=-0.1), "factor must be a positive number, got -0.1"),
        (lambda: lb.falling(30), r"got 30; write falling\(\[30\]\)"),
        (lambda: lb.polynomial(9, power=0), "power must be a positive number, got 0"),
    ],
)
def test_rates_that_no_run_could_have_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_a_schedule_resumes_and_serves_tickets() -> None:
    make = lb.schedule(lb.warm_up(1, start=0.5), lb.cosine(4))
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer, 4)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    saved, rate = schedule_saved(scheduler), optimizer.param_groups[0]["lr"]
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    resumed = make(other, 4)
    schedule_restore(resumed, saved)
    other.load_state_dict(optimizer.state_dict())
    for one in (optimizer, other):
        one.step()
    scheduler.step()
    resumed.step()
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] != rate
    served = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    tickets = RateSchedule(served, make, steps_per_epoch=4, batches=12)
    tickets.go_to(tickets.step_of(1, 3))
    assert served.param_groups[0]["lr"] == rate
