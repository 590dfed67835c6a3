"""The optimizers of torch that the native core has, and their state for each parameter.

LARS and LAMB are momentum SGD and AdamW with a rate of its own for every tensor:

LARS   v ← m v + γλ (g + β w)     w ← w - v          is SGD with dampening 1 - γλ, weight decay β and learning rate 1
LAMB   w ← w - γρ u               ρ = ‖w‖ / ‖u‖      is AdamW with learning rate γρ
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from polytempo.large_batch.layer_wise import LAMB, LARS, adapts, trust_ratio
from polytempo.native.kernels.step import RULES, Hyper, LayerNorms, StepPlan

_REFUSED = ("amsgrad", "capturable", "differentiable", "corrects_momentum")
_REMEDY = "use sync_sgd(), which takes any optimizer"


class NativeRule(NamedTuple):
    """An optimizer's rule: its name for the core, and torch's names for the moments that it keeps."""

    name: str
    first: str | None = None
    second: str | None = None
    counts: bool = False
    """True if torch keeps a count of steps, too."""
    decouples: bool = False
    """True if weight decay is AdamW's: up to torch 2.6 only the class says so."""
    by_layer: bool = False
    """True if each tensor has a rate of its own (see `layer_hypers`)."""
    begins_at_zero: bool = False
    """True if the first step reads a momentum buffer of zeros, where SGD makes one of its gradient."""


def rule_of(optimizer: Optimizer) -> NativeRule:
    """The optimizer's rule. Raises ValueError, naming the optimizer or the option, where the core has none."""
    name = type(optimizer).__name__
    if type(optimizer) not in (SGD, Adam, AdamW, Adagrad) and not has_layer_rates(optimizer):
        raise ValueError(
            f"shared_memory() knows SGD, Adam, AdamW, Adagrad, LARS and LAMB, and this optimizer is {name}; {_REMEDY}"
        )
    for group in optimizer.param_groups:
        for option in _REFUSED:
            if group.get(option):
                raise ValueError(f"shared_memory() does not know {name}({option}=True); {_REMEDY}")
    by_layer = has_layer_rates(optimizer)
    if type(optimizer) is Adagrad:
        return NativeRule("adagrad", None, "sum", counts=True)
    if "betas" in optimizer.defaults:
        decouples = type(optimizer) is not Adam
        return NativeRule("adam", "exp_avg", "exp_avg_sq", counts=True, decouples=decouples, by_layer=by_layer)
    has_momentum = any(group["momentum"] for group in optimizer.param_groups)
    momentum = "momentum_buffer" if has_momentum else None
    return NativeRule("sgd", momentum, by_layer=by_layer, begins_at_zero=by_layer)


def takes_rows(rule: NativeRule, group: dict[str, Any]) -> bool:
    """True if the rule may be applied to some rows alone. Raises ValueError where torch could not either."""
    plain = (
        not rule.by_layer
        and not group["weight_decay"]
        and (rule.name == "adagrad" or (rule.name == "sgd" and not group["momentum"]))
    )
    if not plain:
        raise ValueError(
            f"sparse gradients go with SGD without momentum or Adagrad, both without weight decay, and here is "
            f"{rule.name} with momentum {group.get('momentum', 0)} and weight decay {group['weight_decay']}; make the "
            "embedding with sparse=False"
        )
    return True


def hypers_of(rule: NativeRule, optimizer: Optimizer) -> ctypes.Array[Hyper]:
    """The hyper-parameters of this moment, for each parameter group."""
    return (Hyper * len(optimizer.param_groups))(*(_hyper(rule, group) for group in optimizer.param_groups))


def _hyper(rule: NativeRule, group: dict[str, Any]) -> Hyper:
    hyper = Hyper(lr=group["lr"], weight_decay=group["weight_decay"], maximize=group["maximize"])
    hyper.rule = RULES["adamw" if rule.decouples or group.get("decoupled_weight_decay") else rule.name]
    if rule.name == "sgd":
        hyper.momentum, hyper.dampening, hyper.nesterov = group["momentum"], group["dampening"], group["nesterov"]
        if group["momentum"] and rule.first is None:
            raise ValueError("SGD had no momentum when it was attached, and has now; detach() and attach again")
    else:
        hyper.eps = group["eps"]
    if rule.name == "adagrad":
        hyper.lr_decay = group["lr_decay"]
    if rule.name == "adam":
        hyper.beta1, hyper.beta2 = group["betas"]
    return hyper


def has_layer_rates(optimizer: Optimizer) -> bool:
    """True if each tensor has hyper-parameters of its own in each step."""
    return type(optimizer) in (LARS, LAMB)


def layer_hypers(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], plan: StepPlan, weight: float
) -> ctypes.Array[Hyper]:
    """The hyper-parameters of this step, for each tensor of `plan`. All ranks call it, with gradients in place.

    Norms are of each tensor's mean gradient, or of the step that it leads to; each rank adds its slice. Cost:
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
    """LAMB's hyper-parameters with ratio 1."""
    (beta1, beta2), decay = group["betas"], group["weight_decay"] if adapts(parameter, group) else 0.0
    numbers = {"beta1": beta1, "beta2": beta2, "eps": group["eps"], "weight_decay": decay}
    return Hyper(rule=RULES["adamw"], lr=float(group["lr"]), **numbers)
