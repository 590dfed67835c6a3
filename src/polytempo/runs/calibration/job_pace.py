"""What a job's own forward and backward passes take on an engine's hosts, beside what kernels say of them.

    seconds of a step  =  rest + pace · passes       the median of a real run; rest and passes by two simulations

Kernels are fitted to many models, and one model's operators may be slower or faster than that. So the job itself is
trained for some steps, by all workers at once and without an exchange. How its steps vary is what stragglers are then:
a disturbance of a millisecond is half of a short step, and nothing beside a long one.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from polytempo.cluster import Cluster, JobPace
from polytempo.cluster.slow_spells import measured_steps
from polytempo.cluster.stragglers import constant
from polytempo.engines.engine import EngineSetup
from polytempo.report.runs import load_run
from polytempo.report.validation import steps_of_ranks
from polytempo.runs.calibration.measurement import NO_EXCHANGE, correlation_of, quantiles_of
from polytempo.runs.run import run
from polytempo.runs.simulate import simulate
from polytempo.spec.job import Job
from polytempo.spec.options import RunOptions

_STEPS, _WARM_UP, _SIMULATED = 90, 10, 4
_LEAST = 0.01
"""A pace is at least this: a step that takes no longer than its rest was measured while the machine was faster."""


def with_pace(cluster: Cluster, setup: EngineSetup, job: Job, workers: int, options: RunOptions) -> Cluster:
    """The cluster, knowing the job's pace and its stragglers. Of `options` count the batch size, the data and the seed.

    Cost: 90 steps of the job, of which the first 10 do not count. Raises ValueError for a cluster whose kernels were
    not measured; errors of `run`.
    """
    if cluster.speeds is None:
        raise ValueError(f"{cluster.name} has one speed for everything; `polytempo calibrate` measures kernels")
    asked = replace(options, epochs=1_000_000, threads=1)
    parameters = sum(p.numel() for p in job.model().parameters())
    ranks = _measured_s(setup, job, workers, asked)
    step_s = median(taken for rank in ranks for taken in rank)
    factors = [taken / step_s for rank in ranks for taken in rank]
    varied = measured_steps(quantiles_of(factors), median(correlation_of(rank) for rank in ranks))
    at_1, at_2 = (
        _simulated_s(_paced(cluster, JobPace(job.name, parameters, pace)), job, workers, asked) for pace in (1.0, 2.0)
    )
    pace = 1.0 + (step_s - at_1) / (at_2 - at_1)
    return replace(_paced(cluster, JobPace(job.name, parameters, max(pace, _LEAST))), stragglers=varied)


def _paced(cluster: Cluster, pace: JobPace) -> Cluster:
    assert cluster.speeds is not None
    others = tuple(each for each in cluster.speeds.jobs if each[:2] != pace[:2])
    return replace(cluster, speeds=replace(cluster.speeds, jobs=(*others, pace)))


def _measured_s(setup: EngineSetup, job: Job, workers: int, asked: RunOptions) -> list[list[float]]:
    """Each rank's steps on the hosts."""
    with tempfile.TemporaryDirectory(prefix="polytempo-calibrate-") as folder:
        out = Path(folder) / "run"
        run(job, NO_EXCHANGE, workers, replace(asked, steps=_STEPS, out=out), engine=setup)
        return [taken[_WARM_UP:] for taken in steps_of_ranks(load_run(out).events)]


def _simulated_s(cluster: Cluster, job: Job, workers: int, asked: RunOptions) -> float:
    undisturbed = replace(cluster, stragglers=constant())
    result = simulate(job, NO_EXCHANGE, workers, undisturbed, replace(asked, steps=_SIMULATED))
    return result.seconds / result.steps
