"""Error feedback: what a codec did not send this time goes with what it sends next time.

Source: F. Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed training of
speech DNNs", 2014, section 3; S. P. Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression
schemes", 2019, Algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.compression import entries
from polytempo.core import ALONE, Codec, CodecState, EncodeContext, Law, Residual
from polytempo.core.codec import check_codec
from polytempo.core.state import narrowed, wide

_LARGE = torch.empty(1024, 1024, device="meta")
"""A tensor on which a law has to hold."""


class Fed(NamedTuple):
    """What is owed of this tensor, and the inner codec's state. None is owed before the first encoding."""

    owed: Residual
    inner: CodecState


@dataclass(frozen=True)
class Feedback:
    """See `feedback`."""

    codec: Codec
    passes_nonfinite: bool = False
    """An infinity in the residual would stay for ever."""

    @property
    def name(self) -> str:
        """As a person would write it."""
        return f"feedback({self.codec.name})"

    @property
    def law(self) -> Law:
        """Nothing is lost over several steps, whatever the inner codec does in one."""
        return Law("lossless") if self.codec.law.kind == "lossless" else Law("conserving")

    @property
    def summable(self) -> bool:
        """As the inner codec."""
        return self.codec.summable

    @property
    def sparse(self) -> bool:
        """As the inner codec."""
        return self.codec.sparse

    @property
    def fixed(self) -> bool:
        """As the inner codec."""
        return self.codec.fixed

    @property
    def flops(self) -> float:
        """Two additions more than the inner codec."""
        return self.codec.flops + 2

    def init(self, like: Tensor) -> Fed:
        """Nothing is owed."""
        return Fed(Residual(), self.codec.init(like))

    def wire_dtype(self, like: Tensor, terms: int = 1) -> torch.dtype:
        """As the inner codec."""
        return self.codec.wire_dtype(like, terms)

    def wire_bytes(self, like: Tensor, terms: int = 1) -> int:
        """As the inner codec."""
        return self.codec.wire_bytes(like, terms)

    def statistic(self, x: Tensor, state: CodecState) -> float | None:
        """The inner codec's, of x + r."""
        residual, inner = (None, self.codec.init(x)) if state is None else (state.owed.residual, state.inner)
        return self.codec.statistic(x if residual is None else narrowed(x + residual, x), inner)

    def encode(
        self, x: Tensor, state: CodecState = None, when: EncodeContext = ALONE, out: Tensor | None = None
    ) -> tuple[Tensor, CodecState]:
        """The wire of v = x + r. The state that is given is spent: its residual becomes the next one, in place.

        Raises NotFinite before anything has changed: the `encode_` of every codec does, also where `encode` does not.
        """
        fed = self.init(x) if state is None else state
        residual = fed.owed.residual
        if residual is None:
            residual = torch.zeros_like(x, dtype=wide(x.dtype))
        encode_ = self.codec.encode_ if residual.dtype is x.dtype else self._encode_wide_
        wire, inner = encode_(x, residual, fed.inner, when, out)
        return wire, Fed(Residual(residual), inner)

    def _encode_wide_(
        self, x: Tensor, residual: Tensor, state: CodecState, when: EncodeContext, out: Tensor | None
    ) -> tuple[Tensor, CodecState]:
        """The wire of v, rounded to x's dtype; residual ← v - decode(wire), so the rounding is owed, too."""
        v = x.detach() + residual
        entries.check_finite(self.codec.name, v)
        rounded = narrowed(v, x)
        wire, state = self.codec.encode(rounded, state, when, out)
        torch.sub(v, self._alone(wire, rounded, when), out=residual)
        return wire, state

    def _alone(self, wire: Tensor, like: Tensor, when: EncodeContext) -> Tensor:
        """What a wire decodes to; one for a sum, in a sum with as many wires of zeros as it waits for."""
        if when.terms > 1:
            nothing, _ = self.codec.encode(torch.zeros_like(like), self.codec.init(like), when)
            wire = wire + (when.terms - 1) * nothing
        return self.codec.decode(wire, like, when)

    def encode_(
        self,
        x: Tensor,
        residual: Tensor,
        state: CodecState = None,
        when: EncodeContext = ALONE,
        out: Tensor | None = None,
    ) -> tuple[Tensor, CodecState]:
        """Not to be fed twice."""
        raise NotImplementedError(f"{self.name} keeps its residual itself")

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext = ALONE) -> Tensor:
        """As the inner codec."""
        return self.codec.decode(wire, like, when)

    def add_(self, wire: Tensor, out: Tensor, when: EncodeContext = ALONE) -> None:
        """As the inner codec."""
        self.codec.add_(wire, out, when)


def feedback(codec: Codec) -> Feedback:
    """v = x + r; send encode(v); r ← v - decode(encode(v)), for each tensor.

    So Σ decoded + the last r = Σ x: nothing is lost, only late. A change of the learning rate changes the weight of
    what is late. Memory: one more tensor of x's shape, from the first encoding on, and of x's dtype; for 16-bit tensors
    of float32, 4 bytes an element, so that r takes up what is small against it. Their v is rounded for the codec, and
    what that leaves is owed as well.

    Raises ValueError for a codec that remembers already what it did not send (`dgc`, `feedback`), and for one whose
    error may be larger than what it encodes (`qsgd` with few levels, `terngrad`): the residual would grow without end,
    and such a codec is right on average without it. NaN and infinities are refused (NotFinite), whatever the codec does
    with them: they would stay in the residual for ever. Raises TypeError for what is no codec, as `bf16` without ().
    """
    check_codec(codec)
    if isinstance(codec, Feedback) or getattr(codec, "feeds_itself", False):
        raise ValueError(f"{codec.name} keeps what it has not sent already; use it without feedback(…)")
    if codec.law.kind in ("unbiased", "conserving") and codec.law.bound(_LARGE) >= 1:
        raise ValueError(
            f"the error of {codec.name} may be larger than what it encodes, so that a residual would grow without end; "
            "use it without feedback(…), or a finer one"
        )
    return Feedback(codec)
