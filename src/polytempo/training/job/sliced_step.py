"""A rank's part of a step that is computed in slices, so that its bits do not depend on the number of ranks.

    slices of this rank   2            3
    seeds                 (seed, step, slice): noise in samples and dropout belong to a slice, not to a rank
    gradients             n₂/n · g₂    n₃/n · g₃          each of a batch of its own
                              ╰──── + ────╯               along `core.slice_tree`, then over ranks by the route

Where slices are dealt by the ranks' speeds, a rank sends sums of nodes that belong to another rank before the exchange.

Other differences between numbers of ranks are refused: running statistics of norms, and other buffers that a forward
pass changes, see the slices of one rank after each other; sparse gradients would be another sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import accumulate, permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polytempo.collectives import tree
from polytempo.core import Port, Work
from polytempo.core.arithmetic.slice_tree import along_tree, from_nodes, nodes, subtree
from polytempo.core.bundle import Bundle, by_kind
from polytempo.data.plan import Shares
from polytempo.data.shard import DataShard
from polytempo.spec.job import Job
from polytempo.spec.job_calls import next_batch
from polytempo.spec.objective import loss_of
from polytempo.spec.run_spec import RunSpec
from polytempo.training.model.randomness import seed_step
from polytempo.training.model.requirements import check_sliced
from polytempo.training.step.parameter_exchange import noted
from polytempo.training.step.replica import Replica


class BatchSlice(NamedTuple):
    """A slice of the global batch, ready to be computed."""

    number: int
    batch: Any
    samples: int
    share: float
    """Part of the global batch's samples; 0 for a stand-in."""
    dealt: Shares = ()
    """The slices of each rank; empty where each has its `subtree`."""


def next_slices(job: Job, shard: DataShard, batches: Iterator[Any], seed: int, step: int) -> list[BatchSlice] | None:
    """This rank's slices of the next global batch; None at the end of an epoch."""
    found = []
    dealt = () if shard.shares is None or shard.slices is None else shard.parts
    purpose = "data" if shard.slices is None and len(shard.own) == 1 else "slice's data"
    for number in shard.own:
        seed_step(seed, number, step, purpose)
        follows = True
        while follows:  # micro-batches draw the numbers of their batch
            batch = next_batch(job, batches)
            if batch is None:
                return None
            found.append(BatchSlice(number, batch, shard.batch_samples, shard.share or 0.0, dealt))
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
        self._dealt: Shares = ()
        self._found: dict[range, list[Tensor]] = {}
        """Sums of nodes, with the number of slices that used each parameter behind them, where slices are dealt."""

    async def begin(self, port: Port, slices: list[BatchSlice]) -> None:
        """Fetch state for the slices from other ranks."""

    async def meet(self, port: Port) -> None:
        """Exchange further sums, before the gradients are exchanged.

        Cost, where slices are dealt: the gradients' bytes for each node that belongs to another rank. Memory: gradients
        for each node of `compute` and each node from another rank, and once more while a node is packed.
        """
        if not self._dealt:
            return
        like = [*self._parameters, self._parameters[0].new_empty(len(self._parameters))]
        begins = [0, *accumulate(self._dealt)]
        homes = [subtree(begins[-1], port.size, rank) for rank in range(port.size)]
        going: list[Work[None]] = []
        coming: dict[range, list[Work[Tensor]]] = {}
        for source, to in permutations(range(port.size), 2):
            for node in nodes(homes[to], range(begins[source], begins[source + 1])):
                if source == port.rank:
                    going += [await port.start(port.send(each, to)) for each in _packed(self._found.pop(node))]
                elif to == port.rank:
                    coming[node] = [await port.start(port.recv(each, source)) for each in _packed_shapes(like)]
        for node, parts in coming.items():
            self._found[node] = _unpacked([await part for part in parts], like)
        for sent in going:
            await sent
        *total, used = from_nodes(homes[port.rank], self._found, _added_)
        for parameter, each, number in zip(self._parameters, total, used.tolist(), strict=True):
            parameter.grad = each if number else None

    def compute(self, slices: list[BatchSlice], rank: int) -> Tensor:
        """The mean loss of this rank's samples; parameters that a slice has used have a gradient afterwards.

        Cost: a forward and a backward pass for each slice. Memory: ⌈log₂S⌉ + 1 gradients for S slices.
        Where they are dealt, also gradients for each of the run's `nodes`, in each rank's subtree, until `meet`: the
        largest that are whole here, so none could be merged before.
        """
        losses: list[Tensor] = []
        self._dealt = slices[0].dealt
        if self._dealt:
            run = range(slices[0].number, slices[-1].number + 1)
            for to in range(len(self._dealt)):
                for node in nodes(subtree(sum(self._dealt), len(self._dealt), to), run):
                    there = slices[node.start - run.start : node.stop - run.start]
                    total, used = self._summed(there, rank, losses)
                    uses = [float(i in used) for i in range(len(total))]
                    self._found[node] = [*total, torch.tensor(uses, dtype=total[0].dtype, device=total[0].device)]
        else:
            total, used = self._summed(slices, rank, losses)
            self._sums = total[len(self._parameters) :]
            for i, (parameter, each) in enumerate(zip(self._parameters, total, strict=False)):
                parameter.grad = each if i in used else None
        own = sum(piece.share for piece in slices) or 1.0
        zero = torch.zeros((), device=self._parameters[0].device)
        mean = sum((loss * (piece.share / own) for loss, piece in zip(losses, slices, strict=True)), zero)
        return noted(self._replica.parameters, mean)

    def _summed(self, slices: list[BatchSlice], rank: int, losses: list[Tensor]) -> tuple[list[Tensor], set[int]]:
        """The slices' gradients along the tree, and the indices of parameters with one. Adds to `losses`."""
        used: set[int] = set()

        def gradient(place: int) -> list[Tensor]:
            loss, gradients = self._computed(slices[place], rank, used)
            losses.append(loss)
            return gradients

        return along_tree(len(slices), gradient, _added_), used

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


def _packed(tensors: list[Tensor]) -> list[Tensor]:
    return [Bundle(group).flat for group in _groups(tensors)]


def _packed_shapes(tensors: list[Tensor]) -> list[Tensor]:
    """Tensors with the shapes of `_packed` alone: a number's memory each."""
    return [
        next(iter(group.values())).new_empty(()).expand(sum(each.numel() for each in group.values()))
        for group in _groups(tensors)
    ]


def _unpacked(flats: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    """The tensors of `_packed`, shaped like `like`."""
    found = {
        name: view
        for group, flat in zip(_groups(like), flats, strict=True)
        for name, view in Bundle(group, flat=flat).views.items()
    }
    return [found[str(i)] for i in range(len(like))]


def _groups(tensors: list[Tensor]) -> list[dict[str, Tensor]]:
    return list(by_kind({str(i): each for i, each in enumerate(tensors)}).values())


def _versions(model: nn.Module) -> dict[str, int]:
    return {name: buffer._version for name, buffer in model.named_buffers()}
