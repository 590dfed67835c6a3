"""What a job's own forward and backward passes take on an engine's hosts, beside what kernels say of them.

    seconds of a step  =  rest + pace · passes        rest, passes: by two simulations; seconds: of a real run

Kernels are fitted to many models, and one model's operators may be slower or faster than that. So the job itself is
trained for some steps, by all workers at once and without an exchange.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from polytempo.cluster import Cluster, JobPace
from polytempo.cluster.slow_spells import CorrelatedStragglers, steps_of
from polytempo.cluster.stragglers import constant
from polytempo.engines.engine import EngineSetup
from polytempo.report.runs import load_run
from polytempo.report.validation import typical_step_s
from polytempo.runs.calibration.measurement import NO_EXCHANGE
from polytempo.runs.run import run
from polytempo.runs.simulate import simulate
from polytempo.spec.job import Job
from polytempo.spec.options import RunOptions

_STEPS, _SIMULATED = 80, 4
_LEAST = 0.01
"""A pace is at least this: a step that takes no longer than its rest was measured while the machine was faster."""


def with_pace(cluster: Cluster, setup: EngineSetup, job: Job, workers: int, options: RunOptions) -> Cluster:
    """The cluster, knowing the job's pace. Of `options` count the batch size, the data and the seed.

    Cost: 80 steps of the job. Raises ValueError for a cluster whose kernels were not measured; errors of `run`.
    """
    if cluster.speeds is None:
        raise ValueError(f"{cluster.name} has one speed for everything; `polytempo calibrate` measures kernels")
    asked = replace(options, epochs=1_000_000, threads=1)
    parameters = sum(p.numel() for p in job.model().parameters())
    step_s = _measured_s(setup, job, workers, asked) / _median_factor(cluster)
    at_1, at_2 = (
        _simulated_s(_paced(cluster, JobPace(job.name, parameters, pace)), job, workers, asked) for pace in (1.0, 2.0)
    )
    pace = 1.0 + (step_s - at_1) / (at_2 - at_1)
    return _paced(cluster, JobPace(job.name, parameters, max(pace, _LEAST)))


def _paced(cluster: Cluster, pace: JobPace) -> Cluster:
    assert cluster.speeds is not None
    others = tuple(each for each in cluster.speeds.jobs if each[:2] != pace[:2])
    return replace(cluster, speeds=replace(cluster.speeds, jobs=(*others, pace)))


def _measured_s(setup: EngineSetup, job: Job, workers: int, asked: RunOptions) -> float:
    """A typical step on the hosts."""
    with tempfile.TemporaryDirectory(prefix="polytempo-calibrate-") as folder:
        out = Path(folder) / "run"
        run(job, NO_EXCHANGE, workers, replace(asked, steps=_STEPS, out=out), engine=setup)
        return typical_step_s(load_run(out).events)


def _simulated_s(cluster: Cluster, job: Job, workers: int, asked: RunOptions) -> float:
    undisturbed = replace(cluster, stragglers=constant())
    result = simulate(job, NO_EXCHANGE, workers, undisturbed, replace(asked, steps=_SIMULATED))
    return result.seconds / result.steps


def _median_factor(cluster: Cluster) -> float:
    """By what stragglers multiply a typical step."""
    found = steps_of(cluster.stragglers) if isinstance(cluster.stragglers, CorrelatedStragglers) else None
    return 1.0 if found is None else found[0][len(found[0]) // 2]
