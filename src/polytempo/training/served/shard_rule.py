"""An optimizer of torch and a model's parameters, as the shards of a parameter server know them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from polytempo.core import Strategy, is_idle
from polytempo.core.rule import Service, UpdateRule
from polytempo.server.layout import Parameter
from polytempo.server.tensors.tables import serves_rows, takes_rows
from polytempo.training.model.local_decay import coupled, is_decoupled
from polytempo.training.model.requirements import check_model, check_momentum
from polytempo.training.model.trainable_parameters import sparse_tables, trainable

_REFUSED = ("amsgrad", "capturable", "differentiable")
_APART = ("params", "lr", "initial_lr", "foreach", "fused")
"""Options that may differ between parameter groups: the learning rate travels with each push, the last two do not
change results."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_REMEDY = "use sync_sgd(), which takes any optimizer"


def update_rule_of(optimizer: Optimizer) -> UpdateRule:
    """The optimizer for the shards to apply. Its learning rates stay with the worker and travel with each push.

    Raises ValueError for an optimizer or an option that a shard does not know.
    """
    name = type(optimizer).__name__
    if type(optimizer) not in (SGD, Adam, AdamW, Adagrad):
        raise ValueError(
            f"a parameter server knows SGD, Adam, AdamW and Adagrad, and this optimizer is {name}; {_REMEDY}"
        )
    first = optimizer.param_groups[0]
    for number, group in enumerate(optimizer.param_groups):
        for option in _REFUSED:
            if group.get(option):
                raise ValueError(f"a parameter server does not know {name}({option}=True); {_REMEDY}")
        for option in group.keys() - _APART:
            if group[option] != first[option]:
                raise ValueError(
                    f"a shard applies one optimizer to all parameters, and group {number} has {option}={group[option]} "
                    f"where group 0 has {first[option]}; only learning rates may differ"
                )
    return _rule(optimizer, first)


def _rule(optimizer: Optimizer, group: dict[str, Any]) -> UpdateRule:
    decay, maximize = float(group["weight_decay"]), bool(group["maximize"])
    if type(optimizer) is SGD:
        return UpdateRule(
            "sgd",
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            nesterov=bool(group["nesterov"]),
            weight_decay=decay,
            maximize=maximize,
        )
    if type(optimizer) is Adagrad:
        return UpdateRule(
            "adagrad",
            weight_decay=decay,
            eps=float(group["eps"]),
            lr_decay=float(group["lr_decay"]),
            initial=float(group["initial_accumulator_value"]),
            maximize=maximize,
        )
    decouples = type(optimizer) is AdamW or group.get("decoupled_weight_decay")
    first, second = group["betas"]
    return UpdateRule(
        "adamw" if decouples else "adam",
        weight_decay=decay,
        betas=(float(first), float(second)),
        eps=float(group["eps"]),
        maximize=maximize,
    )


def shard_rule_of(service: Service, optimizer: Optimizer) -> UpdateRule:
    """The shards' update rule: the optimizer that the service names, or the job's own.

    Workers that add weight decay to their gradients (`LocalDecay`) push it, and a shard adds none. AdamW's decay is not
    a part of the gradient; the shards apply it if they apply AdamW. A named optimizer goes uphill if the job's does.

    Raises ValueError for options that a shard does not know, and for decoupled weight decay that the shards would drop.
    """
    if service.decays == "shards":
        rule = update_rule_of(optimizer) if service.optimizer is None else service.optimizer
        if rule.kind != "sgd" and any(modifier.remembers for modifier in service.modifiers):
            names = ", ".join(modifier.name for modifier in service.modifiers)
            raise ValueError(
                f"{names} keeps squares of gradients beside SGD, and this optimizer is {type(optimizer).__name__}, "
                "which keeps its own; use SGD, or leave out mean_square"
            )
        return rule
    if service.optimizer is None:
        rule = update_rule_of(optimizer)
        return rule if rule.kind == "adamw" else replace(rule, weight_decay=0.0)
    coupled(optimizer)  # refuses unknown optimizers
    uphill = {bool(group.get("maximize")) for group in optimizer.param_groups}
    decays = {float(group.get("weight_decay", 0.0)) for group in optimizer.param_groups}
    if len(uphill) > 1:
        raise ValueError("a shard applies one optimizer to all parameters, so maximize must be the same in all groups")
    rule = replace(service.optimizer, maximize=uphill.pop())
    if not is_decoupled(optimizer) or decays == {0.0}:
        return rule
    if rule.kind != "adamw" or len(decays) > 1:
        raise ValueError(
            f"the job decays weights as AdamW does, by {sorted(decays)}, and its shards apply {rule.kind}, which would "
            'drop that; use optimizer="adamw" with one weight decay for all groups, or an optimizer whose weight decay '
            "is a part of the gradient, as SGD's, or weight_decay=0"
        )
    return replace(rule, weight_decay=decays.pop())


def rates_of(optimizer: Optimizer) -> tuple[float, ...]:
    """The present learning rate of each parameter group."""
    return tuple(float(group["lr"]) for group in optimizer.param_groups)


def parameters_of(model: nn.Module, optimizer: Optimizer, strategy: Strategy | None = None) -> tuple[Parameter, ...]:
    """The trained parameters in the model's order, each with its parameter group.

    An embedding with sparse gradients is a table: of it only rows travel that gradients touch.

    Raises ValueError where they are of several dtypes or on several devices, or of a dtype that no shard holds, and
    where there are tables and the optimizer, or the `strategy`, cannot go with them; also where the shards apply an
    optimizer with momentum to gradients that the strategy's codec gives momentum, too, or a module that looks at whole
    batches would see slices.
    """
    server = None if strategy is None else strategy.server
    if strategy is not None:
        check_model(model, strategy)
    if server is not None and server.codec is not None and server.optimizer is None:
        check_momentum(optimizer, server.codec.facts.momentum, server.codec.facts.name)
    found = trainable(model, optimizer)
    kinds = {(parameter.dtype, parameter.device) for parameter in found.values()}
    if len(kinds) > 1:
        shown = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ValueError(
            f"a parameter server holds all parameters in one vector, and this model has {shown}; make the model of "
            "one dtype on one device"
        )
    for dtype, _ in kinds:
        if dtype in _DTYPES:
            continue
        raise ValueError(
            f"a parameter server holds float16, bfloat16, float32 or float64, and this model's parameters are {dtype}; "
            "make the model of one of these, such as by model.float(), or use sync_sgd()"
        )
    tables = sparse_tables(model) & found.keys()
    if tables:
        _check_tables(min(tables), optimizer, strategy)
    groups = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return tuple(
        Parameter(name, p.numel(), groups[id(p)], p.shape[1] if name in tables else 0, tuple(p.shape))
        for name, p in found.items()
    )


def _check_tables(name: str, optimizer: Optimizer, strategy: Strategy | None) -> None:
    """The worker's own optimizer counts too: with momentum it would change rows that no gradient has touched."""
    takes_rows(update_rule_of(optimizer))
    if strategy is None or strategy.server is None:
        return
    serves_rows(strategy.server)
    if is_idle(strategy.gradients, 2):
        raise ValueError(
            f"{strategy} exchanges parameters, and of {name}, which has sparse gradients, only gradients travel; make "
            "the embedding with sparse=False"
        )


@torch.no_grad()
def flat_of(model: nn.Module, optimizer: Optimizer) -> torch.Tensor:
    """The trained parameters' values one after the other, shape (numel,), in memory of their own."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in trainable(model, optimizer).values()])
