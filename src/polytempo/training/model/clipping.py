"""The norm of a gradient whose parts lie on several ranks, and clipping by it."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from polytempo.collectives import tree
from polytempo.core import Port

EPSILON = 1e-6
"""As in `torch.nn.utils.clip_grad_norm_`."""


async def clip_grad_norm_(
    model: Port, parameters: Collection[nn.Parameter], max_norm: float, again: Collection[nn.Parameter] = ()
) -> Tensor:
    """Scale the gradients of one model's parts so that the norm of them all is at most `max_norm`; returns that norm.

        norm = √(Σ over ranks Σ over parameters ‖g‖²)        g ← g · min(1, max_norm / (norm + 1e-6))

    All ranks of `model` call it; no two hold the same parameter, but for those `again`, which another rank counts. On
    one rank it is torch's. Cost: one number, in float64, to all of them.
    """
    if model.size == 1:
        return nn.utils.clip_grad_norm_(parameters, max_norm)
    norm = await gradient_norm(model, parameters, again)
    scale = torch.clamp(max_norm / (norm + EPSILON), max=1.0)
    for gradient in [parameter.grad.detach() for parameter in parameters if parameter.grad is not None]:
        gradient.mul_(scale.to(gradient.device, gradient.dtype))
    return norm


async def gradient_norm(
    model: Port, parameters: Collection[nn.Parameter], again: Collection[nn.Parameter] = ()
) -> Tensor:
    """√(Σ over ranks Σ over parameters ‖g‖²), in float64, where ranks hold parts of one model, as above."""
    others = {id(parameter) for parameter in again}
    counted = [p.grad.detach() for p in parameters if p.grad is not None and id(p) not in others]
    values = [gradient if gradient.layout == torch.strided else gradient.coalesce().values() for gradient in counted]
    squares = torch.zeros(1, dtype=torch.float64)
    for value in values:
        squares += torch.linalg.vector_norm(value, dtype=torch.float64).cpu() ** 2
    return (await tree(model, squares) if model.size > 1 else squares).sqrt()[0]
