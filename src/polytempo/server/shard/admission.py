"""Checks of a push before the rule sees it: its shapes, version and rates, and no NaN or infinity in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace
from torch import Tensor

from polytempo.core.rule import Service
from polytempo.server.encoding import Pushes, Undecodable
from polytempo.server.layout import Parameter, Spans, describe, flat_index
from polytempo.server.message import Push, PushPart
from polytempo.server.shard.replies import Waiting
from polytempo.server.tensors.optimizer import Optimizer
from polytempo.server.tensors.running_statistics import RunningStatistics
from polytempo.server.tensors.tables import Tables

Examine = Callable[[Tensor, tuple[float, ...]], int]
"""`(gradient, learning rates)` -> the index of the first element that is NaN or infinite, -1 if there is none."""


class Admission:
    """The checks of one shard's pushes. Cost: one read of the gradient."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        spans: Spans,
        weights: Tensor,
        optimizer: Optimizer,
        examine: Examine,
        *,
        tables: Tables | None = None,
        pushes: Pushes | None = None,
    ) -> None:
        self._tables, self._pushes = tables, pushes
        self._parameters, self._spans = parameters, spans
        self._shape, self._dtype = tuple(weights.shape), weights.dtype
        self._optimizer, self._examine = optimizer, examine
        self._good_lrs: tuple[float, ...] | None = None

    def admit(self, push: Push, version: int, queues: Mapping[int, Sequence[Waiting]]) -> tuple[Push, str]:
        """`push` with its gradient decoded where it came encoded, and why it is refused; "" if it is not.

        `queues`: the pushes that still wait; their gradients must not be written over.
        """
        if self._pushes is not None:
            kept = [waiting.gradient for queue in queues.values() for waiting in queue]
            try:
                push = replace(push, gradient=self._pushes.gradient(push.gradient, kept))
            except Undecodable as error:
                return push, f"worker {push.worker}, clock {push.clock}: {error}"
        return push, self.fault(push, version)

    def can_add_sum(self, push: Push, version: int, service: Service, running: RunningStatistics) -> bool:
        """True if the rule takes sums, and no check speaks against the sum in `push`.

        Where one does, each worker pushes alone, so that the shard can name the refused one.
        """
        if not service.rule.adds_sums or any(not 0 <= part.basis <= version for part in push.parts):
            return False
        requests: tuple[Push | PushPart, ...] = (push, *push.parts)
        faults = (running.fault(request, allow_nan=service.allow_nan) for request in requests)
        return not any(faults) and not self.fault(push, version)

    def gradient_of(self, push: Push) -> Tensor:
        """The gradient of `push`, decoded into new memory. Raises Undecodable."""
        return push.gradient if self._pushes is None else self._pushes.copy(push.gradient)

    def fault(self, push: Push, version: int) -> str:
        """The reason to refuse `push` at a shard with weights of `version`; "" if there is none."""
        gradient, who = push.gradient, f"worker {push.worker}"
        if gradient.shape != self._shape or gradient.dtype != self._dtype:
            return (
                f"{who} pushes {tuple(gradient.shape)} of {gradient.dtype}, but the shard holds {self._shape} "
                f"of {self._dtype}"
            )
        if self._tables is not None:
            if fault := self._tables.fault(push):
                return fault
        elif push.rows:
            return f"{who} pushes rows, but this shard holds no tables"
        if not 0 <= push.basis <= version:
            return f"{who} pushes a gradient of version {push.basis}, but there are only versions 0 to {version}"
        if push.lrs != self._good_lrs:
            lacks = self._optimizer.lacks(push.lrs)
            if lacks or not all(map(math.isfinite, push.lrs)):
                return f"{who}: {lacks or f'learning rates {push.lrs} are not all finite'}"
            self._good_lrs = push.lrs
        bad = self._examine(gradient, push.lrs)
        if bad < 0:
            return ""
        where = describe(self._parameters, flat_index(self._spans, bad))
        return f"{who}, clock {push.clock}: the gradient of {where} is {float(gradient[bad])}"
