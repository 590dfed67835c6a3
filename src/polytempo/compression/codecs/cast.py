"""16-bit floats: half the bytes, and numbers that may be added on their way.

Source: P. Micikevicius et al., "Mixed precision training", 2018, section 3; D. Kalamkar et al., "A study of BFLOAT16
for deep learning training", 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from polytempo.compression.encoding.coded import Coded, WireSize
from polytempo.compression.encoding.values import computed, whole
from polytempo.compression.kernels.dense import CAST
from polytempo.core import EncodeContext, Facts, Law
from polytempo.core.state import narrowed

_HALF_ULP = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""The largest relative error of a number in the normal range."""


def fp16() -> Coded:
    """IEEE half precision: 11 significant bits, up to 65504, whole down to 6.1e-5 and gone below 3e-8.

    No loss scaling is needed for overflow: a finite number beyond the range becomes the largest one that is in it, and
    with feedback the rest goes next time. NaN and infinities arrive as such. Cost: 2 bytes an element.
    """
    return Coded(Cast("fp16()", torch.float16), CAST)


def bf16() -> Coded:
    """bfloat16: 8 significant bits, and the range of float32. Cost: 2 bytes an element."""
    return Coded(Cast("bf16()", torch.bfloat16), CAST)


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
        """To nearest even. What is finite stays finite, also in the sum of `when.terms` wires."""
        return narrowed(computed(x), torch.empty(0, dtype=self.dtype, device=x.device), self.limit(when.terms))

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext) -> Tensor:
        """Exact, but that what is finite stays finite in float16, too."""
        wire = whole(self.name, wire, like, like.numel(), self.dtype)
        if torch.finfo(like.dtype).max < torch.finfo(self.dtype).max:
            wire = narrowed(wire.float(), like)
        return wire.view(like.shape)

    def limit(self, terms: int) -> float:
        """So many numbers of this magnitude have a finite sum, in whatever order they are added and rounded.

        Of multiples of the largest number's last place no partial sum rounds. Where `terms` is beyond what the mantissa
        can count, half as much is left: no addition can then round up by more than its smaller term.
        """
        most = torch.finfo(self.dtype).max
        place = most * torch.finfo(self.dtype).eps / (2 - torch.finfo(self.dtype).eps)
        return place * (most / place // terms) or most / 2 / terms
