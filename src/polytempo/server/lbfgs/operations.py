"""L-BFGS as operations on named vectors. This module sees numbers alone, not vectors.

x + t d ──▶ loss, gradient        t: weak Wolfe conditions, by bisection
d = - H g                         two-loop recursion over the last steps s and changes of the gradient y
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator
from typing import NamedTuple

X, G, D, NEXT_X, NEXT_G = "x", "g", "d", "next x", "next g"
_SUFFICIENT, _CURVATURE = 1e-4, 0.9


class VectorOperation(NamedTuple):
    """An operation on named vectors, on each shard's part: `dot` a · b, `scale` out = factor a, `add` out = a +
    factor b."""

    kind: str
    out: str
    a: str
    b: str = ""
    factor: float = 1.0


class LossAt(NamedTuple):
    """The loss at the vector `at`, and its gradient into the vector `into`."""

    at: str
    into: str


class Iteration(NamedTuple):
    """An iteration that is over."""

    number: int
    loss: float
    gradient_norm: float
    rate: float
    """The step's length along the direction, t."""
    evaluations: int
    """The number of evaluations of loss and gradient so far."""


class _Pair(NamedTuple):
    """A step s, the change y of the gradient in it (a number names both vectors), and 1 / (s · y)."""

    slot: int
    inverse: float

    @property
    def s(self) -> str:
        """The name of the step."""
        return f"s{self.slot}"

    @property
    def y(self) -> str:
        """The name of the change."""
        return f"y{self.slot}"


Asked = VectorOperation | LossAt
Asking = Generator["Asked | Iteration", float]
"""Asks for operations and evaluations, and is sent numbers: a dot product, a loss; 0.0 for all else."""


def lbfgs(iterations: int, history: int, tolerance: float, searches: int) -> Asking:
    """Minimise from the vector x on, for so many iterations, or until ‖g‖ ≤ tolerance.

    history: the number m of kept pairs (s, y). searches: the most evaluations for one iteration; if the last point is
    not lower, the iteration is discarded and the run is over. x ends at the lowest point of any iteration. Errors:
    ValueError for a first loss that is not finite.
    Source: J. Nocedal and S. J. Wright, "Numerical optimization", 2006, algorithms 7.4 and 7.5; for a parameter server,
    J. Dean et al., "Large scale distributed deep networks", 2012, section 4.2.
    """
    pairs: deque[_Pair] = deque(maxlen=history)
    loss = yield LossAt(X, G)
    if not math.isfinite(loss):
        raise ValueError(f"the loss is {loss} before the first step; L-BFGS begins where it is finite")
    evaluations, norm = 1, math.sqrt((yield VectorOperation("dot", "", G, G)))
    for number in range(1, iterations + 1):
        if norm <= tolerance:
            return
        yield from _direction(pairs)
        slope = yield VectorOperation("dot", "", G, D)
        rate = 1.0 if pairs else min(1.0, 1 / norm)
        found = yield from _searched(loss, slope, rate, searches)
        evaluations += found.evaluations
        if not found.lower:
            return
        yield from _remember(pairs, history, found.rate)
        yield VectorOperation("scale", X, NEXT_X)
        yield VectorOperation("scale", G, NEXT_G)
        loss, norm = found.loss, math.sqrt((yield VectorOperation("dot", "", G, G)))
        yield Iteration(number, loss, norm, found.rate, evaluations)


def _direction(pairs: deque[_Pair]) -> Asking:
    """d = - H g."""
    yield VectorOperation("scale", D, G, factor=-1.0)
    weights = []
    for pair in reversed(pairs):
        weights.append(pair.inverse * (yield VectorOperation("dot", "", pair.s, D)))
        yield VectorOperation("add", D, D, pair.y, -weights[-1])
    if pairs:
        newest = pairs[-1]
        length = yield VectorOperation("dot", "", newest.y, newest.y)
        yield VectorOperation("scale", D, D, factor=1 / (newest.inverse * length))
    for pair, weight in zip(pairs, reversed(weights), strict=True):
        other = pair.inverse * (yield VectorOperation("dot", "", pair.y, D))
        yield VectorOperation("add", D, D, pair.s, weight - other)


class _Found(NamedTuple):
    """The end of a line search."""

    rate: float
    loss: float
    evaluations: int
    lower: bool


def _searched(loss: float, slope: float, rate: float, searches: int) -> Generator[Asked, float, _Found]:
    """Leaves a point x + t d, and its gradient, that has the weak Wolfe conditions where one is found in time.

    f(x + t d) ≤ f(x) + 10⁻⁴ t g·d          ∇f(x + t d)·d ≥ 0.9 g·d
    """
    low, high, found = 0.0, math.inf, loss
    for tried in range(1, searches + 1):
        yield VectorOperation("add", NEXT_X, X, D, rate)
        found = yield LossAt(NEXT_X, NEXT_G)
        if not found <= loss + _SUFFICIENT * rate * slope:  # a loss of NaN is not a descent
            high = rate
        elif (yield VectorOperation("dot", "", NEXT_G, D)) < _CURVATURE * slope:
            low = rate
        else:
            return _Found(rate, found, tried, lower=True)
        if tried < searches:
            rate = 2 * low if high == math.inf else (low + high) / 2
    return _Found(rate, found, searches, lower=found <= loss + _SUFFICIENT * rate * slope)


def _remember(pairs: deque[_Pair], history: int, rate: float) -> Asking:
    """Keep s = t d and y = ∇f(x + t d) - g, unless the loss bends downwards between them."""
    slot = (pairs[-1].slot + 1) % (history + 1) if pairs else 0  # one more than are kept, so it is free
    pair = _Pair(slot, 0.0)
    yield VectorOperation("scale", pair.s, D, factor=rate)
    yield VectorOperation("add", pair.y, NEXT_G, G, -1.0)
    product = yield VectorOperation("dot", "", pair.s, pair.y)
    if product > 0:
        pairs.append(_Pair(slot, 1 / product))
