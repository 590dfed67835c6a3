"""Codistillation: groups train a model each, and learn from the others' predictions of a while ago."""

from __future__ import annotations

from polytempo.aggregation import peer_models
from polytempo.core import Strategy, call_name, chain
from polytempo.core.strategy import Distillation, InGroups, checked_inner
from polytempo.strategies.sync_sgd import sync_sgd
from polytempo.synchronization import after, every


def codistillation(
    groups: int = 2, period: int = 50, burn_in: int = 100, weight: float = 1.0, inner: Strategy | None = None
) -> Strategy:
    """Every `period` steps groups exchange models; a group's loss is its own and the distance from their predictions.

    Lᵢ = φ(y, Fᵢ(x)) + w ψ(mean over j ≠ i of F̄ⱼ(x), Fᵢ(x)), ψ the cross-entropy with the other groups' probabilities as
    soft targets, w = `weight`; F̄ⱼ is group j's model of the last exchange, in eval mode and without a gradient.

    `workers` is a multiple of `groups`: worker r is in group r mod `groups`. Group i has the samples i, i + groups, …
    of the training set (as many for each, a rest is left out), begins at parameters of its own, and its workers train
    by `inner` (default: `sync_sgd()`) among themselves. An epoch is one of a group's samples. The first exchange is at
    step max(`period`, `burn_in`); until then, and with w = 0 all the time, groups train alone. Scores are of group 0's
    model, the result of a run. Checkpoints hold all groups, and the models that they have of each other.

    A job's output must be logits, classes in the last dim, and its loss a function of output and target; a model
    with running statistics is refused, because no group has another group's statistics. For jobs alone, not elastic.

    Cost: `inner`'s, a model to each other group every `period` steps, and from then on `groups` - 1 forward passes a
    step; memory for `groups` more models.

    Source: R. Anil et al., "Large scale distributed neural network training through online distillation", 2018,
    algorithm 1. There groups read each other's checkpoints from a file system whenever these are there; here all groups
    exchange them after the same step.
    """
    if groups < 2:
        raise ValueError(f"codistillation needs at least 2 groups, got groups={groups}")
    if not weight >= 0 or burn_in < 0:
        raise ValueError(f"codistillation needs weight >= 0 and burn_in >= 0, got {weight} and {burn_in}")
    within = checked_inner(inner or sync_sgd(), "codistillation")
    exchange = after(max(0, burn_in - period), every(period, peer_models(groups)))
    return Strategy(
        call_name(codistillation, locals(), brief=("inner",)),
        gradients=within.gradients,
        parameters=chain(within.parameters, exchange),
        synchronized=within.synchronized,
        momentum=within.momentum,
        layout=InGroups(Distillation(groups, weight)),
    )
