"""`Buffers`: memory that is lent out and not written until it has come back.

       hold ─▶ ┌────────┐
take ─▶ held 1 │ tensor │ release ─▶ held 0: free, the next `take` gets it
               └────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

Empty = Callable[[int, torch.dtype], Tensor]
"""`(numel, dtype) -> tensor`: new memory, of an arena perhaps. What it has given is never given back."""


def plain_empty(numel: int, dtype: torch.dtype) -> Tensor:
    """Memory of this process alone."""
    return torch.empty(numel, dtype=dtype)


class Buffers:
    """Tensors of one length by number, each with a count of those that hold it."""

    def __init__(self, numel: int, dtype: torch.dtype, empty: Empty) -> None:
        self._numel, self._dtype, self._empty = numel, dtype, empty
        self.tensors: list[Tensor] = []
        self.holders: list[int] = []
        self._free: list[int] = []

    def take(self) -> int:
        """A buffer that nobody holds, held once from now on; new memory only where there is none."""
        if self._free:
            number = self._free.pop()
            self.holders[number] = 1
            return number
        self.tensors.append(self._empty(self._numel, self._dtype))
        self.holders.append(1)
        return len(self.tensors) - 1

    def hold(self, number: int) -> None:
        """One more holds it."""
        self.holders[number] += 1

    def release(self, number: int) -> None:
        """One less holds it."""
        self.holders[number] -= 1
        if not self.holders[number]:
            self._free.append(number)

    def adopt(self, tensors: Iterable[Tensor], spare: Iterable[Tensor]) -> None:
        """Begin with these, which whoever needs them must `hold`, and with memory that is free."""
        self.tensors = list(tensors)
        self.holders = [0] * len(self.tensors)
        for tensor in spare:
            self._free.append(len(self.tensors))
            self.tensors.append(tensor)
            self.holders.append(0)
