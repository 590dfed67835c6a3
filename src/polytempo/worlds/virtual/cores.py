"""The cores of one machine of a virtual world, for ranks that have no processor of their own.

2 cores    rank 0  ███████████──────────      while three compute, each has two thirds of a core
           rank 1  ───███████████───────
           server  ──────███────────────
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from polytempo.worlds.virtual.clockwork import Clockwork

_DONE_S = 1e-12
"""What is left of a computation that is over, by rounding."""


@dataclass(slots=True, eq=False)
class _Computation:
    left_s: float
    then: Callable[[], None]


class Cores:
    """Computations that are under way together share `cores` evenly, none of them with more than one core."""

    def __init__(self, world: Clockwork, cores: int) -> None:
        self._world, self._cores = world, cores
        self._running: list[_Computation] = []
        self._since_s = 0.0
        """Until when what is left of the computations is known."""
        self._plan = 0
        """The number of the last plan of what ends next; those before are void."""

    def run(self, seconds: float, then: Callable[[], None]) -> None:
        """Compute something that takes `seconds` on a core of its own; `then` is called when it is over."""
        self._pass()
        self._running.append(_Computation(seconds, then))
        self._look_ahead()

    def _pass(self) -> None:
        """What has been computed until now."""
        now_s = self._world.now_s
        if self._running:
            done_s = (now_s - self._since_s) * self._rate()
            for each in self._running:
                each.left_s -= done_s
        self._since_s = now_s

    def _rate(self) -> float:
        return min(1.0, self._cores / len(self._running))

    def _look_ahead(self) -> None:
        """Come back when the next computation ends, unless another one begins before."""
        self._plan += 1
        if self._running:
            plan, soonest_s = self._plan, max(0.0, min(each.left_s for each in self._running))
            self._world.at(self._world.now_s + soonest_s / self._rate(), lambda: self._end(plan))

    def _end(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._pass()
        least_s = max(_DONE_S, min(each.left_s for each in self._running))
        over = [each for each in self._running if each.left_s <= least_s]
        self._running = [each for each in self._running if each.left_s > least_s]
        self._look_ahead()
        for each in over:
            each.then()
