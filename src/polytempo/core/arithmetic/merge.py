"""`Merge`: a pure function of all ranks' tensors; and `add_`, their sums, with or without values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from polytempo.core.transform import Transform

Merge = Callable[[Sequence[Tensor]], Tensor]
"""All ranks' flat buffers, each (numel,), in the order of ranks, to one.

A merge that looks at more than one coordinate at a time says so: `merge.coordinate_wise = False`. A merge that
begins at its last answer says `merge.from_last = True`, and is called with that answer, too: `merge(buffers, last)`,
with zeros at first; `aggregation.merged` remembers it. A merge that needs several ranks says `merge.least_ranks = 5`:
a run with fewer is refused before it begins. One rank alone merges nothing.
"""


def begins_at_last(merge: Merge) -> bool:
    """True if the merge is called with its last answer."""
    return bool(getattr(merge, "from_last", False))


def least_ranks(merge: Merge | None) -> int:
    """The number of ranks that the merge needs."""
    return int(getattr(merge, "least_ranks", 1))


def check_merge(given: object) -> None:
    """Raise TypeError for a value that cannot be called: the name of a merge, or a transform such as `mean()`."""
    if not callable(given):
        what = "a transform" if isinstance(given, Transform) else repr(given)
        raise TypeError(
            f"a merge is a function of all ranks' buffers, such as pt.aggregation.vote or median, got {what}; leave "
            "out merge for the mean"
        )


def add_(total: Tensor, other: Tensor, alpha: float = 1.0) -> Tensor:
    """`total` += alpha · other. A tensor without values is left alone: torch would take 30 µs."""
    if total.is_meta:
        return total
    return total.add_(other) if alpha == 1 else total.add_(other, alpha=alpha)
