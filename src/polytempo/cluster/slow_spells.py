"""Stragglers that remember: a worker that was slow in one step is likely to be slow in the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import exp, inf, sqrt
from random import Random
from statistics import NormalDist
from typing import Protocol, runtime_checkable

_NORMAL = NormalDist()


@runtime_checkable
class CorrelatedStragglers(Protocol):
    """A distribution with draws that depend on earlier draws, or on the time."""

    def begun(self, random: Random, host: int) -> Callable[[float], float]:
        """A worker's function of the virtual seconds since the beginning, asked once for each of its steps."""


@dataclass(frozen=True)
class _SlowSpells:
    """See `slow_spells`."""

    every_s: float
    duration_s: float
    factor: float

    def begun(self, random: Random, host: int) -> Callable[[float], float]:
        begin_s = end_s = 0.0

        def factor_at(now_s: float) -> float:
            nonlocal begin_s, end_s
            while now_s >= end_s:
                begin_s = end_s + random.expovariate(1 / self.every_s)
                end_s = begin_s + random.expovariate(1 / self.duration_s)
            return self.factor if now_s >= begin_s else 1.0

        return factor_at


@dataclass(frozen=True)
class _Correlated:
    """See `correlated` and `measured_steps`. `quantiles` None: log-normal with `sigma`."""

    sigma: float
    correlation: float
    quantiles: tuple[float, ...] | None = None

    def begun(self, random: Random, host: int) -> Callable[[float], float]:
        fresh, last = sqrt(1 - self.correlation**2), random.gauss(0.0, 1.0)

        def factor_at(now_s: float) -> float:
            nonlocal last
            drawn, last = last, self.correlation * last + fresh * random.gauss(0.0, 1.0)
            return exp(self.sigma * drawn) if self.quantiles is None else _between(self.quantiles, _NORMAL.cdf(drawn))

        return factor_at


def slow_spells(every_s: float = 30.0, duration_s: float = 2.0, factor: float = 3.0) -> CorrelatedStragglers:
    """Now and then a worker takes `factor` times as long, for a while, as beside another program on its host.

    Spells begin `every_s` after the one before has ended, and last `duration_s`: means of exponential distributions.
    Raises ValueError unless all are above 0.
    """
    if not min(every_s, duration_s, factor) > 0:
        raise ValueError(f"slow_spells needs numbers above 0, got {every_s=}, {duration_s=} and {factor=}")
    return _SlowSpells(every_s, duration_s, factor)


def correlated(sigma: float = 0.3, correlation: float = 0.9) -> CorrelatedStragglers:
    """exp(sigma · Zₖ) in step k with Zₖ = ρ·Zₖ₋₁ + √(1-ρ²)·N(0, 1), ρ = `correlation`; median 1, as `lognormal`.

    Raises ValueError for a negative sigma, or a correlation outside [0, 1).
    """
    if sigma < 0 or not 0 <= correlation < 1:
        raise ValueError(f"correlated needs sigma >= 0 and correlation in [0, 1), got {sigma} and {correlation}")
    return _Correlated(sigma, correlation)


def measured_steps(quantiles: tuple[float, ...], correlation: float = 0.0) -> CorrelatedStragglers:
    """Factors with these quantiles, at equal distances from the least to the most, and that correlation over steps.

    It is a Gaussian copula: Zₖ as for `correlated`, and the factor at the quantile Φ(Zₖ), linear between two of them.
    Raises ValueError for fewer than two quantiles, for quantiles that are 0 or less, infinite or do not ascend, and as
    `correlated`.
    """
    ascending = all(a <= b for a, b in pairwise(quantiles))
    above_0 = len(quantiles) >= 2 and 0 < quantiles[0] <= quantiles[-1] < inf
    if not above_0 or not ascending or not 0 <= correlation < 1:
        raise ValueError(
            "measured_steps needs at least two ascending quantiles above 0, none infinite, and a correlation in "
            f"[0, 1), got {quantiles} and {correlation}"
        )
    return _Correlated(0.0, correlation, tuple(quantiles))


def steps_of(distribution: CorrelatedStragglers) -> tuple[tuple[float, ...], float] | None:
    """The quantiles and the correlation of `measured_steps`; None for another distribution."""
    if isinstance(distribution, _Correlated) and distribution.quantiles is not None:
        return distribution.quantiles, distribution.correlation
    return None


def _between(quantiles: tuple[float, ...], share: float) -> float:
    place = share * (len(quantiles) - 1)
    below = min(int(place), len(quantiles) - 2)
    return quantiles[below] + (place - below) * (quantiles[below + 1] - quantiles[below])
