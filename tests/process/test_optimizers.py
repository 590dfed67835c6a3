"""Rates, decay and momentum keep their meaning on real processes, too: the clock of `laws.optimizers`."""

from __future__ import annotations

import pytest
import torch

import polytempo as pt
from laws.catalogue import Row
from laws.optimizers import OPTIMIZED, PLAIN, STEPS, Optimized, Weights, end_of
from laws.test_optimizers import hogwild
from polytempo.core import Strategy
from polytempo.engines.processes.worker import Result
from polytempo.worlds import ProcessWorld
from process.crew import together

pytestmark = pytest.mark.process

s = pt.strategies
STRATEGIES = [s.shared_memory(), s.adasum(), s.adasum(of="updates"), s.gossip(), s.parameter_averaging(period=2)]


def ends(strategy: Strategy, optimized: Optimized) -> list[float]:
    """This rank's weights after the plain loop."""
    weights = Weights()
    optimizer = optimized.make(weights.parameters())
    handle = pt.attach(weights, optimizer, strategy)
    schedule = optimized.schedule(optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        weights(torch.zeros(2, 1)).mean().backward()
        optimizer.step()
        schedule.step()
    handle.detach()
    return weights.ends().tolist()


def test_every_rank_ends_where_plain_torch_ends() -> None:
    def work(world: ProcessWorld) -> Result:
        return [[ends(strategy, optimized) for optimized in OPTIMIZED] for strategy in STRATEGIES]

    targets = [end_of(optimized, [PLAIN] * STEPS).tolist() for optimized in OPTIMIZED]
    for rank in together(2, work):
        for strategy, found in zip(STRATEGIES, rank, strict=True):
            for optimized, end, target in zip(OPTIMIZED, found, targets, strict=True):
                assert end == pytest.approx(target, abs=1e-6), f"{strategy}, {optimized}"


def test_ranks_that_update_in_turn_make_their_updates_in_turn() -> None:
    strategy = s.hogwild("in_turn")

    def work(world: ProcessWorld) -> Result:
        return [ends(strategy, optimized) for optimized in OPTIMIZED]

    row = Row("hogwild", lambda: strategy)
    targets = [hogwild(row, optimized, 2).tolist() for optimized in OPTIMIZED]
    last = together(2, work)[1]  # rank 1 makes the last update
    for optimized, end, target in zip(OPTIMIZED, last, targets, strict=True):
        assert end == pytest.approx(target, abs=1e-6), optimized
