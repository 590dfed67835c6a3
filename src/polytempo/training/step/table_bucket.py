"""`TableBucket`: an embedding's table, of which the rows travel that the gradient of any rank touches.

ranks' rows   {3, 7}   {7, 9}   ──▶   all ranks: {3, 7, 9}   ──▶   the transform of a bundle of these three rows
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polytempo.core import Bundle, Port
from polytempo.training.model.table_rows import rows_of
from polytempo.training.step.bucket import Bucket


class TableBucket(Bucket):
    """One parameter with sparse gradients, shape (rows, width), and a transform that remembers nothing of a row.

    Cost of a step: two small all-gathers, of how many rows each rank has and of which ones (8 bytes each), and the
    exchange of all that have a gradient on any rank. Where the ranks' rows together are as many as the table has,
    the second one is left out, and the whole table travels.
    """

    def __init__(self, index: int, name: str, parameter: nn.Parameter) -> None:
        super().__init__(index, {name: parameter})
        self._name, self._table = name, parameter
        self._rows: Tensor | None = None
        """The rows of this exchange, ascending. None: all."""
        self._own: tuple[Tensor, Tensor]
        """Of this rank's gradient the rows, ascending, and their values."""

    async def agree(self, port: Port) -> None:
        """Find out which rows any rank has a gradient for."""
        self._memory = None  # it has other rows
        table = self._table
        if table.grad is None:
            self._own = torch.empty(0, dtype=torch.int64, device=table.device), table.new_empty((0, *table.shape[1:]))
        else:
            self._own = rows_of(table.grad)
        own, _ = self._own
        counts = [int(count) for count in await port.all_gather(own.new_tensor([len(own)]))]
        if sum(counts) >= len(self._table):
            self._rows = None
            return
        self._rows = own.new_empty(0)
        if most := max(counts):
            padded = torch.cat([own, own.new_zeros(most - len(own))])
            everyone = await port.all_gather(padded)
            self._rows = torch.cat([theirs[:count] for theirs, count in zip(everyone, counts, strict=True)]).unique()

    def gathered(self, share: float | None) -> Bundle:
        """The gradients of the rows agreed on, shape (rows, width); one row of zeros where there are none."""
        if self._rows is None:
            return super().gathered(share)
        values = self._table.new_zeros((max(len(self._rows), 1), *self._table.shape[1:]))
        rows, own = self._own
        values[torch.searchsorted(self._rows, rows)] = own
        self._begin_exchange()
        return Bundle({self._name: values}, share)

    def place(self, answer: Bundle | None, *, answered: bool) -> None:
        """`.grad` becomes the rows of the answer, as a sparse gradient."""
        if answer is None or self._rows is None:
            super().place(answer, answered=answered)
            return
        values = answer.views[self._name][: len(self._rows)]
        gradient = torch.sparse_coo_tensor(
            self._rows.unsqueeze(0), values, self._table.shape, is_coalesced=True, check_invariants=False
        )
        self._point({self._name: gradient}, answer, answered=answered)
