"""Who is who in a run with a parameter server, and what each is made of; the same in both worlds.

node   0 … W-1  workers │ W …  copies of shard 0, copies of shard 1, … │ the coordinator │ the evaluator, if processes
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from polytempo.core import Strategy
from polytempo.core.rule import Service
from polytempo.data.batches import Batches
from polytempo.data.plan import check_enough
from polytempo.server.coordinator.batch_scheduler import BatchScheduler
from polytempo.server.shard.score_snapshots import ScorePoints, score_points
from polytempo.spec.job import Data, Job
from polytempo.spec.job_calls import made_schedule
from polytempo.spec.options import RunOptions
from polytempo.training.guard import Guard
from polytempo.training.local_decay import LocalDecay
from polytempo.training.program import check_goals
from polytempo.training.rate_schedule import RateSchedule, check_schedule
from polytempo.training.served_context import ServedContext
from polytempo.training.server_worker import gradients_of
from polytempo.training.shard_rule import shard_rule_of
from polytempo.training.trainable_parameters import trainable

_MOST_HELD = 1024
"""A worker asks for one ticket at a time, so it holds as many as its strategy pushes together, and one or two more."""


class Cast(NamedTuple):
    """The nodes by number."""

    workers: tuple[int, ...]
    chains: tuple[tuple[int, ...], ...]
    """For each shard the nodes of its copies."""
    coordinator: int
    spares: tuple[tuple[int, ...], ...] = ()
    """The same for shards that come later."""

    @property
    def evaluator(self) -> int:
        """The node of the process that scores; there is none in the virtual world, and without a test set."""
        return self.coordinator + 1

    @property
    def num_servers(self) -> int:
        """Copies of shards, and the coordinator."""
        return self.coordinator + 1 - len(self.workers)


def cast_of(service: Service, workers: int, added: int = 0) -> Cast:
    """Numbers for everybody; `added` shards come later."""
    copies, shards = 1 + service.replicas, service.shards
    chains = tuple(
        tuple(range(workers + shard * copies, workers + (shard + 1) * copies)) for shard in range(shards + added)
    )
    return Cast(tuple(range(workers)), chains[:shards], workers + (shards + added) * copies, chains[shards:])


def service_of(service: Service, job: Job, optimizer: Optimizer, batches: Batches, options: RunOptions) -> Service:
    """`service` with the optimizer that its shards apply, as `options` want it. `optimizer`, the job's, is given away.

    Raises ValueError where the shards cannot do what the job's optimizer and schedule say.
    """
    made = replace(service, optimizer=shard_rule_of(service, optimizer), allow_nan=options.allow_nan)
    if (schedule := made_schedule(job)) is not None:
        check_schedule(optimizer, schedule, scheduled_steps(batches), _movable(service))
    return made


def scheduler_of(
    service: Service, batches: Batches, job: Job, options: RunOptions, *, has_test: bool
) -> BatchScheduler:
    """Deals as many batches as `workers` synchronous workers would take: `steps` counts a batch of each as one step."""
    check_goals(job, options, has_test=has_test)
    if service.reassigns is not None:  # every worker cuts a share of every step into slices
        check_enough(batches.num_samples, batches.size)
    return BatchScheduler(
        batches_per_epoch=len(batches),
        num_tickets=num_tickets(batches, job, options),
        deals=service.deals,
        workers=batches.size,
        warm_start=service.warm_start,
        most_held=_MOST_HELD,
        rests=service.waits,
    )


def points_of(batches: Batches, scheduler: BatchScheduler) -> ScorePoints:
    """When scores are taken."""
    return score_points(len(batches), scheduler.num_tickets, batches.size)


def num_tickets(batches: Batches, job: Job, options: RunOptions) -> int:
    """How many batches the run has, to the end of its steps or its epochs, whichever comes first."""
    by_steps = None if options.steps is None else options.steps * batches.size
    if options.epochs is None and by_steps is not None:
        return by_steps
    epochs = options.epochs or job.epochs * (10 if options.until else 1)
    unit = 1 if batches.deals == "freely" else batches.size
    by_epochs = max(1, -int(-epochs * (len(batches) // unit) // 1)) * unit
    return by_epochs if by_steps is None else min(by_steps, by_epochs)


def samples_behind(scheduler: BatchScheduler, batches: Batches) -> int:
    """How many samples the finished tickets are of; of an epoch that is not finished as if its first ones were."""
    return batches.samples_before(sum(last - first + 1 for first, last in scheduler.done))


def reached(row: dict[str, float], options: RunOptions) -> bool | None:
    """Whether a row of a test meets what `until` asks for; None where it asks for nothing."""
    if not options.until:
        return None
    return all(
        row["loss"] <= target if name == "loss" else (row["accuracy"] or 0.0) >= target
        for name, target in options.until.items()
    )


def scheduled_steps(batches: Batches) -> int:
    """The steps of an epoch for the learning-rate schedule: one worker's part of the batches."""
    return max(1, len(batches) // batches.size)


def dtype_of(model: torch.nn.Module) -> torch.dtype:
    """The dtype of the model's first parameter; `parameters_of` has checked the others."""
    return next(parameter.dtype for parameter in model.parameters() if parameter.requires_grad)


def context_of(
    job: Job,
    strategy: Strategy,
    options: RunOptions,
    data: Data,
    batches: Batches,
    model: nn.Module,
    optimizer: Optimizer,
    flops_per_sample: float = 0.0,
) -> ServedContext:
    """What a worker is to train, in either world and in a replay; a virtual one charges `flops_per_sample`."""
    server = strategy.server
    assert server is not None, "whoever has no server has no part in this"
    decay = LocalDecay(optimizer) if server.decays == "workers" else None
    schedule = None
    if (make := made_schedule(job)) is not None:
        steps = scheduled_steps(batches)
        schedule = RateSchedule(
            *(optimizer, make), steps_per_epoch=steps, batches=len(batches), movable=_movable(server)
        )
    return ServedContext(
        job=job,
        strategy=strategy,
        model=model,
        optimizer=optimizer,
        data=data,
        batches=batches,
        compute_gradients=gradients_of(model, job, flops_per_sample),
        seed=options.seed,
        schedule=schedule,
        decay=decay,
        guard=None if options.allow_nan else Guard(model, trainable(model, optimizer)),
    )


def _movable(service: Service) -> Collection[str] | None:
    """What a schedule may move: what the shards need of it travels with each push, or the workers alone need it."""
    if service.optimizer is None:
        return ("lr",)
    return ("lr", "momentum", "betas") if service.decays == "workers" else None
