"""PowerSGD: of each matrix of the gradient, the product of two thin ones travels, and they can be summed."""

from __future__ import annotations

from polytempo.aggregation import low_rank
from polytempo.core import Route, Strategy, call_name, native


def power_sgd(rank: int = 2, route: Route = native, exact_below: int = 1024) -> Strategy:
    """The mean gradient by matrices of rank r = `rank`, one power iteration a step; the rest goes with the next.

    M = g/N + e; P = Σ M Q, made orthonormal; Q ← Σ Mᵀ P; M̂ = P Qᵀ; e ← M - M̂/N. See `aggregation.low_rank`.
    Vectors, tensors of fewer than `exact_below` elements and matrices that gain nothing travel as they are. With one
    worker nothing is left out.

    Cost: the route's for r (n + m) numbers instead of n · m, in two all-reduces: the gain does not shrink with N.
    6 r n m operations; memory for one more gradient, in float32 where that has 16 bits.

    Source: T. Vogels, S. P. Karimireddy and M. Jaggi, "PowerSGD: practical low-rank gradient compression for
    distributed optimization", 2019.
    """
    return Strategy(
        call_name(power_sgd, locals()),
        gradients=low_rank(rank, route, exact_below=exact_below),
    )
