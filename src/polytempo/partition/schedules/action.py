"""`Action` and `Schedule`: what a stage of a pipeline does in one step, as plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from polytempo.partition.schedules.correction import Correction, Estimation, PipeMare
from polytempo.partition.wires import AS_THEY_ARE, Wires

Kind = Literal["forward", "backward", "input", "weight", "update", "learn"]
"""`input` and `weight` are the halves of a backward pass: the gradient that travels on, and that of the parameters.
`learn` trains a stage's estimator of its output's gradient by the gradient that the stage behind sends."""
Weights = Literal["stashed", "current", "vertical", "previous"]
"""With which parameters a backward pass computes that comes after later updates; see `Schedule`."""


class Action(NamedTuple):
    """One thing that a stage does. What it sends and receives follows from it."""

    kind: Kind
    micro_batch: int = 0
    """Counted from the first of this step: -1 is the last micro-batch of the step before. Of an update: 0."""
    part: int = 0
    """Which of the stage's parts of the model."""

    def __str__(self) -> str:
        if self.kind == "update":
            return "U"
        return f"{LETTERS[self.kind]}{self.micro_batch}" + ("" if self.part == 0 else f".{self.part}")


LETTERS = {"forward": "F", "backward": "B", "input": "I", "weight": "W", "learn": "L"}

Order = Callable[[int, int, int], tuple[Action, ...]]
"""(stage, stages, micro-batches) to the actions of one step of this stage, in their order."""


@dataclass(frozen=True)
class Schedule:
    """Which stage does what, step after step. Every step of a stage has the same actions.

    part p of the model is at stage p mod K, of K stages; a stage with V parts has p = stage, stage + K, …
    a forward pass waits for that of the part before, a backward pass for that of the part behind
    a step takes `micro_batches` micro-batches, and those whose number is negative are of earlier steps

    `weights` says with which parameters a backward pass computes, if updates came between it and its forward pass:

        stashed    those of its forward pass
        current    the present ones, through the activations of its forward pass
        vertical   forward and backward pass of a batch have at every stage what stage 0 had when the batch entered
        previous   forward and backward pass of a batch have at every stage those before the last update

    `recomputes`: a forward pass keeps its inputs only, and a backward pass computes the activations anew, with the
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
    """Whether all stages end a step before one of them begins the next."""
    estimation: Estimation | None = None
    """How a stage estimates the gradient of its output; None: it waits for the gradient."""
    stripes: int = 1
    """The last so many parts are stripes of one layer: each uses what is before them, and the last one the others."""
    correction: Correction | None = None
    """What a stage does about late gradients."""
    wires: Wires = AS_THEY_ARE
    """By which codecs tensors pass from stage to stage, and their gradients back."""

    def __post_init__(self) -> None:
        """Refuse numbers that no pipeline has."""
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
                f"{self.correction} changes the parameters that a pass computes with, and those of {self.name} with "
                f'weights="{self.weights}"{" are computed anew" if replays else ""} are given; use '
                'pipelined_backprop or ddg(weights="current"), or pipemare without decay'
            )

    def actions(self, stage: int) -> tuple[Action, ...]:
        """One step of `stage`."""
        return self.order(stage, self.stages, self.micro_batches)

    def __str__(self) -> str:
        return self.name
