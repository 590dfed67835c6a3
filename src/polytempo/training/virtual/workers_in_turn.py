"""`WorkersInTurn`: as `WorkersInStep`, but each worker's gradient is computed alone, and the sum has the same bits.

worker 0   batch₀ ─▶ g₀ ─▶ share₀ g₀
worker 1   batch₁ ─▶ g₁ ─▶  + share₁ g₁        added in the workers' order, as the exchange of all of them does
worker 2   batch₂ ─▶ g₂ ─▶  + share₂ g₂        by the last group's first worker; the others give zeros
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_unflatten

from polytempo.core import Bundle, NotFinite, Port
from polytempo.one_host.hogwild import Updates
from polytempo.spec.job import Job
from polytempo.spec.objective import loss_of
from polytempo.training.job.context import TakeStep
from polytempo.training.model.randomness import seed_step
from polytempo.training.observe.user_log import logged
from polytempo.training.step.guard import Guard, first_bad
from polytempo.training.step.replica import Replica
from polytempo.training.step.step_cost import StepCost
from polytempo.training.virtual.batched_checks import PooledGuard
from polytempo.training.virtual.batched_gradients import leaves_of
from polytempo.training.virtual.virtual_step import StepWork, charged, step_of_work


class WorkersInTurn:
    """The workers of a simulation in `groups`, each with one model, its first worker's. They compute in this order.

    The model must remember nothing from one pass to the next: it is one for the passes of all workers of a group.
    """

    def __init__(self, job: Job, groups: Sequence[range], seed: int) -> None:
        self._job, self._seed = job, seed
        self._groups = {group.start: group for group in groups}
        self._last = groups[-1].start
        self._sums: list[Tensor] = []
        """Sums of the gradients in this step, times their shares, over all groups so far."""
        self._used: set[int] = set()
        """Places of the parameters that had a gradient in one of these groups."""

    def place(self, worker: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Nothing is to be prepared."""

    def step(self, worker: int, replica: Replica, cost: StepCost, updates: Updates) -> TakeStep:
        """The steps of the group of `worker`, as `priced_step` makes one worker's."""
        guard = replica.guard
        if guard is not None:
            replica.guard = PooledGuard(replica.model, replica.trainable)

        async def take_step(port: Port, batch: Any, samples: int, share: float | None) -> Tensor:
            assert share is not None
            summed = partial(self._compute, worker, replica, guard, batch, share)
            work = StepWork(summed, replica.optimizer.step, share=1.0)
            charge = charged(cost, replica, [samples], updates.varied(1.0))
            loss: Tensor = await step_of_work(port, replica, charge, work, updates)
            return loss

        return take_step

    def _compute(self, first: int, replica: Replica, guard: Guard | None, batch: Any, share: float) -> Tensor:
        """Let `.grad` be this group's part of the sum of all; returns the first worker's loss.

        The batches of the group follow each other in `batch`, equally long. Each is copied: the memory's alignment
        decides the order of sums, and a worker alone has the copy's.
        """
        group = self._groups[first]
        if not first:
            self._sums, self._used = [], set()
        leaves, structure = leaves_of(batch)
        trained, losses, bad = list(replica.trainable.values()), [], None
        for worker, *own in zip(group, *(leaf.chunk(len(group)) for leaf in leaves), strict=True):
            seed_step(self._seed, worker, replica.step, "model")
            for parameter in trained:
                parameter.grad = None
            values = tree_unflatten([leaf.clone() for leaf in own], structure)
            forward = partial(loss_of, self._job, replica.model, values)
            loss = forward() if worker == first else logged(None, forward)
            if guard is not None:
                guard.loss(loss, replica.step, worker)
            loss.backward()
            losses.append(loss.detach())
            self._used.update(place for place, p in enumerate(trained) if p.grad is not None)
            self._add([torch.zeros_like(p) if p.grad is None else p.grad for p in trained], share)
            if guard is not None and bad is None and first_bad(("", total) for total in self._sums) is not None:
                bad = _look(guard, replica, worker)
        if bad is not None:  # alone, all workers look at their losses first
            raise bad
        for place, (parameter, total) in enumerate(zip(trained, self._sums, strict=True)):
            part = total if first == self._last else torch.full_like(total, -0.0)  # x + -0 is x, also for -0
            parameter.grad = part if place in self._used else None
        return losses[0]

    def _add(self, gradients: list[Tensor], share: float) -> None:
        scaled = list(torch._foreach_mul(gradients, share))
        if self._sums:
            torch._foreach_add_(self._sums, scaled)
        else:
            self._sums = scaled


def _look(guard: Guard, replica: Replica, worker: int) -> NotFinite | None:
    """The NotFinite error for the gradients of `worker`; None if only a sum overflows."""
    try:
        for bucket in replica.buckets:
            own = {name: p.grad for name, p in bucket.parameters.items() if p.grad is not None}
            guard.bundle(Bundle(own), replica.step, worker)
        guard.catch_up(worker)
    except NotFinite as found:
        return found
    return None
