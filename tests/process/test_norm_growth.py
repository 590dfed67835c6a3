"""A batch that grows by the norm test grows in the same step in both worlds, and in a run that is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import polytempo as pt

pytestmark = pytest.mark.process

s = pt.strategies
ring = pt.collectives.ring
WORKERS = 3
X = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
RUN: dict[str, Any] = {"threads": 1, "batch_growth": pt.training.norm_test(theta=0.5, every=2)}


def job() -> pt.Job:
    return pt.Job(
        model=lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.1), nn.Linear(6, 1)),
        data=lambda folder: pt.Data(TensorDataset(X, X.sum(1, keepdim=True))),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        batch_size=4,
        lr=0.02,
        epochs=6,
    )


def test_gradients_are_looked_at_before_one_copy_of_the_weights_takes_them() -> None:
    found = pt.run(job(), s.shared_memory(), WORKERS, **RUN)
    known = pt.simulate(job(), s.sync_sgd(), WORKERS, **RUN)
    assert (found.steps, found.samples) == (known.steps, known.samples)
    assert found.steps < 60


@pytest.mark.parametrize("strategy", [s.sync_sgd(route=ring), s.local_sgd(period=3, route=ring)], ids=str)
def test_both_worlds_and_a_resumed_run_grow_alike(strategy: pt.Strategy, tmp_path: Path) -> None:
    """Stopped before the batch has grown, and after: 200 samples in steps of 12 are 102 steps in 6 epochs."""
    virtual = pt.simulate(job(), strategy, WORKERS, **RUN)
    assert virtual.steps < 60
    assert virtual.samples == 1200
    for stop in (7, 40):
        out = tmp_path / str(stop)
        pt.run(job(), strategy, WORKERS, **RUN, steps=stop, checkpoint_every=stop, out=out)
        resumed = pt.run(job(), strategy, WORKERS, **RUN, resume=True, out=out)
        assert (resumed.steps, resumed.samples) == (virtual.steps, virtual.samples)
        assert resumed.parameters_sha256 == virtual.parameters_sha256
