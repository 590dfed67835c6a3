"""Sampling of long curves on the server: the least, the greatest and the mean value in each pixel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


class SampledCurve(NamedTuple):
    """A curve with at most one point a pixel, in the order of x."""

    x: Numbers
    mean: Numbers
    low: Numbers
    high: Numbers
    num_points: int
    """Points of the whole curve in the range."""

    def plain(self) -> dict[str, Any]:
        """The curve for JSON, with six digits; bounds only where a pixel has several points."""
        found: dict[str, Any] = {"x": _plain(self.x), "y": _plain(self.mean), "points": self.num_points}
        if self.num_points > len(self.x):
            found |= {"low": _plain(self.low), "high": _plain(self.high)}
        return found


def sampled(
    x: Sequence[float] | Numbers,
    y: Sequence[float] | Numbers,
    num_pixels: int,
    begin: float | None = None,
    end: float | None = None,
) -> SampledCurve:
    """The points with x from `begin` to `end` in `num_pixels` pixels of equal width.

    Points without a finite x or y are left out. A curve with at most one point a pixel keeps its own points. Cost:
    O(points), and the sorting of points that are out of order.
    """
    if num_pixels < 1:
        raise ValueError(f"num_pixels {num_pixels}: must be at least 1")
    xs, ys = np.asarray(x, np.float64), np.asarray(y, np.float64)
    kept = np.isfinite(xs) & np.isfinite(ys)
    if begin is not None:
        kept &= xs >= begin
    if end is not None:
        kept &= xs <= end
    if not kept.all():
        xs, ys = xs[kept], ys[kept]
    if np.any(xs[1:] < xs[:-1]):
        order = np.argsort(xs, kind="stable")
        xs, ys = xs[order], ys[order]
    if len(xs) <= num_pixels:
        return SampledCurve(xs, ys, ys, ys, len(xs))
    first, last = (xs[0] if begin is None else begin), (xs[-1] if end is None else end)
    width = (last - first) / num_pixels or 1.0
    starts = np.unique(np.searchsorted(xs, first + width * np.arange(num_pixels)))
    starts = starts[starts < len(xs)]
    counts = np.diff(starts, append=len(xs))
    with np.errstate(over="ignore"):
        mean = np.add.reduceat(ys, starts) / counts
        at = np.add.reduceat(xs, starts) / counts
    return SampledCurve(at, mean, np.minimum.reduceat(ys, starts), np.maximum.reduceat(ys, starts), len(xs))


def _plain(values: Numbers) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]
