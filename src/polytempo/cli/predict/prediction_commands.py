"""The commands that measure for a simulation, and check it. A command imports its code when it is called."""

from __future__ import annotations

from polytempo.cli.options import parameters as p
from polytempo.cli.options.failure import exit_code


def calibrate(
    engine: p.Calibrating = None,
    workers: p.CalibratingWorkers = None,
    out: p.CalibratedFile = None,
    job: p.CalibratedJob = None,
    batch_size: p.BatchSize = None,
    data: p.Data = None,
    json: p.Json = None,
) -> None:
    """Measure these hosts, for `simulate --cluster`.

    Kernels, codecs, optimizers, memory, messages and collectives, and how much steps vary; under a minute a host.
    With --job also 90 steps of that job, so that its own steps are predicted as they are here.
    """
    with exit_code():
        from polytempo.cli.predict.calibrate import PacedJob  # imports torch, which takes seconds
        from polytempo.cli.predict.calibrate import calibrate as command

        if job is None and (batch_size is not None or data is not None):
            raise ValueError("--batch-size and --data say how a job is measured: give --job, too, or leave them out")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"--batch-size {batch_size}: must be a whole number >= 1")
        paced = PacedJob(job, batch_size, data) if job is not None else None
        command(engine or "local", workers, out, paced, as_json=bool(json))


def profile(
    job: p.CutJob,
    strategy: p.Strategy = None,
    workers: p.Workers = None,
    batch_size: p.BatchSize = None,
    cluster: p.ProfiledOn = None,
    data: p.Data = None,
    json: p.Json = None,
) -> None:
    """Say what a step of JOB costs, operator by operator.

    Times are measured on this machine, on one thread; with --cluster they stand beside those of its kernels.
    """
    with exit_code():
        from polytempo.cli.predict.profile import profile as command  # imports torch, which takes seconds

        command(job, strategy, workers, batch_size, cluster, data, as_json=bool(json))


def validate(
    run: p.Run,
    cluster: p.ValidatedOn = None,
    job: p.ValidatedJob = None,
    data: p.Data = None,
    json: p.Json = None,
) -> None:
    """Compare a run with its simulation, step by step.

    RUN is the run's folder. Says which component (computing, or a kind of communication) is behind most of the error.
    """
    with exit_code():
        from polytempo.cli.predict.validate import validate as command  # imports torch, which takes seconds

        command(run, cluster or "cluster.toml", job, data, as_json=bool(json))
