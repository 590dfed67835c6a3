"""A network that loses, repeats, reorders, delays and cuts messages by a `FaultPlan`, which lists the faults and times.

A failing seed prints its plan. All further chance comes from one `Random`.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

ANY_NODE = -1
"""All nodes of a cut."""


class Weather(NamedTuple):
    """Faults that may hit each message, on every link."""

    delay_s: float = 0.001
    """The least time on the way."""
    jitter_s: float = 0.0
    """Up to so much more, evenly; messages overtake each other."""
    slow: float = 0.0
    """The share of messages that take `slow_s` more."""
    slow_s: float = 0.0
    drop: float = 0.0
    duplicate: float = 0.0


FAIR = Weather()


class LinkCut(NamedTuple):
    """No message passes from `source` to `target` between two moments; the other direction needs another cut."""

    begin_s: float
    end_s: float
    source: int
    target: int


class ProcessPause(NamedTuple):
    """A process stands still: its messages wait, its timers are late."""

    begin_s: float
    end_s: float
    node: int

    def __str__(self) -> str:
        """Keep the name "Pause" in traces: their hashes are compared between versions."""
        return f"Pause(begin_s={self.begin_s!r}, end_s={self.end_s!r}, node={self.node!r})"


class Death(NamedTuple):
    """A process ends, and its state is lost. The launcher decides whether another one takes its place."""

    begin_s: float
    node: int


Fault = LinkCut | ProcessPause | Death


class FaultPlan(NamedTuple):
    """All faults of one run, and when they end."""

    weather: Weather = FAIR
    faults: tuple[Fault, ...] = ()
    """Faults in the order of time."""
    healed_s: float = 0.0
    """The end: the weather is fair from here, and no fault begins or lasts."""

    def lines(self) -> list[str]:
        """The plan as text, a line a fault."""
        return [f"{self.weather} until {self.healed_s:.3f} s", *(str(fault) for fault in self.faults)]


class FaultyNetwork:
    """Draws the delivery times of a message."""

    def __init__(self, plan: FaultPlan, random: Random) -> None:
        """Draw from `random` alone. `cuts` have begun."""
        self.cuts: list[LinkCut] = []
        self._plan = plan
        self._random = random

    def arrivals(self, now_s: float, source: int, target: int) -> list[float]:
        """Delivery times of a message that is sent now: none if it is lost, two if it is repeated."""
        weather = self._plan.weather if now_s < self._plan.healed_s else FAIR
        if any(_cuts(cut, now_s, source, target) for cut in self.cuts):
            return []
        chance = self._random.random
        copies = 0 if weather.drop and chance() < weather.drop else 1
        if weather.duplicate and chance() < weather.duplicate:
            copies += 1
        return [now_s + self._on_the_way(weather) for _ in range(copies)]

    def _on_the_way(self, weather: Weather) -> float:
        chance = self._random.random
        slow_s = weather.slow_s * chance() if weather.slow and chance() < weather.slow else 0.0
        return weather.delay_s + slow_s + (weather.jitter_s * chance() if weather.jitter_s else 0.0)


def _cuts(cut: LinkCut, now_s: float, source: int, target: int) -> bool:
    return now_s < cut.end_s and cut.source in (source, ANY_NODE) and cut.target in (target, ANY_NODE)
