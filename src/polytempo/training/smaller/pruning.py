"""Masks of the weights that stay; the others are 0 from then on.

Source: S. Han, J. Pool, J. Tran, W. Dally, "Learning both weights and connections for efficient neural networks", 2015,
section 3: a threshold for each layer, a factor times the standard deviation of its weights (here around 0).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")
Shares = float | Mapping[str, float]
"""The share of all weights that stay; or of each named layer's, and all of the others'."""


def prunable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trained floating-point parameters with two dims or more, by name: not biases, not norms."""
    named = model.named_parameters()
    return {name: p for name, p in named if p.requires_grad and p.dim() > 1 and p.is_floating_point() and p.numel()}


def masks_of(weights: Mapping[str, Tensor], keep: Shares) -> dict[str, Tensor]:
    """True for each weight that stays: the largest |w| / σ, σ² the mean of w² over a layer's weights that are not 0.

    With one share for all layers a common factor q follows, |w| ≥ q σ; with a share for each layer the factor is each
    layer's own. Weights that are 0 go, so a second call on pruned weights prunes further. Each layer keeps its largest
    weight at least. Cost: a sort of all weights.
    """
    scores = {name: _score(weight) for name, weight in weights.items()}
    if isinstance(keep, Mapping):
        return {name: _largest(score, of_layer(keep, name, 1.0)) for name, score in scores.items()}
    flat = _largest(torch.cat([score.reshape(-1) for score in scores.values()]), keep)
    cut = flat.split([score.numel() for score in scores.values()])
    return {
        name: part.view_as(score) | (score == score.max())
        for (name, score), part in zip(scores.items(), cut, strict=True)
    }


def of_layer(given: T | Mapping[str, T], name: str, otherwise: T) -> T:
    """The value for parameter `name`: for all, or under its own name, or its layer's."""
    if not isinstance(given, Mapping):
        return given
    found: T = given.get(name, given.get(name.rpartition(".")[0], otherwise))
    return found


def _score(weight: Tensor) -> Tensor:
    magnitudes = weight.detach().double().abs()
    kept = magnitudes[magnitudes > 0]
    scale = float((kept**2).mean().sqrt()) if len(kept) else 1.0
    return magnitudes / scale


def _largest(score: Tensor, share: float) -> Tensor:
    """The largest ones, of equal ones the first; nothing that is 0."""
    flat = score.reshape(-1)
    count = max(1, round(share * len(flat)))
    chosen = torch.zeros(len(flat), dtype=torch.bool)
    chosen[flat.sort(descending=True, stable=True).indices[:count]] = True
    return (chosen & (flat > 0)).view_as(score)
