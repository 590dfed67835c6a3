"""How elements of a shard move to another one, with all that the optimizer remembers of them, bit by bit.

shard 0   [ a a a a │ b b ]  ── Lend(b) ─▶ Lent: weights, moments, sum of b ─┐
shard 2   [ ]                ◀─ Reshape(b, pieces) ──────────────────────────┘
shard 0   [ a a a a ]        ◀─ Reshape(a): only now does it let go of b
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from polytempo.core.ranges import Range
from polytempo.server.layout import Span, Spans, numel_of
from polytempo.server.message import Lend, Lent
from polytempo.server.shard.weights import Weights
from polytempo.server.step_rates import Factor, StepRates, largest_of


class Likeness(msgspec.Struct, frozen=True, array_like=True):
    """What a new shard has in common with one whose elements it takes over."""

    rule: Any
    members: dict[int, int]
    workers: tuple[int, ...]
    tickets: tuple[Range, ...]
    let_go: tuple[Range, ...]

    def encode(self) -> bytes:
        """As bytes."""
        return msgspec.msgpack.encode(self)


def likeness_of(lent: Lent) -> Likeness:
    """What came with a piece. Errors: ValueError where that is of something else."""
    try:
        return msgspec.msgpack.decode(lent.likeness, type=Likeness)
    except msgspec.MsgspecError as error:
        raise ValueError(f"shard {lent.shard} lends what is no shard's: {error}") from error


def common(one: Spans, other: Spans) -> Spans:
    """The elements that are in both."""
    return tuple(Span(begin, end) for begin, end, _, _ in _overlaps(one, other))


def covers(spans: Spans, wanted: Spans) -> bool:
    """Whether all of `wanted` are in `spans`."""
    return numel_of(common(spans, wanted)) == numel_of(wanted)


def lent(request: Lend, shard: int, weights: Weights, own: Spans, likeness: Likeness, running: Tensor | None) -> Lent:
    """What is asked for of `weights`, a shard's own vector that holds `own`: views where it is one range of that."""
    present, first, second, total = (
        None if tensor is None else _taken(tensor, own, request.spans) for tensor in _tensors(weights)
    )
    assert present is not None, "every shard has weights"
    return Lent(
        *(shard, request.worker, request.incarnation, request.sequence, request.spans, likeness.encode()),
        version=weights.version,
        steps=weights.steps,
        rates=weights.rates,
        weights=present,
        first=first,
        second=second,
        total=total,
        aside={batch: _taken(parts, own, request.spans) for batch, parts in weights.aside.items()},
        running=running,
    )


class Rest(NamedTuple):
    """All that belongs to moved weights beside their values."""

    first: Tensor | None
    second: Tensor | None
    total: Tensor | None
    aside: dict[int, Tensor]
    version: int
    steps: int
    rates: StepRates

    def put_(self, weights: Weights) -> None:
        """Into new weights."""
        for target, moment in zip(weights.moments, self[:2], strict=True):
            if target is not None and moment is not None:
                target.copy_(moment)
        if self.total is not None:
            weights.total, weights.summed = self.total, True
        weights.aside = self.aside
        weights.version, weights.steps, weights.rates = self.version, self.steps, self.rates


Multiplied = Callable[[Tensor, Spans, Factor], Tensor]
"""A vector of the elements of some spans, times a factor."""


def moved(
    old: Weights, own: Spans, spans: Spans, pieces: Sequence[Lent], multiplied: Multiplied
) -> tuple[Tensor, Rest]:
    """The weights of a shard that held `own` and holds `spans` now, the new ones from `pieces`.

    Version and steps are the highest of all that come together. A sum that only some parts have is 0 in the others.
    Where sums are measured in different rates, as gradients were not equally stale in all shards, all are measured in
    the largest. The shard goes on with its own rule, so with its own rates; a new one with those of the first piece.
    Errors: ValueError where an element of `spans` comes from nowhere.
    """
    sources = [(own, _tensors(old)), *((p.spans, (p.weights, p.first, p.second, p.total)) for p in pieces)]
    each = [old.rates, *(piece.rates for piece in pieces)]
    sums = [rates for rates, (_, tensors) in zip(each, sources, strict=True) if tensors[3] is not None]
    rates = next((rates for rates in (*sums, *each) if rates.largest), StepRates())
    if sums:
        rates, _ = rates.measured_in(largest := largest_of(sums))
        factors = [one.measured_in(largest)[1] if one.largest else 1.0 for one in each]
        sources = [
            (there, (*kept, None if total is None else multiplied(total, there, factor)))
            for (there, (*kept, total)), factor in zip(sources, factors, strict=True)
        ]
    found = sum(numel_of(common(spans, there)) for there, _ in sources)
    if found != numel_of(spans):
        raise ValueError(f"a shard is to hold {numel_of(spans)} elements, and {found} are here")

    def gathered(parts: Sequence[tuple[Spans, Tensor | None]]) -> Tensor | None:
        if all(tensor is None for _, tensor in parts):
            return None
        out = torch.zeros(numel_of(spans), dtype=old.dtype)
        for there, tensor in parts:
            if tensor is not None:
                _put_(out, spans, tensor, there)
        return out

    values, first, second, total = (gathered([(there, ts[kind]) for there, ts in sources]) for kind in range(4))
    apart = [(own, old.aside), *((p.spans, p.aside) for p in pieces)]
    batches = sorted({batch for _, aside in apart for batch in aside})
    asides = {batch: gathered([(there, aside.get(batch)) for there, aside in apart]) for batch in batches}
    assert values is not None, "every shard has weights"
    version, steps = max([old.version, *(p.version for p in pieces)]), max([old.steps, *(p.steps for p in pieces)])
    aside = {batch: parts for batch, parts in asides.items() if parts is not None}
    return values, Rest(first, second, total, aside, version, steps, rates)


def _tensors(weights: Weights) -> tuple[Tensor | None, ...]:
    return weights.present, *weights.moments, weights.total if weights.summed else None


def _taken(vector: Tensor, own: Spans, wanted: Spans) -> Tensor:
    cuts = [vector[at : at + end - begin] for begin, end, at, _ in _overlaps(own, wanted)]
    return cuts[0] if len(cuts) == 1 else torch.cat(cuts) if cuts else vector[:0]


def _put_(out: Tensor, spans: Spans, values: Tensor, there: Spans) -> None:
    for begin, end, at, place in _overlaps(spans, there):
        out[at : at + end - begin] = values[place : place + end - begin]


def _overlaps(one: Spans, other: Spans) -> Iterator[tuple[int, int, int, int]]:
    """What both have, ascending: (begin, end, where in the first's own vector, where in the second's)."""
    at = 0
    for span in one:
        place = 0
        for foreign in other:
            begin, end = max(span.begin, foreign.begin), min(span.end, foreign.end)
            if begin < end:
                yield begin, end, at + begin - span.begin, place + begin - foreign.begin
            place += foreign.end - foreign.begin
        at += span.end - span.begin
