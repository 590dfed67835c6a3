"""8-bit floats of a dynamic tree: as many bits for the mantissa as the exponent leaves.

Source: T. Dettmers, "8-bit approximations for parallelism in deep learning", 2016, section 3 ("dynamic tree").
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.compression.int8 import (
    LEAST_SCALE,
    Parts,
    blocks_bytes,
    computed,
    give_,
    in_blocks,
    loosened,
    num_blocks,
    refuse,
    refuse_sum,
)
from polytempo.compression.values import opened, room
from polytempo.core import ALONE, CodecState, EncodeContext, Law
from polytempo.core.call_name import codec_name
from polytempo.core.checks import check_whole
from polytempo.native import codes_dense as native

DECADES = 7
ZERO, ONE = 127, 255
"""The codes of 0 and of 1."""
_MOST = torch.finfo(torch.float32).max


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


@dataclass(frozen=True)
class Dynamic8:
    """See `dynamic8`."""

    block: int
    summable: bool = field(default=False, init=False)
    sparse: bool = field(default=False, init=False)
    fixed: bool = field(default=True, init=False)
    passes_nonfinite: bool = field(default=False, init=False)
    flops: float = field(default=24.0, init=False)

    @cached_property
    def name(self) -> str:
        """As a person would write it."""
        return codec_name(dynamic8, self)

    @property
    def law(self) -> Law:
        """The worst block of this length, found among the numbers half way between two codes."""
        return Law("contraction", lambda like: 1 - loosened(_loss(min(self.block, like.numel())), like))

    def init(self, like: Tensor) -> CodecState:
        """Nothing to remember."""
        return None

    def wire_dtype(self, like: Tensor, terms: int = 1) -> torch.dtype:
        """Bytes."""
        return torch.uint8

    def wire_bytes(self, like: Tensor, terms: int = 1) -> int:
        """1 an element, up to a multiple of 4, and 4 a block."""
        return blocks_bytes(like.numel(), self.block)

    def statistic(self, x: Tensor, state: CodecState) -> float | None:
        """Nothing to agree on."""
        return None

    def encode(
        self, x: Tensor, state: CodecState = None, when: EncodeContext = ALONE, out: Tensor | None = None
    ) -> tuple[Tensor, CodecState]:
        """To the nearest of 256 numbers; which of two equally near ones is left to rounding."""
        x = x.detach()
        wire, parts = self._room(x, out)
        if native.fits(x):
            index = native.dynamic8_(x, None, self.block, tree(), parts.scales, parts.codes)
            refuse_sum(self.name, x, None, index)
            return wire, state
        flat = computed(x)
        refuse(self.name, flat)
        rows = in_blocks(flat, self.block)
        scales = rows.abs().amax(1).clamp(max=_MOST).float()
        scales = torch.where(scales < LEAST_SCALE, 0, scales)
        inverse = torch.where(scales > 0, 1 / scales, 0).to(rows)
        codes = nearest((rows * inverse[:, None]).float(), Tree.of(tree().to(x.device)))
        parts.scales.copy_(scales)
        parts.codes.copy_(codes.view(-1)[: flat.numel()])
        return wire, state

    def encode_(
        self,
        x: Tensor,
        residual: Tensor,
        state: CodecState = None,
        when: EncodeContext = ALONE,
        out: Tensor | None = None,
    ) -> tuple[Tensor, CodecState]:
        """As `encode` of v = x + residual; residual ← v - decode(wire)."""
        x = x.detach()
        if native.fits(x, residual):
            wire, parts = self._room(x, out)
            index = native.dynamic8_(x, residual, self.block, tree(), parts.scales, parts.codes)
            refuse_sum(self.name, x, residual, index)
            return wire, state
        wire, state = self.encode(x + residual, state, when, out)
        return give_(wire, x, residual, self.decode(wire, x, when)), state

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext = ALONE) -> Tensor:
        """scale · number[code]."""
        parts = self._parts(wire, like)
        if native.fits(like):
            found = torch.zeros_like(like)
            native.add_dynamic8_(parts.scales, parts.codes, self.block, tree(), found)
            return found
        wide = torch.float64 if like.dtype is torch.float64 else torch.float32
        numbers = Tree.of(tree().to(like.device)).numbers.to(wide)
        scales = parts.scales.to(wide).repeat_interleave(self.block)[: like.numel()]
        return (numbers[parts.codes.int()] * scales).view(like.shape).to(like.dtype)

    def add_(self, wire: Tensor, out: Tensor, when: EncodeContext = ALONE) -> None:
        """out += scale · number[code]."""
        if native.fits(out):
            parts = self._parts(wire, out)
            native.add_dynamic8_(parts.scales, parts.codes, self.block, tree(), out)
        else:
            out.add_(self.decode(wire, out, when))

    def _room(self, x: Tensor, out: Tensor | None) -> tuple[Tensor, Parts]:
        wire = room(self.name, self.wire_bytes(x), x, out, torch.uint8)
        parts = self._parts(wire, x)
        parts.padding.zero_()
        assert len(parts.scales) == num_blocks(x.numel(), self.block)
        return wire, parts

    def _parts(self, wire: Tensor, like: Tensor) -> Parts:
        wire = opened(self.name, self.wire_bytes(like), like, wire, torch.uint8)
        return Parts(wire, like.numel(), self.block, torch.uint8)


def dynamic8(block: int = 4096) -> Dynamic8:
    """x̂ = scale · number[code], with scale = max |v| over each `block` consecutive elements.

        wire       [ scales: float32, one a block | codes: uint8, one an element | zeros up to a multiple of 4 bytes ]
        magnitude  0 … 0 1 b … b     7 bits m: k zeros for the decade 10^-(k+1) to 10^-k, then 6 - k bits for one of its
                                     2^(6-k) equal cells, whose middle is the number
        code       127 ± m; number[127] = 0

    So codes ascend as their numbers do, over seven decades, the largest with steps of 1.4 %. Sign and magnitude would
    have two zeros; the second one, code 255, is 1. So the largest element arrives exactly where it is positive, and as
    0.993 of itself where it is negative, and all 256 numbers are distinct.

    Cost: 1 + 4 / block bytes an element. Law: a contraction; its bound is computed from the 256 numbers and the block's
    length, and holds where max |v| ≥ 1.2e-38. Smaller blocks travel as zeros, and with feedback are owed.
    Deviations: the paper has one scale for a tensor; cells' middles and code 255 as in the author's later libraries.
    In float64 numbers are looked up in float32.
    Raises NotFinite as `int8` does, and ValueError where block < 1.
    """
    check_whole(block=block)
    if block < 1:
        raise ValueError(f"block must be a number of elements >= 1, got {block}")
    return Dynamic8(block)
