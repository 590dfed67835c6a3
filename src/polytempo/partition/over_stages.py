"""`over_stages`: the strategy of a pipeline, of a schedule for its stages and a strategy between their replicas."""

from __future__ import annotations

from dataclasses import replace

from polytempo.core import Strategy, is_idle
from polytempo.core.calls.refusals import refuse
from polytempo.core.rule import Service
from polytempo.core.strategy import InParts, InStages, Undivided
from polytempo.partition.schedules.action import Schedule
from polytempo.partition.schedules.correction import SpecTrain
from polytempo.partition.schedules.facts import facts
from polytempo.partition.tensor.split_layers import SplitLayers


def over_stages(name: str, schedule: Schedule, inner: Strategy) -> Strategy:
    """InStages that work by `schedule`, and `inner` between the workers that hold the same stage.

    With a parameter server each stage has a server of its own, of as many shards as `inner` says.

    Errors: `Incompatible` for an `inner` with one copy of the parameters, slices or stages; ValueError for one whose
    shards cannot use late gradients where the schedule makes them late.
    """
    divided = inner.parted is not None and not isinstance(inner.parted, SplitLayers)
    refuse(inner.features | {"inside stages"} | ({"divided parts"} if divided else set()), strategy=inner, outer=name)
    assert isinstance(inner.layout, Undivided | InParts)
    service = inner.server
    if service is not None:
        _check_served(name, schedule, inner, service)
        service = replace(service, shards=service.shards * schedule.stages)
    return inner.laid_out(name, InStages(schedule, inner.layout), service)


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
