"""torch's `clip_grad_norm_` and `get_total_norm` where ranks hold parts of a model: the norm of the whole model.

    ‖g‖ₚ = (Σ over ranks ‖their parts‖ₚᵖ + ‖what all ranks have‖ₚᵖ)^(1/p)

They see the gradients of one rank's parameters, and would scale each rank's by another norm. `clip_grad_value_` looks
at each element by itself, so it needs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from polytempo.partition.tensor.model_group import ModelGroup


class PartOfModel(Protocol):
    """A module of which other ranks hold other parts."""

    group: ModelGroup

    def own_parameters(self) -> list[nn.Parameter]:
        """Those that no other rank has."""


_original = clip_grad._get_total_norm
_refusals: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Of models that torch's functions must not see at all: why, and the remedy."""
_parted: WeakKeyDictionary[PartOfModel, None] = WeakKeyDictionary()


def norms_are_whole(model: PartOfModel) -> None:
    """From now on torch's functions know the norm of this model's gradients. All its ranks call them together."""
    _parted[model] = None
    _install()


def refuse_norms(model: nn.Module, why: str) -> None:
    """From now on torch's functions raise ValueError for gradients of this model."""
    _refusals[model] = why
    _install()


def _install() -> None:
    clip_grad._get_total_norm = torch.nn.utils.get_total_norm = _total_norm


@torch.no_grad()
def _total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    left = {id(tensor): tensor for tensor in given}
    for stage, why in list(_refusals.items()):
        if any(id(parameter.grad) in left for parameter in stage.parameters() if parameter.grad is not None):
            raise ValueError(why)
    ranks: list[Tensor] = []
    for model in list(_parted):
        own = [parameter.grad for parameter in model.own_parameters() if parameter.grad is not None]
        held = [left.pop(id(gradient)) for gradient in own if id(gradient) in left]
        if held:
            each = _original(held, norm_type, foreach=foreach).double().cpu().reshape(1)
            ranks += model.group.all(each)
    found: Tensor = _original(
        list(left.values()) or [given[0].new_zeros(1)] if given else [], norm_type, foreach=foreach
    )
    if ranks:
        every = torch.cat([found.double().cpu().reshape(1), *ranks])
        found = torch.linalg.vector_norm(every, norm_type).to(given[0].device, given[0].dtype)
    if error_if_nonfinite and not found.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {float(found)}, so they cannot be clipped"
        )
    return found
