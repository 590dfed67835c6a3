"""`TouchedRows`: the rows of tables for a worker's next push, and the pulled rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.server.message import Rows
from polytempo.server.pieces import Pieces
from polytempo.server.tensors.tables import RowsTerm, summed

_MOST_APART = 32
"""The most steps with separate gradients before they are summed."""


class TableRows(NamedTuple):
    """Some rows of a whole table: `rows` (n,) int64, `values` (n, width)."""

    table: int
    """The number of the table, in the parameters' order."""
    rows: Tensor
    values: Tensor


class TouchedRows:
    """Shard s holds the pieces `shards[s]`. Gradients enter by `accrue` and leave by `take`; pulled rows enter by
    `arrive` and leave by `taken`."""

    def __init__(self, shards: Sequence[Pieces]) -> None:
        self._shards = shards
        self.bases = [-1] * len(shards)
        """The version of each shard's rows that has arrived; -1: none yet."""
        self._accrued: dict[int, list[RowsTerm]] = {}
        self._arrived: list[TableRows] = []

    def accrue(self, gradient: TableRows) -> None:
        """Sum this gradient (rows ascending, each once) with those before; it is lent until the push is done."""
        terms = self._accrued.setdefault(gradient.table, [])
        terms.append((gradient.rows, gradient.values, 1.0))
        if len(terms) > _MOST_APART:
            terms[:] = [(*summed(terms), 1.0)]

    def take(self) -> list[tuple[Rows, ...]]:
        """The rows to push to each shard: the sum of all accrued gradients, which then begins again at 0."""
        sums = {table: summed(terms) for table, terms in self._accrued.items()}
        self._accrued = {}
        return [self._part(sums, pieces) for pieces in self._shards]

    def _part(self, sums: dict[int, tuple[Tensor, Tensor]], pieces: Pieces) -> tuple[Rows, ...]:
        found: list[Rows] = []
        for number, piece in enumerate(pieces):
            if piece.table not in sums:
                continue
            rows, values = sums[piece.table]
            begin, end = torch.searchsorted(rows, torch.tensor([piece.first, piece.first + piece.num_rows])).tolist()
            if begin < end:
                found.append(Rows(number, rows[begin:end] - piece.first, values[begin:end]))
        return tuple(found)

    def arrive(self, shard: int, version: int, rows: Sequence[Rows]) -> None:
        """A pull's answer: the rows that have changed in `shard` up to `version`."""
        self.bases[shard] = version
        for one in rows:
            piece = self._shards[shard][one.piece]
            self._arrived.append(TableRows(piece.table, one.rows + piece.first, one.values))

    def taken(self) -> list[TableRows]:
        """The rows that have arrived since the last call, oldest first: values to put in place."""
        arrived, self._arrived = self._arrived, []
        return arrived
