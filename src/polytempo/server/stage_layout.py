"""Where the parameters of each stage of a cut model lie in the flat vector of all parameters, and in its shards.

whole model's vector    [ a a a | b b | c c c c | d ]        stage 0 has a and c, stage 1 b and d
a stage's own vector    [ a a a | c c c c ]                  which its workers push and pull
a shard of stage 0      └ 0…2 ┘   └ 5…8 ┘                    ranges in the whole vector; 0…6 in the stage's own
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from polytempo.server.layout import Parameter, Span, Spans, shard_map


class StageSpans(NamedTuple):
    """The ranges of one shard of a stage, in the same order."""

    whole: Spans
    """In the vector of all parameters, ascending."""
    own: Spans
    """In the stage's own vector."""


def stage_spans(parameters: Sequence[Parameter], own: Sequence[Parameter], num_shards: int) -> tuple[StageSpans, ...]:
    """A stage that has the parameters `own`, of all `parameters`, in `num_shards` shards of nearly equal size.

    Each shard has its elements in the order of all parameters, whatever the stage's own order is. A stage that has all
    of them is cut as `shard_map` cuts. Errors: as of `shard_map`.
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
