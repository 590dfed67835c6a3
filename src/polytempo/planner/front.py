"""The front of the forecasts, the choice among them, and changes that would reverse the choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from polytempo.planner.forecast import RunForecast
from polytempo.planner.run_price import Pricer


class PlanLimits(NamedTuple):
    """The limits of a run. None: no limit."""

    memory_bytes: float | None = None
    """Bytes of each worker."""
    deadline_s: float | None = None
    budget: float | None = None
    """Money, in the currency of the price; without a price host hours."""
    price_per_host_hour: float | None = None

    @property
    def by_price(self) -> bool:
        """True if the cheapest run is chosen, because only a deadline is given; else the fastest is chosen."""
        return self.deadline_s is not None and self.budget is None

    def weight(self, found: RunForecast) -> int:
        """The weight of a second of the run in the choice: 1, or its hosts if the cheapest run is chosen."""
        return found.hosts if self.by_price else 1

    def hold(self, found: RunForecast) -> bool:
        """True if the run is expected to keep to all limits."""
        return (
            (self.memory_bytes is None or found.memory_bytes <= self.memory_bytes)
            and (self.deadline_s is None or found.seconds <= self.deadline_s)
            and (self.budget is None or found.money(self.price_per_host_hour) <= self.budget)
        )


def front(forecasts: Sequence[RunForecast]) -> list[RunForecast]:
    """The forecasts that no other beats in both time and money, from the fastest on."""
    found: list[RunForecast] = []
    for each in sorted(forecasts, key=lambda one: (one.seconds, one.host_s, one.run)):
        if not found or each.host_s < found[-1].host_s:
            found.append(each)
    return found


def ranked(forecasts: Sequence[RunForecast], limits: PlanLimits) -> list[RunForecast]:
    """The forecasts within the limits, the best first: the cheapest if only a deadline is given, else the fastest."""
    within = [each for each in forecasts if limits.hold(each)]
    return sorted(within, key=lambda one: (limits.weight(one) * one.seconds, one.seconds, one.host_s, one.run))


def runner_up(order: Sequence[RunForecast]) -> RunForecast | None:
    """The best run of another family than the first run's; None if there is none."""
    return next((each for each in order[1:] if each.run.family != order[0].run.family), None)


def chance(first: RunForecast, second: RunForecast, limits: PlanLimits) -> float:
    """The share of draws in favour of the first run: faster, or cheaper if the cheapest run is chosen."""
    one, other = limits.weight(first), limits.weight(second)
    better = sum(one * a <= other * b for a, b in zip(first.drawn_s, second.drawn_s, strict=True))
    return better / len(first.drawn_s)


_FURTHEST = 64.0
_HALVINGS = 5


class Reversal(NamedTuple):
    """Conditions that make the runner-up as fast as the winner, or as cheap if the cheapest run is chosen."""

    slower_bytes_per_s: float | None
    """Links between hosts of this rate or below; None: not down to a 64th of the cluster's."""
    faster_bytes_per_s: float | None
    """Links of this rate or above; None: not up to 64 times the cluster's."""
    more_samples: float
    """The factor of the winner's expected samples."""


def reversal(winner: RunForecast, other: RunForecast, pricer: Pricer, limits: PlanLimits) -> Reversal:
    """The reversal by prices on other links, with the expected samples. Cost: about twenty prices."""

    def on_links(found: RunForecast, factor: float) -> float:
        """The seconds of the forecast, or host seconds, on links that carry `factor` times as many bytes."""
        rates = [pricer.price(found.run, network_factor=each).samples_per_s for each in (1.0, factor)]
        return limits.weight(found) * found.seconds * rates[0] / rates[1]

    def ahead(factor: float) -> float:
        """The winner's lead, as the logarithm of the ratio of times, or of prices."""
        return math.log(on_links(other, factor) / on_links(winner, factor))

    rate = pricer.cluster.network.bytes_per_s
    found: list[float | None] = []
    for direction in (-1.0, 1.0):
        crossed = _crossing(ahead, direction)
        found.append(None if crossed is None else rate * crossed)
    return Reversal(found[0], found[1], math.exp(ahead(1.0)))


def _crossing(ahead: Callable[[float], float], direction: float) -> float | None:
    """The root of `ahead` nearest to a factor of 1 in that direction; None if there is none up to the furthest."""
    near, far = 0.0, None
    for exponent in (1.0, 3.0, math.log2(_FURTHEST)):
        if ahead(2 ** (direction * exponent)) < 0:
            far = exponent
            break
        near = exponent
    if far is None:
        return None
    for _ in range(_HALVINGS):
        half = (near + far) / 2
        if ahead(2 ** (direction * half)) < 0:
            far = half
        else:
            near = half
    return math.pow(2.0, direction * far)
