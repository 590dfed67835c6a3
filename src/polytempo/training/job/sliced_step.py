"""A rank's part of a step that is computed in slices, so that its bits do not depend on the number of ranks.

    slices of this rank   2            3
    seeds                 (seed, step, slice): noise in samples and dropout belong to a slice, not to a rank
    gradients             n₂/n · g₂    n₃/n · g₃          each of a batch of its own
                              ╰──── + ────╯               along `core.slice_tree`, then over ranks by the route

Other differences between numbers of ranks are refused: running statistics of norms, and other buffers that a forward
pass changes, see the slices of one rank after each other; sparse gradients would be another sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polytempo.collectives import tree
from polytempo.core import Port
from polytempo.core.arithmetic.slice_tree import along_tree
from polytempo.data.shard import DataShard
from polytempo.spec.job import Job
from polytempo.spec.job_calls import next_batch
from polytempo.spec.objective import loss_of
from polytempo.spec.run_spec import RunSpec
from polytempo.training.model.randomness import seed_step
from polytempo.training.model.requirements import check_sliced
from polytempo.training.step.replica import Replica


class BatchSlice(NamedTuple):
    """A slice of the global batch, ready to be computed."""

    number: int
    batch: Any
    samples: int
    share: float
    """Part of the global batch's samples; 0 for a stand-in."""


def next_slices(job: Job, shard: DataShard, batches: Iterator[Any], seed: int, step: int) -> list[BatchSlice] | None:
    """This rank's slices of the next global batch; None at the end of an epoch."""
    found = []
    purpose = "data" if shard.slices is None and len(shard.own) == 1 else "slice's data"
    for number in shard.own:
        seed_step(seed, number, step, purpose)
        follows = True
        while follows:  # micro-batches draw the numbers of their batch
            batch = next_batch(job, batches)
            if batch is None:
                return None
            found.append(BatchSlice(number, batch, shard.batch_samples, shard.share or 0.0))
            follows = shard.following > 0
    return found


async def weighed_slices(
    data: Port,
    number: int,
    slices: list[BatchSlice],
    weigh: Callable[[Any], float] | None,
    shares: Callable[[Tensor], Tensor] | None = None,
) -> list[BatchSlice]:
    """The slices, with their shares by another weight than their samples; the same bits for any number of ranks.

    `shares`: the shares of all slices from their weights. None: each weight's part of the sum.
    """
    if weigh is None:
        return slices
    weights = torch.zeros(number, dtype=torch.float64)
    for piece in slices:
        weights[piece.number] = weigh(piece.batch) if piece.share else 0.0
    own, weights = weights.clone(), await tree(data, weights)  # of each, all ranks but one add 0
    if shares is not None:
        found = shares(weights)
        return [piece._replace(share=float(found[piece.number])) for piece in slices]
    total = math.fsum(weights.tolist())
    return [piece._replace(share=float(own[piece.number]) / total if total else 0.0) for piece in slices]


class SlicedGradients:
    """Computes the slices of one replica, one after the other, and leaves their weighted sum in `.grad`."""

    def __init__(self, replica: Replica, spec: RunSpec) -> None:
        check_sliced(replica.model, spec.strategy)
        self._replica, self._job, self._seed = replica, spec.job, spec.seed
        self._parameters = list(replica.trainable.values())
        self._sums: list[Tensor] = []
        """Further sums over this rank's slices, behind the gradients' sums."""

    async def begin(self, port: Port, slices: list[BatchSlice]) -> None:
        """Fetch state for the slices from other ranks."""

    async def meet(self, port: Port) -> None:
        """Exchange further sums, before the gradients are exchanged."""

    def compute(self, slices: list[BatchSlice], rank: int) -> Tensor:
        """The mean loss of this rank's samples; parameters that a slice has used have a gradient afterwards.

        Cost: a forward and a backward pass for each slice. Memory: ⌈log₂S⌉ + 1 gradients for S slices.
        """
        losses: list[Tensor] = []
        used: set[int] = set()

        def gradient(place: int) -> list[Tensor]:
            loss, gradients = self._computed(slices[place], rank, used)
            losses.append(loss)
            return gradients

        total = along_tree(len(slices), gradient, _added_)
        self._sums = total[len(self._parameters) :]
        for i, (parameter, each) in enumerate(zip(self._parameters, total, strict=False)):
            parameter.grad = each if i in used else None
        own = sum(piece.share for piece in slices) or 1.0
        zero = torch.zeros((), device=self._parameters[0].device)
        return sum((loss * (piece.share / own) for loss, piece in zip(losses, slices, strict=True)), zero)

    def _computed(self, piece: BatchSlice, rank: int, used: set[int]) -> tuple[Tensor, list[Tensor]]:
        """A slice's mean loss, and its gradients times its share of the global batch. Adds their parameters' indices to
        `used`."""
        replica = self._replica
        versions = _versions(replica.model)
        seed_step(self._seed, piece.number, replica.step, "slice's model")
        for parameter in self._parameters:
            parameter.grad = None
        loss = loss_of(self._job, replica.model, piece.batch)
        if replica.guard is not None and piece.share:
            replica.guard.loss(loss, replica.step, rank)
        replica.scaled(loss).backward()
        if (changed := _versions(replica.model)) != versions:
            self._refuse_buffers(versions, changed)
        used.update(i for i, p in enumerate(self._parameters) if p.grad is not None)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        if not piece.share:  # NaN times 0 would be NaN
            return torch.zeros_like(loss), [torch.zeros_like(each) for each in gradients]
        torch._foreach_mul_(gradients, piece.share)
        return loss.detach(), gradients

    def _refuse_buffers(self, before: dict[str, int], after: dict[str, int]) -> None:
        name = next(name for name, version in after.items() if before.get(name) != version)
        raise ValueError(
            f"{self._replica.strategy} computes a batch in slices, and buffer {name!r} changes in each of them, so it "
            "would depend on the number of workers; use layers that keep nothing from batch to batch, such as "
            "GroupNorm, or another route"
        )


def _added_(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    torch._foreach_add_(left, right)
    return left


def _versions(model: nn.Module) -> dict[str, int]:
    return {name: buffer._version for name, buffer in model.named_buffers()}
