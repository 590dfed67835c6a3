"""Batches that grow while a run goes on, each worker's part computed in pieces that are no larger than at first.

epochs     0 … 4      5 … 9        10 …          {5: 4, 10: 2}
batch      B          4 B          8 B           over all workers
pieces     1          4            8             of a worker's part, one backward pass after the other
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from polytempo.data.shard import DataShard
from polytempo.spec.batch_growth import BatchGrowth, NormTest
from polytempo.spec.job import Job
from polytempo.spec.objective import part_weights
from polytempo.spec.run_spec import RunSpec
from polytempo.training.job.sliced_step import BatchSlice, next_slices

Backward = Callable[[Any, float], Tensor]
"""`loss = backward(batch, weight)`: adds the weighted gradient of a batch to `.grad`, and answers the batch's loss."""


class Pieces(NamedTuple):
    """A worker's batch in pieces."""

    pieces: list[BatchSlice]
    weights: list[float] | None = None
    """How much their losses count in the batch's; None: as much as they have samples."""

    @property
    def samples(self) -> int:
        """Those that count."""
        return sum(piece.samples for piece in self.pieces if piece.share)

    @property
    def share(self) -> float:
        """The worker's part of the global batch."""
        return sum(piece.share for piece in self.pieces)

    def computed(self, backward: Backward, silent: Callable[[], AbstractContextManager[None]] = nullcontext) -> Tensor:
        """The mean loss of the worker's samples; `.grad` is its gradient. `silent`: around all passes but the last."""
        total, own = torch.zeros(()), self.share
        each = self.weights or [piece.share / own if own else 1 / len(self.pieces) for piece in self.pieces]
        counting = [(piece, weight) for piece, weight in zip(self.pieces, each, strict=True) if weight]
        for number, (piece, weight) in enumerate(counting, start=1):  # a mean of nothing is NaN, and times 0 still is
            with nullcontext() if number == len(counting) else silent():
                total = total + weight * backward(piece.batch, weight).detach()
        return total


def next_pieces(job: Job, shard: DataShard, batches: Iterator[Any], seed: int, step: int) -> Pieces | None:
    """The next batch of a rank whose batches come in pieces; None at the end of the epoch."""
    found = next_slices(job, shard, batches, seed, step)
    if found is None:
        return None
    counting = [piece for piece in found if piece.share]
    return Pieces(counting, part_weights(job, [piece.batch for piece in counting])) if counting else Pieces(found)


def times_by(growth: BatchGrowth, epoch: float) -> float:
    """By what a rule of epochs has multiplied the first batch in this epoch."""
    assert not isinstance(growth, NormTest), "that goes by steps"
    return prod(factor for after, factor in growth.items() if epoch >= after)


def grown(spec: RunSpec, size: int, num_samples: int, epoch: int) -> tuple[int, int]:
    """The global batch in `epoch`, of at most `num_samples`, and in how many pieces each of `size` ranks computes its
    part: of a rank's first batch at most. In an elastic run other ranks than those that began may share the batch."""
    began = spec.workers if spec.options.elastic else size
    first = spec.options.global_batch_size or began * spec.batch_size
    batch = min(round(first * times_by(spec.options.batch_growth, epoch)), max(first, num_samples))
    return batch, -(-batch // (size * spec.batch_size))


def grow(spec: RunSpec, shard: DataShard) -> None:
    """Let the shard's coming epoch, or the rest of it, have the batch that the options give it by epochs."""
    growth = spec.options.batch_growth
    if growth and not isinstance(growth, NormTest) and shard.num_samples is not None:
        shard.grow(*grown(spec, shard.size, shard.num_samples, shard.epoch))


def follow(scheduler: LRScheduler, epochs: float, steps_per_epoch: int) -> None:
    """Step a schedule to where it would be after so many epochs of steps with the first batch."""
    for _ in range(int(epochs * steps_per_epoch + 1e-6) - scheduler.last_epoch):
        scheduler.step()
