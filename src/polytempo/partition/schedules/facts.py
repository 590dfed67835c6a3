"""The costs of a schedule for a stage, found by playing it: micro-batches and versions held, and delays of updates."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from polytempo.partition.schedules.action import Schedule, turns
from polytempo.partition.wires import AS_THEY_ARE


class StageFacts(NamedTuple):
    """The needs of one stage once the pipeline is full."""

    held: int
    """The most micro-batches, times parts of the model, with activations (or inputs) in memory at a time."""
    delay: int
    """Updates between the parameters that a batch's gradient is computed from, and the update by that gradient."""
    versions: int
    """Versions of its parameters that it holds."""
    target_delay: int = 0
    """Batches that a stage has forwarded since, when its estimator learns by the gradient of a batch."""


def version_of(schedule: Schedule, step: int, updates: int) -> int:
    """Updates in the parameters of forward passes of `step`, at a stage that has made `updates`."""
    match schedule.weights:
        case "vertical":
            return max(0, step - (schedule.stages - 1))
        case "previous":
            return max(0, step - 1)
        case _:
            return updates


def facts(schedule: Schedule, stage: int) -> StageFacts:
    """Play some steps of `stage`. Cost: once linear in the number of actions of 4 K + 4 steps."""
    return _played(replace(schedule, wires=AS_THEY_ARE, correction=None), stage)  # codecs need not be hashable


@lru_cache(maxsize=1024)
def _played(schedule: Schedule, stage: int) -> StageFacts:
    held: set[tuple[int, int]] = set()
    used: dict[int, int] = {}
    updates = most = delay = versions = target_delay = 0
    last = 0
    for turn in turns(schedule, stage, 4 * schedule.stages + 4):
        batch, step = turn.micro_batch, turn.micro_batch // schedule.micro_batches
        match turn.action.kind:
            case "forward":
                held.add((batch, turn.action.part))
                used.setdefault(step, version_of(schedule, step, updates))
            case "backward" | "weight":
                held.discard((batch, turn.action.part))
                last = step
            case "learn":
                target_delay = turn.step - step
            case "update":
                delay = updates - used[last]
                updates += 1
        oldest = min((used[b // schedule.micro_batches] for b, _ in held), default=updates)
        most = max(most, len(held))
        versions = max(versions, updates - oldest + 1)
    return StageFacts(most, delay, 1 if schedule.weights == "current" else versions, target_delay)


def steps_late(schedule: Schedule) -> int:
    """The most steps from a batch's own step until its last gradient has come back to every stage."""
    numbers = [a.micro_batch for stage in range(schedule.stages) for a in schedule.actions(stage) if a.kind != "update"]
    return -(min(numbers) // schedule.micro_batches)
