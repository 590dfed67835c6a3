"""`over_stages`: the strategy of a pipeline, of a schedule for its stages and a strategy between their replicas."""

from __future__ import annotations

from dataclasses import replace

from torch.optim import Optimizer

from polytempo.core import Strategy
from polytempo.core.rule import Service
from polytempo.partition.schedules.action import Schedule
from polytempo.partition.schedules.facts import facts, steps_late


def over_stages(name: str, schedule: Schedule, inner: Strategy) -> Strategy:
    """Stages that work by `schedule`, and `inner` between the workers that hold the same stage.

    With a parameter server each stage has a server of its own, of as many shards as `inner` says.

    Errors: ValueError for an `inner` with one copy of the parameters, slices or stages; for one with a parameter server
    where the schedule is late, or where workers of a host, or of other batches, work together.
    """
    between = checked_inner(inner)
    by_optimizer, service = between.by_optimizer, between.server

    def staged(optimizer: Optimizer) -> Strategy:
        assert by_optimizer is not None
        return replace(by_optimizer(optimizer), name=name, schedule=schedule, by_optimizer=None)

    if service is not None:
        _check_served(name, schedule, between, service)
        service = replace(service, shards=service.shards * schedule.stages)
    return replace(between, name=name, server=service, schedule=schedule, by_optimizer=by_optimizer and staged)


def checked_inner(strategy: Strategy) -> Strategy:
    """The strategy itself. ValueError for one that replicas of a stage cannot have."""
    ways = (strategy.one_copy, strategy.slices, strategy.schedule, strategy.distillation)
    if any(way is not None for way in ways):
        raise ValueError(
            "replicas of a stage exchange gradients or parameters by messages, among themselves or with a parameter "
            f"server, and {strategy} works by another way (one copy of the weights, slices of a batch, stages or "
            "groups of its own); give an inner strategy such as sync_sgd(), int8_sgd(), local_sgd(period=8), downpour()"
        )
    return strategy


def _check_served(name: str, schedule: Schedule, inner: Strategy, service: Service) -> None:
    """ValueError where the stages of a replica cannot push a batch's gradients when the batch is done."""
    late = steps_late(schedule) or max(facts(schedule, stage).delay for stage in range(schedule.stages))
    if late or schedule.estimation is not None:
        raise ValueError(
            f"{name}: a worker of {inner} pushes a batch's gradient before it takes the next batch, and with this "
            "schedule gradients, or what estimators learn by, come back later; use gpipe, one_f_one_b, interleaved or "
            "zero_bubble with a parameter server, or an inner strategy without one, such as local_sgd(period=8)"
        )
    if service.hierarchical or service.reassigns is not None:
        what = "sums the gradients of a host's workers" if service.hierarchical else "lets workers help each other"
        raise ValueError(
            f"{name}: {inner} {what}, and workers that hold stages of a model have no such part; leave that out, or "
            "use async_sgd(), downpour() or ssp()"
        )
