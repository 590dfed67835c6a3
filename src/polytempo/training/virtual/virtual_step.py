"""One training step as the virtual world sees it: real gradients, virtual time, communication that overlaps backward.

compute   | forward | backward of bucket 0 | backward of bucket 1 | ...        step |
network                                    | exchange bucket 0    | exchange bucket 1 |

A batch in pieces, or in micro-batches, is computed in so many passes; "forward" above then includes all but the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polytempo.core import Port, Program
from polytempo.core.arithmetic.kernel_use import Uses
from polytempo.core.strategy import InRounds
from polytempo.core.suspension import suspendable
from polytempo.device import random_states, set_random_states
from polytempo.one_host.hogwild import Updates
from polytempo.spec.run_spec import RunSpec
from polytempo.training.job.context import TakeStep
from polytempo.training.job.gradients import StepGradients
from polytempo.training.job.growth import Pieces
from polytempo.training.job.sliced_step import BatchSlice
from polytempo.training.model.parted_parameters import align
from polytempo.training.step.replica import Replica
from polytempo.training.step.step_cost import StepCost, StepUses

_UPDATE_FLOPS = 4.0
"""Charged for each parameter in an optimizer step: SGD with momentum does two multiplications and two additions."""


class StepWork(NamedTuple):
    """The computations of a step: each begins when its virtual time begins, and is there when that is over."""

    gradients: Callable[[], Any]
    update: Callable[[], Any]
    share: float | None = None
    """The gradients' weight in the mean over ranks."""
    computed: Callable[[Any], Any] = lambda answer: answer
    """The step's loss from the answer of `gradients`, once the gradients are needed."""
    updated: Callable[[], None] = lambda: None
    meet: Callable[[Port], Program[None]] | None = None
    """An exchange between `gradients` and the gradients' own."""


class Charge(NamedTuple):
    """The costs of a step on the virtual clock."""

    flops: float
    uses: StepUses
    last: float = 1.0
    """The last pass's part of the operations: exchanges begin in its backward."""
    shares: tuple[float, ...] = ()
    """The part of that backward pass before each bucket's exchange."""


def charged(cost: StepCost, replica: Replica, passes: Sequence[float], factor: float) -> Charge:
    """The costs of a step in passes over so many samples, times `factor`."""
    samples = sum(passes)
    flops, last = cost.flops_per_sample * samples * factor, passes[-1] / samples if samples else 1.0
    return Charge(flops, cost.uses(replica, passes, factor), last, cost.shares(replica))


def priced_step(replica: Replica, spec: RunSpec, cost: StepCost, updates: Updates) -> TakeStep:
    """A step that computes for real and charges `cost`: of its operations a third forward, two thirds backward.

    Where a strategy computes in slices, exchanges begin behind the last slice. In rounds a slice is a client, with all
    passes over its samples.

    The gradient is that at the parameters as they are when its computation begins; `updates` says when it is applied.
    """

    gradients = StepGradients(replica, spec)

    def computed(batch: Any, rank: int, share: float) -> Tensor:
        loss = gradients.compute(batch, rank, share)
        if replica.guard is not None and not (replica.exchanges_gradients or replica.exchanges_parameters):
            replica.guard.gradients(replica.step, rank)
        return loss.detach()

    async def take_step(port: Port, batch: Any, samples: int, share: float | None) -> Tensor:
        replica.weigh_layers(share)
        await gradients.begin(port, batch)
        if replica.strategy.slices is not None:
            passes = [sum(_passes(piece, spec.strategy.rounds) for piece in batch)]
        else:
            passes = [piece.samples for piece in batch.pieces] if isinstance(batch, Pieces) else [samples]
        charge = charged(cost, replica, passes, gradients.work * updates.varied(1.0))
        compute = partial(computed, batch, port.world_rank, 1 / port.size if share is None else share)
        work = StepWork(compute, replica.optimizer.step, share, meet=gradients.meet)
        loss: Tensor = await step_of_work(port, replica, charge, work, updates)
        return loss

    return take_step


def _passes(piece: BatchSlice, rounds: InRounds | None) -> float:
    """Samples in the passes of a slice."""
    return piece.samples if rounds is None else rounds.local.passes(len(piece.batch))


async def meta_step(port: Port, replica: Replica, cost: StepCost, passes: Sequence[float], updates: Updates) -> None:
    """A step of a model on the meta device: nothing is computed, everything is charged."""
    charge = charged(cost, replica, passes, updates.varied(1.0))

    def gradients() -> None:
        for parameter in replica.trainable.values():
            if parameter.grad is None:
                parameter.grad = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")

    await step_of_work(port, replica, charge, StepWork(gradients, lambda: None), updates)


async def step_of_work(port: Port, replica: Replica, charge: Charge, work: StepWork, updates: Updates) -> Any:
    """One step of a replica."""
    size = replica.numel
    buckets, (flops, uses, last, shares) = replica.buckets, charge
    overlaps = bool(buckets) and replica.strategy.slices is None
    begun = (flops * (1 - last) + flops * last / 3, uses.forward) if overlaps else (flops, uses.whole)
    answer = work.computed(await _computed(port, replica, work.gradients, *begun))
    if work.meet is not None:
        await work.meet(port)
    exchanges = []
    for i, bucket in enumerate(buckets):
        if overlaps:
            part = uses.backward[i] if uses.backward else ()
            await port.compute(lambda: None, flops * last * 2 / 3 * shares[i], uses=part)
        exchange = replica.exchange(port, bucket, work.share)
        if i + 1 < len(buckets):
            exchanges.append(await port.start(exchange))
        else:  # nothing is left to compute meanwhile
            await exchange
    for earlier in exchanges:
        await earlier
    await replica.leave_unused(port)
    replica.drop_stand_in(work.share)
    if replica.clip_norm is not None:
        model = replica.splits[0].group.port if replica.splits else port.among([port.rank])
        await replica.clip_whole(port, model, replica.clip_norm)
    await replica.agree_to_step(port)
    await updates.perform(port, work.update, _UPDATE_FLOPS * size, uses.update)
    work.updated()
    await replica.finish_step(port)
    with replica.in_float32():
        await align(replica.splits)
    return answer


async def _computed(port: Port, replica: Replica, gradients: Callable[[], Any], flops: float, uses: Uses) -> Any:
    """Layers on several ranks exchange while they compute; their operations are charged before."""
    if not (replica.splits or replica.own):
        return await port.compute(gradients, flops, uses=uses)
    seeded = random_states()
    await port.compute(lambda: None, flops, uses=uses)
    set_random_states(seeded)  # meanwhile other ranks have drawn
    return await suspendable(gradients)
