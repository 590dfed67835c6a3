"""Which of the forecasts are worth a look, and which of them is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from polytempo.planner.forecast import RunForecast


class PlanLimits(NamedTuple):
    """What a run must keep to. None: no limit."""

    memory_bytes: float | None = None
    """Of each worker."""
    deadline_s: float | None = None
    budget: float | None = None
    """Money, in the currency of the price; without a price host hours."""
    price_per_host_hour: float | None = None

    @property
    def by_price(self) -> bool:
        """Whether the cheapest run is chosen, as where only a deadline is given; else the fastest."""
        return self.deadline_s is not None and self.budget is None

    def weight(self, found: RunForecast) -> int:
        """What a second of the run counts in the choice: 1, or its hosts where the cheapest run is chosen."""
        return found.hosts if self.by_price else 1

    def hold(self, found: RunForecast) -> bool:
        """Whether the run is expected to keep to all of them."""
        return (
            (self.memory_bytes is None or found.memory_bytes <= self.memory_bytes)
            and (self.deadline_s is None or found.seconds <= self.deadline_s)
            and (self.budget is None or found.money(self.price_per_host_hour) <= self.budget)
        )


def front(forecasts: Sequence[RunForecast]) -> list[RunForecast]:
    """Those that no other one beats in both time and money, from the fastest on."""
    found: list[RunForecast] = []
    for each in sorted(forecasts, key=lambda one: (one.seconds, one.host_s, one.run)):
        if not found or each.host_s < found[-1].host_s:
            found.append(each)
    return found


def ranked(forecasts: Sequence[RunForecast], limits: PlanLimits) -> list[RunForecast]:
    """Those within the limits, the best first: the cheapest where only a deadline is given, else the fastest."""
    within = [each for each in forecasts if limits.hold(each)]
    return sorted(within, key=lambda one: (limits.weight(one) * one.seconds, one.seconds, one.host_s, one.run))


def runner_up(order: Sequence[RunForecast]) -> RunForecast | None:
    """The best run by another family than the first one's; None where there is none."""
    return next((each for each in order[1:] if each.run.family != order[0].run.family), None)


def chance(first: RunForecast, second: RunForecast, limits: PlanLimits) -> float:
    """In how many of the draws the first is faster, or cheaper where the cheapest run is chosen: from 0 to 1."""
    one, other = limits.weight(first), limits.weight(second)
    better = sum(one * a <= other * b for a, b in zip(first.drawn_s, second.drawn_s, strict=True))
    return better / len(first.drawn_s)
