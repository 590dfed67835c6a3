"""A step of the optimizer is one step, however many of its hooks torch runs."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

import polytempo as pt
from polytempo.one_host.hogwild import TurnHooks
from polytempo.worlds import ProcessWorld


class OnTopOfSgd(SGD):
    """torch runs the hooks of a step for this class, and again for SGD, once an SGD has been made."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Baton:
    """Counts."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def take(self, port: Any) -> None:
        self.calls.append("take")

    async def hand_on(self, port: Any) -> None:
        self.calls.append("hand on")


def drive(coroutine: Any) -> None:
    with suppress(StopIteration):
        coroutine.send(None)


def test_a_step_that_calls_its_parents_step_takes_one_turn() -> None:
    SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    model = nn.Linear(2, 1)
    optimizer, baton = OnTopOfSgd(model.parameters(), lr=0.1), Baton()
    world: Any = SimpleNamespace(drive=drive, port=None)
    hooks = TurnHooks(world, optimizer, "in_turn").watch()
    hooks._baton = baton  # type: ignore[assignment]
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert baton.calls == ["take", "hand on"] * 3


def test_a_step_that_calls_its_parents_step_counts_once() -> None:
    SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    model = nn.Linear(2, 1)
    optimizer = OnTopOfSgd(model.parameters(), lr=0.1)
    handle = pt.attach(model, optimizer, pt.strategies.local_sgd(period=4), world=ProcessWorld(0, [0]))
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert handle.replica.step == 3
    handle.detach()
