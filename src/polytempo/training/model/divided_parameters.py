"""What training asks of a model with divided layers (`pt.hybrid`): which parameters are a rank's own, and what fits.

Their gradients are those of all ranks' samples already, and no other rank has them: they are exchanged with none,
taken from none and compared with none.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer

from polytempo.core import Strategy, is_idle
from polytempo.partition.hybrid.hybrid_model import divided_layers
from polytempo.training.model.requirements import fitted


def own_parameters(model: nn.Module) -> frozenset[str]:
    """Names of the parameters of which this rank has a part that is its own; none where one rank has all layers."""
    return frozenset(
        f"{name}.{parameter}" if name else parameter
        for name, layer in divided_layers(model).items()
        if layer.group.size > 1
        for parameter, _ in layer.named_parameters()
    )


def check_restorable(model: nn.Module, on_drift: str) -> None:
    """Raise ValueError where a rank that has drifted should be given what no other rank has."""
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
        raise ValueError(
            f"layers of the model are divided by pt.hybrid, so all ranks make each step together, and {strategy} lets "
            "them differ, or exchanges parameters; use one that exchanges gradients, such as sync_sgd() or top_k_sgd()"
        )
    if any(optimizer.state.values()):
        raise ValueError(
            f"this {type(optimizer).__name__} has a state already, and ranks have other parts of the divided layers; "
            "attach first, and load the rank's own state then"
        )


def shared_elsewhere(trained: Mapping[str, nn.Parameter], own: frozenset[str], rank: int) -> list[nn.Parameter]:
    """Parameters that all ranks have, which the first of them counts, where this is another one."""
    return [parameter for name, parameter in trained.items() if rank and name not in own]
