"""A toy model in two halves, for meshes of data=2 and model=2: each half has its own shapes, loss and optimizer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.core import Strategy

MESH = {"data": 2, "model": 2}
s = pt.strategies

STRATEGIES: list[Strategy] = [
    s.sync_sgd(pt.collectives.ring),
    s.local_sgd(period=3, route=pt.collectives.tree),
    s.top_k_sgd(0.2, exact_below=4),
    s.delayed_sgd(delay=1, route=pt.collectives.ring),
]
"""One strategy of each kind: gradients, parameters, a codec with residuals, and exchanges that outlive a step."""


def half(number: int) -> nn.Sequential:
    """4 - 5 - 3 or 4 - 7 - 3, with a batch norm and its statistics."""
    torch.manual_seed(number)
    hidden = 5 + 2 * number
    return nn.Sequential(nn.Linear(4, hidden), nn.BatchNorm1d(hidden), nn.Tanh(), nn.Linear(hidden, 3))


def samples(num_samples: int = 52) -> TensorDataset:
    """Inputs (num_samples, 4) and targets (num_samples, 3). 52 are dealt unevenly to two ranks in batches of 6."""
    random = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(num_samples, 4, generator=random), torch.randn(num_samples, 3, generator=random))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean squared error."""
    return ((output - target) ** 2).mean()


def half_job(number: int) -> pt.Job:
    """Trains one half."""
    return pt.Job(
        model=lambda: half(number),
        data=lambda folder: pt.Data(samples(), samples(16)),
        loss=loss,
        optimizer=lambda parameters, lr: SGD(parameters, lr=lr, momentum=0.9),
        lr=0.05,
        batch_size=6,
        name="halves",
    )
