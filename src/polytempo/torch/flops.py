"""How many floating-point operations a sample costs: what a virtual world charges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


def flops_per_sample(model: nn.Module, loss: Callable[[Any, Any], Tensor], batch: tuple[Any, Any]) -> float:
    """Forward and backward of one sample, counted from one batch. Leaves no gradient behind, and buffers as they are.

    Counts matrix products, convolutions and attention; where a model has none of them, two operations
    for each parameter forward and four backward.
    """
    inputs, targets = batch
    gradients = [parameter.grad for parameter in model.parameters()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    state = torch.get_rng_state()
    with FlopCounterMode(display=False) as counter:
        loss(model(inputs), targets).backward()
    torch.set_rng_state(state)
    for buffer, kept in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(kept)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    counted = counter.get_total_flops() / len(targets)
    return counted or 6.0 * sum(parameter.numel() for parameter in model.parameters())
