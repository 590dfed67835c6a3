"""The tables of a worker's model: gradients by rows out of them, the server's rows into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from polytempo.server.worker.touched_rows import TableRows

_MOST_APART = 32
"""So many steps' changes are kept apart before they are put together."""


class ModelTables:
    """`tables` by name, in the order of all parameters; each is a copy of the server's, row for row.

    A local step changes some rows. Their former values are kept, because a pull brings only the rows that the server
    has changed: the worker's own changes must go, as they do in a pull of everything.
    """

    def __init__(self, tables: Mapping[str, nn.Parameter]) -> None:
        self._tables = list(tables.values())
        self._before: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self._tables]
        """Table by table: (rows, values before a local step), oldest first."""

    def gradients(self) -> list[TableRows]:
        """Each table's gradient on the host, if it has one: rows ascending, each once; of a dense one rows with a
        value."""
        return [
            TableRows(number, *(part.cpu() for part in rows_of(table.grad)))
            for number, table in enumerate(self._tables)
            if table.grad is not None
        ]

    def forget(self) -> None:
        """The optimizer shall see no gradient."""
        for table in self._tables:
            table.grad = None

    @torch.no_grad()
    def remember(self, gradients: Sequence[TableRows]) -> None:
        """Keep the rows that the optimizer will change by these gradients."""
        for table, rows, _ in gradients:
            changes = self._before[table]
            changes.append((rows, self._tables[table].detach()[rows].cpu()))
            if len(changes) > _MOST_APART:
                changes[:] = [_earliest(changes)]

    @torch.no_grad()
    def place(self, pulled: Sequence[TableRows]) -> None:
        """Become the server's tables; `pulled` has the rows that the server has changed."""
        for table, changes in zip(self._tables, self._before, strict=True):
            for rows, values in reversed(changes):
                table[rows] = values.to(table.device)
            changes.clear()
        for number, rows, values in pulled:
            table = self._tables[number]
            table[rows] = values.to(table.device)


def rows_of(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of a gradient's rows, ascending, and their values; of a dense gradient the rows that are not 0."""
    if gradient.layout is torch.sparse_coo:
        whole = gradient.coalesce()
        return whole.indices()[0], whole.values()
    rows = (gradient != 0).any(dim=1).nonzero().view(-1)
    return rows, gradient[rows]


def _earliest(changes: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    rows = torch.unique(torch.cat([rows for rows, _ in changes]))
    values = changes[0][1].new_empty(len(rows), changes[0][1].shape[1])
    for some, were in reversed(changes):
        values[torch.searchsorted(rows, some)] = were
    return rows, values
