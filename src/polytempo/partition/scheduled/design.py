"""The design matrix X (n samples, p columns), cut over workers by rows or by columns.

                       by rows                        by columns
    a worker has       some samples of all columns    all samples of some columns
    Xβ, the residual   of its own samples             of all samples, on every worker
    X_Sᵀ v             sums of |S| numbers            |S| numbers, each from one worker
    X_S δ              no message                     sums of n numbers
    X_Sᵀ X_T           sums of |S|·|T| numbers        n·|S| numbers, and then |S|·|T|

By rows is for many samples, by columns for more columns than samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from polytempo.core import Port
from polytempo.partition.scheduled.program import added, borders

CUTS = ("rows", "columns")


class Design(Protocol):
    """One worker's part of X; its answers are whole unless they say "part"."""

    async def squares(self) -> Tensor:
        """‖xⱼ‖² of all columns, (p,)."""

    def samples(self, vector: Tensor) -> Tensor:
        """This worker's part of a vector over all samples."""

    async def products(self, chosen: Tensor, vector: Tensor) -> Tensor:
        """This worker's part of X_Sᵀ v, (|S|,); `vector` is `samples(v)`."""

    async def all_products(self, vector: Tensor) -> Tensor:
        """Xᵀ v, (p,)."""

    async def combination(self, chosen: Tensor, amounts: Tensor) -> Tensor:
        """X_S δ, the part of `samples`."""

    async def gram(self, left: Tensor, right: Tensor | None) -> Tensor:
        """X_Lᵀ X_R, (|L|, |R|); None: R are all columns."""

    async def total(self, parts: Tensor) -> Tensor:
        """Sums over all samples, from this worker's sums over its samples."""


def check_cut(by: str) -> None:
    """ValueError where X cannot be cut like that."""
    if by not in CUTS:
        raise ValueError(f"cut must be one of {', '.join(CUTS)}, got {by!r}")


def cut_design(port: Port, x: Tensor, by: str) -> Design:
    """This worker's part of `x` (n, p), in float64, columns contiguous."""
    ends = borders(torch.ones(x.shape[0 if by == "rows" else 1]), port.size)
    first, end = ends[port.rank], ends[port.rank + 1]
    if by == "rows":
        return _ByRows(port, x[first:end].T.double().contiguous(), first)
    return _ByColumns(port, x[:, first:end].T.double().contiguous(), first, x.shape[1])


@dataclass(frozen=True)
class _ByRows:
    """Some samples of all columns. See `Design`."""

    port: Port
    columns: Tensor
    """(p, own samples): each column is contiguous."""
    first: int

    async def squares(self) -> Tensor:
        return await added(self.port, self.columns.square().sum(1))

    def samples(self, vector: Tensor) -> Tensor:
        return vector[self.first : self.first + self.columns.shape[1]]

    async def products(self, chosen: Tensor, vector: Tensor) -> Tensor:
        return await _times(self.port, self.columns, chosen, vector)

    async def all_products(self, vector: Tensor) -> Tensor:
        flops = 2.0 * self.columns.numel()
        return await added(self.port, await self.port.compute(lambda: self.columns @ vector, flops))

    async def combination(self, chosen: Tensor, amounts: Tensor) -> Tensor:
        return await _combined(self.port, self.columns, chosen, amounts)

    async def gram(self, left: Tensor, right: Tensor | None) -> Tensor:
        others = self.columns if right is None else self.columns[right]
        part = await self.port.compute(lambda: self.columns[left] @ others.T, 2.0 * len(left) * others.numel())
        return await added(self.port, part)

    async def total(self, parts: Tensor) -> Tensor:
        return await added(self.port, parts)


@dataclass(frozen=True)
class _ByColumns:
    """All samples of some columns. See `Design`."""

    port: Port
    columns: Tensor
    """(own columns, n)."""
    first: int
    num_columns: int

    async def squares(self) -> Tensor:
        return await self._placed(self.columns.square().sum(1))

    def samples(self, vector: Tensor) -> Tensor:
        return vector

    async def products(self, chosen: Tensor, vector: Tensor) -> Tensor:
        part, mine = torch.zeros(len(chosen), dtype=torch.float64), self._mine(chosen)
        part[mine] = await _times(self.port, self.columns, chosen[mine] - self.first, vector)
        return part

    async def all_products(self, vector: Tensor) -> Tensor:
        flops = 2.0 * self.columns.numel()
        return await self._placed(await self.port.compute(lambda: self.columns @ vector, flops))

    async def combination(self, chosen: Tensor, amounts: Tensor) -> Tensor:
        mine = self._mine(chosen)
        return await added(
            self.port, await _combined(self.port, self.columns, chosen[mine] - self.first, amounts[mine])
        )

    async def gram(self, left: Tensor, right: Tensor | None) -> Tensor:
        right = torch.arange(self.num_columns) if right is None else right
        mine, theirs = self._mine(left), self._mine(right)
        given = torch.zeros(len(left), self.columns.shape[1], dtype=torch.float64)
        given[mine] = self.columns[left[mine] - self.first]
        given = await added(self.port, given)
        part = torch.zeros(len(left), len(right), dtype=torch.float64)
        own = self.columns[right[theirs] - self.first]
        part[:, theirs] = await self.port.compute(lambda: given @ own.T, 2.0 * len(left) * own.numel())
        return await added(self.port, part)

    async def total(self, parts: Tensor) -> Tensor:
        return parts

    def _mine(self, chosen: Tensor) -> Tensor:
        return (self.first <= chosen) & (chosen < self.first + len(self.columns))

    async def _placed(self, own: Tensor) -> Tensor:
        """A number for each column, from each worker's own."""
        part = torch.zeros(self.num_columns, dtype=torch.float64)
        part[self.first : self.first + len(own)] = own
        return await added(self.port, part)


async def _times(port: Port, columns: Tensor, chosen: Tensor, vector: Tensor) -> Tensor:
    """A dot product for each chosen column; none is copied."""

    def work() -> Tensor:
        return torch.stack([torch.dot(columns[j], vector) for j in chosen.tolist()]) if len(chosen) else _NOTHING

    return await port.compute(work, 2.0 * len(chosen) * columns.shape[1], "push")


async def _combined(port: Port, columns: Tensor, chosen: Tensor, amounts: Tensor) -> Tensor:
    """Read columns with an amount other than 0 only: most of a sparse model's do not move."""

    def work() -> Tensor:
        total = torch.zeros(columns.shape[1], dtype=torch.float64)
        for j, amount in zip(chosen.tolist(), amounts.tolist(), strict=True):
            if amount:
                total.add_(columns[j], alpha=amount)
        return total

    return await port.compute(work, 2.0 * int(amounts.count_nonzero()) * columns.shape[1], "pull")


_NOTHING = torch.zeros(0, dtype=torch.float64)
