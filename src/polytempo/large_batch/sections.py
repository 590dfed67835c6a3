"""Sections of a loss surface: along the line between two models, and in a plane through one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from polytempo.large_batch.points import Loss, LossSurface, flat


def losses_between(loss: Loss, tensors: Sequence[Tensor], others: Sequence[Tensor], at: Sequence[float]) -> list[float]:
    """f((1 - α) x + α x') for each α of `at`: 0 is the model itself, 1 the other one, which has the same shapes.

    `tensors`: parameters, and buffers where they are to follow, as the running statistics of norms: else these are the
    model's own all along. Afterwards they are as they were. Cost: a value of the loss for each α.
    Source: I. J. Goodfellow, O. Vinyals and A. M. Saxe, "Qualitatively characterizing neural network optimization
    problems", 2015; Keskar et al., 2017, figure 3, between a small-batch and a large-batch minimum.
    """
    shapes, theirs = ([tuple(each.shape) for each in several] for several in (tensors, others))
    if shapes != theirs:
        raise ValueError(f"a line joins two models of the same shapes, got {shapes} and {theirs}")
    surface, end = LossSurface(loss, tensors), flat(others)
    with surface.kept() as x:
        return [surface.value((1 - alpha) * x + alpha * end) for alpha in at]


def filter_direction(parameters: Sequence[nn.Parameter], seed: int = 0) -> Tensor:
    """A random direction, shape (n,), whose every filter is as long as the model's own: dᵢ ← dᵢ ‖wᵢ‖ / ‖dᵢ‖.

    A filter is what leads to one output: w[i] of a parameter with two dimensions or more. Along biases and gains of
    norms it is 0. Surfaces of models whose weights differ in scale can be compared so.
    Source: H. Li et al., "Visualizing the loss landscape of neural nets", 2018, section 4.
    """
    drawn = torch.Generator().manual_seed(seed)
    parts = []
    for parameter in parameters:
        if parameter.ndim <= 1:
            parts.append(torch.zeros(parameter.numel(), dtype=torch.float64))
            continue
        own = parameter.detach().double().cpu().flatten(1)
        part = torch.randn(own.shape, dtype=torch.float64, generator=drawn)
        parts.append((part * own.norm(dim=1, keepdim=True) / part.norm(dim=1, keepdim=True)).reshape(-1))
    return torch.cat(parts)


def losses_around(
    loss: Loss, parameters: Sequence[nn.Parameter], across: Tensor, along: Tensor, at: Sequence[float]
) -> list[list[float]]:
    """f(x + α a + β b) for α and β of `at`, as rows by β, each by α; `across` is a, `along` is b.

    Directions are vectors of shape (n,), such as `filter_direction` makes. The parameters are afterwards as they were.
    Cost: len(at)² values of the loss.
    """
    surface = LossSurface(loss, parameters)
    with surface.kept() as x:
        return [[surface.value(x + alpha * across + beta * along) for alpha in at] for beta in at]
