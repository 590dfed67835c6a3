"""LARS and LAMB on one copy of the weights: momentum SGD and AdamW, with a rate of its own for every tensor.

LARS   v ← m v + γλ (g + β w)     w ← w - v          is SGD with dampening 1 - γλ, weight decay β and learning rate 1
LAMB   w ← w - γρ u               ρ = ‖w‖ / ‖u‖      is AdamW with learning rate γρ
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from polytempo.large_batch.lamb import LAMB
from polytempo.large_batch.lars import LARS
from polytempo.large_batch.layer_wise import adapts, trust_ratio
from polytempo.native.kernels.step import RULES, Hyper, LayerNorms, StepPlan


def has_layer_rates(optimizer: Optimizer) -> bool:
    """Whether each tensor has hyper-parameters of its own in each step."""
    return type(optimizer) in (LARS, LAMB)


def layer_hypers(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], plan: StepPlan, weight: float
) -> ctypes.Array[Hyper]:
    """The hyper-parameters of this step, for each tensor of `plan`. All ranks call it, with gradients in place.

    Norms are of each tensor's mean gradient, or of the step that it leads to, to which each rank adds its slice. Cost:
    two meetings; see `StepPlan.layer_norms`. A step of LAMB computes the moments twice: for the norm, and to keep them.
    """
    by_parameter = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    groups = [by_parameter[id(parameter)] for parameter in parameters]
    each = list(zip(parameters, groups, strict=True))
    if type(optimizer) is LARS:
        norms = plan.layer_norms(None, weight)
        return _array([_of_lars(p, group, norm) for (p, group), norm in zip(each, norms, strict=True)])
    hypers = _array([_of_lamb(p, group) for p, group in each])
    for hyper, (p, group), norm in zip(hypers, each, plan.layer_norms(hypers, weight), strict=True):
        if adapts(p, group):
            hyper.lr *= trust_ratio(*norm)
    return hypers


def _array(hypers: Sequence[Hyper]) -> ctypes.Array[Hyper]:
    return (Hyper * len(hypers))(*hypers)


def _of_lars(parameter: nn.Parameter, group: dict[str, Any], norm: LayerNorms) -> Hyper:
    rate, decay, momentum = float(group["lr"]), 0.0, float(group["momentum"])
    if adapts(parameter, group):
        decay = float(group["weight_decay"])
        divisor = norm.step + decay * norm.weights if norm.step > 0 else 0.0
        rate *= trust_ratio(norm.weights * group["trust"], divisor)
    if not momentum:  # SGD has no buffer then, so the rate cannot stand in front of it
        return Hyper(rule=RULES["sgd"], lr=rate, weight_decay=decay)
    return Hyper(rule=RULES["sgd"], lr=1.0, weight_decay=decay, momentum=momentum, dampening=1 - rate)


def _of_lamb(parameter: nn.Parameter, group: dict[str, Any]) -> Hyper:
    """With ratio 1."""
    (beta1, beta2), decay = group["betas"], group["weight_decay"] if adapts(parameter, group) else 0.0
    numbers = {"beta1": beta1, "beta2": beta2, "eps": group["eps"], "weight_decay": decay}
    return Hyper(rule=RULES["adamw"], lr=float(group["lr"]), **numbers)
