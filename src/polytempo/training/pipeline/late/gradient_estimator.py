"""`GradientEstimator`: a network that predicts the gradient of a stage's output from the output, and from labels."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


class GradientEstimator(nn.Module):
    """Layers over the features of every sample: the last dimension, or the channels of maps. The last one is zero.

    `shape` is that of one sample: (features,), (places, features) or (channels, height, width). Labels are further
    features, the same at every place. ValueError for other shapes.
    """

    def __init__(self, shape: tuple[int, ...], classes: int = 0, hidden_layers: int = 0, width: int = 256) -> None:
        super().__init__()
        if len(shape) not in (1, 2, 3):
            raise ValueError(
                f"no estimator is known for outputs of shape {shape}; a stage ends with one of one, two or three "
                "dimensions beside that of samples, or give estimator="
            )
        self.is_map = len(shape) == 3
        features = shape[0] if self.is_map else shape[-1]
        sizes = [features + classes, *[width] * hidden_layers, features]
        layers = [_layer(before, after, self.is_map) for before, after in pairwise(sizes)]
        for parameter in layers[-1].parameters():
            nn.init.zeros_(parameter)
        joined = [module for layer in layers for module in (layer, nn.ReLU())][:-1]
        self.body = nn.Sequential(*joined)

    def forward(self, h: Tensor, labels: Tensor | None = None) -> Tensor:
        """h: (samples, *shape); labels: (samples, classes); the answer: (samples, *shape)."""
        if labels is not None:
            dim = 1 if self.is_map else -1
            shape = list(h.shape)
            shape[dim] = labels.shape[-1]
            inserted = [1] * (h.dim() - 2)
            wide = labels.reshape(len(labels), *([-1, *inserted] if self.is_map else [*inserted, labels.shape[-1]]))
            h = torch.cat([h, wide.expand(shape)], dim=dim)
        answer: Tensor = self.body(h)
        return answer


def _layer(before: int, after: int, is_map: bool) -> nn.Module:
    return nn.Conv2d(before, after, 3, padding=1) if is_map else nn.Linear(before, after)
