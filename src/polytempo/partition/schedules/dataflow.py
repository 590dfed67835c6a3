"""What an action of a schedule waits for, and what waits for it: micro-batches that have passed parts of the model.

part p of the model ── forward ──▶ Passed("forward", batch, p) ──▶ forward of p + 1, backward of p
part p of the model ── backward ─▶ Passed("backward", batch, p) ─▶ backward of p - 1, or its learning

Stripes of one layer, the last parts, all use what is before the first of them; the last one uses the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from polytempo.partition.schedules.action import LETTERS, Action, Schedule


class Passed(NamedTuple):
    """A micro-batch of the run has passed a part of the model, forward or back."""

    way: Literal["forward", "backward"]
    micro_batch: int
    part: int


class Turn(NamedTuple):
    """An action of a stage at its place in a run."""

    step: int
    action: Action
    micro_batch: int
    """Counted over the run; -1 for an update."""

    def __str__(self) -> str:
        if self.action.kind == "update":
            return "U"
        return f"{LETTERS[self.action.kind]}{self.micro_batch}" + (f".{self.action.part}" if self.action.part else "")


def part_of(schedule: Schedule, stage: int, action: Action) -> int:
    """The number of the part of the model that `action` computes."""
    return action.part * schedule.stages + stage


def turns(schedule: Schedule, stage: int, steps: int | None = None) -> Iterator[Turn]:
    """What `stage` does from the first step on; `steps` None: without an end.

    Actions on micro-batches from before the run are left out, and updates without a gradient.
    """
    step, has_gradient = 0, False
    actions = schedule.actions(stage)
    while steps is None or step < steps:
        for action in actions:
            micro_batch = step * schedule.micro_batches + action.micro_batch
            if action.kind == "update":
                if has_gradient:
                    yield Turn(step, action, -1)
                has_gradient = False
            elif micro_batch >= 0:
                has_gradient |= action.kind in ("backward", "weight")
                yield Turn(step, action, micro_batch)
        step += 1


def waits_for(schedule: Schedule, stage: int, turn: Turn) -> tuple[Passed, ...]:
    """What has to have happened before it."""
    kind, batch, part = turn.action.kind, turn.micro_batch, part_of(schedule, stage, turn.action)
    here = Passed("forward", batch, part)
    behind = [Passed("backward", batch, other) for other in _behind(schedule, part)]
    match kind:
        case "forward":
            return tuple(Passed("forward", batch, other) for other in range(part) if part in _behind(schedule, other))
        case "backward" | "input":
            return (here,) if schedule.estimation is not None else (here, *behind)
        case "learn":
            return (here, *behind)
        case _:
            return ()


def _behind(schedule: Schedule, part: int) -> range:
    """The parts that use what `part` gives."""
    last = schedule.stages * schedule.parts - 1
    first_stripe = last - schedule.stripes + 1
    if part >= first_stripe:
        return range(last, last + (part < last))
    return range(part + 1, part + 2) if part + 1 < first_stripe else range(first_stripe, last + 1)


def makes(schedule: Schedule, stage: int, turn: Turn) -> Passed | None:
    """What others may wait for once it is done."""
    part = part_of(schedule, stage, turn.action)
    match turn.action.kind:
        case "forward":
            return Passed("forward", turn.micro_batch, part)
        case "backward" | "input":
            return Passed("backward", turn.micro_batch, part)
        case _:
            return None
