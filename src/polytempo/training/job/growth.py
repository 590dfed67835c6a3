"""Batches that grow while a run goes on, each worker's part computed in pieces of at most its first size.

epochs     0 … 4      5 … 9        10 …          {5: 4, 10: 2}
batch      B          4 B          8 B           over all workers
pieces     1          4            8             of a worker's part, one backward pass after the other

At a geometric rate (`GeometricGrowth`) the number of steps says how large the next batch is.

With a norm test (`NormGrowth`) a batch grows in the same step of every rank and of every run:

take a step ── was it looked at? ──▶ rows of all ranks ──▶ averages ──▶ does the test fail? ──▶ a larger batch
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from polytempo.core import Port
from polytempo.data.shard import DataShard
from polytempo.large_batch.noise_scale import dynamic_batch
from polytempo.spec.batch_growth import BatchGrowth, Geometric, NormTest
from polytempo.spec.job import Job
from polytempo.spec.loss_divisor import in_sum
from polytempo.spec.objective import batch_weight, part_weights
from polytempo.spec.rates.schedules import has_ended
from polytempo.spec.run_spec import RunSpec
from polytempo.training.job.sliced_step import BatchSlice, next_slices
from polytempo.training.step.noise_watch import NoiseWatch
from polytempo.training.step.replica import Replica

Backward = Callable[[Any, float], Tensor]
"""`loss = backward(batch, weight)`: adds the weighted gradient of a batch to `.grad`, and answers the batch's loss."""


class Pieces(NamedTuple):
    """A worker's batch in pieces."""

    pieces: list[BatchSlice]
    weights: list[float] | None = None
    """Weights of their losses in the batch's loss; None: by their samples."""
    weight: float | None = None
    """The batch's weight, where it is not its number of samples."""

    @property
    def samples(self) -> int:
        """Samples that count."""
        return sum(piece.samples for piece in self.pieces if piece.share)

    @property
    def share(self) -> float:
        """The worker's share of the global batch."""
        return sum(piece.share for piece in self.pieces)

    def computed(
        self,
        backward: Backward,
        silent: Callable[[], AbstractContextManager[None]] = nullcontext,
        *,
        together: bool = False,
    ) -> Tensor:
        """The mean loss of the worker's samples; `.grad` is its gradient. `silent`: around all passes but the last.

        A piece that weighs 0 is not computed, but where ranks compute `together`.
        """
        total, own = torch.zeros(()), self.share
        each = self.weights or [piece.share / own if own else 1 / len(self.pieces) for piece in self.pieces]
        counting = [(piece, weight) for piece, weight in zip(self.pieces, each, strict=True) if weight or together]
        for number, (piece, weight) in enumerate(counting, start=1):  # a mean of nothing is NaN, and times 0 still is
            with nullcontext() if number == len(counting) else silent():
                total = total + weight * backward(piece.batch, weight).detach()
        return total


def next_pieces(job: Job, shard: DataShard, batches: Iterator[Any], seed: int, step: int) -> Pieces | None:
    """The next batch in pieces; None at the end of the epoch."""
    found = next_slices(job, shard, batches, seed, step)
    if found is None:
        return None
    counting = [piece for piece in found if piece.share]
    if job.weight is not None:
        each = [batch_weight(job, piece.batch) if piece.share else 0.0 for piece in found]
        return Pieces(found, in_sum(each), sum(each))
    return Pieces(counting, part_weights(job, [piece.batch for piece in counting])) if counting else Pieces(found)


def times_by(growth: BatchGrowth, epoch: float) -> float:
    """The factor of a rule of epochs for the first batch in this epoch."""
    assert isinstance(growth, Mapping), "other rules go by steps"
    return prod(factor for after, factor in growth.items() if epoch >= after)


def grown(spec: RunSpec, size: int, num_samples: int, epoch: int) -> tuple[int, int]:
    """The global batch in `epoch`, of at most `num_samples`, and in how many pieces each of `size` ranks computes its
    part: of a rank's first batch at most. In an elastic run the number of ranks may differ from the first one."""
    began = spec.workers if spec.options.elastic else size
    first = spec.options.global_batch_size or began * spec.batch_size
    batch = min(round(first * times_by(spec.options.batch_growth, epoch)), max(first, num_samples))
    return batch, -(-batch // (size * spec.batch_size))


def grow(spec: RunSpec, shard: DataShard) -> None:
    """Let the shard's coming epoch, or the rest of it, have the batch that the options give it by epochs."""
    growth = spec.options.batch_growth
    if growth and isinstance(growth, Mapping) and shard.num_samples is not None:
        shard.grow(*grown(spec, shard.size, shard.num_samples, shard.epoch))


def follow(scheduler: LRScheduler, epochs: float, steps_per_epoch: int) -> None:
    """Step a schedule to where it would be after so many epochs of steps with the first batch."""
    for _ in range(int(epochs * steps_per_epoch + 1e-6) - scheduler.last_epoch):
        if not has_ended(scheduler):
            scheduler.step()


_FEWEST_LOOKS = 10
"""A batch never shrinks, so it grows only after so many looks at its noise."""
_MOST_TIMES = 2
"""The most that a batch grows at a time: the averages are of gradients before it has grown."""


class HeldRow:
    """The row of the step that was just made, until the program exchanges it: a `NoisePost` for runs that need it."""

    def __init__(self) -> None:
        self.row: Tensor | None = None

    def post(self, watch: NoiseWatch, row: Tensor) -> None:
        """See `NoisePost`."""
        self.row = row

    def finish(self, watch: NoiseWatch) -> None:
        """See `NoisePost`: nothing is under way."""


class NormGrowth:
    """One rank's batch, as `spec.batch_growth.norm_test` says. All ranks make one, at the beginning of a run.

    `watch` looks at the gradients, and hands its rows to this from now on. `shard`: its batch is the first one. The
    state is equal on all ranks after each step.
    """

    def __init__(self, test: NormTest, watch: NoiseWatch, shard: DataShard) -> None:
        self._theta, self._watch, self._held = test.theta, watch, HeldRow()
        watch.rows_to(self._held)
        self._first = self.global_batch_size = shard.global_batch_size

    async def grows(self, data: Port, shard: DataShard) -> bool:
        """Return True after a step if the shard has a larger batch from now on. All ranks of `data` call it."""
        row, self._held.row = self._held.row, None
        if row is None:
            return False
        self._watch.take(await data.all_gather(row))
        noise = self._watch.noise
        if noise.steps < _FEWEST_LOOKS or shard.num_samples is None:
            return False
        wanted = dynamic_batch(self.global_batch_size, noise.simple, self._theta)
        most = min(_MOST_TIMES * self.global_batch_size, shard.num_samples)
        return self._set(min(-(-wanted // self._first) * self._first, most // self._first * self._first), shard)

    def _set(self, batch: int, shard: DataShard) -> bool:
        if batch <= self.global_batch_size:
            return False
        self.global_batch_size = batch
        shard.grow(batch, batch // self._first)
        return True

    def saved(self) -> str:
        """All that a resumed run needs, as text."""
        return json.dumps({"batch": self.global_batch_size, "watch": self._watch.state()})

    def restore(self, text: str, step: int, shard: DataShard) -> None:
        """Go on from `saved` after so many steps, perhaps with other workers and another first batch."""
        state = json.loads(text)
        if "watch" in state:  # else the run had another rule so far
            self._watch.restore(state["watch"], step)
        self._set(-(-state["batch"] // self._first) * self._first, shard)


def norm_growth(spec: RunSpec, replica: Replica, shard: DataShard) -> NormGrowth | None:
    """A rank's part of the norm test that lets the run's batches grow; None for options without it."""
    test = spec.options.batch_growth
    if not isinstance(test, NormTest):
        return None
    assert replica.noise is not None, "the options ask for looks"
    return NormGrowth(test, replica.noise, shard)


class GeometricGrowth:
    """One rank's batch, as `spec.batch_growth.geometric` says; all ranks compute the same.

        rest of the epoch    100 samples, bₖ = 30 wanted     100 // 30 = 3 batches: 34 now
                              66 samples, bₖ₊₁ = 33 wanted   2 batches: 33 now

    `shard`: its batch is the first one, and none of a rank's pieces is larger than its part of that.
    """

    def __init__(self, rule: Geometric, shard: DataShard) -> None:
        self._rule, self._steps = rule, 0
        self._first = self._wanted = self.global_batch_size = shard.global_batch_size

    async def grows(self, data: Port, shard: DataShard) -> bool:
        """Return True after a step if the shard has another batch from now on."""
        assert shard.num_samples is not None
        self._steps += 1
        if self._steps % self._rule.every == 0:
            self._wanted = max(self._first, min(self._rule.after(self._wanted), shard.num_samples))
        return self._deal(shard, shard.num_samples)

    def _deal(self, shard: DataShard, num_samples: int) -> bool:
        rest = num_samples - shard.used or num_samples
        batch = -(-rest // max(1, rest // self._wanted))
        if batch == self.global_batch_size or batch < shard.size:
            return False
        self.global_batch_size = batch
        shard.grow(batch, min(-(-batch // self._first), batch // shard.size))
        return True

    def saved(self) -> str:
        """All that a resumed run needs, as text."""
        return json.dumps({"batch": self._wanted, "steps": self._steps})

    def restore(self, text: str, step: int, shard: DataShard) -> None:
        """Go on from `saved`, perhaps with other workers and another first batch."""
        state = json.loads(text)
        self._wanted, self._steps = max(self._first, state["batch"]), state.get("steps", step)
        assert shard.num_samples is not None
        self._deal(shard, shard.num_samples)


def geometric_growth(spec: RunSpec, shard: DataShard) -> GeometricGrowth | None:
    """A rank's batch at a geometric rate; None for options without it."""
    rule = spec.options.batch_growth
    return GeometricGrowth(rule, shard) if isinstance(rule, Geometric) else None
