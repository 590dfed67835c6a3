"""Models for job files: a perceptron for tables, a convolutional network and classifiers of `transformers` for
pictures."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor, nn


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


def from_transformers(name: str, outputs: int) -> nn.Module:
    """A classifier of pictures of `transformers`, by its name or its folder: (N, 3, H, W) to (N, outputs).

    A head for other classes than `outputs` is made again.
    """
    try:
        made = import_module("transformers").AutoModelForImageClassification  # takes seconds to import
    except ModuleNotFoundError as error:
        raise ValueError(f"model {name}: there is no module {error.name}; run: pip install {error.name}") from error
    return Logits(made.from_pretrained(name, num_labels=outputs, ignore_mismatched_sizes=True))


class Logits(nn.Module):
    """The logits of a model of `transformers`, which `polytempo export --to hf` writes."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        """(N, 3, H, W) to (N, classes)."""
        logits: Tensor = self.model(pixel_values=pixels).logits
        return logits

    def save_pretrained(self, folder: Path) -> None:
        """Write the folder that `from_pretrained` of the model's own class reads."""
        self.model.save_pretrained(folder)
