"""`Correlations`: how much columns of the design interfere, computed when the scheduler asks."""

from __future__ import annotations

import torch
from torch import Tensor

from polytempo.partition.scheduled.design import Design

TABLE_BYTES = 256 << 20


class Correlations:
    """corr(j, k) = xⱼᵀxₖ / (‖xⱼ‖ ‖xₖ‖), which is the correlation of columns that are centred.

    A column's products with all others are computed when it is first a candidate, and kept: p² numbers. Where those are
    more than 256 MiB, the products of the candidates are computed in each round.
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
