"""Moving elements of a shard to another one, with their optimizer state, bit by bit.

shard 0   [ a a a a │ b b ]  ── Lend(b) ─▶ Lent: weights, moments, sum of b ─┐
shard 2   [ ]                ◀─ Reshape(b, pieces) ──────────────────────────┘
shard 0   [ a a a a ]        ◀─ Reshape(a): only now it releases b
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from polytempo.core.arithmetic.ranges import Range
from polytempo.server.layout import Span, Spans, numel_of
from polytempo.server.message import Lend, Lent
from polytempo.server.step_rates import Factor, StepRates, UnusedParameters, joined, largest_of
from polytempo.server.tensors.weights import Weights


class Likeness(msgspec.Struct, frozen=True, array_like=True):
    """The state that a new shard takes over from the giver of its elements."""

    rule: Any
    members: dict[int, int]
    workers: tuple[int, ...]
    tickets: tuple[Range, ...]
    dropped_tickets: tuple[Range, ...]


def likeness_of(lent: Lent) -> Likeness:
    """The `Likeness` in an answer to `Lend`. Errors: ValueError where the bytes are none."""
    try:
        return msgspec.msgpack.decode(lent.likeness, type=Likeness)
    except msgspec.MsgspecError as error:
        raise ValueError(f"shard {lent.shard} lends bytes that are not a shard's state: {error}") from error


def common(one: Spans, other: Spans) -> Spans:
    """The elements that are in both."""
    return tuple(Span(begin, end) for begin, end, _, _ in _overlaps(one, other))


def covers(spans: Spans, wanted: Spans) -> bool:
    """True if all of `wanted` are in `spans`."""
    return numel_of(common(spans, wanted)) == numel_of(wanted)


def lend(request: Lend, shard: int, weights: Weights, own: Spans, likeness: Likeness, running: Tensor | None) -> Lent:
    """The answer to `Lend` by a shard that holds `own`: views of `weights` where the elements are one range there."""
    present, first, second, total = (
        None if tensor is None else _taken(tensor, own, request.spans) for tensor in _tensors(weights)
    )
    assert present is not None, "every shard has weights"
    return Lent(
        shard=shard,
        worker=request.worker,
        incarnation=request.incarnation,
        sequence=request.sequence,
        spans=request.spans,
        likeness=msgspec.msgpack.encode(likeness),
        version=weights.version,
        steps=weights.steps,
        rates=weights.rates,
        weights=present,
        first=first,
        second=second,
        total=total,
        aside={batch: _taken(parts, own, request.spans) for batch, parts in weights.partial_sums.items()},
        running=running,
        unused=weights.unused,
    )


class Rest(NamedTuple):
    """The state of weights beside their values: moments, sums and counts."""

    first: Tensor | None
    second: Tensor | None
    total: Tensor | None
    partial_sums: dict[int, Tensor]
    version: int
    steps: int
    rates: StepRates
    unused: UnusedParameters

    def put_(self, weights: Weights) -> None:
        """Put this into new weights."""
        for target, moment in zip(weights.moments, self[:2], strict=True):
            if target is not None and moment is not None:
                target.copy_(moment)
        if self.total is not None:
            weights.total, weights.summed = self.total, True
        weights.partial_sums = self.partial_sums
        weights.version, weights.steps, weights.rates = self.version, self.steps, self.rates
        weights.unused = self.unused


Multiplied = Callable[[Tensor, Spans, Factor], Tensor]
"""A vector of the elements of some spans, times a factor."""


class _Source(NamedTuple):
    """The source of elements: the shard, or a piece that another shard lends."""

    spans: Spans
    tensors: tuple[Tensor | None, ...]
    """Weights, first and second moment, and sum, each of the elements of `spans`."""
    rates: StepRates
    partial_sums: Mapping[int, Tensor]
    version: int
    steps: int
    unused: UnusedParameters


def take_over(
    old: Weights, own: Spans, spans: Spans, pieces: Sequence[Lent], multiplied: Multiplied
) -> tuple[Tensor, Rest]:
    """The weights of a shard that held `own` and holds `spans` now, the new ones from `pieces`.

    Version and steps are the highest of all that come together. A sum that only some parts have is 0 in the others. The
    shard keeps its own rule and rates; a new one takes those in the first piece. Errors: ValueError where a source for
    some element of `spans` is missing.
    """
    sources = [
        _Source(own, _tensors(old), old.rates, old.partial_sums, old.version, old.steps, old.unused),
        *(
            _Source(p.spans, (p.weights, p.first, p.second, p.total), p.rates, p.aside, p.version, p.steps, p.unused)
            for p in pieces
        ),
    ]
    rates, sources = _in_one_rate(sources, multiplied)
    found = sum(numel_of(common(spans, source.spans)) for source in sources)
    if found != numel_of(spans):
        raise ValueError(f"a shard is to hold {numel_of(spans)} elements, and {found} are here")

    def gathered(vectors: Sequence[Tensor | None]) -> Tensor | None:
        return _gathered(spans, [(source.spans, v) for source, v in zip(sources, vectors, strict=True)], old.dtype)

    values, first, second, total = (gathered([source.tensors[kind] for source in sources]) for kind in range(4))
    batches = sorted({batch for source in sources for batch in source.partial_sums})
    partial = {batch: gathered([source.partial_sums.get(batch) for source in sources]) for batch in batches}
    assert values is not None, "every shard has weights"
    steps = max(source.steps for source in sources)
    return values, Rest(
        first=first,
        second=second,
        total=total,
        partial_sums={batch: parts for batch, parts in partial.items() if parts is not None},
        version=max(source.version for source in sources),
        steps=steps,
        rates=rates,
        unused=joined([(source.unused, source.steps) for source in sources], steps),
    )


def _in_one_rate(sources: list[_Source], multiplied: Multiplied) -> tuple[StepRates, list[_Source]]:
    """The rates to go on with, and the sources with their sums measured in these.

    Sums are measured in different rates where gradients were not equally stale in all shards; then the largest counts.
    """
    with_sum = [source.rates for source in sources if source.tensors[3] is not None]
    every = [*with_sum, *(source.rates for source in sources)]
    rates = next((rates for rates in every if rates.largest), StepRates())
    if not with_sum:
        return rates, sources
    largest = largest_of(with_sum)
    rates, _ = rates.measured_in(largest)
    measured = []
    for source in sources:
        *others, total = source.tensors
        if total is not None:
            factor = source.rates.measured_in(largest)[1] if source.rates.largest else 1.0
            total = multiplied(total, source.spans, factor)
        measured.append(source._replace(tensors=(*others, total)))
    return rates, measured


def _gathered(spans: Spans, parts: Sequence[tuple[Spans, Tensor | None]], dtype: torch.dtype) -> Tensor | None:
    """The elements of `spans` from `parts`, 0 where a part has no tensor; None where no part has one."""
    if all(tensor is None for _, tensor in parts):
        return None
    out = torch.zeros(numel_of(spans), dtype=dtype)
    for there, tensor in parts:
        if tensor is not None:
            _put_(out, spans, tensor, there)
    return out


def _tensors(weights: Weights) -> tuple[Tensor | None, ...]:
    return weights.present, *weights.moments, weights.total if weights.summed else None


def _taken(vector: Tensor, own: Spans, wanted: Spans) -> Tensor:
    cuts = [vector[at : at + end - begin] for begin, end, at, _ in _overlaps(own, wanted)]
    return cuts[0] if len(cuts) == 1 else torch.cat(cuts) if cuts else vector[:0]


def _put_(out: Tensor, spans: Spans, values: Tensor, there: Spans) -> None:
    for begin, end, at, place in _overlaps(spans, there):
        out[at : at + end - begin] = values[place : place + end - begin]


def _overlaps(one: Spans, other: Spans) -> Iterator[tuple[int, int, int, int]]:
    """The ranges in both, ascending: (begin, end, where in the first's own vector, where in the second's)."""
    at = 0
    for span in one:
        place = 0
        for foreign in other:
            begin, end = max(span.begin, foreign.begin), min(span.end, foreign.end)
            if begin < end:
                yield begin, end, at + begin - span.begin, place + begin - foreign.begin
            place += foreign.end - foreign.begin
        at += span.end - span.begin
