"""One training step as the virtual world sees it: real gradients, virtual time, communication that overlaps backward.

compute   | forward | backward of bucket 0 | backward of bucket 1 | ...        step |
network                                    | exchange bucket 0    | exchange bucket 1 |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from polytempo.core import Port
from polytempo.core.suspension import suspendable
from polytempo.one_host.hogwild import Updates
from polytempo.spec.job import Job
from polytempo.training.distillation import Distiller, objective_of
from polytempo.training.program import TakeStep
from polytempo.training.replica import Replica
from polytempo.training.replicated_parameters import align
from polytempo.training.sliced_step import BatchSlice, SlicedGradients

_UPDATE_FLOPS = 4.0
"""Charged for each parameter in an optimizer step: SGD with momentum does two multiplications and two additions."""


def priced_step(replica: Replica, job: Job, flops_per_sample: float, updates: Updates, seed: int = 0) -> TakeStep:
    """A step that computes for real and charges `flops_per_sample`: a third forward, two thirds backward.

    Where a strategy computes in slices, exchanges begin behind the last slice.

    The gradient is that at the parameters as they are when its computation begins; `updates` says when it is applied.
    """

    guard, objective = replica.guard, objective_of(job, replica, replica.strategy.distillation)

    def forward_and_backward(batch: Any, rank: int) -> Tensor:
        replica.optimizer.zero_grad()
        loss = objective(batch)
        if guard is not None:
            guard.loss(loss, replica.step, rank)
        loss.backward()
        if guard is not None and not (replica.exchanges_gradients or replica.exchanges_parameters):
            guard.gradients(replica.step, rank)
        return loss.detach()

    sliced = None if replica.strategy.slices is None else SlicedGradients(replica, job, seed)

    def all_slices(slices: list[BatchSlice], rank: int) -> Tensor:
        assert sliced is not None
        loss = sliced.compute(slices, rank)
        if guard is not None and not replica.exchanges_gradients:
            guard.gradients(replica.step, rank)
        return loss

    async def take_step(port: Port, batch: Any, samples: int) -> Tensor:
        if sliced is not None:
            samples = sum(piece.samples for piece in batch)
        work = objective.work if isinstance(objective, Distiller) else 1.0
        flops = updates.varied(flops_per_sample * samples * work)
        update = replica.optimizer.step
        computed = partial(forward_and_backward if sliced is None else all_slices, batch, port.world_rank)
        loss: Tensor = await _step(port, replica, flops, computed, update, updates)
        return loss

    return take_step


async def meta_step(port: Port, replica: Replica, flops: float, updates: Updates) -> None:
    """A step of a model on the meta device: nothing is computed, everything is charged."""

    def gradients() -> None:
        for parameter in replica.trainable.values():
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)

    await _step(port, replica, updates.varied(flops), gradients, lambda: None, updates)


async def _step(
    port: Port,
    replica: Replica,
    flops: float,
    gradients: Callable[[], Any],
    update: Callable[[], Any],
    updates: Updates,
) -> Any:
    size = sum(p.numel() for p in replica.trainable.values())
    buckets = replica.buckets
    overlaps = bool(buckets) and replica.strategy.slices is None
    answer = await _computed(port, replica, gradients, flops / 3 if overlaps else flops)
    exchanges = []
    for bucket in buckets:
        if overlaps:
            await port.compute(lambda: None, flops * 2 / 3 * bucket.numel / size)
        exchanges.append(await port.start(replica.exchange(port, bucket)))
    for exchange in exchanges:
        await exchange
    await updates.perform(port, update, _UPDATE_FLOPS * size)
    await replica.finish_step(port)
    await align(replica.splits)
    return answer


async def _computed(port: Port, replica: Replica, gradients: Callable[[], Any], flops: float) -> Any:
    """Layers on several ranks exchange while they compute; their operations are charged before."""
    if not (replica.splits or replica.own):
        return await port.compute(gradients, flops)
    seeded = torch.get_rng_state()
    await port.compute(lambda: None, flops)
    torch.set_rng_state(seeded)  # meanwhile other ranks have drawn
    return await suspendable(gradients)
