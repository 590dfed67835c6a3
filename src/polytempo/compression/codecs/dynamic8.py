"""8-bit floats of a dynamic tree: as many bits for the mantissa as the exponent leaves.

Source: T. Dettmers, "8-bit approximations for parallelism in deep learning", 2016, section 3 ("dynamic tree").
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from polytempo.compression.encoding.blocks import (
    Parts,
    Tree,
    in_blocks,
    loosened,
    nearest,
    normal_scales,
    size,
    tree,
    wire_of,
)
from polytempo.compression.encoding.coded import Coded, WireSize
from polytempo.compression.encoding.values import check_finite, computed
from polytempo.compression.kernels.dense import DYNAMIC8
from polytempo.core import EncodeContext, Facts, Law
from polytempo.core.calls.call_name import codec_name
from polytempo.core.calls.typed_arguments import check_whole

_MOST = torch.finfo(torch.float32).max


def dynamic8(block: int = 4096) -> Coded:
    """x̂ = scale · number[code], with scale = max |v| over each `block` consecutive elements.

        wire       [ scales: float32, one a block | codes: uint8, one an element | zeros up to a multiple of 4 bytes ]
        magnitude  0 … 0 1 b … b     7 bits m: k zeros for the decade 10^-(k+1) to 10^-k, then 6 - k bits for one of its
                                     2^(6-k) equal cells, whose middle is the number
        code       127 ± m; number[127] = 0

    So codes ascend as their numbers do, over seven decades, the largest with steps of 1.4 %. Sign and magnitude would
    have two zeros; the second one, code 255, is 1. So the largest element arrives exactly where it is positive, and as
    0.993 of itself where it is negative, and all 256 numbers are distinct.

    Cost: 1 + 4 / block bytes an element. Law: a contraction; its bound is computed from the 256 numbers and the block's
    length, and holds where max |v| ≥ 1.2e-38. Smaller blocks travel as zeros, and with feedback are residual.
    Deviations: the paper has one scale for a tensor; cells' middles and code 255 as in the author's later libraries.
    In float64 numbers are looked up in float32.
    Raises NotFinite as `int8` does, and ValueError where block < 1.
    """
    check_whole(block=block)
    if block < 1:
        raise ValueError(f"block must be a number of elements >= 1, got {block}")
    return Coded(Dynamic8(block), DYNAMIC8)


@dataclass(frozen=True)
class Dynamic8:
    """See `dynamic8`."""

    block: int

    @cached_property
    def facts(self) -> Facts:
        """The bound is that of the worst block of this length, found among the numbers half way between two codes."""
        bound = Law("contraction", lambda like: 1 - loosened(_loss(min(self.block, like.numel())), like))
        return Facts(codec_name(dynamic8, self), bound, flops=24.0)

    def size(self, like: Tensor, terms: int = 1) -> WireSize:
        """1 an element, up to a multiple of 4, and 4 a block."""
        return size(like.numel(), self.block)

    def parts(self, wire: Tensor, like: Tensor) -> Parts:
        """Scales and codes."""
        return Parts(self.facts.name, wire, like, self.block, torch.uint8)

    def encode(self, x: Tensor, when: EncodeContext) -> Tensor:
        """To the nearest of 256 numbers; which of two equally near ones is left to rounding."""
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
