"""The trained parameters of a model, and its parameters with sparse gradients."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from polytempo.training.pipeline.stage_model import StageModel


def trainable(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The trained parameters by name: they need gradients, and the optimizer holds them.

    Errors: ValueError for none, except in a stage of a model, and for others that the optimizer holds.
    """
    held = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    found = {name: p for name, p in model.named_parameters() if id(p) in held}
    if not found and not (isinstance(model, StageModel) and is_frozen(model)):
        raise ValueError("the optimizer holds no parameter of the model that needs gradients; make it from model")
    strangers = held.keys() - {id(p) for p in found.values()}
    if strangers:
        shapes = [list(p.shape) for key, p in held.items() if key in strangers]
        raise ValueError(
            f"the optimizer trains {len(shapes)} tensors that do not belong to the model, the first of shape "
            f"{shapes[0]}; no rank would exchange them. Put both into one module, e.g. nn.ModuleList([model, other])"
        )
    return found


def is_frozen(model: nn.Module) -> bool:
    """True if none of its parameters is trained."""
    return not any(parameter.requires_grad for parameter in model.parameters())


def sparse_tables(model: nn.Module) -> frozenset[str]:
    """The parameters with sparse gradients."""
    return frozenset(
        f"{name}.weight".lstrip(".")
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    )
