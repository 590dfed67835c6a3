"""8-bit floats of a dynamic tree: as many bits for the mantissa as the exponent leaves.

Source: T. Dettmers, "8-bit approximations for parallelism in deep learning", 2016, section 3 ("dynamic tree").
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.compression.encoding.blocks import (
    Parts,
    block_kernels,
    in_blocks,
    loosened,
    normal_scales,
    size,
    wire_of,
)
from polytempo.compression.encoding.coded import Coded, WireSize
from polytempo.compression.encoding.values import check_finite, computed
from polytempo.core import EncodeContext, Facts, Law
from polytempo.core.calls.call_name import codec_name
from polytempo.core.calls.typed_arguments import check_whole
from polytempo.native.kernels import codes_dense

_MOST = torch.finfo(torch.float32).max
DECADES = 7
ZERO, ONE = 127, 255
"""The codes of 0 and of 1."""


def dynamic8(block: int = 4096) -> Coded:
    """x̂ = scale · number[code], with scale = max |v| over each `block` consecutive elements.

        wire       [ scales: float32, one a block | codes: uint8, one an element | zeros up to a multiple of 4 bytes ]
        magnitude  0 … 0 1 b … b     7 bits m: k zeros for the decade 10^-(k+1) to 10^-k, then 6 - k bits for one of its
                                     2^(6-k) equal cells; its middle is the number
        code       127 ± m; number[127] = 0

    So codes ascend as their numbers do, over seven decades, the largest with steps of 1.4 %. Sign and magnitude would
    have two zeros; the second one, code 255, is 1. So the largest element arrives exactly if positive, times 0.993 if
    negative, and all 256 numbers are distinct.

    Cost: 1 + 4 / block bytes an element. Law: a contraction; its bound is computed from the 256 numbers and the block's
    length, and holds where max |v| ≥ 1.2e-38. Smaller blocks travel as zeros, and with feedback are residual.
    Deviations: the paper has one scale for a tensor; cells' middles and code 255 as in the author's later libraries.
    In float64 numbers are looked up in float32.
    Raises NotFinite as `int8` does, and ValueError where block < 1.
    """
    check_whole(block=block)
    if block < 1:
        raise ValueError(f"block must be a number of elements >= 1, got {block}")
    return Coded(Dynamic8(block), _KERNELS)


@dataclass(frozen=True)
class Dynamic8:
    """See `dynamic8`."""

    block: int

    @cached_property
    def facts(self) -> Facts:
        """The bound holds for the worst block of this length, found among the numbers half way between two codes."""
        bound = Law("contraction", lambda like: 1 - loosened(_loss(min(self.block, like.numel())), like))
        return Facts(codec_name(dynamic8, self), bound, flops=24.0)

    def size(self, like: Tensor, terms: int = 1) -> WireSize:
        """1 an element, up to a multiple of 4, and 4 a block."""
        return size(like.numel(), self.block)

    def parts(self, wire: Tensor, like: Tensor) -> Parts:
        """Scales and codes."""
        return Parts(self.facts.name, wire, like, self.block, torch.uint8)

    def encode(self, x: Tensor, when: EncodeContext) -> Tensor:
        """Round to the nearest of 256 numbers; rounding decides between two equally near ones."""
        check_finite(self.facts.name, x)
        rows = in_blocks(computed(x), self.block)
        scales, inverse = normal_scales(rows.abs().amax(1).clamp(max=_MOST).float())
        codes = nearest((rows * inverse.to(rows)[:, None]).float(), Tree.of(tree().to(x.device)))
        return wire_of(scales, codes.to(torch.uint8), x.numel())

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext) -> Tensor:
        """scale · number[code]."""
        parts, wide = self.parts(wire, like), torch.float64 if like.dtype is torch.float64 else torch.float32
        numbers = Tree.of(tree().to(like.device)).numbers.to(wide)
        scales = parts.scales.to(wide).repeat_interleave(self.block)[: like.numel()]
        return (numbers[parts.codes.int()] * scales).view(like.shape).to(like.dtype)


@cache
def _loss(count: int) -> float:
    """The largest ‖x - x̂‖² / ‖x‖² of so many elements.

    One is ±1 (-1 is met to 0.007), and the others are best all alike, and half way between two numbers: there the
    error e is largest for its x, and e² - loss · x² is convex between.
    """
    numbers = Tree.of(tree()).numbers.double()
    x = (numbers[1:] + numbers[:-1]) / 2
    error = (numbers[1:] - numbers[:-1]) / 2
    own = (1 + numbers[0]) ** 2
    others = max(0, count - 1)
    return float(((own + others * error**2) / (1 + others * x**2)).max().maximum(own))


class Tree(NamedTuple):
    """The numbers of codes, in float32. Decade k is from 10^-(k+1) to 10^-k, and has 2^(6-k) cells."""

    numbers: Tensor
    """(256,), ascending."""
    begins: Tensor
    """(7,) The smallest magnitude with its nearest number in decade k."""
    steeps: Tensor
    """(7,) Cells for a unit."""
    firsts: Tensor
    """(7,) 2^(6-k): the magnitude's bits for the first cell."""
    one: Tensor
    """(1,) The smallest that is nearer to 1 than to the number before."""

    @classmethod
    def of(cls, packed: Tensor) -> Tree:
        """The parts of one tensor, as the kernels read it."""
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


_KERNELS = block_kernels(
    lambda x, residual, block, *parts: codes_dense.dynamic8_(x, residual, block, tree(), *parts),
    lambda scales, codes, block, out: codes_dense.add_dynamic8_(scales, codes, block, tree(), out),
)
