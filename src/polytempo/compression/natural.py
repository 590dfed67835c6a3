"""Natural compression: sign and exponent; the mantissa decides at random whether up or down.

    wire    a byte of exponent for each element, zeros up to a multiple of 4 | signs, 1 bit each (`compression.fields`)

Source: S. Horváth, C.-Y. Ho, L. Horváth, A. N. Sahu, M. Canini, P. Richtárik, "Natural compression for distributed deep
learning", 2019, definition 1 and theorem 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from polytempo.compression.draw import draw_key, draws
from polytempo.compression.fields import dense_fields, num_words, packed, unpacked
from polytempo.compression.values import fitted, flat_f32, opened, refused, room
from polytempo.core import ALONE, CodecState, EncodeContext, Law
from polytempo.core.call_name import codec_name
from polytempo.core.checks import check_whole
from polytempo.native import codes_drawn
from polytempo.native.codes_drawn import is_native

_SIGNS = dense_fields(1)
_LARGEST_POWER = 254
"""The byte of 2^127."""


@dataclass(frozen=True)
class Natural:
    """See `natural`."""

    seed: int
    summable: bool = False
    sparse: bool = False
    fixed: bool = True
    passes_nonfinite: bool = False
    flops: float = 20.0

    @cached_property
    def name(self) -> str:
        """As a person would write it."""
        return codec_name(natural, self)

    @property
    def law(self) -> Law:
        """1/8, in the range from 2^-126 to 2^127."""
        return Law("unbiased", lambda like: 1 / 8)

    def init(self, like: Tensor) -> CodecState:
        """Nothing to remember."""
        return None

    def wire_dtype(self, like: Tensor, terms: int = 1) -> torch.dtype:
        """Bytes."""
        return torch.uint8

    def wire_bytes(self, like: Tensor, terms: int = 1) -> int:
        """9 bits an element."""
        return _padded(like.numel()) + 4 * num_words(_SIGNS, like.numel())

    def statistic(self, x: Tensor, state: CodecState) -> float | None:
        """Nothing to agree on."""
        return None

    def encode(
        self, x: Tensor, state: CodecState = None, when: EncodeContext = ALONE, out: Tensor | None = None
    ) -> tuple[Tensor, CodecState]:
        """One pass. Raises NotFinite."""
        flat, wire, key = flat_f32(x), room(self.name, self.wire_bytes(x), x, out), draw_key(self.seed, when)
        if is_native(wire, flat):
            if codes_drawn.natural_encode(flat, None, key, wire) >= 0:
                raise refused(self.name, x)
            return wire, state
        if not flat.isfinite().all():
            raise refused(self.name, x)
        bits = flat.view(torch.int32).to(torch.int64)
        drawn = draws(key, flat.numel(), flat.device) >> 9
        powers = (((bits & 0x7FFFFFFF) + drawn) >> 23).clamp(max=_LARGEST_POWER)
        wire[: flat.numel()] = powers
        wire[flat.numel() : _padded(flat.numel())] = 0
        wire[_padded(flat.numel()) :] = packed(_SIGNS, (bits < 0).to(torch.int64)).view(torch.uint8)
        return wire, state

    def encode_(
        self,
        x: Tensor,
        residual: Tensor,
        state: CodecState = None,
        when: EncodeContext = ALONE,
        out: Tensor | None = None,
    ) -> tuple[Tensor, CodecState]:
        """Two passes, so that nothing has changed where v = x + residual is not finite: NotFinite."""
        x = x.detach()
        wire = room(self.name, self.wire_bytes(x), x, out)
        if not is_native(wire, x, residual):
            v = x + residual
            wire, state = self.encode(v, state, when, out)
            residual.copy_(v - self.decode(wire, v, when))
            return wire, state
        if codes_drawn.natural_encode(x, residual, draw_key(self.seed, when), wire) >= 0:
            raise refused(self.name, x, residual)
        return wire, state

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext = ALONE) -> Tensor:
        """±2^exponent, or 0."""
        wire = opened(self.name, self.wire_bytes(like), like, wire)
        if is_native(wire, like):
            out = torch.empty_like(like)
            codes_drawn.natural_decode(wire, out, add=False)
            return out
        signs = unpacked(_SIGNS, wire[_padded(like.numel()) :].view(torch.int32), like.numel())
        sizes = (wire[: like.numel()].to(torch.int32) << 23).view(torch.float32)
        return fitted(torch.where(signs == 1, -sizes, sizes), like)

    def add_(self, wire: Tensor, out: Tensor, when: EncodeContext = ALONE) -> None:
        """out += ±2^exponent."""
        wire = opened(self.name, self.wire_bytes(out), out, wire)
        if is_native(wire, out):
            codes_drawn.natural_decode(wire, out, add=True)
        else:
            out.add_(self.decode(wire, out, when))


def _padded(count: int) -> int:
    return -(-count // 4) * 4


def natural(seed: int = 0) -> Natural:
    """x̂ = sign(v) · 2^e or sign(v) · 2^(e+1), for 2^e ≤ |v| < 2^(e+1): up with probability (|v| - 2^e) / 2^e.

    So E x̂ = v, and E(x̂ - v)² ≤ v² / 8, the worst at |v| = 4/3 · 2^e. Without arithmetic on floats: a draw of 23 bits
    is added to the number's bits, and what it carries into the exponent is the rounding up, with exactly the
    probability that the mantissa says.

    Zeros stay. Denormals become 0 or 2^-126 in the same way, unbiased, though with more variance than v² / 8. Above
    2^127 x̂ is 2^127, for 2^128 is no float32: there alone it is biased. A float16 x̂ of 2^16 becomes 65504.

    Cost: 9 bits an element. Other dtypes are encoded as float32 (float64: rounded to it first). Raises NotFinite for
    NaN, infinities, and float64 values beyond float32's range.

    Deviation: the signs are a plane of their own, instead of 9-bit numbers side by side.
    """
    check_whole(seed=seed)
    return Natural(seed)
