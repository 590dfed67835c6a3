"""`over_stages`: the strategy of a pipeline, of a schedule for its stages and a strategy between their replicas."""

from __future__ import annotations

from dataclasses import replace

from torch.optim import Optimizer

from polytempo.core import Strategy
from polytempo.partition.schedules.action import Schedule


def over_stages(name: str, schedule: Schedule, inner: Strategy) -> Strategy:
    """Stages that work by `schedule`, and `inner` between the workers that hold the same stage.

    Errors: ValueError for an `inner` with a parameter server, one copy of the parameters, slices or stages.
    """
    between = checked_inner(inner)
    by_optimizer = between.by_optimizer

    def staged(optimizer: Optimizer) -> Strategy:
        assert by_optimizer is not None
        return replace(by_optimizer(optimizer), name=name, schedule=schedule, by_optimizer=None)

    return replace(between, name=name, schedule=schedule, by_optimizer=by_optimizer and staged)


def checked_inner(strategy: Strategy) -> Strategy:
    """The strategy itself. ValueError for one that replicas of a stage cannot have."""
    ways = (strategy.server, strategy.one_copy, strategy.slices, strategy.schedule, strategy.distillation)
    if any(way is not None for way in ways):
        raise ValueError(
            f"replicas of a stage exchange gradients or parameters by messages among themselves, and {strategy} works "
            "by another way (a parameter server, one copy of the weights, slices of a batch, stages or groups of its "
            "own); give an inner strategy such as sync_sgd(), int8_sgd() or local_sgd(period=8)"
        )
    return strategy
