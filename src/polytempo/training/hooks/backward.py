"""`Backward`: the backward passes of one rank. Exchanges begin while they run, and are over when they return.

loss.backward()    the last gradient of a bucket is there ──▶ its exchange begins
                   the pass is over ──▶ the others begin, and the rank waits for all
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from polytempo.core import Promise
from polytempo.training.hooks.join import JoinMembership
from polytempo.training.model.ports import Ports
from polytempo.training.step.bucket import Bucket
from polytempo.training.step.loss_scale import LossScale
from polytempo.training.step.replica import Replica
from polytempo.worlds import ProcessWorld


class Backward:
    """Follows backward passes, starts exchanges as gradients arrive, and finishes them.

    `scale`: the loss scale of a GradScaler, if ranks have to agree on skipped steps.
    """

    def __init__(
        self,
        world: ProcessWorld,
        ports: Ports,
        replica: Replica,
        members: JoinMembership,
        *,
        scale: LossScale | None = None,
    ) -> None:
        self._world, self._ports, self._replica, self._members = world, ports, replica, members
        self._scale = scale
        self.silent = False
        """True in `no_sync`: gradients accumulate, and nothing is exchanged."""
        self.exchanged = False
        """True if all gradients since the last step have been exchanged."""
        self.num_exchanges = 0
        self.answered = False
        """True if a transform of the last exchange did something."""
        self.mark_s = world.now_s()
        self._mixed = False
        """True if gradients were added to an answer; the sum cannot be exchanged."""
        self._unsure = False
        """True if `.grad` may hold the last answer, so a new gradient needs a check."""
        self._following: ref[Callable[[], None]] | None = None
        """The end of the backward pass as torch's callback, which torch holds until then."""
        self._missing: list[int] = []
        self._launched: list[Any] = []

    def watch(self) -> list[RemovableHandle]:
        """Hook all parameters with exchanged gradients."""
        buckets = self._replica.buckets
        parameters = [(p, bucket.index) for bucket in buckets for p in bucket.parameters.values()]
        if self._scale is not None and not buckets:
            parameters = [(p, -1) for p in self._replica.trainable.values()]
        return [p.register_post_accumulate_grad_hook(self._arrival(index)) for p, index in parameters]

    def _arrival(self, index: int) -> Callable[[Tensor], None]:
        weakly = ref(self)  # torch keeps a parameter's hooks where the garbage collector does not look

        def arrived(parameter: Tensor) -> None:
            backward = weakly()
            if backward is not None:
                backward._arrived(parameter, index)

        return arrived

    def _arrived(self, parameter: Tensor, index: int) -> None:
        self._members.arrived = True
        if self.silent:
            if self._unsure and not self._mixed:
                self._look_for_answers(parameter)
            self.exchanged = False
            self._members.accumulates = self.num_exchanges == 0
            return
        if self._following is None or self._following() is None:
            self._look_for_answers(parameter)
            self._begin()
            self._follow()
        if index < 0:
            return
        self._missing[index] -= 1
        if self._missing[index] < 0:
            raise RuntimeError(
                "a gradient arrived twice in one backward pass, perhaps after its exchange had begun; use "
                "checkpointing with use_reentrant=False, or no_sync() around all backward passes but the last"
            )
        if self._missing[index] == 0 and not self._members.joining and index == len(self._launched):
            self._launch_ready()

    def _look_for_answers(self, arrived: Tensor | None) -> None:
        """Check, with the first gradient that has `arrived`, if the last answer would be exchanged once more."""
        if self._unsure:
            self._mixed = any(bucket.holds_answer(arrived) for bucket in self._replica.buckets)
            self._unsure = self._mixed

    def _refuse_mixed(self) -> None:
        """Raise RuntimeError: a transform that is not linear cannot exchange an answer plus a gradient."""
        if self._mixed:
            raise RuntimeError(
                f"gradients were added to some that had been exchanged already, and {self._replica.strategy} cannot "
                "exchange the two together; put no_sync() around all backward passes of a step but the last, drop "
                "gradients by zero_grad() before the next step, and use checkpointing with use_reentrant=False"
            )

    def _begin(self) -> None:
        """Forget a failed backward pass. RuntimeError for a second exchange in a step that may have one."""
        if self._launched:
            raise RuntimeError(
                f"a backward pass ended with an error when {len(self._launched)} of {len(self._missing)} exchanges had "
                "begun, which cannot be taken back; end this run and go on from its last checkpoint"
            )
        if self._members.joining and self.num_exchanges:
            raise RuntimeError(
                "gradients would be exchanged a second time before optimizer.step(), but inside join() ranks that "
                "have left count every exchange as a step; put no_sync() around all other backward passes, and use "
                "checkpointing with use_reentrant=False"
            )
        weights = self._members.weights
        if weights is not None and weights.num_batches > 1 and self.num_exchanges:
            raise RuntimeError(
                f"gradients of {weights.num_batches} batches of a step would be exchanged in several parts, and "
                "their weights are not known together; put no_sync() around all backward passes of a step but the last"
            )
        self._following = None
        self._missing = [_num_expected(bucket) for bucket in self._replica.buckets]

    def _follow(self) -> None:
        finish = self.finish
        self._following = ref(finish)
        torch.autograd.Variable._execution_engine.queue_callback(finish)

    def _launch_ready(self) -> None:
        """Start the buckets that are complete, in their order, which is the same on every rank."""
        self._members.agree_on_share()
        while len(self._launched) < len(self._missing) and self._missing[len(self._launched)] <= 0:
            self._launch(self._replica.buckets[len(self._launched)])

    def _launch(self, bucket: Bucket) -> None:
        exchange = self._replica.exchange(self._ports.data, bucket, self._members.share)
        self._launched.append(self._world.launch(exchange))

    # ------------------------------------------------------------------ the end of a pass

    def complete(self) -> None:
        """Exchange the rest, if no backward pass has: all were silent, or reached nothing."""
        buckets = self._replica.buckets
        if not self.exchanged or (buckets and all(bucket.dropped for bucket in buckets)):
            self._look_for_answers(None)
            self._refuse_mixed()
            self._begin()
            self.finish()
        self._refuse_mixed()

    def finish(self) -> None:
        """Start the remaining exchanges, and wait for all."""
        if self._ports.data.size > 1:
            self._world.record("compute", self.mark_s)
        try:
            self._members.agree_on_share()
            for bucket in self._replica.buckets[len(self._launched) :]:
                self._launch(bucket)
            answers = [strand.wait() for strand in self._launched]
        finally:
            self._launched = []
            self._following = None
        self._world.drive(self._replica.leave_unused(self._ports.data))
        if self._scale is not None:
            self._agree_on_overflow(self._scale)
        self.exchanged, self.answered = True, any(answers)
        self._members.accumulates, self._members.exchanged = False, True
        self.num_exchanges += 1
        self._unsure = Promise.LINEAR not in self._replica.strategy.gradients.promises
        if self._replica.drift is not None:
            self._replica.drift.after_exchange()
        self.mark_s = self._world.now_s()

    def _agree_on_overflow(self, scale: LossScale) -> None:
        parameters: list[nn.Parameter] = list(self._replica.trainable.values())
        if self._replica.loss_scale is None:
            scale.look(parameters)
        self._world.drive(scale.agree(self._ports.whole, parameters))

    def end_step(self) -> None:
        """An optimizer step has used the exchanged gradients."""
        self.exchanged, self.num_exchanges, self._mixed = False, 0, False
        self._members.end_step()
        self.mark_s = self._world.now_s()


def _num_expected(bucket: Bucket) -> int:
    return sum([parameter.requires_grad for parameter in bucket.parameters.values()])
