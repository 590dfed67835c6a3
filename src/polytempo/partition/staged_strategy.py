"""Strategies with stages or parts of a model on each worker, and an inner strategy between equal holders.

`staged_strategy` makes the answer of a pipeline's function by `over_stages`; `over_parts` is for layers in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from polytempo.core import Strategy, call_name, is_idle
from polytempo.core.calls.refusals import refuse
from polytempo.core.rule import Service
from polytempo.core.strategy import InParts, InStages, Parted, Undivided, averages_numbers
from polytempo.partition.schedules.action import Schedule
from polytempo.partition.schedules.correction import SpecTrain
from polytempo.partition.schedules.facts import facts
from polytempo.partition.tensor.way import SplitLayers
from polytempo.partition.wires import Wires

_BRIEF = ("inner", "activations", "gradients")


def staged_strategy(
    function: Callable[..., Strategy],
    arguments: Mapping[str, Any],
    schedule: Schedule,
    inner: Strategy,
    brief: Collection[str] = (),
) -> Strategy:
    """The strategy that `function` makes of its `arguments`, among them the codecs `activations` and `gradients`.

    Errors: TypeError for an argument that is not a codec, ValueError for a codec that stages cannot use (see `Wires`),
    and for an `inner` that replicas of a stage cannot have.
    """
    wired = replace(schedule, wires=Wires(arguments["activations"], arguments["gradients"]))
    return over_stages(call_name(function, arguments, brief=(*brief, *_BRIEF)), wired, inner)


def over_stages(name: str, schedule: Schedule, inner: Strategy) -> Strategy:
    """InStages that work by `schedule`, and `inner` between the workers that hold the same stage.

    With a parameter server each stage has a server of its own, with the shards of `inner`.

    Errors: `Incompatible` for an `inner` with one copy of the parameters, slices, stages or periods by numbers that
    ranks average; ValueError for an `inner`
    with shards that cannot use late gradients where the schedule makes them late.
    """
    divided = inner.parted is not None and not isinstance(inner.parted, SplitLayers)
    more = {"divided parts": divided, "averaged numbers": averages_numbers(inner)}
    features = inner.features | {"inside stages", *(each for each, has in more.items() if has)}
    refuse(features, strategy=inner, outer=name)
    assert isinstance(inner.layout, Undivided | InParts)
    service = inner.server
    if service is not None:
        _check_served(name, schedule, inner, service)
        service = replace(service, shards=service.shards * schedule.stages)
    return inner.laid_out(name, InStages(schedule, inner.layout), service)


def _check_served(name: str, schedule: Schedule, inner: Strategy, service: Service) -> None:
    """Raise ValueError where a stage's server cannot use its gradients, or the stage lacks the optimizer's state."""
    delay = max(facts(schedule, stage).delay for stage in range(schedule.stages))
    if delay and service.rule.needs_newest:
        raise ValueError(
            f"{name}: {inner} drops gradients that were not computed on the newest parameters, and this "
            f"schedule's are up to {delay} updates late, so it would drop all of them; use async_sgd(), softsync() or "
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
            "it; correct by pipemare, or use downpour() or easgd(): their workers step alone"
        )


def over_parts(name: str, parted: Parted, inner: Strategy) -> Strategy:
    """Layers in parts as `parted` says, and `inner` between the workers that hold the same.

    Errors: `Incompatible` for an `inner` with a parameter server, one copy of the parameters, slices, stages, parts,
    groups or periods by numbers that ranks average.
    """
    numbers = {"averaged numbers"} if averages_numbers(inner) else set()
    refuse(inner.features | numbers | {"inside parts"}, strategy=inner, outer=name)
    return inner.laid_out(name, InParts(parted))
