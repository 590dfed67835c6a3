"""`WorkersInStep`: workers that hold equal parameters and do the same at the same time, with one model between them.

    worker 0   batch₀ ─╮
    worker 1   batch₁ ─┤▶ loss₀ + loss₁ + loss₂, one backward pass ─▶ g₀ + g₁ + g₂ in the `.grad` of worker 0
    worker 2   batch₂ ─╯                                                  │ exchanged for all three

A mean over workers is linear, so worker 0 may exchange the sum of their gradients. `runs.in_step` has the conditions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.optim import Optimizer
from torch.utils._pytree import tree_unflatten

from polytempo.core import Bundle, Port
from polytempo.one_host.hogwild import Updates
from polytempo.spec.job import Job
from polytempo.spec.objective import loss_of
from polytempo.training.job.context import TakeStep
from polytempo.training.step.guard import Guard, first_bad
from polytempo.training.step.replica import Replica
from polytempo.training.step.step_cost import StepCost
from polytempo.training.virtual.batched_checks import PooledGuard, check_batched, compare, gradients_alone, refused
from polytempo.training.virtual.batched_gradients import MOST_AT_ONCE, leaves_of
from polytempo.training.virtual.virtual_step import StepWork, charged, step_of_work


class WorkersInStep:
    """The workers of a simulation in `groups`, each group with one model, its first worker's. Else like
    `BatchedReplicas`."""

    def __init__(self, job: Job, groups: Sequence[range]) -> None:
        self._job, self._groups = job, {group.start: group for group in groups}

    def place(self, worker: int, model: nn.Module, optimizer: Optimizer) -> None:
        """ValueError where the passes of a group cannot be one."""
        check_batched(self._job, model)

    def step(self, worker: int, replica: Replica, cost: StepCost, updates: Updates) -> TakeStep:
        """The steps of the group of `worker`, as `priced_step` makes one worker's."""
        summed = _SummedGradients(self._job, replica, self._groups[worker])
        if replica.guard is not None:
            replica.guard = PooledGuard(replica.model, replica.trainable)

        async def take_step(port: Port, batch: Any, samples: int, share: float | None) -> Tensor:
            work = StepWork(partial(summed.compute, batch), replica.optimizer.step, share)
            charge = charged(cost, replica, [samples], updates.varied(1.0))
            loss: Tensor = await step_of_work(port, replica, charge, work, updates)
            return loss

        return take_step


class _SummedGradients:
    def __init__(self, job: Job, replica: Replica, workers: range) -> None:
        self._job, self._replica, self._workers = job, replica, workers
        self._looks = replica.guard is not None
        self._compared = False

    def compute(self, batch: Any) -> Tensor:
        """Let `.grad` be the sum of the gradients of all workers; returns the first one's loss.

        `batch` holds the workers' batches one after the other, equally long.
        """
        leaves, structure = leaves_of(batch)
        batches = [leaf.unflatten(0, (len(self._workers), -1)) for leaf in leaves]
        if not self._compared:
            self._compare([leaf[0] for leaf in batches], structure)
        self._replica.optimizer.zero_grad()
        losses = []
        for part in zip(*(leaf.split(MOST_AT_ONCE) for leaf in batches), strict=True):
            found = self._losses(part, structure)
            found.sum().backward()
            losses.append(found.detach())
        if self._looks:
            self._look(torch.cat(losses), batches, structure)
        return losses[0][0]

    def _losses(self, batches: Sequence[Tensor], structure: Any) -> Tensor:
        """Each worker's loss; `batches` have windows of shape (workers, samples, …)."""

        def loss(*leaves: Tensor) -> Tensor:
            return loss_of(self._job, self._replica.model, tree_unflatten(leaves, structure)).reshape(())

        try:
            found: Tensor = vmap(loss)(*batches)
        except Exception as error:
            raise refused(self._job, error) from error
        return found

    def _compare(self, first: Sequence[Tensor], structure: Any) -> None:
        trained = self._replica.trainable
        alone = gradients_alone(self._job, self._replica.model, trained, tree_unflatten(first, structure))
        loss = self._losses([leaf.unsqueeze(0) for leaf in first], structure).sum()
        reached = [trained[name] for name in alone]
        compare(self._job, alone, dict(zip(alone, torch.autograd.grad(loss, reached), strict=True)))
        self._compared = True

    def _look(self, losses: Tensor, batches: Sequence[Tensor], structure: Any) -> None:
        """Raise NotFinite for the first worker with a loss or gradient that is not finite, as its guard does."""
        replica = self._replica
        summed = {name: p.grad for name, p in replica.trainable.items() if p.grad is not None}
        if first_bad([("", losses), *summed.items()]) is None:
            return
        guard = Guard(replica.model, replica.trainable)
        for i, worker in enumerate(self._workers):
            replica.optimizer.zero_grad()
            loss = loss_of(self._job, replica.model, tree_unflatten([leaf[i] for leaf in batches], structure))
            guard.loss(loss, replica.step, worker)
            loss.backward()
            for bucket in replica.buckets:
                own = {name: p.grad for name, p in bucket.parameters.items() if p.grad is not None}
                guard.bundle(Bundle(own), replica.step, worker)
            guard.catch_up(worker)
        for name, gradient in summed.items():  # each is finite, and only their sum is not
            replica.trainable[name].grad = gradient
