"""16-bit floats: half the bytes, and numbers that may be added on their way.

Source: P. Micikevicius et al., "Mixed precision training", 2018, section 3; D. Kalamkar et al., "A study of BFLOAT16
for deep learning training", 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from polytempo.compression.encoding.coded import Coded, Kernels, WireSize, room_for
from polytempo.compression.encoding.values import computed, refuse, whole
from polytempo.core import EncodeContext, Facts, Law
from polytempo.core.state import narrowed
from polytempo.native.kernels import codes_dense
from polytempo.native.kernels.codes_dense import fits

_HALF_ULP = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""The largest relative error of a number in the normal range."""


def fp16() -> Coded:
    """IEEE half precision: 11 significant bits, up to 65504, whole down to 6.1e-5 and gone below 3e-8.

    No loss scaling is needed for overflow: a finite number beyond the range becomes the range's end, and with feedback
    the rest goes next time. NaN and infinities arrive as such. Cost: 2 bytes an element.
    """
    return Coded(Cast("fp16()", torch.float16), _KERNELS)


def bf16() -> Coded:
    """bfloat16: 8 significant bits, and the range of float32. Cost: 2 bytes an element."""
    return Coded(Cast("bf16()", torch.bfloat16), _KERNELS)


@dataclass(frozen=True)
class Cast:
    """See `fp16` and `bf16`."""

    name: str
    dtype: torch.dtype

    @cached_property
    def facts(self) -> Facts:
        """The bound holds in the normal range: 6.1e-5 to 65504 for fp16, 1.2e-38 to 3.4e38 for bf16."""
        law = Law("contraction", lambda like: 1 - _HALF_ULP[self.dtype] ** 2)
        return Facts(self.name, law, flops=2.0, summable=True, elementwise=True, passes_nonfinite=True)

    def size(self, like: Tensor, terms: int = 1) -> WireSize:
        """2 bytes an element, of the 16-bit type itself, so that wires can be added."""
        return WireSize(2 * like.numel(), self.dtype)

    def encode(self, x: Tensor, when: EncodeContext) -> Tensor:
        """Round to nearest even. Finite values stay finite, also in the sum of `when.terms` wires."""
        return narrowed(computed(x), torch.empty(0, dtype=self.dtype, device=x.device), self.limit(when.terms))

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext) -> Tensor:
        """Exact, except that finite values stay finite in float16, too."""
        wire = whole(self.name, wire, like, like.numel(), self.dtype)
        if torch.finfo(like.dtype).max < torch.finfo(self.dtype).max:
            wire = narrowed(wire.float(), like)
        return wire.view(like.shape)

    def limit(self, terms: int) -> float:
        """The largest magnitude with a finite sum of `terms` numbers in any order of adding and rounding.

        Of multiples of the largest number's last place no partial sum rounds. Where `terms` is beyond the mantissa's
        count, half as much is left: no addition can then round up by more than its smaller term.
        """
        most = torch.finfo(self.dtype).max
        place = most * torch.finfo(self.dtype).eps / (2 - torch.finfo(self.dtype).eps)
        return place * (most / place // terms) or most / 2 / terms


def _encode(encoding: Cast, x: Tensor, residual: Tensor | None, when: EncodeContext, out: Tensor | None) -> Tensor:
    wire = room_for(encoding, x, out)
    bad = codes_dense.cast_(x, residual, encoding.limit(when.terms), wire)
    if residual is not None:
        refuse(encoding.facts.name, bad, x, residual)
    return wire


def _add_(encoding: Cast, wire: Tensor, out: Tensor, when: EncodeContext) -> None:
    codes_dense.add_cast_(whole(encoding.facts.name, wire, out, out.numel(), encoding.size(out).dtype), out)


_KERNELS = Kernels(fits, _add_, None, fits, _encode)
