"""The pace of a job's own steps on an engine's hosts, compared with its kernels.

    seconds of a step  =  pace · kernels        measured by a real run without an exchange, kernels by a simulation

Kernels are fitted to many models, and one model's steps may be slower or faster than that. So the job itself is
trained for some steps, by all workers together and without an exchange. The variation of its steps replaces the
stragglers: a disturbance of a millisecond is half of a short step, and little of a long one. If workers share cores, a
step's time depends on the free cores, so stragglers are left as `calibrate` measured them, the pace follows from the
mean step, and a number of workers with a core each is measured in addition.

On one host it is trained with an exchange as well. The further seconds of an exchange depend on the share of the job's
weights, moments and activations that the caches would hold without it. Elsewhere such steps give the error of a
prediction.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean, median
from typing import NamedTuple

from polytempo.cluster import Cluster, JobPace
from polytempo.cluster.computing_time import EXCHANGE
from polytempo.cluster.slow_spells import measured_steps
from polytempo.cluster.stragglers import constant
from polytempo.core import Strategy
from polytempo.engines.engine import EngineSetup
from polytempo.engines.processes import janitor
from polytempo.report.pages.validation import steps_of_ranks
from polytempo.report.runs import load_run
from polytempo.runs.calibration.measurement import NO_EXCHANGE, correlation_of, quantiles_of
from polytempo.runs.frame.short_fork import beside_forks
from polytempo.runs.run import run
from polytempo.runs.simulated.simulate import simulate
from polytempo.spec.job import Job
from polytempo.spec.run_options import RunOptions
from polytempo.strategies import sync_sgd

_STEPS, _WARM_UP, _SIMULATED = 90, 10, 4
_CHECKED_STEPS = 40
"""Steps with an exchange, for the error of a prediction."""
_LEAST_BYTES = 1 << 20
"""The fewest bytes of gradients that show the cost of a byte of an exchange."""
_SLOWEST = 0.02
"""The share of left-out steps, if workers share cores: something else held them up."""
_LEAST = 0.01
"""A pace is at least this: a step that takes next to nothing was measured while the machine was faster."""


class Paced(NamedTuple):
    """A cluster that knows a job."""

    cluster: Cluster
    error: float
    """The largest |ln(simulated / measured)| of the job's steps with an exchange; 0 if it was fitted."""


def with_pace(cluster: Cluster, setup: EngineSetup, job: Job, workers: int, options: RunOptions) -> Paced:
    """The cluster with the job's pace, its stragglers, and on one host the further seconds of a byte of an exchange.

    A cluster with a device has the job's pace there, too, by the same steps on the device.

    Only the batch size, the data and the seed of `options` count. Cost: 90 steps of the job and 40 or 90 with an
    exchange, without the first 10; twice if workers share cores. Raises ValueError for a cluster without measured
    kernels; errors of `run`.
    """
    if cluster.speeds is None:
        raise ValueError(f"{cluster.name} has one speed for everything; `polytempo calibrate` measures kernels")
    asked = replace(options, epochs=1_000_000, threads=1, device="cpu")
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
    return Paced(_with_pace_on_device(cluster, setup, job, workers, asked), max(errors))


def _with_pace_on_device(cluster: Cluster, setup: EngineSetup, job: Job, workers: int, asked: RunOptions) -> Cluster:
    """The cluster with the job's pace on its device, where it has one."""
    device = cluster.device
    if device is None:
        return cluster
    there = replace(asked, device=device.kind)
    ranks = _measured_s(setup, job, NO_EXCHANGE, workers, there)
    speeds = _with_steps(cluster.on_device(), job, there, ranks, shared=False).speeds
    assert speeds is not None
    return replace(cluster, device=replace(device, speeds=replace(device.speeds, jobs=speeds.jobs)))


def _with_a_core_each(cluster: Cluster, workers: int) -> int:
    """The largest number of workers, up to so many, who share no cores; one at least."""
    return next((count for count in range(workers, 1, -1) if not cluster.shares_cores(count)), 1)


def _with_steps(cluster: Cluster, job: Job, asked: RunOptions, ranks: list[list[float]], *, shared: bool) -> Cluster:
    """The cluster with the pace of the ranks' steps without an exchange, and their stragglers, unless workers share
    cores."""
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
    """The cluster with the further seconds of each byte of an exchange on one host."""
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

    def simulated() -> float:
        result = simulate(job, strategy, workers, cluster, replace(asked, steps=steps))
        return result.seconds / result.steps

    return beside_forks(simulated)
