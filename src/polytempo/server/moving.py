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
from polytempo.server.message import Lent
from polytempo.server.weights import Weights


class Likeness(msgspec.Struct, frozen=True, array_like=True):
    """What a shard that takes over elements of another must know of it, beside their tensors."""

    version: int
    steps: int
    """Of the optimizer."""
    lrs: tuple[float, ...]
    rule: Any
    members: dict[int, int]
    workers: tuple[int, ...]
    tickets: tuple[Range, ...]

    def encode(self) -> bytes:
        """As bytes."""
        return msgspec.msgpack.encode(self)


def likeness_of(lent: Lent) -> Likeness:
    """What came with a piece. Errors: ValueError where that is of something else."""
    try:
        return msgspec.msgpack.decode(lent.likeness, type=Likeness)
    except msgspec.MsgspecError as error:
        raise ValueError(f"shard {lent.shard} lends what is no shard's: {error}") from error


class Part(NamedTuple):
    """The tensors of some elements, each flat."""

    weights: Tensor
    first: Tensor | None
    second: Tensor | None
    total: Tensor | None


def common(one: Spans, other: Spans) -> Spans:
    """The elements that are in both."""
    return tuple(Span(begin, end) for begin, end, _, _ in _overlaps(one, other))


def covers(spans: Spans, wanted: Spans) -> bool:
    """Whether all of `wanted` are in `spans`."""
    return numel_of(common(spans, wanted)) == numel_of(wanted)


def part_of(weights: Weights, own: Spans, wanted: Spans) -> Part:
    """The elements `wanted`, as views where they are one range of the shard's own vector, which holds `own`."""
    total = weights.total if weights.summed else None
    return Part(*(_taken(t, own, wanted) for t in (weights.present, *weights.moments, total)))  # type: ignore[arg-type]


def moved(
    old: Weights, own: Spans, spans: Spans, pieces: Sequence[Lent], make: Callable[[Tensor], Weights]
) -> Weights:
    """The weights of a shard that held `own` and holds `spans` now, the new ones from `pieces`.

    Version and steps are the highest of all that come together. A sum that only some parts have is 0 in the others.
    Errors: ValueError where an element of `spans` comes from nowhere.
    """
    sources = [(own, part_of(old, own, own)), *((p.spans, Part(p.weights, p.first, p.second, p.total)) for p in pieces)]
    found = sum(numel_of(common(spans, there)) for there, _ in sources)
    if found != numel_of(spans):
        raise ValueError(f"a shard is to hold {numel_of(spans)} elements, and {found} are here")
    values = torch.empty(numel_of(spans), dtype=old.dtype)
    for there, tensors in sources:
        _put_(values, spans, tensors.weights, there)
    new = make(values)
    if any(tensors.total is not None for _, tensors in sources):
        new.total, new.summed = torch.zeros_like(new.present), True
    for there, tensors in sources:
        for target, source in zip((*new.moments, new.total), tensors[1:], strict=True):
            if target is not None and source is not None:
                _put_(target, spans, source, there)
    likenesses = [likeness_of(piece) for piece in pieces]
    new.version = max([old.version, *(likeness.version for likeness in likenesses)])
    new.steps = max([old.steps, *(likeness.steps for likeness in likenesses)])
    new.lrs = old.lrs or next((likeness.lrs for likeness in likenesses), ())
    return new


def _taken(vector: Tensor | None, own: Spans, wanted: Spans) -> Tensor | None:
    if vector is None:
        return None
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
