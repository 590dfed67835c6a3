"""LARS on one copy of the weights: its step is momentum SGD's with a rate of its own for every tensor.

v ← m v + γλ (g + β w)     w ← w - v          is SGD with dampening 1 - γλ, weight decay β and learning rate 1
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from polytempo.large_batch.lars import LARS
from polytempo.large_batch.layer_wise import LayerKernels, adapts, trust_ratio
from polytempo.native.step import RULES, Hyper, StepPlan


def has_layer_rates(optimizer: Optimizer) -> bool:
    """Whether each tensor has hyper-parameters of its own in each step."""
    return type(optimizer) is LARS


def lars_hypers(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], plan: StepPlan, weight: float
) -> ctypes.Array[Hyper]:
    """The hyper-parameters of this step, for each tensor of `plan`. All ranks call it, with gradients in place.

    λ needs the norm of each tensor's mean gradient, to which each rank adds its slice, and of its weights, which each
    rank has in front of it. Cost: two meetings a tensor that adapts; a pass over its gradients, each rank its slice,
    and one over its weights.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    used, kernels, hypers = bytes(plan.used), LayerKernels(), []
    try:
        for index, parameter in enumerate(parameters):
            group = groups[id(parameter)]
            rate, decay = float(group["lr"]), 0.0
            if adapts(parameter, group):
                decay = float(group["weight_decay"])
                plan.used[:] = bytes(len(used))
                plan.used[index] = used[index]
                of_g = plan.norm(weight)
                of_w, _ = kernels.norms(parameter.detach(), parameter.detach())
                rate *= trust_ratio(of_w * group["trust"], of_g + decay * of_w if of_g > 0 else 0.0)
            hypers.append(_sgd(rate, decay, float(group["momentum"])))
    finally:
        plan.used[:] = used
    return (Hyper * len(hypers))(*hypers)


def _sgd(rate: float, decay: float, momentum: float) -> Hyper:
    if not momentum:  # SGD has no buffer then, so the rate cannot stand in front of it
        return Hyper(rule=RULES["sgd"], lr=rate, weight_decay=decay)
    return Hyper(rule=RULES["sgd"], lr=1.0, weight_decay=decay, momentum=momentum, dampening=1 - rate)
