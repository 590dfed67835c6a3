"""Parameters of models in parts: a rank's own, replicated ones, checks of them, and the norm over all ranks.

divided layers (`pt.hybrid`)   gradients already come from all ranks' samples, and no other rank has the parameters:
                               they are not exchanged, copied or compared
split layers (`pt.split`)      parameters that every rank has whole, such as norms, have gradients of the same bits;
                               after exchanges along "data" they may differ, so the first rank's count (`align`)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Adafactor, Muon, Optimizer

from polytempo.collectives import tree
from polytempo.core import Bundle, Port, Strategy, is_idle
from polytempo.core.bundle import by_kind
from polytempo.core.calls.refusals import refuse
from polytempo.large_batch.layer_wise import LayerWise
from polytempo.partition.hybrid.hybrid_model import divided_layers
from polytempo.partition.tensor import SplitModel
from polytempo.training.model.requirements import fitted


def own_parameters(model: nn.Module) -> frozenset[str]:
    """Names of parameters with a part of this rank's own; none if one rank has all layers."""
    return frozenset(
        f"{name}.{parameter}" if name else parameter
        for name, layer in divided_layers(model).items()
        if layer.group.size > 1
        for parameter, _ in layer.named_parameters()
    )


def check_restorable(model: nn.Module, on_drift: str) -> None:
    """Raise ValueError if a rank that has drifted would need parameters that no other rank has."""
    if on_drift == "restore" and own_parameters(model):
        raise ValueError(
            'on_drift="restore" takes a rank\'s model from another, and of layers that pt.hybrid divides each rank has '
            'parts of its own; use on_drift="stop"'
        )


def check_divided(model: nn.Module, optimizer: Optimizer, strategy: Strategy) -> None:
    """Raise ValueError where ranks would not meet in every step's gradients, which divided layers take for granted."""
    if not own_parameters(model):
        return
    alike = strategy.server is None and strategy.one_copy is None
    if not (alike and strategy.synchronized and is_idle(fitted(strategy, optimizer).parameters, 2)):
        refuse({"divided layers", "models differ"}, who="pt.hybrid has divided layers of the model", strategy=strategy)
    if any(optimizer.state.values()):
        raise ValueError(
            f"this {type(optimizer).__name__} has a state already, and ranks have other parts of the divided layers; "
            "attach first, and load the rank's own state then"
        )


def shared_elsewhere(trained: Mapping[str, nn.Parameter], own: frozenset[str], rank: int) -> list[nn.Parameter]:
    """Parameters that all ranks have, which the first of them counts, where this is another one."""
    return [parameter for name, parameter in trained.items() if rank and name not in own]


_OF_WHOLE_LAYERS = (LayerWise, Adafactor, LBFGS, Muon)


def check_optimizer(optimizer: Optimizer, splits: Sequence[SplitModel], own: Collection[str]) -> None:
    """Raise ValueError for an optimizer that would take a rank's part of a layer, or `own` part, for the layer."""
    parts = own or any(split.group.size > 1 for split in splits)
    if isinstance(optimizer, _OF_WHOLE_LAYERS) and parts:
        raise ValueError(
            f"{type(optimizer).__name__} looks at whole layers, of which this rank has parts; with pt.split and "
            "pt.hybrid use an optimizer that treats each element alone, such as SGD or AdamW"
        )


def counted_elsewhere(splits: Sequence[SplitModel]) -> list[nn.Parameter]:
    """Parameters that the model's first rank counts; none on that rank."""
    return [p for split in splits if split.group.rank for p in split.replicated()]


async def align(splits: Sequence[SplitModel]) -> None:
    """Take the first rank's values of trained parameters that all ranks of a model have whole. Cost: one broadcast."""
    for split in splits:
        held = {str(i): p.detach() for i, p in enumerate(split.replicated()) if p.requires_grad}
        for group in by_kind(held).values() if split.group.size > 1 else ():
            bundle = Bundle(group).copy()
            first = bundle.with_flat(await split.group.port.broadcast(bundle.flat))
            for name, view in first.views.items():
                group[name].copy_(view)


EPSILON = 1e-6
"""The constant of `torch.nn.utils.clip_grad_norm_`."""


async def clip_grad_norm_(
    model: Port, parameters: Collection[nn.Parameter], max_norm: float, again: Collection[nn.Parameter] = ()
) -> Tensor:
    """Scale the gradients of one model's parts so that the norm of them all is at most `max_norm`; returns that norm.

        norm = √(Σ over ranks Σ over parameters ‖g‖²)        g ← g · min(1, max_norm / (norm + 1e-6))

    All ranks of `model` call it; no two hold the same parameter, but for those `again`, which another rank counts. On
    one rank it is torch's, and sparse gradients are as in torch's step. Cost: one number, in float64, to all of them.
    """
    if model.size == 1 and all(p.grad is None or p.grad.layout == torch.strided for p in parameters):
        return nn.utils.clip_grad_norm_(parameters, max_norm)
    norm = await gradient_norm(model, parameters, again)
    scale = torch.clamp(max_norm / (norm + EPSILON), max=1.0)
    with torch.no_grad():
        for gradient in [parameter.grad for parameter in parameters if parameter.grad is not None]:
            gradient.mul_(scale.to(gradient.device, gradient.dtype))  # `detach` of a sparse one has values of its own
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
