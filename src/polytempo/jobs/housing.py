"""`housing`: the price of houses in California's districts from a CSV table."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer

from polytempo import data
from polytempo.jobs import file_of
from polytempo.spec.job import Data, Job

NUM_FEATURES = 13
"""Eight columns of numbers and the five values of `ocean_proximity`."""


def model() -> nn.Module:
    """13 - 64 - 64 - 1."""
    return nn.Sequential(nn.Linear(NUM_FEATURES, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def read(given: str | Path | None) -> Data:
    """The table given as `--data`, or `housing.csv` in that folder; everything standardized."""
    path = file_of(given, "housing", "housing.csv")
    split = data.csv_regression(path, target="median_house_value")
    found = split.train.tensors[0].shape[1]
    if found != NUM_FEATURES:
        raise ValueError(f"{path} gives {found} features; job housing expects {NUM_FEATURES} (the table of Géron)")
    return Data(*split)


def optimizer(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


job = Job(
    name="housing",
    model=model,
    data=read,
    loss=functional.mse_loss,
    optimizer=optimizer,
    lr=0.02,
    batch_size=32,
    epochs=10,
)
"""The loss is the mean squared error in units of the target's variance: 1 - loss is about R²."""
