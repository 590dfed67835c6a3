"""16-bit floats: half the bytes, and numbers that may be added on their way.

Source: P. Micikevicius et al., "Mixed precision training", 2018, section 3; D. Kalamkar et al., "A study of BFLOAT16
for deep learning training", 2019.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polytempo.compression.int8 import computed, give_, refuse, refuse_sum
from polytempo.compression.values import check_flat, room
from polytempo.core import ALONE, CodecState, EncodeContext, Law
from polytempo.core.state import narrowed
from polytempo.native import codes_dense as native

_HALF_ULP = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""The largest relative error of a number in the normal range."""


def _limit(dtype: torch.dtype, terms: int) -> float:
    """So many numbers of this magnitude have a finite sum, in whatever order they are added and rounded.

    Of multiples of the largest number's last place no partial sum rounds. Where `terms` is beyond what the mantissa can
    count, half as much is left: no addition can then round up by more than its smaller term.
    """
    most = torch.finfo(dtype).max
    place = most * torch.finfo(dtype).eps / (2 - torch.finfo(dtype).eps)
    return place * (most / place // terms) or most / 2 / terms


@dataclass(frozen=True)
class Cast:
    """See `fp16` and `bf16`."""

    name: str
    dtype: torch.dtype
    summable: bool = True
    sparse: bool = False
    fixed: bool = True
    passes_nonfinite: bool = True
    flops: float = 2.0

    @property
    def law(self) -> Law:
        """The bound holds in the normal range: 6.1e-5 to 65504 for fp16, 1.2e-38 to 3.4e38 for bf16."""
        return Law("contraction", lambda like: 1 - _HALF_ULP[self.dtype] ** 2)

    def init(self, like: Tensor) -> CodecState:
        """Nothing to remember."""
        return None

    def wire_dtype(self, like: Tensor, terms: int = 1) -> torch.dtype:
        """The 16-bit type itself, so that wires can be added."""
        return self.dtype

    def wire_bytes(self, like: Tensor, terms: int = 1) -> int:
        """2 an element."""
        return 2 * like.numel()

    def statistic(self, x: Tensor, state: CodecState) -> float | None:
        """Nothing to agree on."""
        return None

    def encode(
        self, x: Tensor, state: CodecState = None, when: EncodeContext = ALONE, out: Tensor | None = None
    ) -> tuple[Tensor, CodecState]:
        """To nearest even. What is finite stays finite, also in the sum of `when.terms` wires."""
        x = x.detach()
        wire, limit = self._room(x, out), _limit(self.dtype, when.terms)
        if native.fits(x):
            native.cast_(x, None, limit, wire)
        else:
            wire.copy_(narrowed(computed(x), wire, limit))
        return wire, state

    def encode_(
        self,
        x: Tensor,
        residual: Tensor,
        state: CodecState = None,
        when: EncodeContext = ALONE,
        out: Tensor | None = None,
    ) -> tuple[Tensor, CodecState]:
        """As `encode` of v = x + residual; residual ← v - decode(wire).

        Raises NotFinite for NaN and infinities, which would stay in the residual for ever; then everything is as it was
        (if the residual itself is not finite, or so large that it overflows with a small x, earlier parts of it may
        have been encoded).
        """
        x = x.detach()
        if native.fits(x, residual):
            wire = self._room(x, out)
            refuse_sum(self.name, x, residual, native.cast_(x, residual, _limit(self.dtype, when.terms), wire))
            return wire, state
        total = x + residual
        refuse(self.name, total.reshape(-1))
        wire, state = self.encode(total, state, when, out)
        return give_(wire, x, residual, self.decode(wire, x)), state

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext = ALONE) -> Tensor:
        """Exact, but that what is finite stays finite in float16, too. Raises ValueError for another tensor's wire."""
        return self._shaped(wire, like).to(like.dtype, copy=True)

    def add_(self, wire: Tensor, out: Tensor, when: EncodeContext = ALONE) -> None:
        """out += the numbers. Raises ValueError for a wire of another tensor."""
        if native.fits(out):
            native.add_cast_(self._shaped(wire, out), out)
        else:
            out.add_(self._shaped(wire, out))

    def _shaped(self, wire: Tensor, like: Tensor) -> Tensor:
        check_flat(f"a wire of {self.name}", wire, like.device, self.dtype)
        if wire.numel() != like.numel():
            raise ValueError(f"a wire of {self.name} has {wire.numel()} elements, and the tensor {like.numel()}")
        if torch.finfo(like.dtype).max < torch.finfo(self.dtype).max:
            wire = narrowed(wire.float(), like)
        return wire.view(like.shape)

    def _room(self, x: Tensor, out: Tensor | None) -> Tensor:
        return room(self.name, self.wire_bytes(x), x, out, self.dtype)


def fp16() -> Cast:
    """IEEE half precision: 11 significant bits, up to 65504, whole down to 6.1e-5 and gone below 3e-8.

    No loss scaling is needed for overflow: a finite number beyond the range becomes the largest one that is in it, and
    with feedback the rest goes next time. NaN and infinities arrive as such. Cost: 2 bytes an element.
    """
    return Cast("fp16()", torch.float16)


def bf16() -> Cast:
    """bfloat16: 8 significant bits, and the range of float32. Cost: 2 bytes an element."""
    return Cast("bf16()", torch.bfloat16)
