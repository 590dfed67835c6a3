"""`over_stages`: the strategy of a pipeline, of a schedule for its stages and a strategy between their replicas."""

from __future__ import annotations

from dataclasses import replace

from torch.optim import Optimizer

from polytempo.core import Strategy, is_idle
from polytempo.partition.schedules.action import Schedule


def over_stages(name: str, schedule: Schedule, inner: Strategy) -> Strategy:
    """Stages that work by `schedule`, and `inner` between the workers that hold the same stage.

    Errors: ValueError for an `inner` that does more than exchange gradients, or by another way than messages.
    """
    between = checked_inner(inner)
    by_optimizer = between.by_optimizer

    def staged(optimizer: Optimizer) -> Strategy:
        assert by_optimizer is not None
        return replace(by_optimizer(optimizer), name=name, schedule=schedule, by_optimizer=None)

    return replace(between, name=name, schedule=schedule, by_optimizer=by_optimizer and staged)


def checked_inner(strategy: Strategy) -> Strategy:
    """The strategy itself. ValueError for one that replicas of a stage cannot have."""
    if strategy.server is not None:
        raise ValueError(
            f"{strategy} has a parameter server, and replicas of a stage meet each other; give a strategy without one "
            "as inner, such as sync_sgd() or int8_sgd()"
        )
    exchanges_more = strategy.one_copy is not None or strategy.slices is not None or strategy.schedule is not None
    if exchanges_more or not is_idle(strategy.parameters, 2):
        raise ValueError(
            f"replicas of a stage exchange their gradients, and {strategy} exchanges more, or by another way; give a "
            "strategy of gradients alone as inner, such as sync_sgd(), int8_sgd() or top_k_sgd()"
        )
    return strategy
