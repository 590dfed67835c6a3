"""Two rules of a shard that its tests share, and the server of `halos` as its docstring says it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from polytempo.core.rule import Action, Add, Answer, Arrival, Situation, Update


def on_arrival(state: Any, arrival: Arrival, situation: Situation) -> tuple[Any, list[Action]]:
    """Every gradient makes an update."""
    actions: list[Action] = [Add(arrival.worker), Update()] if arrival.kind == "push" else []
    return state, [*actions, Answer(arrival.worker)]


def in_pairs(state: int, arrival: Arrival, situation: Situation) -> tuple[int, list[Action]]:
    """Every second gradient makes an update; all are answered immediately."""
    if arrival.kind != "push":
        return state, [Answer(arrival.worker)]
    end: list[Action] = [Update(2.0)] if state else []
    return 1 - state, [Add(arrival.worker, 0.5), *end, Answer(arrival.worker)]


@dataclass
class Nesterov:
    """x ← x - lr (g + μv), v ← μv + the sum of N gradients in every N-th step; without μv in the others."""

    lr: float
    momentum: float = 0.0
    every: int = 1
    plus: Callable[[Any, Any, float], Any] = lambda x, y, factor: x + factor * y
    steps: int = 0
    velocity: Any = 0.0

    def step(self, x: Any, gradient: Any, rate: float = 1.0) -> Any:
        """The next x."""
        if self.momentum:
            begins = self.steps % self.every == 0
            self.velocity = (self.momentum * self.velocity if begins else self.velocity) + gradient
        self.steps += 1
        if self.momentum and self.steps % self.every == 0:
            gradient = self.plus(gradient, self.velocity, self.momentum)
        return self.plus(x, gradient, -(rate * self.lr))


@dataclass
class PlainRegion:
    """A region's φ, φ⁰, optimizer, and its pushes since it last gave its movement to θ."""

    phi: Any
    begun: Any
    optimizer: Nesterov
    pushes: int = 0


@dataclass
class PlainHalos:
    """The server of `halos` for numbers, arrays or tensors. `mix(x, y, a)` is (1 - a) x + a y."""

    theta: Any
    size: int
    every: int
    share: float
    optimizer: Callable[[], Nesterov]
    outer: Nesterov
    mix: Callable[[Any, Any, float], Any] = lambda x, y, share: (1 - share) * x + share * y
    regions: dict[int, PlainRegion] = field(default_factory=dict)
    present: int = 1
    """Regions at the last push."""

    def set_members(self, workers: Collection[int]) -> None:
        """Regions begin and end."""
        for worker in workers:
            self.regions.setdefault(worker // self.size, PlainRegion(self.theta, self.theta, self.optimizer()))
        for number in sorted(self.regions.keys() - {worker // self.size for worker in workers}):
            if self.regions[number].pushes:
                self.merge(number)
            del self.regions[number]

    def push(self, worker: int, movement: Any, workers: Collection[int]) -> Any:
        """The parameters that the worker goes on from."""
        number = worker // self.size
        region = self.regions[number]
        together = sum(each // self.size == number for each in workers)
        region.phi = region.optimizer.step(region.phi, movement, 1 / together)
        region.pushes += 1
        self.present = len({each // self.size for each in workers} | {number})
        if region.pushes == self.every:
            self.merge(number)
        return region.phi

    def merge(self, number: int) -> None:
        """The region's movement moves θ, and θ is blended in."""
        region = self.regions[number]
        self.theta = self.outer.step(self.theta, region.begun - region.phi, 1 / self.present)
        region.phi = region.begun = self.mix(region.phi, self.theta, self.share)
        region.pushes = 0


def plain_halos(
    name: str, start: Any, plus: Callable[[Any, Any, float], Any], mix: Callable[[Any, Any, float], Any]
) -> PlainHalos:
    """The server of the strategy with this name, which begins with `start`. `plus(x, y, a)` is x + a y."""
    given = {key: float(value) for key, value in re.findall(r"(\w+)=([\d.]+)", name)}

    def nesterov(outer: str) -> Nesterov:
        every = "momentum_every" if outer == "outer" else f"{outer}_momentum_every"
        return Nesterov(given[f"{outer}_lr"], given[f"{outer}_momentum"], int(given[every]), plus)

    size, every, share = int(given["region"]), int(given["every"]), given["share"]
    return PlainHalos(start, size, every, share, lambda: nesterov("outer"), nesterov("global"), mix)
