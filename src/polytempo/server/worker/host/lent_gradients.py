"""`LentGradients`: keeps gradients in memory that the shards can read while their pushes are under way.

gradient ──copy──▶ buffer ──lent──▶ shards          a buffer is free again when every shard has answered
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from polytempo.server.layout import Empty, Span, place_


class LentGradients:
    """`empty` makes memory that shards can read; `is_readable(tensor)` says whether a tensor is in such memory already.

    Cost: one copy of a gradient elsewhere; as many buffers as pushes under way.
    """

    def __init__(self, empty: Empty, is_readable: Callable[[Tensor], bool]) -> None:
        self.empty, self._is_readable = empty, is_readable
        self._free: list[Tensor] = []
        self._lent: dict[object, Tensor] = {}
        self._sums: list[Tensor] = []
        self._lent_sums: dict[object, Tensor] = {}

    def lend(self, flat: Tensor, push: object) -> Tensor:
        """`flat`, or its copy, to be read by shards until `take_back(push)`."""
        if not flat.numel() or self._is_readable(flat):
            return flat
        buffer = self._free.pop() if self._free else self.empty(flat.numel(), flat.dtype)
        if buffer.shape != flat.shape or buffer.dtype != flat.dtype:
            buffer = self.empty(flat.numel(), flat.dtype)
        place_(buffer, (Span(0, flat.numel()),), flat)
        self._lent[push] = buffer
        return buffer

    def sum_of(self, several: Sequence[Tensor], push: object) -> Tensor:
        """The sum of `several` flat vectors, in their order, to be read by shards until `take_back(push)`."""
        first, *others = several
        total = self._sums.pop() if self._sums else self.empty(first.numel(), first.dtype)
        if total.shape != first.shape or total.dtype != first.dtype:
            total = self.empty(first.numel(), first.dtype)
        self._lent_sums[push] = add_all_(total, first, others)
        return total

    def take_back(self, push: object) -> None:
        """Every shard has answered `push`."""
        for lent, free in ((self._lent, self._free), (self._lent_sums, self._sums)):
            if (buffer := lent.pop(push, None)) is not None:
                free.append(buffer)


def add_all_(total: Tensor, first: Tensor, others: Sequence[Tensor]) -> Tensor:
    """`total` ← first + others, in that order."""
    torch.add(first, others[0], out=total)
    for other in others[1:]:
        total.add_(other)
    return total
