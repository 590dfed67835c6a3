"""Loops of one's own in 16 bits with norm layers, against float32 masters that are written out by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import polytempo as pt
from polytempo import aggregation
from polytempo.aggregation.adasum import adaptive_sum
from polytempo.core import Strategy
from polytempo.engines.processes.worker import Result
from polytempo.worlds import ProcessWorld
from process.crew import batches, close, flat, squared, together

pytestmark = pytest.mark.process

RANKS, STEPS, PERIOD = 2, 6, 2
_CLOSE = 1e-6
"""Beginning at rounded parameters is 3e-3 off."""


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 3))


class ByHand:
    """A rank that computes with 16-bit parameters, except for norms, and steps float32 masters."""

    def __init__(self, rank: int) -> None:
        self.masters, self.rank = normed(), rank
        self.optimizer = AdamW(self.masters.parameters(), lr=0.02)

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        low = copy.deepcopy(self.masters)
        for layer in (low[0], low[4]):
            layer.bfloat16()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            answer = low(inputs.chunk(RANKS)[self.rank])
        squared(answer.float(), targets.chunk(RANKS)[self.rank]).backward()
        for master, parameter in zip(self.masters.parameters(), low.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        self.optimizer.step()


Vectors = list[list[Tensor]]
"""Each rank's tensors that meet."""


def means(found: Vectors) -> list[Tensor]:
    return [torch.stack(each).mean(0) for each in zip(*found, strict=True)]


class Outer:
    """θ ← θ_anchor - lr · (Δ + μv) with ν = 1, or lr · v with ν = 0, and v ← μv + Δ."""

    def __init__(self, lr: float, momentum: float, nesterov: int) -> None:
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov
        self.anchor = [p.detach().clone() for p in normed().parameters()]
        self.velocity = [torch.zeros_like(each) for each in self.anchor]

    def __call__(self, found: Vectors) -> list[Tensor]:
        moved = [a - m for a, m in zip(self.anchor, means(found), strict=True)]
        self.velocity = [self.momentum * v + d for v, d in zip(self.velocity, moved, strict=True)]
        ahead = [d + self.momentum * v if self.nesterov else v for d, v in zip(moved, self.velocity, strict=True)]
        self.anchor = [a - self.lr * each for a, each in zip(self.anchor, ahead, strict=True)]
        return self.anchor


class Adaptive:
    """θ ← θ - (Δ₀ ⊕ Δ₁)."""

    def __init__(self) -> None:
        self.anchor = [p.detach().clone() for p in normed().parameters()]

    def __call__(self, found: Vectors) -> list[Tensor]:
        moved = [[a - p for a, p in zip(self.anchor, each, strict=True)] for each in found]
        merged = [adaptive_sum(one, other) for one, other in zip(*moved, strict=True)]
        self.anchor = [a - each for a, each in zip(self.anchor, merged, strict=True)]
        return self.anchor


Meet = Callable[[Vectors], list[Tensor]]

ROWS: list[tuple[Strategy, Callable[[], Meet], int]] = [
    # the strategy, two ranks' parameters by hand, after how many steps
    (pt.strategies.local_sgd(PERIOD), lambda: means, PERIOD),
    (pt.strategies.parameter_averaging(PERIOD), lambda: means, PERIOD),
    (pt.strategies.gossip(aggregation.complete), lambda: means, 1),
    (pt.strategies.stochastic_gradient_push(aggregation.complete), lambda: means, 1),
    (pt.strategies.diloco(PERIOD, outer_lr=0.7, outer_momentum=0.9), lambda: Outer(0.7, 0.9, nesterov=1), PERIOD),
    (pt.strategies.slowmo(PERIOD, slow_momentum=0.7), lambda: Outer(1.0, 0.7, nesterov=0), PERIOD),
    (pt.strategies.adasum(), Adaptive, 1),
]


def by_hand(strategy: Strategy, meet: Meet, period: int) -> list[float]:
    ranks = [ByHand(rank) for rank in range(RANKS)]
    for step, (inputs, targets) in enumerate(batches(STEPS, torch.float32), 1):
        for each in ranks:
            each.step(inputs, targets)
        if step % period:
            continue
        every = [[p.detach() for p in each.masters.parameters()] for each in ranks]
        state = [[s[key] for s in each.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")] for each in ranks]
        met = [(every, meet(every)), *([(state, means(state))] if strategy.carries_optimizer else [])]
        for tensors, agreed in met:
            for own in tensors:
                torch._foreach_copy_(own, agreed)
    return flat(ranks[0].masters)


def test_parameters_that_are_exchanged_are_the_masters_whatever_norms_stand_beside_them() -> None:
    def work(world: ProcessWorld) -> Result:
        ends = []
        for strategy, _, _ in ROWS:
            net = normed()
            optimizer = AdamW(net.parameters(), lr=0.02)
            handle = pt.attach(net, optimizer, strategy, precision="bf16")
            for inputs, targets in batches(STEPS, torch.float32):
                optimizer.zero_grad()
                squared(net(inputs.chunk(RANKS)[world.rank]), targets.chunk(RANKS)[world.rank]).backward()
                optimizer.step()
            handle.detach()
            ends.append(flat(net))
        return ends

    first, second = together(RANKS, work)
    for (strategy, meet, period), mine, theirs in zip(ROWS, first, second, strict=True):
        assert mine == theirs, strategy
        assert close(mine, by_hand(strategy, meet(), period), _CLOSE), strategy
