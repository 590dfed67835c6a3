"""`Estimation`: how a stage estimates the gradient of its output, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

Shape = tuple[int, ...]
Make = Callable[[Shape, int], nn.Module]
"""From the shape of one sample's output and the number of classes to `module(h)` or, with classes, `module(h, labels)`:
h of (samples, *shape), labels of (samples, classes), one-hot; the answer has the shape of h."""


@dataclass(frozen=True)
class Estimation:
    """The estimators M of a pipeline, one for each tensor that crosses a cut, and how they learn.

    Without `make`: layers on the last dimension, or 3 × 3 convolutions on maps (samples, channels, height, width);
    `hidden_layers` of `width` features with ReLU, then a layer that begins with zeros.
    """

    classes: int = 0
    """Labels are given to the estimators, one-hot among so many classes; 0: they are not."""
    hidden_layers: int = 0
    width: int = 256
    lr: float = 1e-3
    make: Make | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None
    """None: Adam with `lr`."""

    def __post_init__(self) -> None:
        """Refuse numbers that no estimator has."""
        if self.classes < 0 or self.hidden_layers < 0 or self.width < 1 or self.lr < 0:
            raise ValueError(
                "an estimator needs classes, hidden_layers and lr of 0 or more and a width of 1 or more, got "
                f"classes={self.classes}, hidden_layers={self.hidden_layers}, lr={self.lr}, width={self.width}"
            )
