"""Matrix factorisation by cyclic coordinate descent, one factor of all rows and columns after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polytempo.core import Port
from polytempo.core.calls.call_name import call_name
from polytempo.partition.scheduled.program import Measure, added, borders, check_kinds, check_places


def factorization(rank: int = 10, l2: float = 0.1, seed: int = 0) -> Factorization:
    """Minimise Σ (rᵢⱼ - uᵢ·vⱼ)² + λ (Σ ‖uᵢ‖² + Σ ‖vⱼ‖²), λ = `l2`, over the entries that are there, by factors.

        pt.schedule(pt.partition.scheduled.factorization(rank=10), ratings, workers=2)

    A worker has some rows, their entries and their uᵢ; all have all vⱼ. schedule: the next factor t. push: for each
    column the sums Σᵢ uᵢₜ eᵢⱼ and Σᵢ uᵢₜ² over the worker's rows, e being the error without factor t. pull:
    vⱼₜ ← Σ uᵢₜ eᵢⱼ / (λ + Σ uᵢₜ²), and then uᵢₜ in the same way, which needs no message.

    Cost of a round: about 12 operations an entry, shared by the workers; each sends 2 numbers a column to each other
    one. The error is the part of the objective that the last sweep over all factors has gained.

    Source: STRADS (see `program.py`); H.-F. Yu, C.-J. Hsieh, S. Si and I. Dhillon, "Scalable coordinate descent
    approaches to parallel matrix factorization for recommender systems", 2012 (CCD++, one inner iteration).
    """
    if rank < 1 or not 0 < l2 < float("inf"):
        raise ValueError(f"factorization needs rank >= 1 and a finite l2 above 0, got rank={rank} and l2={l2:g}")
    return Factorization(call_name(factorization, locals()), rank, l2, seed)


@dataclass(frozen=True)
class Factorization:
    """The job of `factorization`. See `ScheduledJob`."""

    name: str
    rank: int
    l2: float
    seed: int

    def __str__(self) -> str:
        return self.name

    def check(self, data: tuple[Any, ...]) -> None:
        """See `ScheduledJob`."""
        _checked(data)

    async def begin(self, port: Port, data: tuple[Any, ...]) -> _FactorDescent:
        """`data`: rows (m,), columns (m,) and values (m,) of the entries, and the numbers of rows and columns."""
        return _FactorDescent(port, self, *_checked(data))


class _FactorDescent:
    """One worker's state. See `ScheduledProgram`."""

    divided = frozenset({"rows"})

    def __init__(
        self,
        port: Port,
        job: Factorization,
        rows: Tensor,
        columns: Tensor,
        values: Tensor,
        num_rows: int,
        num_columns: int,
    ) -> None:
        self._port, self._l2, self.rounds = port, job.l2, job.rank
        ends = borders(torch.bincount(rows, minlength=num_rows), port.size)
        first, end = ends[port.rank], ends[port.rank + 1]
        mine = (first <= rows) & (rows < end)
        self._rows, self._columns = rows[mine] - first, columns[mine]
        random = torch.Generator().manual_seed(job.seed)
        self._u = torch.randn(num_rows, job.rank, generator=random, dtype=torch.float64)[first:end].clone()
        self._v = torch.zeros(num_columns, job.rank, dtype=torch.float64)
        self._error = values[mine].double()
        """rᵢⱼ - uᵢ·vⱼ of this worker's entries."""
        self._factor, self._before = 0, float("inf")

    async def schedule(self) -> Tensor:
        self._factor = (self._factor + 1) % self.rounds
        return torch.tensor([self._factor])

    async def push(self, chosen: Tensor) -> Tensor:
        return await self._port.compute(lambda: self._sums(int(chosen)), 6.0 * len(self._error), "push")

    def _sums(self, t: int) -> Tensor:
        u = self._u[self._rows, t]
        self._error += u * self._v[self._columns, t]
        return torch.stack([sums(self._columns, u * self._error, self._v), sums(self._columns, u * u, self._v)])

    async def pull(self, chosen: Tensor, pushed: Tensor) -> None:
        await self._port.compute(lambda: self._update(int(chosen), pushed), 6.0 * len(self._error), "pull")

    def _update(self, t: int, pushed: Tensor) -> None:
        self._v[:, t] = pushed[0] / (self._l2 + pushed[1])
        v = self._v[self._columns, t]
        self._u[:, t] = sums(self._rows, v * self._error, self._u) / (self._l2 + sums(self._rows, v * v, self._u))
        self._error -= self._u[self._rows, t] * v

    async def measure(self) -> Measure:
        """The objective, and the part of it that the last sweep has gained."""
        own = self._error.square().sum() + self._l2 * self._u.square().sum()
        objective = float(await added(self._port, own.reshape(1))) + self._l2 * float(self._v.square().sum())
        gain = (self._before - objective) / self._before if self._before < float("inf") else None
        self._before = objective
        return Measure(objective, gain)

    def parameters(self) -> Mapping[str, Tensor]:
        """U, divided by rows over workers, and V."""
        return {"rows": self._u, "columns": self._v}


def sums(places: Tensor, values: Tensor, of: Tensor) -> Tensor:
    """The sum of the values at each place, a row of `of`."""
    return torch.zeros(len(of), dtype=torch.float64).index_add_(0, places, values)


def _checked(data: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """The entries. ValueError where they are none."""
    expected = "factorization learns from tensors rows, columns and values, and the numbers of rows and columns"
    check_kinds(data, (Tensor, Tensor, Tensor, int, int), expected)
    rows, columns, values, num_rows, num_columns = data
    if not (rows.shape == columns.shape == values.shape == (len(values),)) or not len(values):
        raise ValueError(f"rows, columns and values must be one number an entry, got {len(rows)} and {len(values)}")
    check_places("rows", rows, num_rows)
    check_places("columns", columns, num_columns)
    if not values.isfinite().all():
        raise ValueError("the values hold NaN or an infinity; leave those entries out")
    return rows, columns, values, num_rows, num_columns
