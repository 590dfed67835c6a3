"""Natural compression: sign and exponent; the mantissa decides at random whether up or down.

    wire    a byte of exponent for each element, zeros up to a multiple of 4 | signs, 1 bit each (`encoding.fields`)

Source: S. Horváth, C.-Y. Ho, L. Horváth, A. N. Sahu, M. Canini, P. Richtárik, "Natural compression for distributed deep
learning", 2019, definition 1 and theorem 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from polytempo.compression.encoding.coded import Coded, WireSize
from polytempo.compression.encoding.draw import draw_key, drawn_kernels, draws, given_values
from polytempo.compression.encoding.entries import padded
from polytempo.compression.encoding.fields import dense_fields, num_words, packed, unpacked
from polytempo.compression.encoding.values import check_f32, fitted, opened, refused, room
from polytempo.core import EncodeContext, Facts, Law
from polytempo.core.calls.call_name import codec_name
from polytempo.core.calls.typed_arguments import check_whole
from polytempo.native.kernels import codes_drawn

_SIGNS = dense_fields(1)
_LARGEST_POWER = 254
"""The byte of 2^127."""


def natural(seed: int = 0) -> Coded:
    """x̂ = sign(v) · 2^e or sign(v) · 2^(e+1), for 2^e ≤ |v| < 2^(e+1): up with probability (|v| - 2^e) / 2^e.

    So E x̂ = v, and E(x̂ - v)² ≤ v² / 8, the worst at |v| = 4/3 · 2^e. Without arithmetic on floats: a draw of 23 bits
    is added to the number's bits, and its carry into the exponent is the rounding up, with exactly the
    mantissa's probability.

    Zeros stay. Denormals become 0 or 2^-126 in the same way, unbiased, though with more variance than v² / 8. Above
    2^127 x̂ is 2^127, for float32 lacks 2^128: there alone it is biased. A float16 x̂ of 2^16 becomes 65504.

    Cost: 9 bits an element. Other dtypes are encoded as float32 (float64: rounded to it first). Raises NotFinite for
    NaN, infinities, and float64 values beyond float32's range.

    Deviation: the signs are a plane of their own, instead of 9-bit numbers side by side.
    """
    check_whole(seed=seed)
    return Coded(Natural(seed), _KERNELS)


@dataclass(frozen=True)
class Natural:
    """See `natural`."""

    seed: int

    @cached_property
    def facts(self) -> Facts:
        """The bound is 1/8, in the range from 2^-126 to 2^127."""
        return Facts(codec_name(natural, self), Law("unbiased", lambda like: 1 / 8), flops=20.0, draws=True)

    def size(self, like: Tensor, terms: int = 1) -> WireSize:
        """9 bits an element."""
        return WireSize(padded(like.numel()) + 4 * num_words(_SIGNS, like.numel()))

    def encode(self, x: Tensor, when: EncodeContext) -> Tensor:
        """Exponents, and signs."""
        flat = check_f32(self.facts.name, x)
        bits = flat.view(torch.int32).to(torch.int64)
        drawn = draws(draw_key(self.seed, when), flat.numel(), flat.device) >> 9
        powers = (((bits & 0x7FFFFFFF) + drawn) >> 23).clamp(max=_LARGEST_POWER)
        wire = torch.zeros(self.size(x).num_bytes, dtype=torch.uint8, device=x.device)
        wire[: flat.numel()] = powers
        wire[padded(flat.numel()) :] = packed(_SIGNS, (bits < 0).to(torch.int64)).view(torch.uint8)
        return wire

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext) -> Tensor:
        """±2^exponent, or 0."""
        wire = opened(self.facts.name, self.size(like).num_bytes, like, wire)
        signs = unpacked(_SIGNS, wire[padded(like.numel()) :].view(torch.int32), like.numel())
        sizes = (wire[: like.numel()].to(torch.int32) << 23).view(torch.float32)
        return fitted(torch.where(signs == 1, -sizes, sizes), like)


def _encode(encoding: Natural, x: Tensor, residual: Tensor | None, when: EncodeContext, out: Tensor | None) -> Tensor:
    wire = room(encoding.facts.name, encoding.size(x).num_bytes, x, out)
    if codes_drawn.natural_encode(given_values(x, residual), residual, draw_key(encoding.seed, when), wire) >= 0:
        raise refused(encoding.facts.name, x, residual)
    return wire


def _decode(encoding: Natural, wire: Tensor, out: Tensor, when: EncodeContext, *, add: bool) -> None:
    wire = opened(encoding.facts.name, encoding.size(out).num_bytes, out, wire)
    codes_drawn.natural_decode(wire, out, add=add)


_KERNELS = drawn_kernels(_encode, _decode)
