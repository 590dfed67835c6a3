"""Where to cut a chain of n units into K stages: exact, by dynamic programming over the ends of stages.

A stage is a segment [a, b) of units. Matrices of shape (n + 1, n + 1) have at [a, b] what the segment costs.

    minimize the largest:   best[k, b] = min over a of max(best[k − 1, a], cost[a, b])
    minimize the sum:       best[k, b] = min over a of best[k − 1, a] + cost[a, b]

Cost: O(K n²) time, O(n²) memory. Other graphs than chains are taken in the order in which the model computes them:
the cut is the best of those whose stages are contiguous in that order, and not always the best of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

_ALMOST = 1 + 1e-9
"""Two sums of the same costs differ by rounding."""


def slowest_least(worst: Tensor, total: Tensor, allowed: Tensor, stages: int) -> tuple[int, ...] | None:
    """Ends that minimize the largest `worst` of a segment, and among those the sum of `total`.

    The matrices have the shape (n + 1, n + 1); `allowed` says which segments may be stages. The answer has K + 1 ends,
    0 and n among them; None where no cut into so many allowed segments exists.
    """
    least = total_least(torch.zeros_like(total), worst, allowed, stages)
    if least is None:
        return None
    bound = max(float(worst[a, b]) for a, b in pairwise(least))
    return total_least(total, worst, allowed & (worst <= bound), stages)


def total_least(total: Tensor, worst: Tensor, allowed: Tensor, stages: int) -> tuple[int, ...] | None:
    """Ends that minimize the sum of `total`, and among those the largest `worst`. Arguments as `slowest_least`.

    Of several that are equal in both, the one whose last stages begin first.
    """
    units = len(total) - 1
    nowhere = torch.full((units + 1,), torch.inf, dtype=torch.float64)
    sums, largest = nowhere.clone(), torch.zeros(units + 1, dtype=torch.float64)
    sums[0] = 0.0
    behind = torch.ones(units + 1, units + 1, dtype=torch.bool).triu(1) & allowed
    begins = []
    for _ in range(stages):
        to = torch.where(behind, sums[:, None] + total, torch.inf)
        least = to.amin(0)
        most = torch.where(to <= least * _ALMOST, torch.maximum(largest[:, None], worst), torch.inf)
        begin = torch.where(least.isfinite(), most, torch.inf).argmin(0)
        sums, largest = least, most.gather(0, begin[None])[0]
        begins.append(begin)
    if not sums[units].isfinite():
        return None
    ends = [units]
    for begin in reversed(begins):
        ends.append(int(begin[ends[-1]]))
    return tuple(reversed(ends))


def prefix(loads: Sequence[float]) -> Tensor:
    """The sum of a segment's loads, shape (n + 1, n + 1)."""
    ends = torch.cat([torch.zeros(1, dtype=torch.float64), torch.tensor(loads, dtype=torch.float64).cumsum(0)])
    return ends[None, :] - ends[:, None]


class SegmentBytes:
    """Bytes that a segment has once, however many of its units use them: sums over such tensors.

    A tensor counts for [a, b) if one of the units that use it is in [a, b). Per use one rectangle of the matrix is
    raised; the sum of all rectangles is taken at the end. Cost: O(uses + n²).
    """

    def __init__(self, units: int) -> None:
        self._corners = torch.zeros(units + 2, units + 2, dtype=torch.float64)

    def add(self, num_bytes: int, uses: Iterable[int], *, after: int = -1, until: int | None = None) -> None:
        """Count the tensor in segments that have a use, and that begin behind the unit `after` (and up to `until`)."""
        last = len(self._corners) - 2 if until is None else until
        begin = after + 1
        for use in sorted(set(uses)):
            end = min(use, last)
            if begin <= end:  # a in [begin, end], b in [use + 1, n]
                self._corners[begin, use + 1] += num_bytes
                self._corners[end + 1, use + 1] -= num_bytes
                begin = end + 1

    def matrix(self) -> Tensor:
        """Bytes of every segment, shape (n + 1, n + 1)."""
        return self._corners.cumsum(0).cumsum(1)[:-1, :-1]
