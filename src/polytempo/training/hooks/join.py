"""`JoinMembership`: who still takes part, where ranks may leave the training loop at different steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from polytempo.collectives import tree
from polytempo.core import Port, Promise
from polytempo.core.calls.refusals import refuse
from polytempo.training.hooks.step_weights import (
    GradientFactor,
    StepWeights,
    scale_output_gradients,
    zero_output_gradients,
)
from polytempo.training.model.agree import share_of
from polytempo.training.step.buffers import MemberWeight
from polytempo.training.step.replica import Replica
from polytempo.worlds import ProcessWorld
from polytempo.worlds.process.shares import Batch


class JoinMembership:
    """This rank's part in exchanges over `data`: its batch's share, or, while ranks may leave, equal ones."""

    def __init__(self, world: ProcessWorld, data: Port, replica: Replica, *, sums_at_step: bool = False) -> None:
        """`sums_at_step`: the step exchanges gradients, and not a backward pass, so all passes accumulate."""
        self._world, self._data, self._replica, self._sums_at_step = world, data, replica, sums_at_step
        self._batch: Batch | None = None
        """The batch of the coming step, if its share is known."""
        self._given: Batch | None = None
        """The batch of the last forward pass."""
        self._recognised = False
        """True if an input of this step was recognised: `_given` is then more than the last batch that was yielded."""
        self.stands_in: bool | None = None
        """True if all batches of the coming step stand in for samples; None before the first one."""
        self._counts: GradientFactor | None = None
        """0 while gradients of a batch that stands in are computed; made at the first such batch of `pt.shard`."""
        self._waits = False
        """True if a batch with samples was given to the model since the last backward pass."""
        self.arrived = False
        """True once a gradient has arrived since the last forward pass."""
        self.joining = False
        self.exchanged = False
        """True if gradients of the present step have been exchanged."""
        self.accumulates = False
        """True while `.grad` holds this rank's gradients of earlier passes, which no exchange has seen yet."""
        self._left = False
        self._agreed_share: float | None = None
        """This rank's part as the active ranks last agreed, or as weights are, in the present step."""
        self.weights: StepWeights | None = None
        """The weights of the step's batches, once `pt.shard` has given one."""

    @contextmanager
    def join(self, shadow_step: Callable[[], None]) -> Iterator[None]:
        """Ranks may leave inside; a rank that has left takes `shadow_step` with weight zero until all have left."""
        strategy = self._replica.strategy
        if Promise.WEIGHS not in strategy.gradients.promises & strategy.parameters.promises:
            raise ValueError(
                f"{strategy} counts every rank alike, also ranks that have left, so join() cannot be used; give "
                "all ranks equally many batches, as pt.shard does, or take a strategy that weighs them, e.g. sync_sgd"
            )
        if strategy.one_copy == "in_turn":
            raise ValueError(
                f"{strategy} waits for every rank's turn, also of ranks that have left, so join() cannot be used; give "
                "all ranks equally many batches, as pt.shard does, or take hogwild()"
            )
        if self._world.shares.weighs:
            refuse({"own loop", "join", "weight"})
        if self._world.dealing is not None:
            refuse({"own loop", "join", "balance"})
        self.joining = self._data.size > 1
        try:
            yield
            self._left = True
            while self.joining and self._share_among_active(0.0):
                shadow_step()
            if self.joining and not strategy.synchronized:
                self._take_consensus()
        finally:
            self.joining = self._left = False
            self._replica.member = MemberWeight()

    @property
    def share(self) -> float | None:
        """This rank's weight in the coming exchange: its batch's share, or, inside `join`, an active rank's part."""
        if self.joining or self._weighs:
            return self._agreed_share
        return self._world.shares.last if self._batch is None else self._batch.share

    @property
    def _weighs(self) -> bool:
        """True if batches of the present step have weights of their own."""
        return self.weights is not None and self.weights.num_batches > 0

    @property
    def _counts_by_shares(self) -> bool:
        """True if gradients of the present step count by the shares of their batches."""
        replica = self._replica
        averages = Promise.WEIGHS in replica.strategy.gradients.promises and replica.exchanges_next()
        return not self.joining and (self._sums_at_step or averages)

    def begin_batch(self, share: float | None) -> None:
        """The coming step is made of a batch with this share."""
        self._batch = self._given = Batch(share, [], frozenset(), ())
        self._recognised = True
        self._note(share)

    def _note(self, share: float | None) -> None:
        self.stands_in = share == 0.0 and self.stands_in is not False

    def given_to(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Look for a batch of `pt.shard` among a forward pass's inputs."""
        if self._replica.pace is not None:
            self._replica.pace.has_batch()
        if not torch.is_grad_enabled():
            return
        if self._data.size == 1 and not self._world.shares.weighs:
            self._batch = self._world.shares.newest or self._batch
            return
        found = self._world.shares.of(inputs, named)
        self._recognised = self._recognised or found is not None
        given = found or (self._given if self._recognised else self._world.shares.newest) or self._given
        self._given = given
        if given is not None and given.weight is not None:
            self._weigh(module, given)
        else:
            self._take(module, given)

    def _take(self, module: nn.Module, given: Batch | None) -> None:
        """The coming forward pass is of the batch `given`."""
        if self._weighs:
            refuse({"own loop", "uneven batches", "weight"})
        before = self._batch
        share = self._world.shares.last if given is None else given.share
        self._note(share)
        waits = self._count(module, given)
        if waits and share and before is not None and before.share and self._counts_by_shares:
            scale_output_gradients(module, share / before.share)  # one backward pass counts by its first batch
            self._replica.weigh_layers(before.share)
            return
        if share != 0 or before is None or self.exchanged or self.joining:  # else earlier gradients keep their share
            self._batch = given
        if not self.joining:
            self._replica.weigh_layers(share)
            if before is not None and self._batch is not None:
                self._reweigh(before.share, self._batch.share)

    def _count(self, module: nn.Module, batch: Batch | None) -> bool:
        """Let gradients of a forward pass be 0 if its `batch` of `pt.shard` stands in for samples. Returns True if
        another pass waits for the backward pass.

        They are 0 at its output, and at the parameters unless another pass waits for the backward pass. A job's step
        zeroes its own.

        Layers that ranks divide have all ranks' gradients, which shares weigh already.
        """
        stands_in = batch is not None and batch.share == 0 and bool(batch.ranks)
        if (stands_in or self._sums_at_step) and self._counts is None:
            trained, own = self._replica.trainable, self._replica.own
            self._counts = GradientFactor(each for name, each in trained.items() if name not in own)
        if self.arrived or (self._counts is not None and self._counts.used):
            self._count_all()
            self._waits = False
        waits, self._waits = self._waits, self._waits or not stands_in
        if self._counts is not None:
            self._counts.value = float(self._waits)
        if stands_in:
            zero_output_gradients(module)
        return waits

    @property
    def hooks(self) -> list[RemovableHandle]:
        """Hooks of parameters that scale gradients."""
        factors = (self._counts, None if self.weights is None else self.weights.factor)
        return [hook for factor in factors if factor is not None for hook in factor.hooks]

    @torch.no_grad()
    def _reweigh(self, before: float | None, after: float | None) -> None:
        """Keep the weight of accumulated gradients, which count by the last batch's share."""
        weighed: list[nn.Parameter] = []
        if self._sums_at_step:
            weighed += self._replica.trainable.values()
        elif self.accumulates and self._counts_by_shares:
            weighed += [p for bucket in self._replica.buckets for p in bucket.parameters.values()]
        if before and after and before != after:
            for parameter in weighed:
                if parameter.grad is not None:
                    parameter.grad.mul_(before / after)

    def _weigh(self, module: nn.Module | None, batch: Batch) -> None:
        """The coming forward pass, or a compiled model's last one (None), is of `batch`, which has a weight."""
        if self.joining:
            refuse({"own loop", "join", "weight"})
        if self._replica.computes_together:
            refuse({"own loop", "divided layers", "weight"})
        if self._batch is not None:
            refuse({"own loop", "uneven batches", "weight"})
        if self.weights is None:
            self.weights = StepWeights(self._replica.trainable.values())
        if self.weights.take(batch, module):
            self._agreed_share = None

    def end_step(self) -> None:
        """The coming step is made of another batch."""
        if self.weights is not None:
            self.weights.end_step()
            self._agreed_share = None
        self._batch = self._given = self.stands_in = None
        self._recognised = self.accumulates = self.exchanged = self._waits = False
        self._count_all()

    def _count_all(self) -> None:
        self.arrived = False
        if self._counts is not None:
            self._counts.value, self._counts.used = 1.0, False

    def agree_on_share(self) -> None:
        """Agree on the ranks' parts of the coming exchange, where they are not known: by the weights of their batches,
        or, inside `join`, equal ones of the active ranks."""
        newest = self._world.shares.newest
        if self._given is None and newest is not None and newest.weight is not None:  # a compiled model's
            self._weigh(None, newest)
        weights, meets = self.weights, self._sums_at_step or self._replica.exchanges_next()
        if weights is not None and self._weighs and self._agreed_share is None and meets:
            self._agreed_share = self._world.drive(share_of(self._data, weights.total))
        if self.joining and not self._left:
            self._share_among_active(1.0)

    def _share_among_active(self, active: float) -> bool:
        mine = torch.zeros(self._data.size)
        mine[self._data.rank] = active
        who = self._world.drive(tree(self._data, mine)).nonzero().flatten().tolist()
        if who:
            self._agreed_share = active / len(who)
            self._replica.member = MemberWeight(active / len(who), who[0])
        return bool(who)

    @torch.no_grad()
    def _take_consensus(self) -> None:
        data, replica = self._data, self._replica
        agreed = self._world.drive(replica.consensus(data)) | self._world.drive(replica.consensus_buffers(data))
        with replica.in_float32():
            for name, tensor in [*replica.model.named_parameters(), *replica.model.named_buffers()]:
                if name in agreed:
                    tensor.copy_(agreed[name])
