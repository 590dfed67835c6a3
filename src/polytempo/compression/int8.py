"""Linear 8-bit codes: a scale for each block of elements, and a byte for each element.

Source: T. Dettmers, "8-bit approximations for parallelism in deep learning", 2016, section 3 ("linear"; there one scale
for a tensor). A scale for each block keeps one large element from making zeros of all the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from polytempo.compression.values import check_kind, opened, room
from polytempo.core import ALONE, CodecState, EncodeContext, Law, NotFinite
from polytempo.core.call_name import codec_name
from polytempo.core.checks import check_whole
from polytempo.native import codes_dense as native

MOST_CODE = 127
LEAST_SCALE = 2.0**-126
"""Less is no normal number in float32: its inverse may be infinite, and processors may take it for 0."""
GREATEST_SCALE = float.fromhex("0x1.020406p121")
"""The largest of float32 that is finite 127 times."""


class Parts:
    """A wire's scales (num_blocks,) and codes (numel,), each a view, and the padding behind them.

    [ scale of block 0, of block 1, … : float32 | code of element 0, of element 1, … : 1 byte | zeros up to 4 bytes ]
    """

    def __init__(self, wire: Tensor, numel: int, block: int, code_dtype: torch.dtype) -> None:
        end = 4 * num_blocks(numel, block)
        self.scales = wire[:end].view(torch.float32)
        self.codes = wire[end : end + numel].view(code_dtype)
        self.padding = wire[end + numel :]


def num_blocks(numel: int, block: int) -> int:
    """How many there are; the last may be shorter."""
    return -(-numel // block)


def blocks_bytes(numel: int, block: int) -> int:
    """Of a wire of blocks."""
    return 4 * num_blocks(numel, block) + -(-numel // 4) * 4


def in_blocks(flat: Tensor, block: int) -> Tensor:
    """(num_blocks, block), the last padded with zeros."""
    missing = num_blocks(flat.numel(), block) * block - flat.numel()
    return torch.nn.functional.pad(flat, (0, missing)).view(-1, block)


def computed(x: Tensor) -> Tensor:
    """Flat, in the type of the arithmetic: float64 stays, everything else is float32."""
    check_kind(x)
    return x.reshape(-1).to(torch.float64 if x.dtype is torch.float64 else torch.float32)


def refuse(name: str, flat: Tensor, index: int | None = None) -> None:
    """Raise NotFinite where `flat` has NaN or an infinity; at `index`, where that is known."""
    if index is None:
        bad = ~flat.isfinite()
        if not bad.any():
            return
        index = int(bad.nonzero()[0])
    raise NotFinite(name, index, float(flat[index]))


def refuse_sum(name: str, x: Tensor, residual: Tensor | None, index: int) -> None:
    """Raise NotFinite for element `index` of x + residual, which a kernel has found; -1: fine."""
    if index >= 0:
        found = x.reshape(-1)[index : index + 1]
        raise NotFinite(name, index, float(found if residual is None else found + residual.reshape(-1)[index]))


def loosened(loss: float, like: Tensor) -> float:
    """A bound of ‖x - x̂‖² / ‖x‖² when x̂ is rounded besides, to the dtype of `like`, and all arithmetic to float32."""
    unit = torch.finfo(like.dtype).eps / 2 if like.dtype in (torch.float16, torch.bfloat16) else 0.0
    return (math.sqrt(loss) * (1 + 2.0**-14) + (unit + 2.0**-22) * (1 + math.sqrt(loss))) ** 2


def give_(wire: Tensor, x: Tensor, residual: Tensor, decoded: Tensor) -> Tensor:
    """residual ← x + residual - decoded; answers `wire`."""
    residual.add_(x).sub_(decoded)
    return wire


@dataclass(frozen=True)
class Int8:
    """See `int8`."""

    block: int
    summable: bool = field(default=False, init=False)
    sparse: bool = field(default=False, init=False)
    fixed: bool = field(default=True, init=False)
    passes_nonfinite: bool = field(default=False, init=False)
    flops: float = field(default=6.0, init=False)

    @cached_property
    def name(self) -> str:
        """As a person would write it."""
        return codec_name(int8, self)

    @property
    def law(self) -> Law:
        """See `int8` for the proof."""
        return Law("contraction", self._bound)

    def _bound(self, like: Tensor) -> float:
        others = max(0, min(self.block, like.numel()) - 1)
        return 1 - loosened(others / ((2 * MOST_CODE) ** 2 + others), like)

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
        """To nearest even."""
        x = x.detach()
        wire, parts = self._room(x, out)
        if native.fits(x):
            refuse_sum(self.name, x, None, native.int8_(x, None, self.block, parts.scales, parts.codes))
            return wire, state
        flat = computed(x)
        refuse(self.name, flat)
        rows = in_blocks(flat, self.block)
        scales = (rows.abs().amax(1) / MOST_CODE).clamp(max=GREATEST_SCALE).float()
        scales = torch.where(scales < LEAST_SCALE, 0, scales)
        inverse = torch.where(scales > 0, 1 / scales, 0).to(rows)
        codes = (rows * inverse[:, None]).round().clamp(-MOST_CODE, MOST_CODE)
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
            refuse_sum(self.name, x, residual, native.int8_(x, residual, self.block, parts.scales, parts.codes))
            return wire, state
        wire, state = self.encode(x + residual, state, when, out)
        return give_(wire, x, residual, self.decode(wire, x, when)), state

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext = ALONE) -> Tensor:
        """scale · code."""
        parts = self._parts(wire, like)
        if native.fits(like):
            found = torch.zeros_like(like)
            native.add_int8_(parts.scales, parts.codes, self.block, found)
            return found
        wide = torch.float64 if like.dtype is torch.float64 else torch.float32
        rows = in_blocks(parts.codes.to(wide), self.block) * parts.scales.to(wide)[:, None]
        return rows.view(-1)[: like.numel()].view(like.shape).to(like.dtype)

    def add_(self, wire: Tensor, out: Tensor, when: EncodeContext = ALONE) -> None:
        """out += scale · code."""
        if native.fits(out):
            parts = self._parts(wire, out)
            native.add_int8_(parts.scales, parts.codes, self.block, out)
        else:
            out.add_(self.decode(wire, out, when))

    def _room(self, x: Tensor, out: Tensor | None) -> tuple[Tensor, Parts]:
        wire = room(self.name, self.wire_bytes(x), x, out, torch.uint8)
        parts = self._parts(wire, x)
        parts.padding.zero_()
        return wire, parts

    def _parts(self, wire: Tensor, like: Tensor) -> Parts:
        wire = opened(self.name, self.wire_bytes(like), like, wire, torch.uint8)
        return Parts(wire, like.numel(), self.block, torch.int8)


def int8(block: int = 256) -> Int8:
    """scale = max |v| / 127 over each `block` consecutive elements; code = v / scale to nearest even; x̂ = scale · code.

        wire  [ scales: float32, one a block | codes: int8, one an element | zeros up to a multiple of 4 bytes ]

    Cost: 1 + 4 / block bytes an element; natively one pass over memory, and with a residual one more over x.

    Law: ‖x - x̂‖² ≤ (block - 1) / (254² + block - 1) · ‖x‖², so a contraction for every block. A block's A = max |v|
    is met exactly, and any other error e is at most scale / 2 = A / 254, and at most |x|, since 0 is a code; of
    Σe² / (A² + Σx²) with e ≤ |x| the most is at e = |x| = A / 254. The stated bound leaves room for float32's rounding
    and for that of a 16-bit x̂. It does not hold where A < 1.5e-36, for a scale must be a normal number: such a block
    travels as zeros, and with feedback all of it is owed.

    The scale is rounded to float32 before it is used. In float64 what is beyond float32's range becomes its end.
    Raises NotFinite for NaN and infinities, with everything as it was (if the residual itself is not finite, or so
    large that it overflows with a small x, earlier blocks of it may have been encoded), and ValueError where block < 1.
    """
    check_whole(block=block)
    if block < 1:
        raise ValueError(f"block must be a number of elements >= 1, got {block}")
    return Int8(block)
