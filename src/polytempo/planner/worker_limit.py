"""`worker_limit`: the last number of workers before further workers cost more than they bring, and the cause.

They cost more than they bring if the run's price, in seconds of all workers together, rises by a larger factor than
its time falls: from n to m workers, if T(n) / T(m) < m T(m) / (n T(n)). The last number before is the "knee", where
the ratio of efficiency to time is largest.

    seconds = samples / rate = samples · computing / workers · communication · cores · stragglers

`computing` is a worker's seconds for a sample, and each factor behind it the ratio of two prices, with and without
this cause. From the best run of n workers to the best of m the time is multiplied by n/m and by the change of each
factor.

Source of the knee: D. Eager, J. Zahorjan and E. Lazowska, "Speedup versus efficiency in parallel systems", 1989.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from polytempo.cluster import Cluster, Link
from polytempo.cluster.stragglers import constant
from polytempo.planner.forecast import RunForecast
from polytempo.planner.front import PlanLimits
from polytempo.planner.run_price import Pricer, with_data
from polytempo.planner.search_space import PlannedRun
from polytempo.spec.job import Job
from polytempo.spec.job_calls import data_of

_ROUNDS = 4
"""Prices are of so many periods, as for the best runs of a plan."""

Rate = Callable[[PlannedRun], float]
"""Samples a second of a run."""

CAUSES = {
    "samples": "statistical efficiency: larger global batches need more samples",
    "computing": "computing: a worker needs longer for a sample",
    "communication": "communication",
    "cores": "the host's cores, which its workers share",
    "stragglers": "stragglers: more workers wait for the slowest",
}
"""Cause -> its description."""


class PricedRun(NamedTuple):
    """The fastest run of a number of workers."""

    run: PlannedRun
    seconds: float
    parts: Mapping[str, float]
    """Cause -> its factor of `seconds`; all of them over the workers are the seconds."""


class MoreWorkers(NamedTuple):
    """The change from the best run of some workers to the best run of the next larger number."""

    before: PricedRun
    after: PricedRun

    @property
    def brings(self) -> float:
        """The ratio of the times, before over after."""
        return self.before.seconds / self.after.seconds

    @property
    def costs(self) -> float:
        """The ratio of the prices, after over before."""
        return self.after.run.workers / self.before.run.workers / self.brings

    @property
    def factors(self) -> dict[str, float]:
        """Cause -> its factor of the price. Their product is `costs`."""
        return {cause: self.after.parts[cause] / self.before.parts[cause] for cause in CAUSES}

    @property
    def reason(self) -> str:
        """The cause that costs the most."""
        return max(CAUSES, key=lambda cause: self.factors[cause])


class WorkerLimit(NamedTuple):
    """The changes from each number of workers to the next."""

    steps: list[MoreWorkers]

    @property
    def end(self) -> MoreWorkers | None:
        """The first change that costs more than it brings; None if there is none."""
        return next((step for step in self.steps if step.costs > step.brings), None)

    def as_json(self) -> dict[str, Any]:
        """Plain values, for `json.dumps`."""
        end = self.end
        return {
            "workers": None if end is None else end.before.run.workers,
            "reason": None if end is None else end.reason,
            "steps": [
                {
                    "workers": [step.before.run.workers, step.after.run.workers],
                    "seconds": [step.before.seconds, step.after.seconds],
                    "brings": step.brings,
                    "costs": step.costs,
                    "factors": step.factors,
                }
                for step in self.steps
            ],
        }


def worker_limit(
    forecasts: Sequence[RunForecast], limits: PlanLimits, job: Job, data: str | Path | None, cluster: Cluster
) -> WorkerLimit:
    """The limit among `forecasts` of `job` on `cluster`, by the fastest run of each number of workers.

    Runs that need more memory than the limit are left out. Cost: four prices for each number of workers.
    """
    job = with_data(job, data_of(job, data))
    rates = [_rate(Pricer(job, None, each)) for each in _idealised(cluster)]
    fitting = [each for each in forecasts if limits.memory_bytes is None or each.memory_bytes <= limits.memory_bytes]
    return limit_among(fitting, rates)


def _rate(pricer: Pricer) -> Rate:
    return lambda run: pricer.price(run, rounds=_ROUNDS).samples_per_s


def _idealised(cluster: Cluster) -> list[Cluster]:
    """The cluster; without stragglers; also with a core for each worker; also with links that take no time."""
    even = replace(cluster, stragglers=constant(), busy_stragglers=None)
    apart = replace(even, cores=None)
    free = Link(0.0, inf)
    return [cluster, even, apart, replace(apart, network=free, memory=free, collectives=())]


def limit_among(forecasts: Sequence[RunForecast], rates: Sequence[Rate]) -> WorkerLimit:
    """The limit by rates of runs: as they are, without stragglers, without shared cores too, without messages too."""
    best: dict[int, RunForecast] = {}
    for each in sorted(forecasts, key=lambda one: (one.run.workers, one.seconds, one.run)):
        best.setdefault(each.run.workers, each)
    return WorkerLimit(
        [MoreWorkers(few, many) for few, many in pairwise(_priced(each, rates) for each in best.values())]
    )


def _priced(found: RunForecast, rates: Sequence[Rate]) -> PricedRun:
    run = found.run
    whole, even, apart, alone = (rate(run) for rate in rates)
    parts = {
        "samples": found.samples,
        "computing": run.workers / alone,
        "communication": alone / apart,
        "cores": apart / even,
        "stragglers": even / whole,
    }
    return PricedRun(run, found.samples / whole, parts)
