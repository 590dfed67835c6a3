"""Wires of blocks, a scale for so many elements and a byte for each, and the 256 numbers of `dynamic8`'s bytes.

[ scale of block 0, of block 1, … : float32 | code of element 0, of element 1, … : 1 byte | zeros up to 4 bytes ]
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.compression.encoding.coded import WireSize
from polytempo.compression.encoding.values import opened

LEAST_SCALE = 2.0**-126
"""Less is no normal number in float32: its inverse may be infinite, and processors may take it for 0."""


class Parts:
    """A wire's scales (num_blocks,) and codes (numel,), each a view, and the padding behind them."""

    def __init__(self, codec: str, wire: Tensor, like: Tensor, block: int, code_dtype: torch.dtype) -> None:
        """Raises ValueError where the wire is too short for a tensor like this."""
        numel, end = like.numel(), 4 * num_blocks(like.numel(), block)
        wire = opened(codec, size(numel, block).num_bytes, like, wire, torch.uint8)
        self.scales = wire[:end].view(torch.float32)
        self.codes = wire[end : end + numel].view(code_dtype)
        self.padding = wire[end + numel :]


def num_blocks(numel: int, block: int) -> int:
    """How many there are; the last may be shorter."""
    return -(-numel // block)


def size(numel: int, block: int) -> WireSize:
    """Of a wire: 1 byte an element, up to a multiple of 4, and 4 a block."""
    return WireSize(4 * num_blocks(numel, block) + -(-numel // 4) * 4)


def in_blocks(flat: Tensor, block: int) -> Tensor:
    """(num_blocks, block), the last padded with zeros."""
    missing = num_blocks(flat.numel(), block) * block - flat.numel()
    return torch.nn.functional.pad(flat, (0, missing)).view(-1, block)


def wire_of(scales: Tensor, codes: Tensor, numel: int) -> Tensor:
    """Scales (num_blocks,) and codes (num_blocks, block), of which the first `numel` count."""
    given = codes.reshape(-1)[:numel].view(torch.uint8)
    return torch.cat([scales.float().view(torch.uint8), torch.nn.functional.pad(given, (0, -numel % 4))])


def normal_scales(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Scales as float32, 0 where they are no normal number, and their inverses (0 of 0)."""
    found = torch.where(scales < LEAST_SCALE, 0, scales)
    return found, torch.where(found > 0, 1 / found, 0)


def loosened(loss: float, like: Tensor) -> float:
    """A bound of ‖x - x̂‖² / ‖x‖² when x̂ is rounded besides, to the dtype of `like`, and all arithmetic to float32."""
    unit = torch.finfo(like.dtype).eps / 2 if like.dtype in (torch.float16, torch.bfloat16) else 0.0
    return (math.sqrt(loss) * (1 + 2.0**-14) + (unit + 2.0**-22) * (1 + math.sqrt(loss))) ** 2


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
