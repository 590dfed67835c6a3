"""What a job's own steps take on an engine's hosts, beside what kernels say of them.

    seconds of a step  =  pace · kernels        measured by a real run without an exchange, kernels by a simulation

Kernels are fitted to many models, and one model's steps may be slower or faster than that. So the job itself is
trained for some steps, by all workers at once and without an exchange. How its steps vary is what stragglers are then:
a disturbance of a millisecond is half of a short step, and nothing beside a long one. Where workers share cores a
step's time depends on which of them had a core, so stragglers are left as `calibrate` measured them, the pace follows
from the mean step, and as many workers as have a core each are measured for themselves.

On one host it is trained with an exchange as well. What that costs beside its parts depends on how much of the job's
weights, moments and activations the caches would hold without it. Elsewhere such steps say how far a prediction is off.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean, median
from typing import NamedTuple

from polytempo.cluster import Cluster, JobPace
from polytempo.cluster.slow_spells import measured_steps
from polytempo.cluster.speeds import EXCHANGE
from polytempo.cluster.stragglers import constant
from polytempo.core import Strategy
from polytempo.engines.engine import EngineSetup
from polytempo.engines.processes import janitor
from polytempo.report.pages.validation import steps_of_ranks
from polytempo.report.runs import load_run
from polytempo.runs.calibration.measurement import NO_EXCHANGE, correlation_of, quantiles_of
from polytempo.runs.run import run
from polytempo.runs.simulated.simulate import simulate
from polytempo.spec.job import Job
from polytempo.spec.options import RunOptions
from polytempo.strategies import sync_sgd

_STEPS, _WARM_UP, _SIMULATED = 90, 10, 4
_CHECKED_STEPS = 40
"""With an exchange, to see how far a prediction is off."""
_LEAST_BYTES = 1 << 20
"""Of gradients, for what a byte of an exchange costs to be seen."""
_SLOWEST = 0.02
"""Of steps by workers that share cores; they were held up by something else."""
_LEAST = 0.01
"""A pace is at least this: a step that takes next to nothing was measured while the machine was faster."""


class Paced(NamedTuple):
    """A cluster that knows a job."""

    cluster: Cluster
    error: float
    """The largest |ln(simulated / measured)| of the job's steps with an exchange; 0 where that was fitted."""


def with_pace(cluster: Cluster, setup: EngineSetup, job: Job, workers: int, options: RunOptions) -> Paced:
    """The cluster, knowing the job's pace, its stragglers, and on one host what a byte of an exchange costs besides.

    Of `options` count the batch size, the data and the seed. Cost: 90 steps of the job and 40 or 90 with an exchange,
    of which the first 10 do not count; twice where workers share cores. Raises ValueError for a cluster whose kernels
    were not measured; errors of `run`.
    """
    if cluster.speeds is None:
        raise ValueError(f"{cluster.name} has one speed for everything; `polytempo calibrate` measures kernels")
    asked = replace(options, epochs=1_000_000, threads=1)
    num_bytes = 4 * sum(p.numel() for p in job.model().parameters())
    shared, errors = cluster.shares_cores(workers), [0.0]
    for count in sorted({workers, _with_a_core_each(cluster, workers)}):
        ranks = _measured_s(setup, job, NO_EXCHANGE, count, asked)
        cluster = _with_steps(cluster, job, asked, ranks, shared=shared)
        if count > 1 and cluster.network == cluster.memory and num_bytes >= _LEAST_BYTES:
            cluster = _with_exchange_of(cluster, setup, job, asked, ranks)
        elif count > 1:
            measured = _measured_s(setup, job, sync_sgd(), count, asked, _CHECKED_STEPS)
            said_s = _simulated_s(cluster, job, sync_sgd(), count, asked, _CHECKED_STEPS - _WARM_UP)
            errors.append(abs(math.log(said_s / _mean_s(measured))))
    return Paced(cluster, max(errors))


def _with_a_core_each(cluster: Cluster, workers: int) -> int:
    """The largest number of workers, up to so many, who share no cores; one at least."""
    return next((count for count in range(workers, 1, -1) if not cluster.shares_cores(count)), 1)


def _with_steps(cluster: Cluster, job: Job, asked: RunOptions, ranks: list[list[float]], *, shared: bool) -> Cluster:
    """With the pace of steps without an exchange, those of each rank; and with their stragglers, unless workers may
    share cores."""
    workers, parameters = len(ranks), sum(p.numel() for p in job.model().parameters())
    step_s = _mean_s(ranks) if shared else median(taken for rank in ranks for taken in rank)
    disturbed = cluster.stragglers if shared else constant()
    steps = _STEPS - _WARM_UP if shared else _SIMULATED

    def paced(pace: float) -> Cluster:
        return _paced(cluster, JobPace(job.name, parameters, pace, workers))

    at_1, at_2 = (
        _simulated_s(replace(paced(pace), stragglers=disturbed), job, NO_EXCHANGE, workers, asked, steps)
        for pace in (1.0, 2.0)
    )
    found = paced(max(1.0 + (step_s - at_1) / (at_2 - at_1), _LEAST))
    if shared:
        return found
    factors = [taken / step_s for rank in ranks for taken in rank]
    varied = measured_steps(quantiles_of(factors), median(correlation_of(rank) for rank in ranks))
    return replace(found, stragglers=varied)


def _with_exchange_of(
    cluster: Cluster, setup: EngineSetup, job: Job, asked: RunOptions, ranks: list[list[float]]
) -> Cluster:
    """With what each byte of an exchange costs on one host, beside its parts."""
    workers, undisturbed = len(ranks), replace(cluster, stragglers=constant())
    exchanging = _measured_s(setup, job, sync_sgd(), workers, asked)
    besides_s = median(s for rank in exchanging for s in rank) - median(s for rank in ranks for s in rank)
    plain = _with_exchange(undisturbed, 0.0)
    alone_s, said_s = (_simulated_s(plain, job, each, workers, asked) for each in (NO_EXCHANGE, sync_sgd()))
    num_bytes = 4 * sum(p.numel() for p in job.model().parameters())
    return _with_exchange(cluster, max(0.0, besides_s - (said_s - alone_s)) / num_bytes)


def _mean_s(ranks: list[list[float]]) -> float:
    """The mean step, but for the slowest ones."""
    taken_s = sorted(taken for rank in ranks for taken in rank)
    return fmean(taken_s[: len(taken_s) - int(_SLOWEST * len(taken_s))])


def _with_exchange(cluster: Cluster, byte_s: float) -> Cluster:
    assert cluster.speeds is not None
    return cluster.with_kernel(EXCHANGE, cluster.speeds.of(EXCHANGE)._replace(byte_s=byte_s))


def _paced(cluster: Cluster, pace: JobPace) -> Cluster:
    assert cluster.speeds is not None
    others = [each for each in cluster.speeds.jobs if (*each[:2], each.workers) != (*pace[:2], pace.workers)]
    return replace(cluster, speeds=replace(cluster.speeds, jobs=(*others, pace)))


def _measured_s(
    setup: EngineSetup, job: Job, strategy: Strategy, workers: int, asked: RunOptions, steps: int = _STEPS
) -> list[list[float]]:
    """Each rank's steps on the hosts, after the first ones."""
    with janitor.private_folder() as folder:
        out = folder / "run"
        run(job, strategy, workers, replace(asked, steps=steps, out=out), engine=setup)
        return [taken[_WARM_UP:] for taken in steps_of_ranks(load_run(out).events)]


def _simulated_s(
    cluster: Cluster, job: Job, strategy: Strategy, workers: int, asked: RunOptions, steps: int = _SIMULATED
) -> float:
    result = simulate(job, strategy, workers, cluster, replace(asked, steps=steps))
    return result.seconds / result.steps
