"""Running statistics of norms with a parameter server: they meet at the shards, are scored, saved and handed out.

The model's score is its running mean. The data's mean is 1 in every feature and every batch, so after k batches a norm
with momentum m has the running mean 1 - (1 - m)^k: a clock of its batches.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from laws.catalogue import ONE_WORKER, SERVED, Row, label
from polytempo.cluster import Cluster, Link, lognormal
from polytempo.runs.simulated.simulate import simulate
from polytempo.spec.job import Data, Job
from polytempo.spec.run_options import RunOptions

WORKERS, STEPS, MOMENTUM, FEATURES = 3, 12, 0.1, 2


class Clock(nn.Module):
    """Trains a line behind a norm; where it is scored, its answer is the norm's running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES, momentum=MOMENTUM)
        self.line = nn.Linear(FEATURES, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, features) -> (batch, 1)"""
        if self.training:
            answer: Tensor = self.line(self.norm(inputs))
            return answer
        assert self.norm.running_mean is not None
        return self.norm.running_mean.mean().expand(len(inputs), 1)


def job(samples: int = 48, batch_size: int = 4) -> Job:
    """Every batch of an even number of samples has the mean 1 in each feature."""
    inputs = torch.tensor([[0.0, 3.0], [2.0, -1.0]]).repeat(samples // 2, 1)
    data = TensorDataset(inputs, torch.zeros(samples, 1))
    return Job(
        model=Clock,
        data=lambda folder: Data(torch.utils.data.DataLoader(data, batch_size=batch_size), data),
        loss=lambda output, target: (output - target).mean(),
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=0.01),
        batch_size=batch_size,
    )


def seen(batches: float) -> float:
    """The running mean after so many batches in a row."""
    return float(1 - (1 - MOMENTUM) ** batches)


CLUSTER = Cluster(Link(1e-5, 1e9), flops_per_s=1e7, stragglers=lognormal(0.4))


@pytest.mark.parametrize("row", ONE_WORKER, ids=label)
def test_alone_they_are_what_torch_makes_of_them(row: Row) -> None:
    """A worker that pushes now and then loses the statistics since a fetch began; elastic ones lag."""
    result = simulate(job(), row.make(), 1, CLUSTER, steps=STEPS)
    assert result.loss is not None
    lost = {"easgd": 8}.get(row.name, 0 if row.pushes_every == 1 else 2)
    if "delay=2" in label(row):
        lost = 4  # two fetches
    assert seen(STEPS - lost) - 1e-6 <= result.loss <= seen(STEPS) + 1e-6


@pytest.mark.parametrize("row", SERVED, ids=label)
def test_those_of_all_workers_meet_at_the_server(row: Row) -> None:
    """Workers count as in a synchronous step: λ pushes move the statistics about as far as one step of all does."""
    result = simulate(job(), row.make(), WORKERS, CLUSTER, steps=STEPS)
    if row.joined:
        assert result.loss == pytest.approx(seen(STEPS), abs=1e-6)
    else:
        assert result.loss is not None
        assert 0.4 * seen(STEPS) <= result.loss <= 1.3 * seen(STEPS)


@pytest.mark.parametrize("row", [row for row in SERVED if row.name == "async_sgd"], ids=label)
def test_they_stay_when_shards_come_and_go(row: Row) -> None:
    still = simulate(job(), row.make(), WORKERS, CLUSTER, steps=STEPS)
    moved = RunOptions(steps=STEPS, reshape={1: 3, 2: 1})
    assert simulate(job(), row.make(), WORKERS, CLUSTER, moved).loss == pytest.approx(still.loss, abs=0.1)
