"""`LocalDecay`: weight decay as a part of the gradient, for workers that make steps of their own and push them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer


class LocalDecay:
    """Takes the weight decay out of `optimizer`, and adds it to the gradients: g + λ w, w the worker's own weights.

    So a push holds the regularizer's gradient of every batch, as the local step does, and the local step keeps its
    bits. AdamW's decay is not a part of the gradient, and stays in the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._decayed = [
            (group["params"], -float(group["weight_decay"]) if group.get("maximize") else float(group["weight_decay"]))
            for group in coupled(optimizer)
        ]
        for group in coupled(optimizer):
            group["weight_decay"] = 0.0

    @torch.no_grad()
    def add_(self) -> None:
        """Add it to each gradient."""
        for parameters, factor in self._decayed:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.add_(parameter, alpha=factor)


def is_decoupled(optimizer: Optimizer) -> bool:
    """True if the weight decay multiplies the weights and is not a part of the gradient, as in AdamW."""
    decoupled = type(optimizer) is AdamW or any(g.get("decoupled_weight_decay") for g in optimizer.param_groups)
    if not decoupled and type(optimizer) not in (SGD, Adam, Adagrad) and any(_decaying(optimizer)):
        raise ValueError(
            f"whether the weight decay of {type(optimizer).__name__} is a part of the gradient is not known; use SGD, "
            "Adam, AdamW or Adagrad, or weight_decay=0"
        )
    return decoupled


def coupled(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The parameter groups with weight decay as a part of the gradient. ValueError for an unknown optimizer."""
    return [] if is_decoupled(optimizer) else list(_decaying(optimizer))


def _decaying(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    return (group for group in optimizer.param_groups if group.get("weight_decay"))
