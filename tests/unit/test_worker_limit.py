"""The limit of workers: the first step that costs more than it brings, and its cause, on declared clusters."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from polytempo.cluster import Cluster, Link
from polytempo.jobs import find
from polytempo.planner.forecast import RunForecast
from polytempo.planner.front import PlanLimits
from polytempo.planner.run_price import RunPrice
from polytempo.planner.samples_law import SamplesLaw
from polytempo.planner.search_space import PlannedRun
from polytempo.planner.worker_limit import CAUSES, limit_among, worker_limit

EVEN = SamplesLaw(10_000.0, 0.0)
GROWING = SamplesLaw(1_000.0, 1_000.0)
"""Nearly all of it grows with the batch, at batches of 32 and more."""
EASY = Cluster(Link(0.0, 1e12), flops_per_s=1e8, name="easy")


def best(workers: int, law: SamplesLaw, memory_bytes: int = 1) -> RunForecast:
    run = PlannedRun("sync_sgd(route=native)", workers, 32, workers)
    samples = law.samples(run.global_batch)
    return RunForecast(run, RunPrice(1.0, 1.0, 0.0), workers, memory_bytes, samples, samples / workers, 0.0, 0.0, ())


def test_factors_by_hand() -> None:
    """100 samples at 10 a second, then 150 at 12: 12.5 s for 10 s, and 25 for 10 seconds of workers."""
    one, two = best(1, EVEN)._replace(samples=100.0), best(2, EVEN)._replace(samples=150.0)
    rates = [{1: whole, 2: of_two} for whole, of_two in ((10.0, 12.0), (10.0, 15.0), (10.0, 18.0), (10.0, 20.0))]
    found = limit_among([two, one], [lambda run, table=table: table[run.workers] for table in rates])
    (step,) = found.steps
    assert (step.before.seconds, step.after.seconds, step.brings, step.costs) == (10.0, 12.5, 0.8, 2.5)
    assert step.factors == pytest.approx(
        {"samples": 1.5, "computing": 1.0, "communication": 20 / 18, "cores": 18 / 15, "stragglers": 15 / 12}
    )
    assert step.reason == "samples"
    assert found.end is step
    assert found.as_json()["workers"] == 1


@pytest.mark.parametrize(
    ("cluster", "law", "workers", "reason"),
    [
        (EASY, EVEN, None, None),
        (replace(EASY, network=Link(0.1, 1e12)), EVEN, 1, "communication"),
        (replace(EASY, workers_per_host=8, cores=2, memory=Link(0.0, 1e12)), EVEN, 2, "cores"),
        (EASY, GROWING, 1, "samples"),
        (replace(EASY, stragglers=lambda random, host: 5.0 if host > 1 else 1.0), EVEN, 2, "stragglers"),
    ],
    ids=["nothing in the way", "a far network", "two cores", "large batches", "slow hosts"],
)
def test_the_cause_is_named(cluster: Cluster, law: SamplesLaw, workers: int | None, reason: str | None) -> None:
    runs = [best(number, law) for number in (1, 2, 4, 8)]
    found = worker_limit(runs, PlanLimits(), find("digits"), None, cluster)
    assert (found.as_json()["workers"], found.as_json()["reason"]) == (workers, reason)
    for step in found.steps:
        assert step.costs == pytest.approx(math.prod(step.factors.values()))
        others = [step.factors[cause] for cause in CAUSES if cause != reason]
        assert others == pytest.approx([1.0] * len(others), rel=0.02)


def test_runs_beyond_the_limit_of_memory_are_left_out() -> None:
    runs = [best(1, EVEN), best(2, EVEN), best(4, EVEN, memory_bytes=9)]
    found = worker_limit(runs, PlanLimits(memory_bytes=5), find("digits"), None, EASY)
    assert [step.after.run.workers for step in found.steps] == [2]
