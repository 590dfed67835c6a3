"""Lasso: least squares with an L1 penalty, by scheduled coordinate descent."""

from __future__ import annotations

from torch import Tensor

from polytempo.core.calls.call_name import call_name
from polytempo.partition.scheduled.coordinate_descent import DescentJob
from polytempo.partition.scheduled.scheduler import SetRule


def lasso(
    l1: float = 0.01,
    at_once: int = 32,
    bound: float | None = 0.1,
    order: str = "priority",
    cut: str = "rows",
    seed: int = 0,
) -> DescentJob:
    """Minimise (1/2n) ‖y - Xβ‖² + λ ‖β‖₁, λ = `l1`, updating `at_once` coordinates together that hardly interfere.

        pt.schedule(pt.partition.scheduled.lasso(l1=0.02), (x, y), workers=2)

    schedule: coordinates are drawn by how much what they correlate with has moved (`order`), and kept while
    |corr(xⱼ, xₖ)| < `bound` for all pairs.
    push: xⱼᵀ(y - Xβ) over a worker's samples (`cut="rows"`) or for its columns (`cut="columns"`). pull:
    βⱼ ← S(βⱼ + xⱼᵀ(y - Xβ)/‖xⱼ‖², nλ/‖xⱼ‖²). The error is the duality gap, as a part of the objective at β = 0.

    There is no intercept: centre x and y, or add a column of ones, which is penalised like the others.
    Cost of a round: 4 n · `at_once` operations, shared by the workers; by rows each sends `at_once` numbers to each
    other one, by columns n more. The first time that a column is drawn, its products with all others are computed.
    Deviations from the paper: its weights are `order="last_change"`, plus 1e-4, which means something else in other
    units of y (`scheduler.Scheduler`); columns need not have unit norm (|Δβⱼ| counts times ‖xⱼ‖/√n); a set's
    correlations also have sums below 1 (`scheduler.compatible`); sets are drawn when they are needed, not ahead.
    From 5,793 columns on correlations are not kept, and `priority` is `last_change`.
    `order="random", bound=None` is Shotgun, which diverges where columns are correlated (`NotFinite`).

    Source: STRADS (see `program.py`); J. Friedman, T. Hastie, H. Höfling and R. Tibshirani, "Pathwise coordinate
    optimization", 2007; J. K. Bradley, A. Kyrola, D. Bickson and C. Guestrin, "Parallel coordinate descent for
    L1-regularized loss minimization", 2011.
    """
    name = call_name(lasso, locals())
    rule = SetRule(order, at_once, bound).checked()
    return DescentJob(name, LeastSquares(), l1, rule, cut, seed)


class LeastSquares:
    """ℓ(u, y) = ½ (y - u)². See `Loss`."""

    curvature = 1.0

    def descent(self, scores: Tensor, targets: Tensor) -> Tensor:
        """The residual y - u."""
        return targets - scores

    def value(self, scores: Tensor, targets: Tensor) -> Tensor:
        """½ (y - u)²."""
        return 0.5 * (targets - scores).square()

    def dual(self, slopes: Tensor, targets: Tensor) -> Tensor:
        """y θ - ½ θ²."""
        return slopes * (targets - 0.5 * slopes)
