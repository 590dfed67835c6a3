"""`BufferPool`: memory that is lent, and not written until all its holders have released it.

       hold ─▶ ┌────────┐
take ─▶ held 1 │ tensor │ release ─▶ held 0: free, the next `take` gets it
               └────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

import torch
from torch import Tensor

Empty = Callable[[int, torch.dtype], Tensor]
"""`(numel, dtype) -> tensor`: new memory, perhaps of an arena. Memory is never returned."""


def plain_empty(numel: int, dtype: torch.dtype) -> Tensor:
    """Memory of this process alone."""
    return torch.empty(numel, dtype=dtype)


@lru_cache(maxsize=64)
def without_values(numel: int, dtype: torch.dtype) -> Tensor:
    """No memory: a shape alone, the same one for all who ask."""
    return torch.empty(numel, dtype=dtype, device="meta")


class BufferPool:
    """Tensors of one length by number, each with a count of its holders."""

    def __init__(self, numel: int, dtype: torch.dtype, empty: Empty) -> None:
        self._numel, self._dtype, self._empty = numel, dtype, empty
        self.tensors: list[Tensor] = []
        self.holders: list[int] = []
        self._free: list[int] = []

    def take(self) -> int:
        """A buffer without a holder, held once from now on; new memory only where there is none."""
        if self._free:
            number = self._free.pop()
            self.holders[number] = 1
            return number
        self.tensors.append(self._empty(self._numel, self._dtype))
        self.holders.append(1)
        return len(self.tensors) - 1

    def hold(self, number: int) -> None:
        """Buffer `number` has one holder more."""
        self.holders[number] += 1

    def release(self, number: int) -> None:
        """Buffer `number` has one holder less; without any it is free."""
        self.holders[number] -= 1
        if not self.holders[number]:
            self._free.append(number)

    def adopt(self, tensors: Iterable[Tensor], spare: Iterable[Tensor]) -> None:
        """Begin with `tensors`, which have no holders until `hold` is called, and with free memory."""
        self.tensors = list(tensors)
        self.holders = [0] * len(self.tensors)
        for tensor in spare:
            self._free.append(len(self.tensors))
            self.tensors.append(tensor)
            self.holders.append(0)
