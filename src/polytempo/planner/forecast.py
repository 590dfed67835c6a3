"""`RunForecast`: a run's time to the target and its cost, with an interval.

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
from polytempo.cluster.cluster_file import JOB, KERNELS_AGAIN, MESSAGES_AGAIN
from polytempo.planner.run_price import RunPrice
from polytempo.planner.samples_law import SamplesLaw
from polytempo.planner.search_space import PlannedRun

DRAWS = 200
_OUTER = 0.05
"""The share of draws that is left out at either end."""
_DEVIATIONS = 2.563
"""Standard deviations from the 10th to the 90th percentile of a normal distribution."""


class RunForecast(NamedTuple):
    """The forecast of one run."""

    run: PlannedRun
    price: RunPrice
    hosts: int
    memory_bytes: int
    """Bytes of a worker."""
    samples: float
    """Samples to the score that reaches the target: the mean of the draws."""
    seconds: float
    """The mean of the draws."""
    low_s: float
    high_s: float
    """Nine of ten draws are between `low_s` and `high_s`."""
    drawn_s: tuple[float, ...]
    """Draw i of every run has the same factor for the cluster, and draw i of runs of one family the same law."""

    @property
    def host_s(self) -> float:
        """Paid seconds: the seconds of all hosts together."""
        return self.seconds * self.hosts

    def money(self, price_per_host_hour: float | None) -> float:
        """The cost in the currency of the price; without a price, host hours."""
        return self.host_s / 3600 * (1.0 if price_per_host_hour is None else price_per_host_hour)


class Uncertainty(NamedTuple):
    """Standard deviations, as parts of the varying quantities."""

    computing: float = 0.0
    messages: float = 0.0
    whole: float = 0.0
    """The deviation of the whole step."""


def uncertainty_of(cluster: Cluster, spread: Mapping[str, float]) -> Uncertainty:
    """The uncertainty of a cluster's speeds: the spread of its measurements, the errors of fitted kernels, their change
    between two measurements, and the error of a job's own steps in simulation.

    None for a declared cluster: its numbers are taken as they are.
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
    """The forecast by `laws`, drawn for the run's family; equal runs differ by `noise`, as a part of their samples."""
    of_seeds, of_cluster = Random(f"{seed}/{run}"), Random(f"{seed}/cluster")
    share = price.communication_share
    samples, drawn = [], []
    for law in laws:
        needed = law.samples(run.global_batch) * math.exp(of_seeds.gauss(0.0, noise))
        needed = between_scores * max(1, math.ceil(needed / between_scores))
        slower = share * math.exp(of_cluster.gauss(0.0, uncertain.messages))
        slower += (1 - share) * math.exp(of_cluster.gauss(0.0, uncertain.computing))
        samples.append(needed)
        slower *= math.exp(of_cluster.gauss(0.0, uncertain.whole))
        drawn.append(needed / price.samples_per_s * slower)
    ordered, outer = sorted(drawn), int(_OUTER * len(drawn))
    return RunForecast(
        run,
        price,
        hosts,
        memory_bytes,
        samples=fmean(samples),
        seconds=fmean(drawn),
        low_s=ordered[outer],
        high_s=ordered[-1 - outer],
        drawn_s=tuple(drawn),
    )
