"""A small job for strategies that cut a model: batch norm, dropout, a schedule, and a short batch at an epoch's end."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import polytempo as pt


def points(num_samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, 4, generator=generator)
    return TensorDataset(x, torch.stack([x.sum(1).sin(), x[:, 0] * x[:, 1]], 1))


def model(dropout: float = 0.2) -> nn.Sequential:
    """Batch norm, dropout, and enough layers for six parts."""
    return nn.Sequential(
        *(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(dropout)),
        *(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Dropout(dropout), nn.Tanh()),
        *(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)),
    )


def job(*, tested: bool = True, dropout: float = 0.2) -> pt.Job:
    """The last batch of an epoch is short."""
    return pt.Job(
        model=partial(model, dropout),
        data=lambda folder: pt.Data(points(68, 0), points(16, 1) if tested else None),
        loss=nn.functional.mse_loss,
        correct=lambda output, target: (output - target).abs().amax(1) < 0.5,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        schedule=lambda optimizer, steps: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2 * steps),
        batch_size=12,
        lr=0.02,
        epochs=2,
    )


def plain_model() -> nn.Sequential:
    """A model without random layers and running statistics; enough layers for four parts."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh())]
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), *layers, nn.Linear(6, 2))


def plain() -> pt.Job:
    """The same job with that model."""
    return replace(job(), model=plain_model)


def in_double() -> pt.Job:
    """`plain` in float64, where only the last digits are rounding; it is tested on its training data."""

    def data(_: Any) -> pt.Data:
        found = TensorDataset(*(tensor.double() for tensor in points(68, 0).tensors))
        return pt.Data(found, found)

    return replace(plain(), model=lambda: plain().model().double(), data=data)
