"""A model with a sparse embedding at a parameter server of real processes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from polytempo import strategies
from polytempo.cluster import ethernet
from polytempo.runs.served.run_served import run_served
from polytempo.runs.simulated.simulate_served import simulate_served
from polytempo.spec.job import Data, Job, most_likely
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec

pytestmark = pytest.mark.process

WORDS = 300


class Bag(nn.Module):
    """Most of its parameters are a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(WORDS, 8, mode="mean", sparse=True)
        self.scores = nn.Linear(8, 3)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.table(words))
        return scores


def sentences() -> Data:
    generator = torch.Generator().manual_seed(3)
    classes = torch.randint(3, (256,), generator=generator)
    words = torch.randint(WORDS // 3, (256, 5), generator=generator) * 3 + classes[:, None]
    return Data(TensorDataset(words, classes))


JOB = Job(
    model=Bag,
    data=lambda folder: sentences(),
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters, lr: SGD(parameters, lr=lr),
    lr=0.5,
    batch_size=16,
    correct=most_likely,
)


def test_real_processes_reach_the_weights_of_virtual_ones() -> None:
    """One worker, so that there is one order; two shards with a cut inside the table."""
    strategy, options = strategies.async_sgd(shards=2), RunOptions(steps=24)
    real = run_served(RunSpec.of(JOB, strategy, 1, options))
    virtual = simulate_served(RunSpec.of(JOB, strategy, 1, options), ethernet(), native=True)
    assert real.parameters_sha256 == virtual.parameters_sha256
