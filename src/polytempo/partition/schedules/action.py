"""`Action` and `Schedule`: a pipeline stage's work in one step, as plain data, and the dependencies between actions.

part p of the model ── forward ──▶ Passed("forward", batch, p) ──▶ forward of p + 1, backward of p
part p of the model ── backward ─▶ Passed("backward", batch, p) ─▶ backward of p - 1, or its learning

All stripes of one layer, the last parts, use the part before the first of them; the last one uses the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from polytempo.partition.schedules.correction import Correction, Estimation, PipeMare
from polytempo.partition.wires import AS_THEY_ARE, Wires

Kind = Literal["forward", "backward", "input", "weight", "update", "learn"]
"""`input` and `weight` are the halves of a backward pass: the gradient that travels on, and the parameters' gradient.
`learn` trains a stage's estimator of its output's gradient by the gradient that the stage behind sends."""
Weights = Literal["stashed", "current", "vertical", "previous"]
"""The parameters of a backward pass that comes after later updates; see `Schedule`."""


class Action(NamedTuple):
    """One action of a stage. Its messages follow from it."""

    kind: Kind
    micro_batch: int = 0
    """Counted from the first of this step: -1 is the last micro-batch of the step before. Of an update: 0."""
    part: int = 0
    """The number of the part among the stage's parts of the model."""

    def __str__(self) -> str:
        if self.kind == "update":
            return "U"
        return f"{_LETTERS[self.kind]}{self.micro_batch}" + ("" if self.part == 0 else f".{self.part}")


_LETTERS = {"forward": "F", "backward": "B", "input": "I", "weight": "W", "learn": "L"}

Order = Callable[[int, int, int], tuple[Action, ...]]
"""(stage, stages, micro-batches) to the actions of one step of this stage, in their order."""


@dataclass(frozen=True)
class Schedule:
    """The actions of each stage in a step. Every step of a stage has the same actions.

    part p of the model is at stage p mod K, of K stages; a stage with V parts has p = stage, stage + K, …
    a forward pass waits for the part before, a backward pass for the part behind
    a step takes `micro_batches` micro-batches; a negative number belongs to an earlier step

    `weights` names the parameters of a backward pass, if updates came between it and its forward pass:

        stashed    its forward pass's
        current    the present ones, through the activations of its forward pass
        vertical   for both passes of a batch at every stage: stage 0's version when the batch entered
        previous   for both passes of a batch at every stage: the version before the last update

    `recomputes`: a forward pass keeps its inputs only, and a backward pass computes the activations again, with the
    parameters of that time where `weights` is "current".
    """

    name: str
    stages: int
    micro_batches: int
    order: Order
    parts: int = 1
    """Parts of the model that each stage holds."""
    weights: Weights = "stashed"
    recomputes: bool = False
    lockstep: bool = False
    """True if all stages end a step before one of them begins the next."""
    estimation: Estimation | None = None
    """The stage's estimate of its output's gradient; None: it waits for the gradient."""
    stripes: int = 1
    """The last so many parts are stripes of one layer: each uses the part before them, and the last one the others."""
    correction: Correction | None = None
    """The stage's remedy for late gradients."""
    wires: Wires = AS_THEY_ARE
    """Codecs of tensors from stage to stage, and of their gradients back."""

    def __post_init__(self) -> None:
        for name in ("stages", "micro_batches", "parts", "stripes"):
            if not isinstance(number := getattr(self, name), int) or number < 1:
                raise ValueError(f"{self.name} needs {name} of 1 or more, got {number!r}")
        if self.stripes > self.stages or (self.stripes > 1 and self.parts > 1):
            raise ValueError(
                f"stripes={self.stripes} of a layer are at as many of the {self.stages} stages, with one part each; "
                f"give stripes of {self.stages} or less"
            )
        rates_alone = self.correction is None or (isinstance(self.correction, PipeMare) and not self.correction.decay)
        replays = self.recomputes and isinstance(self.correction, PipeMare)
        if not rates_alone and (self.weights != "current" or replays):
            raise ValueError(
                f"{self.correction} changes the parameters of a pass, and the parameters of {self.name} with "
                f'weights="{self.weights}"{" are computed again" if replays else ""} are given; use '
                'pipelined_backprop or ddg(weights="current"), or pipemare without decay'
            )

    def actions(self, stage: int) -> tuple[Action, ...]:
        """One step of `stage`."""
        return self.order(stage, self.stages, self.micro_batches)

    def __str__(self) -> str:
        return self.name


class Passed(NamedTuple):
    """A micro-batch of the run that has passed a part of the model, forward or back."""

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
        return str(self.action._replace(micro_batch=self.micro_batch))


def part_of(schedule: Schedule, stage: int, action: Action) -> int:
    """The number of the part of the model that `action` computes."""
    return action.part * schedule.stages + stage


def turns(schedule: Schedule, stage: int, steps: int | None = None) -> Iterator[Turn]:
    """The turns of `stage` from the first step on; `steps` None: without an end.

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
    """The passes that come before it."""
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
    """The parts that use the output of `part`."""
    last = schedule.stages * schedule.parts - 1
    first_stripe = last - schedule.stripes + 1
    if part >= first_stripe:
        return range(last, last + (part < last))
    return range(part + 1, part + 2) if part + 1 < first_stripe else range(first_stripe, last + 1)


def makes(schedule: Schedule, stage: int, turn: Turn) -> Passed | None:
    """The pass that others may wait for once it is done."""
    part = part_of(schedule, stage, turn.action)
    match turn.action.kind:
        case "forward":
            return Passed("forward", turn.micro_batch, part)
        case "backward" | "input":
            return Passed("backward", turn.micro_batch, part)
        case _:
            return None
