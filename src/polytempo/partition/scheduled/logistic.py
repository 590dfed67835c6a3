"""Logistic regression with an L1 penalty, by scheduled coordinate descent."""

from __future__ import annotations

import torch
from torch import Tensor

from polytempo.core.calls.call_name import call_name
from polytempo.partition.scheduled.coordinate_descent import DescentJob
from polytempo.partition.scheduled.scheduler import SetRule


def logistic(
    l1: float = 0.001,
    at_once: int = 32,
    bound: float | None = 0.1,
    order: str = "priority",
    cut: str = "rows",
    seed: int = 0,
) -> DescentJob:
    """Minimise (1/n) Σᵢ log(1 + exp(-yᵢ xᵢ·β)) + λ ‖β‖₁, λ = `l1`, yᵢ = ±1, by coordinates that hardly interfere.

        pt.schedule(pt.partition.scheduled.logistic(l1=0.001), (x, y), workers=2)

    `lasso` with another loss: push is xⱼᵀ(y σ(-y Xβ)), and pull divides by ‖xⱼ‖²/4, for the loss bends at most by a
    quarter. So a step is safe without a search, and shorter than Newton's where predictions are certain. Arguments,
    cost and deviations are those of `lasso`; there is no intercept. Errors: ValueError for labels other than ±1.

    Source: STRADS (see `program.py`); J. K. Bradley, A. Kyrola, D. Bickson and C. Guestrin, "Parallel coordinate
    descent for L1-regularized loss minimization", 2011.
    """
    name = call_name(logistic, locals())
    rule = SetRule(order, at_once, bound).checked()
    return DescentJob(name, LogisticLoss(), l1, rule, cut, seed, _check_labels)


def _check_labels(y: Tensor) -> None:
    if not (y.abs() == 1).all():
        raise ValueError(f"logistic learns from labels -1 and 1, got {sorted(set(y.tolist()))[:4]}")


class LogisticLoss:
    """ℓ(u, y) = log(1 + exp(-y u)). See `Loss`."""

    curvature = 0.25

    def descent(self, scores: Tensor, targets: Tensor) -> Tensor:
        """y σ(-y u)."""
        return targets * torch.sigmoid(-targets * scores)

    def value(self, scores: Tensor, targets: Tensor) -> Tensor:
        """log(1 + exp(-y u))."""
        return torch.logaddexp(torch.zeros_like(scores), -targets * scores)

    def dual(self, slopes: Tensor, targets: Tensor) -> Tensor:
        """The entropy of |θ|: -|θ| log |θ| - (1 - |θ|) log(1 - |θ|)."""
        chances = slopes.abs()
        return -torch.xlogy(chances, chances) - torch.xlogy(1 - chances, 1 - chances)
