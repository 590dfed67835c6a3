"""A layer that is too large for one stage, by rows: each stripe is a layer of its own, and can be a stage of its own.

h ──▶ stripe 0: rows 0 … r            y = [W₀ h, W₁ h, …], gathered where the last stripe is
 └──▶ stripe 1: rows r + 1 … 2 r      the gradient of h is the sum of the stripes': W₀ᵀ e₀ + W₁ᵀ e₁ + …
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn


class StripedLinear(nn.Module):
    """A linear layer in stripes of rows, as equal as can be: `stripes.0`, `stripes.1`, …"""

    def __init__(self, whole: nn.Linear, stripes: int) -> None:
        super().__init__()
        bias = None if whole.bias is None else whole.bias.detach().tensor_split(stripes)
        self.stripes = nn.ModuleList()
        for place, rows in enumerate(whole.weight.detach().tensor_split(stripes)):
            stripe = nn.Linear(whole.in_features, len(rows), bias is not None, device="meta", dtype=rows.dtype)
            stripe.weight = nn.Parameter(rows.clone(), whole.weight.requires_grad)
            if bias is not None:
                stripe.bias = nn.Parameter(bias[place].clone(), whole.bias.requires_grad)
            self.stripes.append(stripe)

    def forward(self, h: Tensor) -> Tensor:
        """h: (…, features); the answer: (…, rows)."""
        return torch.cat([stripe(h) for stripe in self.stripes], dim=-1)


def striped(model: nn.Module, name: str, stripes: int) -> nn.Module:
    """A copy of `model` with the linear layer `name` in `stripes`: it computes the same.

    Cut it where the stripes begin, by=[…, "top.stripes.0", "top.stripes.1"], and train it by
    `schedules.pipelined_backprop(stages, stripes=…)`. `unstriped` gives back the whole model's state.

    Errors: ValueError for a layer that is not linear, has fewer rows than stripes, or shares its weight with another
    one.
    """
    found = copy.deepcopy(model)
    layer = dict(found.named_modules()).get(name)
    if type(layer) is not nn.Linear or not name:
        what = "is not there" if layer is None else f"is a {type(layer).__name__}"
        raise ValueError(f"a linear layer can be striped by rows, and {name!r} {what}; name an nn.Linear of the model")
    if not 1 <= stripes <= layer.out_features:
        raise ValueError(f"{name} has {layer.out_features} rows and cannot be in {stripes} stripes")
    held = [own for own, each in found.named_parameters(remove_duplicate=False) if each is layer.weight]
    if len(held) > 1:
        raise ValueError(f"{' and '.join(held)} are one tied weight, which cannot be striped; untie it first")
    owner, _, field = name.rpartition(".")
    setattr(found.get_submodule(owner), field, StripedLinear(layer, stripes))
    return found


def unstriped(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of a striped model by the names of the model that it was made of."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        place = re.fullmatch(r"(.+)\.stripes\.\d+\.(weight|bias)", name)
        whole = name if place is None else f"{place[1]}.{place[2]}"
        found[whole] = tensor if whole not in found else torch.cat([found[whole], tensor])
    return found
