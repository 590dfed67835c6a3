"""Arguments of `run` and `simulate`: arguments of the wrong kind are refused first of all."""

from __future__ import annotations

from polytempo import jobs
from polytempo.collectives.invariant import Invariant
from polytempo.core import Strategy
from polytempo.core.calls.typed_arguments import check_type
from polytempo.core.strategy import check_merges
from polytempo.data.plan import check_global_batch
from polytempo.spec.job import Job, check_job
from polytempo.spec.run_spec import RunSpec
from polytempo.training.served.part_noise import FEWEST


def checked_job(job: Job | str) -> Job:
    """The job itself, or the job of this name. ValueError for anything else, such as a model."""
    return check_job(jobs.find(job) if isinstance(job, str) else job)


def check_workers(strategy: Strategy, workers: int) -> None:
    """ValueError if a run of `strategy` needs more workers, or has nothing to do for so many."""
    check_type("workers", int, workers)
    if workers < 1:
        raise ValueError(f"workers must be positive, got {workers}")
    if strategy.rounds is not None and workers > strategy.rounds.number:
        clients = strategy.rounds.number
        raise ValueError(
            f"{strategy} has at most {clients} clients in a round, so {workers - clients} of {workers} workers would "
            f"play none; use workers={clients} or fewer, or a larger cohort"
        )
    if strategy.slices is not None:
        Invariant(strategy.slices).check(workers)
    for number, how, others in (
        (strategy.stages, "cuts the model into {} stages, so workers={} cannot be whole models", "stages"),
        (strategy.holders, "has each model's layers on {} workers, so workers={} cannot be whole models", "parts"),
        (strategy.groups, "has {} groups of workers, and workers={} cannot be that many of one size", "groups"),
    ):
        if workers % number:
            remedy = f"use workers={-(-workers // number) * number}, or another number of {others}"
            raise ValueError(f"{strategy} {how.format(number, workers)}; {remedy}")
    least = 1 if strategy.server is None else strategy.server.least_workers
    if workers < least * strategy.stages:
        whose = "" if strategy.stages == 1 else f", {least} replicas of {strategy.stages} stages"
        raise ValueError(
            f"{strategy} needs at least {least * strategy.stages} workers{whose}, or it waits for none of them, and "
            f"there are {workers}; use workers={least * strategy.stages} or more, or a smaller argument"
        )
    check_merges(strategy, workers)


def check_noise_scale(spec: RunSpec) -> None:
    """ValueError if the options ask for the noise scale of a run with too small batches."""
    if spec.options.noise_scale is not None and spec.strategy.server is not None and spec.batch_size < FEWEST:
        raise ValueError(
            f"{spec.strategy} measures the noise scale within a worker's batch, and batch_size is {spec.batch_size}; "
            f"give {FEWEST} or more, or leave noise_scale out"
        )


def check_batches(spec: RunSpec) -> None:
    """ValueError if a step has no sample for a worker or a slice, or batches are too small for the options."""
    check_noise_scale(spec)
    slices, workers, asked = spec.strategy.slices, spec.replicas, spec.options.global_batch_size
    if slices is not None:
        check_global_batch(asked or workers * spec.batch_size, slices, "slices")
    elif asked is not None:
        check_global_batch(asked, workers, "workers" if spec.strategy.holders == 1 else "replicas of the model")
