"""`Strategy`: the two places where workers meet, and what a strategy promises about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from torch.optim import Optimizer

from polytempo.core.rule import Service
from polytempo.core.transform import Transform, identity

Turn = Literal["together", "free", "locked", "in_turn"]
"""Who writes to one copy of the parameters, and when: all ranks' gradients make one update, each rank at any time,
one after the other, or in the order of ranks, each once."""


class Staged(Protocol):
    """How a model is cut over workers, and in which order they work; `partition.schedules` makes them."""

    @property
    def stages(self) -> int:
        """Workers that hold the parts of one model."""

    @property
    def micro_batches(self) -> int:
        """In how many parts a batch goes through them."""


class Parted(Protocol):
    """Which layers of a model lie in parts on several workers; `partition.tensor` and `partition.hybrid` make them."""

    @property
    def ranks(self) -> int:
        """Workers that hold one model together and get the same samples; 1 where each gets samples of its own."""


class Distillation(NamedTuple):
    """Groups of workers, each with a model and a part of the data of its own, that learn from each other's predictions.

    `gradients` and `parameters` of the strategy are what happens within a group.
    """

    groups: int
    weight: float
    """What the distance from the other groups' predictions counts in the loss."""


@dataclass(frozen=True, repr=False)
class Strategy:
    """What happens between `backward()` and the next `forward()`.

    `gradients` runs before `optimizer.step`, `parameters` after it. `name` is how the strategy is
    written on the command line; ranks compare it before they begin.

    `synchronized`: all ranks hold equal parameters after every step. Where it is False, a model that is
    evaluated or handed out is the mean of the ranks' models.
    `carries_optimizer`: the `parameters` transform sees the optimizer's state tensors too.
    `one_copy`: the parameters exist once per host, and its ranks write to them by this turn. None: every rank has
    its own.
    `server`: the parameters live at a parameter server; `gradients` and `parameters` push to it and pull from it.
    `momentum`: what `gradients` has of it already (`dgc`). The optimizer must then have none, or it counts twice.
    `slices`: a global batch is computed in so many slices, each by itself, whatever the number of ranks; `gradients` is
    given the weighted sum of a rank's slices (`core.slice_tree`). None: each rank computes its batch at once.
    `schedule`: the model is cut into stages that work in this order; `gradients` and `parameters` are then what happens
    between the workers that hold the same stage. None: every worker holds the whole model.
    `parted`: some layers lie in parts on several workers; `gradients` and `parameters` are then what happens between
    the workers that hold the same. None: every worker holds whole layers.
    `distillation`: the workers are groups, each with a model of its own. None: all train one model.
    `by_optimizer`: the strategy that this one is with a given optimizer, which may be another one; it raises ValueError
    for what does not go with it. None: this one, with any.
    """

    name: str
    gradients: Transform = field(default_factory=identity)
    parameters: Transform = field(default_factory=identity)
    synchronized: bool = True
    carries_optimizer: bool = False
    one_copy: Turn | None = None
    server: Service | None = None
    momentum: float = 0.0
    by_optimizer: Callable[[Optimizer], Strategy] | None = None
    slices: int | None = None
    schedule: Staged | None = None
    parted: Parted | None = None
    distillation: Distillation | None = None

    @property
    def stages(self) -> int:
        """Workers that hold the stages of one model."""
        return 1 if self.schedule is None else self.schedule.stages

    @property
    def holders(self) -> int:
        """Workers that hold one model together, as stages or as parts of layers, and get the same samples."""
        return self.stages * (1 if self.parted is None else self.parted.ranks)

    @property
    def groups(self) -> int:
        """Models that are trained, each by workers of its own."""
        return 1 if self.distillation is None else self.distillation.groups

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__


def checked_inner(strategy: Strategy, who: str) -> Strategy:
    """The strategy itself. ValueError for one that is more than two transforms, so that `who` cannot be built on it."""
    cuts = (strategy.schedule, strategy.parted, strategy.distillation)
    ways = (strategy.server, strategy.one_copy, strategy.slices, *cuts)
    if strategy.carries_optimizer or strategy.by_optimizer or any(way is not None for way in ways):
        raise ValueError(
            f"{who} takes an inner strategy that exchanges gradients or parameters alone, by messages, and {strategy} "
            "works by another way; give one such as sync_sgd(), top_k_sgd(), local_sgd() or gossip()"
        )
    return strategy
