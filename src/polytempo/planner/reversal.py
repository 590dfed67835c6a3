"""What would make the runner-up the winner: another rate of the links, or another number of samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from polytempo.planner.forecast import RunForecast
from polytempo.planner.front import PlanLimits
from polytempo.planner.run_price import Pricer

_FURTHEST = 64.0
_HALVINGS = 5


class Reversal(NamedTuple):
    """When the runner-up is as fast as the winner, or as cheap where the cheapest run is chosen."""

    slower_bytes_per_s: float | None
    """Links between hosts of this rate or below; None: not down to a 64th of the cluster's."""
    faster_bytes_per_s: float | None
    """Links of this rate or above; None: not up to 64 times the cluster's."""
    more_samples: float
    """The winner needs so many times the samples that are expected of it."""


def reversal(winner: RunForecast, other: RunForecast, pricer: Pricer, limits: PlanLimits) -> Reversal:
    """By prices on other links, with the samples that are expected. Cost: about twenty prices."""

    def on_links(found: RunForecast, factor: float) -> float:
        """The seconds of the forecast, or host seconds, on links that carry `factor` times as many bytes."""
        rates = [pricer.price(found.run, network_factor=each).samples_per_s for each in (1.0, factor)]
        return limits.weight(found) * found.seconds * rates[0] / rates[1]

    def ahead(factor: float) -> float:
        """How far the winner is ahead, as the logarithm of the ratio of times, or of prices."""
        return math.log(on_links(other, factor) / on_links(winner, factor))

    rate = pricer.cluster.network.bytes_per_s
    found: list[float | None] = []
    for direction in (-1.0, 1.0):
        crossed = _crossing(ahead, direction)
        found.append(None if crossed is None else rate * crossed)
    return Reversal(found[0], found[1], math.exp(ahead(1.0)))


def _crossing(ahead: Callable[[float], float], direction: float) -> float | None:
    """The factor nearest to 1 in that direction at which `ahead` is 0; None up to the furthest."""
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
