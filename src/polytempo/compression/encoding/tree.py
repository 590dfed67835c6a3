"""The 256 numbers of a dynamic tree, and which of them is nearest. See `dynamic8`."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

DECADES = 7
ZERO, ONE = 127, 255
"""The codes of 0 and of 1."""


class Tree(NamedTuple):
    """What codes mean, in float32. Decade k is from 10^-(k+1) to 10^-k, and has 2^(6-k) cells."""

    numbers: Tensor
    """(256,), ascending."""
    begins: Tensor
    """(7,) The smallest magnitude whose nearest number is in decade k."""
    steeps: Tensor
    """(7,) Cells for a unit."""
    firsts: Tensor
    """(7,) 2^(6-k): the magnitude's bits for the first cell."""
    one: Tensor
    """(1,) The smallest that is nearer to 1 than to the number before."""

    @classmethod
    def of(cls, packed: Tensor) -> Tree:
        """From one tensor, which is what the kernels read."""
        return cls(*packed.split([256, DECADES, DECADES, DECADES, 1]))


@cache
def tree() -> Tensor:
    """The five parts of `Tree`, one behind the other."""
    magnitudes = [0.0]
    begins: list[float] = []
    steeps: list[float] = []
    firsts: list[float] = []
    for k in reversed(range(DECADES)):
        cells, top = 2 ** (6 - k), 10.0**-k
        cell = 0.9 * top / cells
        numbers = [0.1 * top + cell * (i + 0.5) for i in range(cells)]
        begins = [(magnitudes[-1] + numbers[0]) / 2, *begins]
        steeps = [1 / cell, *steeps]
        firsts = [float(cells), *firsts]
        magnitudes += numbers
    numbers = [-m for m in reversed(magnitudes[1:])] + magnitudes + [1.0]
    return torch.tensor(numbers + begins + steeps + firsts + [(magnitudes[-1] + 1) / 2], dtype=torch.float32)


def nearest(t: Tensor, parts: Tree) -> Tensor:
    """The codes (int32) of numbers from -1 to 1, by the arithmetic of the kernel, operation by operation."""
    a = t.abs()
    decade = torch.full_like(a, DECADES - 1, dtype=torch.int64)
    for k in reversed(range(DECADES - 1)):
        decade = torch.where(a >= parts.begins[k], k, decade)
    first = parts.firsts[decade]
    m = a * parts.steeps[decade] + first * (8 / 9)
    m = m.maximum(first).minimum(first + first - 1)
    m = torch.where(a < parts.begins[DECADES - 1], 0, m).int()
    code = torch.where(t < 0, ZERO - m, ZERO + m)
    return torch.where(t >= parts.one, ONE, code)
