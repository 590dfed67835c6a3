"""Nothing is left out: what small tensors travel by, where the rest is encoded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polytempo.compression.values import check_flat, check_kind, room
from polytempo.core import ALONE, CodecState, EncodeContext, Law, NotFinite


@dataclass(frozen=True)
class Exact:
    """See `exact`."""

    name: str = "exact()"
    summable: bool = True
    sparse: bool = False
    fixed: bool = True
    passes_nonfinite: bool = True
    flops: float = 1.0

    @property
    def law(self) -> Law:
        """x̂ = x."""
        return Law("lossless")

    def init(self, like: Tensor) -> CodecState:
        """Nothing to remember."""
        return None

    def wire_dtype(self, like: Tensor, terms: int = 1) -> torch.dtype:
        """The tensor's own."""
        return like.dtype

    def wire_bytes(self, like: Tensor, terms: int = 1) -> int:
        """All of them."""
        return like.numel() * like.element_size()

    def statistic(self, x: Tensor, state: CodecState) -> float | None:
        """Nothing to agree on."""
        return None

    def encode(
        self, x: Tensor, state: CodecState = None, when: EncodeContext = ALONE, out: Tensor | None = None
    ) -> tuple[Tensor, CodecState]:
        """The values, flat."""
        check_kind(x)
        return room(self.name, self.wire_bytes(x), x, out, x.dtype).copy_(x.detach().reshape(-1)), state

    def encode_(
        self,
        x: Tensor,
        residual: Tensor,
        state: CodecState = None,
        when: EncodeContext = ALONE,
        out: Tensor | None = None,
    ) -> tuple[Tensor, CodecState]:
        """All of x + residual; nothing is left. Raises NotFinite, as every `encode_` does: NaN would stay for ever."""
        check_kind(x)
        x = x.detach()
        bad = (~x.reshape(-1).isfinite()).nonzero()
        if len(bad):
            raise NotFinite(self.name, int(bad[0]), float(x.reshape(-1)[bad[0]]))
        wire, state = self.encode(x + residual, state, when, out)
        residual.zero_()
        return wire, state

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext = ALONE) -> Tensor:
        """The values, in their shape. Raises ValueError for a wire of another tensor."""
        return _shaped(wire, like).clone()

    def add_(self, wire: Tensor, out: Tensor, when: EncodeContext = ALONE) -> None:
        """out += the values. Raises ValueError for a wire of another tensor."""
        out.add_(_shaped(wire, out))


def _shaped(wire: Tensor, like: Tensor) -> Tensor:
    check_flat("a wire of exact()", wire, like.device, like.dtype)
    if wire.numel() != like.numel():
        raise ValueError(f"a wire of exact() has {wire.numel()} elements, and the tensor {like.numel()}")
    return wire.view(like.shape)


def exact() -> Exact:
    """x̂ = x: K bytes for K bytes.

    An all-reduce of 16-bit tensors adds in 16 bits: it rounds each partial sum, and one beyond their range is infinite,
    as 3 · (65504 / 3) in float16, whose parts are rounded up. `route=pt.compression.all_gather` adds in float32.
    """
    return Exact()
