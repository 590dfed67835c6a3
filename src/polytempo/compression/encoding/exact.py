"""Nothing is left out: what small tensors travel by, where the rest is encoded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from polytempo.compression.encoding.coded import Coded, WireSize
from polytempo.compression.encoding.values import whole
from polytempo.core import EncodeContext, Facts, Law


def exact() -> Coded:
    """x̂ = x: K bytes for K bytes.

    An all-reduce of 16-bit tensors adds in 16 bits: it rounds each partial sum, and one beyond their range is infinite,
    as 3 · (65504 / 3) in float16, whose parts are rounded up. `route=pt.compression.all_gather` adds in float32.
    """
    return Coded(Exact())


@dataclass(frozen=True)
class Exact:
    """See `exact`."""

    @cached_property
    def facts(self) -> Facts:
        """x̂ = x, bit by bit."""
        return Facts("exact()", Law("lossless"), flops=1.0, summable=True, elementwise=True, passes_nonfinite=True)

    def size(self, like: Tensor, terms: int = 1) -> WireSize:
        """The tensor's."""
        return WireSize(like.numel() * like.element_size(), like.dtype)

    def encode(self, x: Tensor, when: EncodeContext) -> Tensor:
        """The values, flat."""
        return x.reshape(-1)

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext) -> Tensor:
        """The values, in their shape."""
        return whole("exact()", wire, like, like.numel(), like.dtype).view(like.shape)
