"""Tensors of a model that stay with each client: its head, or its normalisation layers."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def head(name: str | None) -> Callable[[nn.Module], frozenset[str]]:
    """The tensors of the module `name`; None: of the last module that has parameters of its own.

    The answer raises ValueError where there is no such module, or nothing beside it.
    """

    def kept(model: nn.Module) -> frozenset[str]:
        modules = dict(model.named_modules())
        with_own = [each for each, module in modules.items() if list(module.parameters(recurse=False))]
        chosen = with_own[-1] if name is None and with_own else name
        if not chosen or chosen not in modules:
            raise ValueError(f"the model has no module {chosen!r} to be a client's head; name one of {with_own}")
        found = _inside(model, f"{chosen}.")
        parameters = [each for each, _ in model.named_parameters()]
        if not found.intersection(parameters) or found.issuperset(parameters):
            raise ValueError(
                f"module {chosen!r} has none or all of the model's parameters, so head and body would not be two; "
                f"name one of {with_own}"
            )
        return found

    return kept


def normalisation(model: nn.Module) -> frozenset[str]:
    """The parameters and buffers of normalisation layers. ValueError where there are none, or nothing else."""
    found = _inside(model, *(f"{name}." for name, module in model.named_modules() if isinstance(module, _NORMS)))
    if not found or found.issuperset(each for each, _ in model.named_parameters()):
        raise ValueError(
            "the model has no normalisation layers beside others for clients to keep; use fed_avg(cohort=10)"
        )
    return found


def _inside(model: nn.Module, *modules: str) -> frozenset[str]:
    names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    return frozenset(name for name in names if name.startswith(modules))
