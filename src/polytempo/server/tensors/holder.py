"""`Holder`: makes the weights and the checks of pushes for a shard that holds certain elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.core import Codec
from polytempo.core.rule import Service
from polytempo.server.encoding import Coding, Pushes, ShownEncoding
from polytempo.server.layout import Empty, Parameter, Spans, numel_of, parameter_parts
from polytempo.server.pieces import cut
from polytempo.server.shard.admission import Admission
from polytempo.server.step_rates import Factor
from polytempo.server.tensors.optimizer import Optimizer, Term
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
        shown = None if pull_codec is None else ShownEncoding(self._coding(pull_codec, spans, values))
        pushes = None if codec is None else Pushes(self._coding(codec, spans, values), values.numel(), values.dtype)
        weights = Weights(
            values, optimizer, self._empty, keeps_reads=self.needs_basis, remembers=self._remembers, shown=shown
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
