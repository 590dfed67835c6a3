"""What a job's own forward and backward passes take on an engine's hosts, beside what kernels say of them.

    seconds of a step  =  rest + pace · passes       the median of a real run; rest and passes by two simulations

Kernels are fitted to many models, and one model's operators may be slower or faster than that. So the job itself is
trained for some steps, by all workers at once and without an exchange. How its steps vary is what stragglers are then:
a disturbance of a millisecond is half of a short step, and nothing beside a long one. Where workers share cores a
step's time depends on which of them had a core, so stragglers are left as `calibrate` measured them.

On one host it is trained with an exchange as well. What that costs beside its parts depends on how much of the job's
weights, moments and activations the caches would hold without it.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

from polytempo.cluster import Cluster, JobPace
from polytempo.cluster.slow_spells import measured_steps
from polytempo.cluster.speeds import EXCHANGE
from polytempo.cluster.stragglers import constant
from polytempo.core import Strategy
from polytempo.engines.engine import EngineSetup
from polytempo.report.runs import load_run
from polytempo.report.validation import steps_of_ranks
from polytempo.runs.calibration.measurement import NO_EXCHANGE, correlation_of, quantiles_of
from polytempo.runs.run import run
from polytempo.runs.simulate import simulate
from polytempo.spec.job import Job
from polytempo.spec.options import RunOptions
from polytempo.strategies import sync_sgd

_STEPS, _WARM_UP, _SIMULATED = 90, 10, 4
_LEAST_BYTES = 1 << 20
"""Of gradients, for what a byte of an exchange costs to be seen."""
_NOT_SLOWEST = 0.95
"""Where ranks share cores the pace follows from the mean of this part of their steps, the shortest ones."""
_LEAST = 0.01
"""A pace is at least this: a step that takes no longer than its rest was measured while the machine was faster."""


def with_pace(cluster: Cluster, setup: EngineSetup, job: Job, workers: int, options: RunOptions) -> Cluster:
    """The cluster, knowing the job's pace, its stragglers, and on one host what a byte of an exchange costs besides.

    Of `options` count the batch size, the data and the seed. Cost: 90 steps of the job, and 90 with an exchange on one
    host, of which the first 10 do not count. Raises ValueError for a cluster whose kernels were not measured; errors of
    `run`.
    """
    if cluster.speeds is None:
        raise ValueError(f"{cluster.name} has one speed for everything; `polytempo calibrate` measures kernels")
    asked = replace(options, epochs=1_000_000, threads=1)
    parameters = sum(p.numel() for p in job.model().parameters())
    ranks = _measured_s(setup, job, NO_EXCHANGE, workers, asked)
    taken_s = sorted(taken for rank in ranks for taken in rank)
    if cluster.shares_cores(workers):
        step_s, varied = fmean(taken_s[: round(_NOT_SLOWEST * len(taken_s))]), cluster.stragglers
    else:
        step_s = median(taken_s)
        factors = [taken / step_s for taken in taken_s]
        varied = measured_steps(quantiles_of(factors), median(correlation_of(rank) for rank in ranks))

    def paced(pace: float) -> Cluster:
        return _paced(cluster, JobPace(job.name, parameters, pace))

    at_1, at_2 = (_simulated_s(paced(pace), job, NO_EXCHANGE, workers, asked) for pace in (1.0, 2.0))
    found = paced(max(1.0 + (step_s - at_1) / (at_2 - at_1), _LEAST))
    num_bytes = 4 * parameters
    if workers > 1 and found.network == found.memory and num_bytes >= _LEAST_BYTES:
        ranks = _measured_s(setup, job, sync_sgd(), workers, asked)
        besides_s = median(taken for rank in ranks for taken in rank) - step_s
        found = _with_exchange(found, 0.0)
        alone_s, exchanging_s = (_simulated_s(found, job, each, workers, asked) for each in (NO_EXCHANGE, sync_sgd()))
        found = _with_exchange(found, max(0.0, besides_s - (exchanging_s - alone_s)) / num_bytes)
    return replace(found, stragglers=varied)


def _with_exchange(cluster: Cluster, byte_s: float) -> Cluster:
    assert cluster.speeds is not None
    kernels = dict(cluster.speeds.kernels)
    kernels[EXCHANGE] = cluster.speeds.of(EXCHANGE)._replace(byte_s=byte_s)
    return replace(cluster, speeds=replace(cluster.speeds, kernels=tuple(kernels.items())))


def _paced(cluster: Cluster, pace: JobPace) -> Cluster:
    assert cluster.speeds is not None
    others = tuple(each for each in cluster.speeds.jobs if each[:2] != pace[:2])
    return replace(cluster, speeds=replace(cluster.speeds, jobs=(*others, pace)))


def _measured_s(setup: EngineSetup, job: Job, strategy: Strategy, workers: int, asked: RunOptions) -> list[list[float]]:
    """Each rank's steps on the hosts."""
    with tempfile.TemporaryDirectory(prefix="polytempo-calibrate-") as folder:
        out = Path(folder) / "run"
        run(job, strategy, workers, replace(asked, steps=_STEPS, out=out), engine=setup)
        return [taken[_WARM_UP:] for taken in steps_of_ranks(load_run(out).events)]


def _simulated_s(cluster: Cluster, job: Job, strategy: Strategy, workers: int, asked: RunOptions) -> float:
    undisturbed = replace(cluster, stragglers=constant())
    result = simulate(job, strategy, workers, undisturbed, replace(asked, steps=_SIMULATED))
    return result.seconds / result.steps
