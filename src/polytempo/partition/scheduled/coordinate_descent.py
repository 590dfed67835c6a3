"""Coordinate descent for a loss of scores Xβ and an L1 penalty: Lasso and logistic regression.

minimise   F(β) = (1/n) Σᵢ ℓ(uᵢ, yᵢ) + λ ‖β‖₁,    u = Xβ

schedule   candidates by the moves of correlated ones, kept if they do not interfere
push       zⱼ = xⱼᵀ(-ℓ'(u))                               over worker p's samples, or for its columns
pull       βⱼ ← S(βⱼ + zⱼ/hⱼ, nλ/hⱼ),   hⱼ = L ‖xⱼ‖²       S(a, t) = sign(a) max(|a| - t, 0)
           u ← u + X_S Δβ
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from polytempo.core import Port
from polytempo.core.calls.call_name import call_name
from polytempo.partition.scheduled.design import Design, check_cut, cut_design
from polytempo.partition.scheduled.program import Measure, check_kinds
from polytempo.partition.scheduled.scheduler import Scheduler, SetRule


class Loss(Protocol):
    """ℓ(u, y) of a sample's score and target, elementwise."""

    @property
    def curvature(self) -> float:
        """L, the most that ℓ'' is."""

    def descent(self, scores: Tensor, targets: Tensor) -> Tensor:
        """-ℓ'(u)."""

    def value(self, scores: Tensor, targets: Tensor) -> Tensor:
        """ℓ(u)."""

    def dual(self, slopes: Tensor, targets: Tensor) -> Tensor:
        """-ℓ*(-θ): with slopes θ and |Xᵀθ| ≤ nλ, the mean of it is at most the least F."""


@dataclass(frozen=True)
class DescentJob:
    """A job of `lasso` or `logistic`; `name` is the call. See `ScheduledJob`."""

    name: str
    loss: Loss
    l1: float
    rule: SetRule
    cut: str
    seed: int
    check_targets: Callable[[Tensor], None] = lambda y: None
    """Raises ValueError for targets that the loss is not of."""

    def __post_init__(self) -> None:
        check_cut(self.cut)
        if not 0 <= self.l1 < float("inf"):
            raise ValueError(f"l1={self.l1:g}: the penalty must be finite and not negative")

    def __str__(self) -> str:
        return self.name

    def check(self, data: tuple[Any, ...]) -> None:
        """See `ScheduledJob`."""
        kind = self.name.partition("(")[0]
        if not all(each.isfinite().all() for each in _samples_of(data, kind)):
            raise ValueError(f"{kind}: the data hold NaN or an infinity; remove those rows")
        self.check_targets(data[1])

    async def begin(self, port: Port, data: tuple[Any, ...]) -> _CoordinateDescent:
        """`data`: x (n, p) and y (n,)."""
        x, y = _samples_of(data, self.name)
        design = cut_design(port, x, self.cut)
        return await _CoordinateDescent(port, design, y, self.loss, self.l1, self.rule, self.seed).begun()


class _CoordinateDescent:
    """One worker's state. See `ScheduledProgram`."""

    def __init__(
        self, port: Port, design: Design, targets: Tensor, loss: Loss, l1: float, rule: SetRule, seed: int
    ) -> None:
        self._port, self._design, self._loss, self._l1 = port, design, loss, l1
        self._targets, self._rule, self._seed = design.samples(targets.double()), rule, seed
        self._scores = torch.zeros_like(self._targets)
        self._num_samples, self._at_zero = len(targets), 1.0

    async def begun(self) -> _CoordinateDescent:
        squares = await self._design.squares()
        self._norms, self._curvatures = squares.sqrt(), self._loss.curvature * squares
        self._weights = torch.zeros_like(squares)
        self._scheduler = Scheduler(self._rule, squares > 0, self._seed)
        self._correlations = Correlations(self._design, self._norms)
        self._at_zero = (await self.measure()).objective or 1.0
        return self

    async def schedule(self) -> Tensor:
        candidates = self._scheduler.candidates()
        known = None if self._rule.bound is None else await self._correlations.among(candidates)
        return self._scheduler.kept(candidates, known)

    async def push(self, chosen: Tensor) -> Tensor:
        descent = self._loss.descent(self._scores, self._targets)
        return await self._design.products(chosen, descent)

    async def pull(self, chosen: Tensor, pushed: Tensor) -> None:
        before, curvatures = self._weights[chosen], self._curvatures[chosen]
        after = shrunk(before + pushed / curvatures, self._num_samples * self._l1 / curvatures)
        self._weights[chosen] = after
        self._scores += await self._design.combination(chosen, after - before)
        change = (after - before) * self._norms[chosen] / self._num_samples**0.5
        self._scheduler.moved(chosen, change, self._correlations.with_all(chosen))

    async def measure(self) -> Measure:
        """F, and the duality gap as a part of F(0): how far F is from its least value at most."""
        slopes = self._loss.descent(self._scores, self._targets)
        steepest = (await self._design.all_products(slopes)).abs().max()
        feasible = slopes * torch.clamp(self._num_samples * self._l1 / steepest.clamp(min=1e-300), max=1.0)
        sums = [self._loss.value(self._scores, self._targets).sum(), self._loss.dual(feasible, self._targets).sum()]
        loss, dual = (await self._design.total(torch.stack(sums)) / self._num_samples).tolist()
        objective = loss + self._l1 * float(self._weights.abs().sum())
        return Measure(objective, (objective - dual) / self._at_zero)

    def parameters(self) -> Mapping[str, Tensor]:
        """β, on every worker."""
        return {"weights": self._weights}

    @property
    def divided(self) -> frozenset[str]:
        return frozenset()

    @property
    def rounds(self) -> int:
        return -(-len(self._weights) // self._rule.at_once)


def shrunk(values: Tensor, threshold: Tensor) -> Tensor:
    """Soft thresholding: sign(a) max(|a| - t, 0)."""
    return values.sign() * (values.abs() - threshold).clamp(min=0)


def _samples_of(data: tuple[Any, ...], name: str) -> tuple[Tensor, Tensor]:
    """x (n, p) and y (n,) of `data`. ValueError for anything else."""
    check_kinds(data, (Tensor, Tensor), f"{name} learns from two tensors, x (n, p) and y (n,)")
    x, y = data
    if x.dim() != 2 or y.shape != (len(x),) or not x.numel():
        raise ValueError(f"{name} learns from x (n, p) and y (n,), got {tuple(x.shape)} and {tuple(y.shape)}")
    return x, y


TABLE_BYTES = 256 << 20


class Correlations:
    """corr(j, k) = xⱼᵀxₖ / (‖xⱼ‖ ‖xₖ‖): the correlation of centred columns.

    A column's products with all others are computed when it is first a candidate, and kept: p² numbers. If that is more
    than 256 MiB, the products of the candidates are computed in each round.
    """

    def __init__(self, design: Design, norms: Tensor) -> None:
        self._design, self._norms = design, norms
        self._known = torch.zeros(len(norms), dtype=torch.bool)
        fits = 8 * len(norms) ** 2 <= TABLE_BYTES
        self._table = torch.zeros(len(norms), len(norms), dtype=torch.float64) if fits else None

    async def among(self, candidates: Tensor) -> Tensor:
        """(candidates, candidates). All workers ask for the same."""
        if self._table is None:
            return await self._between(candidates, candidates)
        new = candidates[~self._known[candidates]]
        if len(new):
            self._table[new] = await self._between(new, None)
            self._known[new] = True
        return self._table[candidates[:, None], candidates]

    def with_all(self, chosen: Tensor) -> Tensor | None:
        """(chosen, all), of columns that were candidates; None where the table does not fit."""
        return None if self._table is None else self._table[chosen]

    async def _between(self, left: Tensor, right: Tensor | None) -> Tensor:
        norms = self._norms if right is None else self._norms[right]
        return await self._design.gram(left, right) / torch.outer(self._norms[left], norms).clamp(min=1e-300)


def lasso(
    l1: float = 0.01,
    at_once: int = 32,
    bound: float | None = 0.1,
    order: str = "priority",
    cut: str = "rows",
    seed: int = 0,
    candidates: int | None = None,
) -> DescentJob:
    """Minimise (1/2n) ‖y - Xβ‖² + λ ‖β‖₁, λ = `l1`, updating `at_once` coordinates together that hardly interfere.

        pt.schedule(pt.partition.scheduled.lasso(l1=0.02), (x, y), workers=2)

    schedule: `candidates` coordinates (3 `at_once`) are drawn by the moves of correlated ones (`order`), and kept while
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
    rule = SetRule(order, at_once, bound, candidates).checked()
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


def logistic(
    l1: float = 0.001,
    at_once: int = 32,
    bound: float | None = 0.1,
    order: str = "priority",
    cut: str = "rows",
    seed: int = 0,
    candidates: int | None = None,
) -> DescentJob:
    """Minimise (1/n) Σᵢ log(1 + exp(-yᵢ xᵢ·β)) + λ ‖β‖₁, λ = `l1`, yᵢ = ±1, by coordinates that hardly interfere.

        pt.schedule(pt.partition.scheduled.logistic(l1=0.001), (x, y), workers=2)

    `lasso` with another loss: push is xⱼᵀ(y σ(-y Xβ)), and pull divides by ‖xⱼ‖²/4, for the loss bends at most by a
    quarter. So a step is safe without a search, and shorter than Newton's where predictions are certain. Arguments,
    cost and deviations are the same; there is no intercept. Errors: ValueError for labels other than ±1.

    Source: STRADS (see `program.py`); J. K. Bradley, A. Kyrola, D. Bickson and C. Guestrin, "Parallel coordinate
    descent for L1-regularized loss minimization", 2011.
    """
    name = call_name(logistic, locals())
    rule = SetRule(order, at_once, bound, candidates).checked()
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
