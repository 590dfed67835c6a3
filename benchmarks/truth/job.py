"""The jobs of this benchmark: perceptrons on noise; only the time matters."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

import polytempo as pt

_SAMPLES = 8192


def model() -> nn.Module:
    """784 - 1024 - 512 - 10: 1.3 million parameters."""
    return nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)
    )  # fmt: skip


def small_model() -> nn.Module:
    """784 - 256 - 10: 0.2 million parameters."""
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


def read(given: Path | None) -> pt.Data:
    """Noise, with labels of it."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(_SAMPLES, 784, generator=draw)
    return pt.Data(TensorDataset(inputs, torch.randint(10, (_SAMPLES,), generator=draw)), None)


def optimizer(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


job = pt.Job(
    name="perceptron",
    model=model,
    data=read,
    loss=functional.cross_entropy,
    optimizer=optimizer,
    lr=0.001,
    batch_size=32,
)
small = pt.Job(
    name="small",
    model=small_model,
    data=read,
    loss=functional.cross_entropy,
    optimizer=optimizer,
    lr=0.001,
    batch_size=32,
)
