"""`Holder`: makes the weights and the checks of pushes for a shard that holds certain elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace as changed
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from polytempo.core import Codec
from polytempo.core.codec import DeltaCodec
from polytempo.core.rule import Service, UpdateRule
from polytempo.server.encoding import Coding, Pushes, ShownEncoding, Undecodable
from polytempo.server.layout import Empty, Parameter, Spans, describe, flat_index, numel_of, parameter_parts
from polytempo.server.message import Push, PushPart
from polytempo.server.pieces import cut
from polytempo.server.shard.replies import Waiting
from polytempo.server.step_rates import Factor
from polytempo.server.tensors.optimizer import Optimizer, Term
from polytempo.server.tensors.running_statistics import RunningStatistics
from polytempo.server.tensors.tables import Tables
from polytempo.server.tensors.weights import Weights


class HeldElements(NamedTuple):
    """The elements of a shard as they were after some entry of its log."""

    spans: Spans
    values: Tensor
    """The elements of `spans`, tables included, shape (numel,)."""
    running: Tensor | None
    """The running statistics of norms."""
    release: Callable[[], None]
    """Call it when `values` may be written over."""


def _nothing_bad(gradient: Tensor, lrs: tuple[float, ...]) -> int:
    """Lets NaN and infinities pass."""
    return -1


def copied(parameters: Sequence[Parameter], spans: Spans, dense: Tensor, tables: Sequence[Tensor]) -> Tensor:
    """The elements of `spans` among all parameters, copied together from the dense part and the pieces of tables."""
    values = torch.empty(numel_of(spans), dtype=dense.dtype)
    parts, pieces = cut(values, parameters, spans)
    for target, source in zip(parts, dense.split([len(target) for target in parts]), strict=True):
        target.copy_(source)
    for target, source in zip(pieces, tables, strict=True):
        target.copy_(source)
    return values


def held_elements(
    weights: Weights, tables: Tables | None, parameters: Sequence[Parameter], spans: Spans, running: Tensor | None
) -> HeldElements:
    """All that a shard with `spans` of `parameters` holds now, to stay as it is until it is released."""
    if tables is not None:
        return HeldElements(spans, copied(parameters, spans, weights.present, tables.values), running, lambda: None)
    buffers, number = weights.buffers, weights.current
    buffers.hold(number)
    return HeldElements(spans, weights.present, running, lambda: buffers.release(number))


class Holder:
    """Makes weights and checks for a shard of `parameters` with this `service`. `tables`: its pieces of tables."""

    def __init__(
        self, parameters: tuple[Parameter, ...], service: Service, empty: Empty, *, native: bool, tables: Tables | None
    ) -> None:
        self._parameters, self._service, self._empty = parameters, service, empty
        self._native, self._tables = native, tables
        self.needs_basis = any(modifier.needs_basis for modifier in service.modifiers)
        self._remembers = any(modifier.remembers for modifier in service.modifiers)

    def hold(self, spans: Spans, values: Tensor) -> tuple[Weights, Admission]:
        """The elements of `spans`, which begin as `values`, before the first update."""
        optimizer = self._optimizer(spans, values.dtype, native=self._native)
        codec, pull_codec = self._service.codec, self._service.pull_codec
        shown, delta = None, pull_codec if isinstance(pull_codec, DeltaCodec) else None
        if pull_codec is not None:
            inner = pull_codec.codec if isinstance(pull_codec, DeltaCodec) else pull_codec
            shown = ShownEncoding(self._coding(inner, spans, values), delta)
        pushes = None if codec is None else Pushes(self._coding(codec, spans, values), values.numel(), values.dtype)
        weights = Weights(
            values,
            optimizer,
            self._empty,
            keeps_reads=self.needs_basis or delta is not None,
            remembers=self._remembers,
            shown=shown,
        )
        return weights, Admission(
            parameters=self._parameters,
            spans=spans,
            weights=values,
            optimizer=optimizer,
            examine=_nothing_bad if self._service.allow_nan else weights.examine,
            tables=self._tables,
            pushes=pushes,
        )

    @property
    def outer(self) -> Holder:
        """The same for the shard's own weights: where there are regions, these have another optimizer."""
        if not self._service.rule.region_size:
            return self
        service = changed(self._service, optimizer=self._service.outer or UpdateRule("sgd", 1.0))
        return Holder(self._parameters, service, self._empty, native=self._native, tables=self._tables)

    def multiplied(self, vector: Tensor, spans: Spans, factor: Factor) -> Tensor:
        """`vector`, which has an entry for each element of `spans`, times `factor`; `vector` where that is 1."""
        if factor == 1:
            return vector
        out = vector.clone()
        self._optimizer(spans, vector.dtype, native=False).add_(out, Term(out, factor), fresh=True)
        return out

    def _optimizer(self, spans: Spans, dtype: torch.dtype, *, native: bool) -> Optimizer:
        assert self._service.optimizer is not None, "the shard has seen to it"
        return Optimizer(self._service.optimizer, tuple(parameter_parts(self._parameters, spans)), dtype, native=native)

    def _coding(self, codec: Codec, spans: Spans, values: Tensor) -> Coding:
        return Coding(self._parameters, spans, codec, values.dtype, own=True)


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
