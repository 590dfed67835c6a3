"""`PartedModel`: a model with this rank's part of some layers, and ways to see the whole.

The norm of the whole model is taken in torch's `clip_grad_norm_` and `get_total_norm`:

    ‖g‖ₚ = (Σ over ranks ‖their parts‖ₚᵖ + ‖the ranks' common parts‖ₚᵖ)^(1/p)

They see the gradients of one rank's parameters, and would scale each rank's by another norm. `clip_grad_value_` looks
at each element alone, so it needs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, Protocol, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from polytempo.core import Port
from polytempo.partition.tensor.division import Division
from polytempo.partition.tensor.layers.layer import SplitLayer
from polytempo.partition.tensor.model_group import ModelGroup, gathered_parts


class PartedModel(nn.Module):
    """Takes a model's place: its parameters and modules under the same names, each this rank's part or the whole."""

    def __init__(self, model: nn.Module, group: ModelGroup) -> None:
        super().__init__()
        # one set of parameters and modules, under the model's own names; the model itself is not a submodule
        for each in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[each] = model.__dict__[each]
        self.__dict__["model"], self.group = model, group
        self.training = model.training
        if group.size > 1:
            norms_are_whole(self)

    def __getattr__(self, name: str) -> Any:
        """The model's other attributes."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "model" not in self.__dict__:
                raise
            return getattr(self.__dict__["model"], name)

    def train(self, mode: bool = True) -> Self:
        """Set the mode, also of the model itself."""
        self.__dict__["model"].training = mode
        super().train(mode)
        return self

    # ------------------------------------------------------------------ the whole

    @property
    def parts(self) -> dict[str, Division]:
        """The cut of each split parameter, by its name. Every rank has the whole of the others."""
        found: dict[str, Division] = {}
        for prefix, module in self.named_modules(remove_duplicate=False):
            if isinstance(module, SplitLayer):
                held = [name for name in module.parts if module._parameters.get(name) is not None]
                found |= {f"{prefix}.{name}" if prefix else name: module.parts[name] for name in held}
        return found

    def own_parameters(self) -> list[nn.Parameter]:
        """Parameters that no other rank of the model has."""
        others = {id(parameter) for parameter in self.replicated()}
        return [parameter for parameter in self.parameters() if id(parameter) not in others]

    def replicated(self) -> list[nn.Parameter]:
        """Parameters that every rank of the model has as a whole."""
        parts = self.parts
        return [parameter for name, parameter in self.named_parameters() if name not in parts]

    def full_parameters(self) -> dict[str, Tensor]:
        """The whole model's parameters by its names, on every rank. All ranks of the model call it.

        They are the saved ones: for a model of 16-bit parameters (`pt.precision`) the float32 masters.

        Cost: a gather of every split parameter.
        """
        saved = self.state_dict()
        return self._full({name: saved[name] for name, _ in self.named_parameters()})

    def full_gradients(self) -> dict[str, Tensor]:
        """The whole model's gradients, as `.grad` has them; parameters without one are left out."""
        mine = {name: parameter.grad for name, parameter in self.named_parameters()}
        return self._full({name: tensor for name, tensor in mine.items() if tensor is not None})

    def _full(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.group.size == 1:
            return {name: tensor.clone() for name, tensor in held.items()}
        whole: dict[str, Tensor] = self.group.drive(joined(self.group.port, held, self.parts))
        return whole

    def load_full_parameters(self, full: Mapping[str, Tensor]) -> None:
        """Take this rank's parts of a whole model's parameters, as `load_state_dict` does: a model of 16-bit parameters
        takes them into its masters. ValueError names missing parameters."""
        parts, own = self.parts, dict(self.named_parameters())
        if missing := sorted(own.keys() - full.keys()):
            raise ValueError(f"the whole model's parameters lack {', '.join(missing[:5])}; there are {len(full)}")
        rank = self.group.rank
        taken = {name: parts[name].take(full[name], rank) if name in parts else full[name] for name in own}
        self.load_state_dict(taken, strict=False)


async def joined(port: Port, tensors: Mapping[str, Tensor], parts: Mapping[str, Division]) -> dict[str, Tensor]:
    """The whole of each rank's `tensors`, which are cut as `parts` says. Cost: a gather of each that is cut."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name not in parts or port.size == 1:
            found[name] = tensor.clone()
            continue
        how = parts[name]
        shapes = [how.shape(tensor.shape, rank) for rank in range(port.size)]
        sizes = [prod(shape) for shape in shapes]
        flat = (await gathered_parts(port, tensor.reshape(-1), sizes, 0)).split(sizes)
        found[name] = how.join([part.view(shape) for part, shape in zip(flat, shapes, strict=True)])
    return found


class PartOfModel(Protocol):
    """A module with other parts on other ranks."""

    group: ModelGroup

    def own_parameters(self) -> list[nn.Parameter]:
        """Parameters that no other rank has."""


_original = clip_grad._get_total_norm
_refusals: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Model -> the reason and the remedy, for models that torch's functions must not see at all."""
_parted: WeakKeyDictionary[PartOfModel, None] = WeakKeyDictionary()


def norms_are_whole(model: PartOfModel) -> None:
    """Let torch's functions know the norm of this model's gradients. All its ranks call them together."""
    _parted[model] = None
    _install()


def refuse_norms(model: nn.Module, why: str) -> None:
    """Let torch's functions raise ValueError for gradients of this model."""
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
