"""The model that a run hands out is one model: parameters and running statistics, the same on every rank."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from polytempo import strategies
from polytempo.core import Strategy
from polytempo.jobs import find
from polytempo.training.trainer import Trainer
from process.crew import together

pytestmark = pytest.mark.process


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


@pytest.mark.parametrize(
    "strategy", [strategies.sync_sgd(), strategies.local_sgd(period=100), strategies.gossip()], ids=str
)
def test_every_rank_ends_with_the_same_state(strategy: Strategy) -> None:
    job = replace(find("digits"), model=normalized)

    def work(*_: Any) -> list[Any]:
        trainer = Trainer(job, strategy, steps=7)
        result = trainer.fit()
        state = trainer.model.state_dict()
        digests = {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in state.items()}
        return [digests, result.accuracy]

    first, *others = together(3, work)
    assert all(other == first for other in others)
