"""Linear 8-bit codes: a scale for each block of elements, and a byte for each element.

Source: T. Dettmers, "8-bit approximations for parallelism in deep learning", 2016, section 3 ("linear"; there one scale
for a tensor). A scale for each block keeps one large element from making zeros of all the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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
from polytempo.compression.kernels import on_device
from polytempo.core import EncodeContext, Facts, Law
from polytempo.core.calls.call_name import codec_name
from polytempo.core.calls.typed_arguments import check_whole
from polytempo.native.kernels import codes_dense

MOST_CODE = 127
GREATEST_SCALE = float.fromhex("0x1.020406p121")
"""The largest of float32 that is finite 127 times."""


def int8(block: int = 256) -> Coded:
    """scale = max |v| / 127 over each `block` consecutive elements; code = v / scale to nearest even; x̂ = scale · code.

        wire  [ scales: float32, one a block | codes: int8, one an element | zeros up to a multiple of 4 bytes ]

    Cost: 1 + 4 / block bytes an element; natively one pass over memory, and with a residual one more over x.

    Law: ‖x - x̂‖² ≤ (block - 1) / (254² + block - 1) · ‖x‖², so a contraction for every block. A block's A = max |v|
    is met exactly, and any other error e is at most scale / 2 = A / 254, and at most |x|, since 0 is a code; of
    Σe² / (A² + Σx²) with e ≤ |x| the most is at e = |x| = A / 254. The stated bound leaves room for float32's rounding
    and a 16-bit x̂'s. It does not hold where A < 1.5e-36, for a scale must be a normal number: such a block
    travels as zeros, and with feedback all of it is residual.

    The scale is rounded to float32 before it is used. In float64, values beyond float32's range become its end.
    Raises NotFinite for NaN and infinities, with everything as it was (if the residual itself is not finite, or so
    large that it overflows with a small x, earlier blocks of it may have been encoded), and ValueError where block < 1.
    """
    check_whole(block=block)
    if block < 1:
        raise ValueError(f"block must be a number of elements >= 1, got {block}")
    return Coded(Int8(block), _KERNELS)


@dataclass(frozen=True)
class Int8:
    """See `int8`."""

    block: int

    @cached_property
    def facts(self) -> Facts:
        """See `int8` for the proof of the bound."""
        return Facts(codec_name(int8, self), Law("contraction", self._bound), flops=6.0)

    def _bound(self, like: Tensor) -> float:
        others = max(0, min(self.block, like.numel()) - 1)
        return 1 - loosened(others / ((2 * MOST_CODE) ** 2 + others), like)

    def size(self, like: Tensor, terms: int = 1) -> WireSize:
        """1 an element, up to a multiple of 4, and 4 a block."""
        return size(like.numel(), self.block)

    def parts(self, wire: Tensor, like: Tensor) -> Parts:
        """Scales and codes."""
        return Parts(self.facts.name, wire, like, self.block, torch.int8)

    def encode(self, x: Tensor, when: EncodeContext) -> Tensor:
        """Round to nearest even."""
        check_finite(self.facts.name, x)
        rows = in_blocks(computed(x), self.block)
        scales, inverse = normal_scales((rows.abs().amax(1) / MOST_CODE).clamp(max=GREATEST_SCALE).float())
        codes = (rows * inverse.to(rows)[:, None]).round().clamp(-MOST_CODE, MOST_CODE)
        return wire_of(scales, codes.to(torch.int8), x.numel())

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext) -> Tensor:
        """scale · code."""
        parts, wide = self.parts(wire, like), torch.float64 if like.dtype is torch.float64 else torch.float32
        rows = in_blocks(parts.codes.to(wide), self.block) * parts.scales.to(wide)[:, None]
        return rows.view(-1)[: like.numel()].view(like.shape).to(like.dtype)


_KERNELS = block_kernels(codes_dense.int8_, codes_dense.add_int8_).or_else(
    block_kernels(on_device.int8_, on_device.add_int8_, on_device.fits)
)
