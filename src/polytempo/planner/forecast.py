"""`RunForecast`: how long a run takes to the target and what it costs, with an interval.

    seconds = E(B), up to the next score / samples a second        money = seconds · hosts · price

The interval is drawn: laws that might as well be true, runs that differ by their seeds, and a cluster that may be as
much faster or slower as its measurements vary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random
from statistics import fmean
from typing import NamedTuple

from polytempo.cluster import Cluster
from polytempo.cluster.prices import JOB, KERNELS_AGAIN, MESSAGES_AGAIN
from polytempo.planner.run_price import RunPrice
from polytempo.planner.samples_law import SamplesLaw
from polytempo.planner.search_space import PlannedRun

DRAWS = 200
_OUTER = 0.05
"""Of the draws, left out at either end."""
_DEVIATIONS = 2.563
"""From the 10th to the 90th percentile of a normal distribution, in standard deviations."""


class RunForecast(NamedTuple):
    """Of one run."""

    run: PlannedRun
    price: RunPrice
    hosts: int
    memory_bytes: int
    """Of a worker."""
    samples: float
    seconds: float
    """The mean of the draws."""
    low_s: float
    high_s: float
    """Nine of ten draws lie between them."""
    drawn_s: tuple[float, ...]
    """Draw i of every run has the same factor for the cluster, and those of one family the same law."""

    @property
    def host_s(self) -> float:
        """Seconds of all hosts together: what is paid for."""
        return self.seconds * self.hosts

    def money(self, price_per_host_hour: float | None) -> float:
        """In the currency of the price; without one, host hours."""
        return self.host_s / 3600 * (1.0 if price_per_host_hour is None else price_per_host_hour)


class Uncertainty(NamedTuple):
    """Standard deviations, as parts of what varies."""

    computing: float = 0.0
    messages: float = 0.0
    whole: float = 0.0
    """Of what both are a part of."""


def uncertainty_of(cluster: Cluster, spread: Mapping[str, float]) -> Uncertainty:
    """How far a cluster's speeds may be wrong: the spread of its measurements, how well its kernels were fitted, and by
    how much they had changed when it was measured again; and how far a job's own steps were from their simulation.

    Nothing for a cluster that is declared: then its numbers are taken as they are.
    """
    errors = [] if cluster.speeds is None else [speed.error for _, speed in cluster.speeds.kernels]
    fit = sorted(errors)[len(errors) // 2] if errors else 0.0
    computing, messages = (spread.get(name, 0.0) / _DEVIATIONS for name in ("workers", "messages"))
    kernels_again, messages_again = (spread.get(name, 0.0) for name in (KERNELS_AGAIN, MESSAGES_AGAIN))
    return Uncertainty(
        math.hypot(computing, fit, kernels_again), math.hypot(messages, messages_again), spread.get(JOB, 0.0)
    )


def forecast(
    run: PlannedRun,
    price: RunPrice,
    laws: Sequence[SamplesLaw],
    *,
    noise: float,
    between_scores: int,
    uncertain: Uncertainty,
    hosts: int,
    memory_bytes: int,
    seed: int,
) -> RunForecast:
    """By `laws` drawn for the run's family; runs of equal arguments differ by `noise`, as a part of their samples."""
    of_seeds, of_cluster = Random(f"{seed}/{run}"), Random(f"{seed}/cluster")
    share = price.communication_share
    drawn = []
    for law in laws:
        needed = law.samples(run.global_batch) * math.exp(of_seeds.gauss(0.0, noise))
        needed = between_scores * max(1, math.ceil(needed / between_scores))
        slower = share * math.exp(of_cluster.gauss(0.0, uncertain.messages))
        slower += (1 - share) * math.exp(of_cluster.gauss(0.0, uncertain.computing))
        slower *= math.exp(of_cluster.gauss(0.0, uncertain.whole))
        drawn.append(needed / price.samples_per_s * slower)
    ordered, outer = sorted(drawn), int(_OUTER * len(drawn))
    return RunForecast(
        run,
        price,
        hosts,
        memory_bytes,
        samples=fmean(drawn) * price.samples_per_s,
        seconds=fmean(drawn),
        low_s=ordered[outer],
        high_s=ordered[-1 - outer],
        drawn_s=tuple(drawn),
    )
