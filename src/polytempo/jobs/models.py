"""Small models for job files: a perceptron for tables, a convolutional network for pictures."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def perceptron(inputs: int, outputs: int, hidden: Sequence[int] = (64, 64)) -> nn.Module:
    """Linear layers with ReLU between them: (N, inputs) to (N, outputs)."""
    sizes = [inputs, *hidden]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


def convolutional(outputs: int, channels: int = 3, widths: Sequence[int] = (32, 64, 128)) -> nn.Module:
    """Convolutions of 3 × 3 with batch norm and pooling, then a mean: (N, channels, H, W) to (N, outputs).

    H and W are at least 2 to the number of widths.
    """
    layers: list[nn.Module] = []
    for before, after in pairwise([channels, *widths]):
        layers += [
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], outputs))
