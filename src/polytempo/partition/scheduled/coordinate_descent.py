"""Coordinate descent for a loss of scores Xβ and an L1 penalty: what Lasso and logistic regression share.

minimise   F(β) = (1/n) Σᵢ ℓ(uᵢ, yᵢ) + λ ‖β‖₁,    u = Xβ

schedule   candidates by what has moved, kept if they do not interfere
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
from polytempo.partition.scheduled.correlations import Correlations
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
        """-ℓ*(-θ): with slopes θ of which |Xᵀθ| ≤ nλ, the mean of it is at most the least F."""


@dataclass(frozen=True)
class DescentJob:
    """What `lasso` and `logistic` make; `name` is the call. See `ScheduledJob`."""

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

    async def begin(self, port: Port, data: tuple[Any, ...]) -> CoordinateDescent:
        """`data`: x (n, p) and y (n,)."""
        x, y = _samples_of(data, self.name)
        design = cut_design(port, x, self.cut)
        return await CoordinateDescent(port, design, y, self.loss, self.l1, self.rule, self.seed).begun()


class CoordinateDescent:
    """One worker's state. See `ScheduledProgram`."""

    def __init__(
        self, port: Port, design: Design, targets: Tensor, loss: Loss, l1: float, rule: SetRule, seed: int
    ) -> None:
        self._port, self._design, self._loss, self._l1 = port, design, loss, l1
        self._targets, self._rule, self._seed = design.samples(targets.double()), rule, seed
        self._scores = torch.zeros_like(self._targets)
        self._num_samples, self._at_zero = len(targets), 1.0

    async def begun(self) -> CoordinateDescent:
        """Learn from all workers what columns measure."""
        squares = await self._design.squares()
        self._norms, self._curvatures = squares.sqrt(), self._loss.curvature * squares
        self._weights = torch.zeros_like(squares)
        self._scheduler = Scheduler(self._rule, squares > 0, self._seed)
        self._correlations = Correlations(self._design, self._norms)
        self._at_zero = (await self.measure()).objective or 1.0
        return self

    async def schedule(self) -> Tensor:
        """See `ScheduledProgram`."""
        candidates = self._scheduler.candidates()
        known = None if self._rule.bound is None else await self._correlations.among(candidates)
        return self._scheduler.kept(candidates, known)

    async def push(self, chosen: Tensor) -> Tensor:
        """See `ScheduledProgram`."""
        descent = self._loss.descent(self._scores, self._targets)
        return await self._design.products(chosen, descent)

    async def pull(self, chosen: Tensor, pushed: Tensor) -> None:
        """See `ScheduledProgram`."""
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
        """See `ScheduledProgram`."""
        return frozenset()

    @property
    def rounds(self) -> int:
        """See `ScheduledProgram`."""
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
