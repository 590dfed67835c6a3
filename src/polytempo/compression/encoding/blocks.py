"""Wires of blocks: a scale for so many elements and a byte for each.

[ scale of block 0, of block 1, … : float32 | code of element 0, of element 1, … : 1 byte | zeros up to 4 bytes ]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from polytempo.compression.encoding.coded import Encoding, Kernels, WireSize, from_zeros, room_for
from polytempo.compression.encoding.values import opened, refuse
from polytempo.core import EncodeContext
from polytempo.native.kernels import codes_dense

LEAST_SCALE = 2.0**-126
"""The smallest normal float32. The inverse of less may be infinite, and processors may take less for 0."""


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
    """The number of blocks; the last may be shorter."""
    return -(-numel // block)


def size(numel: int, block: int) -> WireSize:
    """The size of a wire: 1 byte an element, up to a multiple of 4, and 4 a block."""
    return WireSize(4 * num_blocks(numel, block) + -(-numel // 4) * 4)


def in_blocks(flat: Tensor, block: int) -> Tensor:
    """(num_blocks, block), the last padded with zeros."""
    missing = num_blocks(flat.numel(), block) * block - flat.numel()
    return torch.nn.functional.pad(flat, (0, missing)).view(-1, block)


def wire_of(scales: Tensor, codes: Tensor, numel: int) -> Tensor:
    """The wire of scales (num_blocks,) and the first `numel` codes of (num_blocks, block)."""
    given = codes.reshape(-1)[:numel].view(torch.uint8)
    return torch.cat([scales.float().view(torch.uint8), torch.nn.functional.pad(given, (0, -numel % 4))])


def normal_scales(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Scales as float32, 0 where they are not normal, and their inverses (0 of 0)."""
    found = torch.where(scales < LEAST_SCALE, 0, scales)
    return found, torch.where(found > 0, 1 / found, 0)


def loosened(loss: float, like: Tensor) -> float:
    """A bound of ‖x - x̂‖² / ‖x‖² when x̂ is also rounded to the dtype of `like`, and all arithmetic to float32."""
    unit = torch.finfo(like.dtype).eps / 2 if like.dtype in (torch.float16, torch.bfloat16) else 0.0
    return (math.sqrt(loss) * (1 + 2.0**-14) + (unit + 2.0**-22) * (1 + math.sqrt(loss))) ** 2


class BlockEncoding(Encoding, Protocol):
    """`int8` and `dynamic8`."""

    @property
    def block(self) -> int:
        """Elements that share a scale."""

    def parts(self, wire: Tensor, like: Tensor) -> Parts:
        """A wire's scales and codes."""


def block_kernels(
    encode_: Callable[..., int], add_: Callable[..., None], fits: Callable[..., bool] = codes_dense.fits
) -> Kernels:
    """Kernels of a codec with a scale for each block, from functions of wires' parts."""

    def encode(
        encoding: BlockEncoding, x: Tensor, residual: Tensor | None, when: EncodeContext, out: Tensor | None
    ) -> Tensor:
        wire = room_for(encoding, x, out)
        parts = encoding.parts(wire, x)
        parts.padding.zero_()
        refuse(encoding.facts.name, encode_(x, residual, encoding.block, parts.scales, parts.codes), x, residual)
        return wire

    def add(encoding: BlockEncoding, wire: Tensor, out: Tensor, when: EncodeContext) -> None:
        parts = encoding.parts(wire, out)
        add_(parts.scales, parts.codes, encoding.block, out)

    return Kernels(fits, add, from_zeros(add), fits, encode)
