"""`over_stages`: the strategy of a pipeline, of a schedule for its stages and a strategy between their replicas."""

from __future__ import annotations

from dataclasses import replace

from torch.optim import Optimizer

from polytempo.core import Strategy, is_idle
from polytempo.core.rule import Service
from polytempo.partition.schedules.action import Schedule
from polytempo.partition.schedules.correction import SpecTrain
from polytempo.partition.schedules.facts import facts
from polytempo.partition.tensor.split_layers import SplitLayers


def over_stages(name: str, schedule: Schedule, inner: Strategy) -> Strategy:
    """Stages that work by `schedule`, and `inner` between the workers that hold the same stage.

    With a parameter server each stage has a server of its own, of as many shards as `inner` says.

    Errors: ValueError for an `inner` with one copy of the parameters, slices or stages; for one with a parameter server
    where workers of a host, or of other batches, work together, or whose shards cannot use late gradients where the
    schedule makes them late.
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
    divided = strategy.parted is not None and not isinstance(strategy.parted, SplitLayers)
    if divided or any(way is not None for way in ways):
        raise ValueError(
            "replicas of a stage exchange gradients or parameters by messages, among themselves or with a parameter "
            f"server, and {strategy} works by another way (one copy of the weights, slices of a batch, stages, parts "
            "or groups of its own); give an inner strategy such as sync_sgd(), int8_sgd(), local_sgd(period=8) or "
            "downpour()"
        )
    return strategy


def _check_served(name: str, schedule: Schedule, inner: Strategy, service: Service) -> None:
    """ValueError where the servers of stages cannot use what stages push, or stages do not have what they need."""
    delay = max(facts(schedule, stage).delay for stage in range(schedule.stages))
    if delay and service.rule.needs_newest:
        raise ValueError(
            f"{name}: {inner} drops gradients that were not computed on the newest parameters, and those of this "
            f"schedule are up to {delay} updates late, so it would drop all of them; use async_sgd(), softsync() or "
            "ssp(), or a schedule that waits: gpipe, one_f_one_b, interleaved, zero_bubble"
        )
    if delay and any(modifier.needs_basis for modifier in service.modifiers):
        raise ValueError(
            f"{name}: shards of {inner} correct a gradient by the parameters that its worker has read last, and a "
            f"gradient of this schedule was computed on parameters up to {delay} updates older; use "
            "staleness_aware(), or a schedule that waits: gpipe, one_f_one_b, interleaved, zero_bubble"
        )
    steps_by_itself = is_idle(inner.gradients, 2) or service.decays == "workers"
    if isinstance(schedule.correction, SpecTrain) and not steps_by_itself:
        raise ValueError(
            f"{name}: spectrain predicts by SGD's momentum, which is in the shards of {inner}, and stages do not have "
            "it; correct by pipemare, or use downpour() or easgd(), whose workers step by themselves"
        )
    if service.hierarchical or service.reassigns is not None:
        what = "sums the gradients of a host's workers" if service.hierarchical else "lets workers help each other"
        raise ValueError(
            f"{name}: {inner} {what}, and workers that hold stages of a model have no such part; leave that out, or "
            "use async_sgd(), downpour() or ssp()"
        )
