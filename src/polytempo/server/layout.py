"""The parts of the parameters in each shard.

flat    [ w1 w1 w1 w1 w1 w1 | b1 | w2 w2 w2 | b2 ]         all parameters, in the model's order
spans     └── shard 0 ──┘└──── shard 1 ──────────┘        each shard has one or several ranges of it

Shards are cut from the flat vector by size, not parameter by parameter: a push of the whole gradient is then a view of
it for each shard, and one large parameter cannot make one shard the slowest. A shard keeps its number when others are
added or drained, and as few elements as possible move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.native.kernels.update import copy_

SNAP = 0.025
"""A cut moves to the nearest parameter's beginning if that is within this part of a shard's size."""


class Parameter(NamedTuple):
    """One parameter of the model. `row_width` > 0: its gradient comes as rows of so many elements (an embedding)."""

    name: str
    numel: int
    group: int = 0
    """The optimizer's parameter group."""
    row_width: int = 0
    shape: tuple[int, ...] = ()
    """The shape that codecs see; (): a vector."""


class Span(NamedTuple):
    """The elements `begin … end-1` of the flat vector of all parameters."""

    begin: int
    end: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.end - self.begin


Spans = tuple[Span, ...]
"""The ranges of one shard, ascending. Its own flat vector is these ranges one after the other."""


def numel_of(spans: Spans) -> int:
    """The number of elements in a shard."""
    return sum(span.end - span.begin for span in spans)


# ------------------------------------------------------------------------------------------------------------- maps


def shard_map(parameters: Sequence[Parameter], num_shards: int) -> tuple[Spans, ...]:
    """The flat vector in `num_shards` contiguous ranges of nearly equal size, in order.

    Each cut is where equal sizes would have it, or at the nearest beginning of a parameter within 2.5 % of a shard's
    size, or else, inside of a table, at the nearest row. So every shard's size is within 5 % of the mean, or within
    one row of its table. Errors: ValueError where a shard would get nothing.
    """
    total = sum(parameter.numel for parameter in parameters)
    if num_shards < 1:
        raise ValueError(f"needs at least one shard, got {num_shards}")
    snap = _Snap(parameters, total / num_shards)
    cuts = [0, *(snap(total * i // num_shards) for i in range(1, num_shards)), total]
    if any(begin >= end for begin, end in pairwise(cuts)):
        raise ValueError(f"{total} elements (whole rows of tables) are too few for {num_shards} shards; use fewer")
    return tuple((Span(begin, end),) for begin, end in pairwise(cuts))


def with_shard_added(parameters: Sequence[Parameter], shards: tuple[Spans, ...]) -> tuple[Spans, ...]:
    """The ranges with one shard more: it gets the elements above the new mean from the ends of the others.

    Shards that hold nothing (drained) stay so.
    """
    holders = sum(1 for spans in shards if spans)
    size = sum(map(numel_of, shards)) / (holders + 1)
    snap = _Snap(parameters, size)
    kept: list[Spans] = []
    given: list[Span] = []
    for spans in shards:
        head, tail = _split(spans, round(size), snap) if spans else ((), ())
        kept.append(head)
        given += tail
    if not given:
        raise ValueError(f"{holders} shards hold too little to fill one more")
    return (*kept, _merged(given))


def with_shard_drained(parameters: Sequence[Parameter], shards: tuple[Spans, ...], shard: int) -> tuple[Spans, ...]:
    """The ranges without shard `shard`: its elements go to the others, so that sizes are equal."""
    others = [i for i, spans in enumerate(shards) if spans and i != shard]
    if not others:
        raise ValueError(f"shard {shard} is the last one with parameters, so no other can take them over")
    snap = _Snap(parameters, sum(map(numel_of, shards)) / len(others))
    drained, rest = list(shards), shards[shard]
    drained[shard] = ()
    lacking = sum(map(numel_of, shards)) / len(others)
    for i in others[:-1]:
        taken, rest = _split(rest, max(0, round(lacking - numel_of(shards[i]))), snap)
        drained[i] = _merged([*shards[i], *taken])
    drained[others[-1]] = _merged([*shards[others[-1]], *rest])
    return tuple(drained)


class _Snap:
    """The allowed cuts near a position of the flat vector."""

    def __init__(self, parameters: Sequence[Parameter], shard_size: float) -> None:
        self.starts = list(accumulate((p.numel for p in parameters), initial=0))
        self.parameters, self.slack = parameters, SNAP * shard_size

    def __call__(self, position: int) -> int:
        nearest = min(self.starts, key=lambda start: abs(start - position))
        if abs(nearest - position) <= self.slack:
            return nearest
        index, offset = _place(self.parameters, position)
        width = self.parameters[index].row_width or 1
        return position - offset + (offset + width // 2) // width * width


def _split(spans: Spans, size: int, snap: _Snap) -> tuple[Spans, Spans]:
    """The first `size` elements of `spans`, nearly, and the others."""
    head: list[Span] = []
    for i, (begin, end) in enumerate(spans):
        if size < end - begin:
            cut = min(max(snap(begin + size), begin), end)
            return _merged([*head, Span(begin, cut)]), _merged([Span(cut, end), *spans[i + 1 :]])
        head.append(Span(begin, end))
        size -= end - begin
    return spans, ()


def _merged(spans: Sequence[Span]) -> Spans:
    """Ascending, without empty ranges, and neighbours as one."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and merged[-1].end == begin:
            merged[-1] = Span(merged[-1].begin, end)
        elif begin < end:
            merged.append(Span(begin, end))
    return tuple(merged)


# ----------------------------------------------------------------------------------------------------------- places


def _place(parameters: Sequence[Parameter], flat_index: int) -> tuple[int, int]:
    """The parameter and its element at a position."""
    for index, parameter in enumerate(parameters):
        if flat_index < parameter.numel:
            return index, flat_index
        flat_index -= parameter.numel
    raise ValueError(f"the flat vector ends {flat_index + 1} elements before")


def describe(parameters: Sequence[Parameter], flat_index: int) -> str:
    """The element by the name of its parameter: `conv1.weight[12]`."""
    index, offset = _place(parameters, flat_index)
    return f"{parameters[index].name}[{offset}]"


def flat_index(spans: Spans, index: int) -> int:
    """The place in the flat vector of element `index` of a shard's own vector."""
    for begin, end in spans:
        if index < end - begin:
            return begin + index
        index -= end - begin
    raise ValueError(f"the shard's vector ends {index + 1} elements before")


class ParameterPart(NamedTuple):
    """The elements `begin … end-1` of a shard's own vector, all of one parameter."""

    parameter: Parameter
    begin: int
    end: int


def parameter_parts(parameters: Sequence[Parameter], spans: Spans) -> Iterator[ParameterPart]:
    """A shard's own vector, parameter by parameter."""
    starts = list(accumulate((parameter.numel for parameter in parameters), initial=0))
    at = 0
    for span in spans:
        for parameter, start in zip(parameters, starts, strict=False):
            length = min(span.end, start + parameter.numel) - max(span.begin, start)
            if length > 0:
                yield ParameterPart(parameter, at, at + length)
                at += length


class StageSpans(NamedTuple):
    """The ranges of one shard of a stage, in the same order."""

    whole: Spans
    """Ranges of the vector of all parameters, ascending."""
    own: Spans
    """Ranges of the stage's own vector."""


def stage_spans(parameters: Sequence[Parameter], own: Sequence[Parameter], num_shards: int) -> tuple[StageSpans, ...]:
    """A stage that has the parameters `own`, of all `parameters`, in `num_shards` shards of nearly equal size.

    Each shard has its elements in the order of all parameters, not in the stage's own order. A stage that has all of
    them is cut as `shard_map` cuts. Errors: as of `shard_map`.
    """
    wholes = dict(zip((each.name for each in parameters), _starts(parameters), strict=True))
    owns = dict(zip((each.name for each in own), _starts(own), strict=True))
    ordered = sorted(own, key=lambda each: wholes[each.name])
    starts = _starts(ordered)
    found = []
    for [(begin, end)] in shard_map(ordered, num_shards):
        whole, mine = list[Span](), list[Span]()
        for parameter, start in zip(ordered, starts, strict=True):
            first, last = max(begin, start), min(end, start + parameter.numel)
            if first < last:
                _extend(whole, wholes[parameter.name] + first - start, last - first)
                _extend(mine, owns[parameter.name] + first - start, last - first)
        found.append(StageSpans(tuple(whole), tuple(mine)))
    return tuple(found)


def _starts(parameters: Sequence[Parameter]) -> list[int]:
    return list(accumulate((each.numel for each in parameters), initial=0))[:-1]


def _extend(spans: list[Span], begin: int, numel: int) -> None:
    """Append a range, or let the last one go on."""
    if spans and spans[-1].end == begin:
        spans[-1] = Span(spans[-1].begin, begin + numel)
    else:
        spans.append(Span(begin, begin + numel))


# ---------------------------------------------------------------------------------------------------------- tensors


def part(flat: Tensor, spans: Spans) -> Tensor:
    """A shard's part of the flat vector: a view of it where the shard has one range, else a new tensor."""
    if spans == ((0, flat.numel()),):
        return flat
    if len(spans) == 1:
        return flat[spans[0].begin : spans[0].end]
    return torch.cat([flat[begin:end] for begin, end in spans]) if spans else flat[:0]


def place_(flat: Tensor, spans: Spans, values: Tensor) -> None:
    """Put a shard's own vector where it belongs in the flat one."""
    if flat.is_meta:  # no values
        return
    at = 0
    for begin, end in spans:
        copy_(flat[begin:end], values[at : at + end - begin])
        at += end - begin


Empty = Callable[[int, torch.dtype], Tensor]
"""`(numel, dtype) -> tensor`: new memory, perhaps of an arena. Memory is never returned."""


def plain_empty(numel: int, dtype: torch.dtype) -> Tensor:
    """Memory of this process alone."""
    return torch.empty(numel, dtype=dtype)


@lru_cache(maxsize=64)
def without_values(numel: int, dtype: torch.dtype) -> Tensor:
    """No memory: a shape alone, the same one for all who ask."""
    return torch.empty(numel, dtype=dtype, device="meta")
