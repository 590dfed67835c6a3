"""`PlaceSpan`: some places of an epoch's order, one behind the other. Lists say which places were used, and which are
left.

epoch 4     0 ┄┄┄┄ 30 ━━━━ 34 ┄┄┄┄ 38 ━━━━ 42 ┄┄┄┄ 96        [PlaceSpan(4, 30, 34), PlaceSpan(4, 38, 42)]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class PlaceSpan(NamedTuple):
    """The places `start` to `stop` (exclusive) of the order of `epoch`."""

    epoch: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of places."""
        return self.stop - self.start


def num_places(spans: Iterable[PlaceSpan]) -> int:
    """The number of places in all of them together."""
    return sum(span.size for span in spans)


def parted(spans: Sequence[PlaceSpan], count: int) -> tuple[list[PlaceSpan], list[PlaceSpan]]:
    """The first `count` places, in the order of `spans`, and the others.

    >>> parted([PlaceSpan(0, 2, 5), PlaceSpan(0, 7, 9)], 4)
    ([PlaceSpan(epoch=0, start=2, stop=5), PlaceSpan(epoch=0, start=7, stop=8)], [PlaceSpan(epoch=0, start=8, stop=9)])
    """
    first: list[PlaceSpan] = []
    others: list[PlaceSpan] = []
    for epoch, start, stop in spans:
        middle = min(stop, start + count)
        count -= middle - start
        first += [PlaceSpan(epoch, start, middle)] if middle > start else []
        others += [PlaceSpan(epoch, middle, stop)] if stop > middle else []
    return first, others


def without(spans: Iterable[PlaceSpan], used: Iterable[PlaceSpan]) -> list[PlaceSpan]:
    """The places of `spans` that are not in `used`, in the order of epochs and places. ValueError where a place is in
    `used` twice, or is in none of `spans`.

    >>> without([PlaceSpan(0, 0, 9)], [PlaceSpan(0, 6, 7), PlaceSpan(0, 2, 4)])
    [PlaceSpan(epoch=0, start=0, stop=2), PlaceSpan(epoch=0, start=4, stop=6), PlaceSpan(epoch=0, start=7, stop=9)]
    """
    left: list[PlaceSpan] = []
    taken = sorted(used)
    for epoch, start, stop in joined(spans):
        while taken and taken[0][:2] < (epoch, stop):
            span = taken.pop(0)
            if span.epoch != epoch or not start <= span.start <= span.stop <= stop:
                raise ValueError(f"{span} was used twice, or was not there to be used")
            left += [PlaceSpan(epoch, start, span.start)] if span.start > start else []
            start = span.stop
        left += [PlaceSpan(epoch, start, stop)] if stop > start else []
    if taken:
        raise ValueError(f"{taken[0]} was used twice, or was not there to be used")
    return left


def joined(spans: Iterable[PlaceSpan]) -> list[PlaceSpan]:
    """The same places in order, neighbours as one span.

    >>> joined([PlaceSpan(1, 4, 6), PlaceSpan(0, 1, 2), PlaceSpan(1, 0, 4)])
    [PlaceSpan(epoch=0, start=1, stop=2), PlaceSpan(epoch=1, start=0, stop=6)]
    """
    out: list[PlaceSpan] = []
    for span in sorted(spans):
        if out and out[-1].epoch == span.epoch and out[-1].stop == span.start:
            out[-1] = out[-1]._replace(stop=span.stop)
        elif span.size:
            out.append(span)
    return out


def between(begin: tuple[int, int], end: tuple[int, int], num_samples: int) -> list[PlaceSpan]:
    """The places from (epoch, place) to (epoch, place), of epochs of `num_samples`.

    >>> between((0, 8), (1, 2), num_samples=10)
    [PlaceSpan(epoch=0, start=8, stop=10), PlaceSpan(epoch=1, start=0, stop=2)]
    """
    spans = [
        PlaceSpan(epoch, begin[1] if epoch == begin[0] else 0, end[1] if epoch == end[0] else num_samples)
        for epoch in range(begin[0], end[0] + 1)
    ]
    return [span for span in spans if span.size > 0]


def checked_place(state: Mapping[str, Any], own: Mapping[str, object]) -> tuple[int, int]:
    """The epoch and the samples of a saved position. ValueError where it is of other data than `own`, or damaged."""
    for key, mine in own.items():
        if state.get(key) != mine:
            raise ValueError(
                f"the saved position has {key}={state.get(key)}, this run has {key}={mine}; "
                "go on with the same data and seed, or begin again"
            )
    epoch, consumed = state["epoch"], state["consumed"]
    end = float("inf") if own["num_samples"] is None else own["num_samples"]
    if epoch is None or epoch < 0 or consumed is None or not 0 <= consumed <= end:
        raise ValueError(f"the saved position is epoch={epoch}, consumed={consumed} of {end} samples; it is damaged")
    return epoch, consumed
