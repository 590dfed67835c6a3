"""Checks that a strategy fits its optimizer and model."""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.optim import LBFGS, Optimizer

from polytempo.core import Strategy
from polytempo.core.calls.refusals import refuse
from polytempo.spec.loss_divisor import check_by_samples
from polytempo.training.model.trainable_parameters import sparse_tables


def fitted(strategy: Strategy, optimizer: Optimizer) -> Strategy:
    """The strategy for this optimizer. Raises ValueError for a pair that would not do as the strategy says."""
    strategy = strategy.fit(strategy, optimizer)
    check_momentum(optimizer, strategy.momentum, str(strategy))
    if strategy.carries_optimizer and isinstance(optimizer, LBFGS):
        raise ValueError(
            f"{strategy} averages the optimizer's state, and {type(optimizer).__name__} keeps a history of its own "
            "directions, which have no mean; use parameter_averaging(optimizer_state=False)"
        )
    return strategy


def check_momentum(optimizer: Optimizer, momentum: float, who: str) -> None:
    """Raise `Incompatible` where `who` gives gradients this momentum already and the optimizer has momentum, too.

    Both together make steps 1/((1 - m)(1 - m')) times as long: 100 times at 0.9, and the run diverges. Adam's first
    moment is momentum: an average over 1/(1 - β₁) gradients that have been averaged already.
    """
    name, own = max((_momentum_of(group) for group in optimizer.param_groups), key=lambda found: found[1])
    if momentum > 0 and own > 0:
        adam = re.search(r"\w+_adam", who)
        refuse(
            {"momentum of the strategy", "momentum of the optimizer"},
            who=who,
            momentum=momentum,
            optimizer=type(optimizer).__name__,
            name=name,
            own=own,
            without="dgc(momentum=0)" if adam is None else f"{adam[0]}(beta1=0)",
        )


def check_served(
    model: nn.Module, optimizer: Optimizer, strategy: Strategy, features: frozenset[str], buffers: str = "average"
) -> None:
    """Raise ValueError where a loop of one's own cannot train `model` by a parameter server.

    `features`: features of `strategy` that the loop does not handle itself, as a pipeline handles stages.
    """
    service = strategy.server
    assert service is not None
    refuse(
        features | {"own loop"} | ({"buffers"} if buffers != "average" else set()), strategy=strategy, buffers=buffers
    )
    if service.optimizer is None and service.decays == "shards" and any(optimizer.state.values()):
        raise ValueError(
            f"this {type(optimizer).__name__} has a state already, and with {strategy} the shards make the steps, "
            "with a state of their own; make a new optimizer"
        )


def check_model(model: nn.Module, strategy: Strategy) -> None:
    """Raise ValueError for a batch norm in a model that computes batches in slices.

    It would normalise by the slice's statistics, which is another model; and a slice of one sample it refuses itself. A
    frozen batch norm (in eval mode) normalises every sample alike, and passes.
    """
    if strategy.sample_privacy is not None:
        check_each_sample(model, str(strategy))
    if strategy.slices is not None:
        check_sliced(model, strategy)
    service = strategy.server
    if service is None or service.reassigns is None or (slices := service.numbers_per_batch - 1) == 1:
        return
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            raise ValueError(
                f"{strategy} computes a batch in up to {slices} slices, and "
                f"{type(module).__name__} {name!r} would normalise each slice separately; hand over whole batches by "
                "flexrr(grain=1.0, first_offer=1.0, later_offers=1.0), use a norm that looks at one sample, such as "
                "GroupNorm, or do without help by backup_workers(backups=0)"
            )


def check_loss(loss: object, strategy: Strategy) -> None:
    """Raise ValueError where a strategy computes a batch in slices and the loss is known to be no mean over samples."""
    if (
        strategy.slices is not None
        or strategy.sample_privacy is not None
        or (strategy.server is not None and strategy.server.reassigns is not None)
    ):
        check_by_samples(loss, str(strategy))


def check_sliced(model: nn.Module, strategy: Strategy) -> None:
    """Raise ValueError for results that would depend on a rank's slices: running statistics, and sparse gradients.

    Statistics that stay with a client do not.
    """
    kept: frozenset[str] = frozenset() if strategy.rounds is None else strategy.rounds.local.kept(model)
    for name, module in model.named_modules():
        has = isinstance(module, _NormBase) and module.training and module.track_running_stats
        if has and f"{name}.running_mean".lstrip(".") not in kept:
            raise ValueError(
                f"{strategy} computes a batch in slices, and the running statistics of "
                f"{type(module).__name__} {name!r} would depend on a worker's slices; use a norm that looks at "
                "one sample, such as GroupNorm, track_running_stats=False, or another route"
            )
    if tables := sorted(sparse_tables(model)):
        raise ValueError(f"{strategy} adds dense gradients, and {tables[0]!r} has gradients by rows; use sparse=False")


def check_each_sample(model: nn.Module, who: str) -> None:
    """`Incompatible` (PT2522) where the gradient of a sample would depend on others."""
    for name, module in model.named_modules():
        mixes = isinstance(module, _BatchNorm) or (isinstance(module, _NormBase) and module.track_running_stats)
        if mixes and module.training:
            refuse({"private samples", "batch statistics"}, strategy=who, layer=f"{type(module).__name__} {name!r}")


def _momentum_of(group: dict[str, Any]) -> tuple[str, float]:
    """The momentum of a parameter group and its name in the optimizer; 0 without one."""
    betas = group.get("betas") or (0.0,)
    found = [("momentum", group.get("momentum")), ("beta1", betas[0]), ("beta1", group.get("beta1"))]
    return max(((name, float(value or 0.0)) for name, value in found), key=lambda each: each[1])
