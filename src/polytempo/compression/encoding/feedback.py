"""Error feedback: the unsent rest of a tensor goes with the next tensor.

Source: F. Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed training of
speech DNNs", 2014, section 3; S. P. Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression
schemes", 2019, Algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.compression.encoding.coded import Coded, decoded_alone
from polytempo.compression.encoding.values import check_finite, check_kind
from polytempo.core import ALONE, Codec, EncodeContext, Facts, Law, Residual
from polytempo.core.calls.typed_arguments import check_real
from polytempo.core.codec import check_codec
from polytempo.core.state import narrowed, wide

_LARGE = torch.empty(1024, 1024, device="meta")
"""A tensor for a law to hold on."""


def feedback(codec: Codec, decay: float = 1.0, part: float = 1.0) -> Feedback:
    """v = x + ρ β r; send encode(v); r ← β r + x - decode(encode(v)), for each tensor; β = `decay`, ρ = `part`.

    With β = 1, Σ decoded + the last r = Σ x: nothing is lost, only late. With β < 1 the part that waits shrinks by β in
    every exchange, and Σₜ β^(T-t) decodedₜ + the last r = Σₜ β^(T-t) xₜ. A change of the learning rate changes the
    weight of late values. Memory: one more tensor of x's shape, from the first encoding on, and of x's dtype; for
    16-bit tensors of float32, 4 bytes an element, so that r takes up small values. Their v is rounded for the codec,
    and the rounding error is residual as well.

    With ρ < 1 only a part of the residual is encoded again, so that one large error comes back in small parts; nothing
    more is lost. The moving average e ← μ e + (1 - μ) (x + e - x̂) of errors in LoCo is (1 - μ) r with ρ = 1 - μ.

    Source of the decay: B. Peng et al., "DeMo", 2024; A. Sarfi et al., "SparseLoCo", 2025. Of the part: X. Xie et al.,
    "LoCo: low-bit communication adaptor for large-scale model training", 2024. Deviation: there e has 8 bits, and
    becomes 0 every few hundred steps.
    Raises ValueError for a decay or a part not in (0, 1].
    Raises ValueError for a codec that keeps a residual already (`dgc`, `feedback`), and for a codec with an error that
    may be larger than its input (`qsgd` with few levels, `terngrad`): the residual would grow without end, and such a
    codec is right on average without it. NaN and infinities are refused (NotFinite) with every codec: they would stay
    in the residual for ever. Raises TypeError for anything but a codec, as `bf16` without ().
    """
    check_codec(codec)
    check_real(decay=decay, part=part)
    facts = codec.facts
    if not isinstance(codec, Coded):
        raise ValueError(f"{facts.name} keeps its own residual; use it without feedback(…)")
    if facts.law.kind in ("unbiased", "conserving") and facts.law.bound(_LARGE) >= 1:
        raise ValueError(
            f"the error of {facts.name} may be larger than its input, so that a residual would grow without end; "
            "use it without feedback(…), or a finer one"
        )
    if not 0 < decay <= 1:
        raise ValueError(f"decay is the part of the residual that stays, over 0 and at most 1; got {decay}")
    if not 0 < part <= 1:
        raise ValueError(f"part is the part of the residual that is encoded again, over 0 and at most 1; got {part}")
    return Feedback(codec, decay, part)


class Fed(NamedTuple):
    """The unsent rest of this tensor; None is before the first encoding."""

    memory: Residual


@dataclass(frozen=True, repr=False)
class Feedback:
    """See `feedback`."""

    codec: Coded
    decay: float = 1.0
    part: float = 1.0

    def __repr__(self) -> str:
        return self.facts.name

    @cached_property
    def facts(self) -> Facts:
        """The codec's; but over several steps nothing is lost without a decay, and infinities would stay."""
        inner = self.codec.facts
        law = Law("conserving") if self.decay == 1 and inner.law.kind != "lossless" else inner.law
        given = [f"{name}={value!r}" for name, value in (("decay", self.decay), ("part", self.part)) if value != 1]
        return inner._replace(
            name=f"feedback({', '.join([inner.name, *given])})",
            law=law,
            flops=inner.flops + 2,
            elementwise=False,
            passes_nonfinite=False,
            memory="residual",
            state_bytes=lambda like: like.numel() * wide(like.dtype).itemsize,
        )

    def init(self, like: Tensor) -> Fed:
        """Nothing was left out."""
        return Fed(Residual())

    def wire_dtype(self, like: Tensor, terms: int = 1) -> torch.dtype:
        """The codec's."""
        return self.codec.wire_dtype(like, terms)

    def wire_bytes(self, like: Tensor, terms: int = 1) -> int:
        """The codec's."""
        return self.codec.wire_bytes(like, terms)

    def statistic(self, x: Tensor, state: Fed | None) -> float | None:
        """The codec's, of x + r."""
        residual = None if state is None else state.memory.residual
        return self.codec.statistic(x if residual is None else narrowed(self._fed(x, residual), x), None)

    def _fed(self, x: Tensor, residual: Tensor) -> Tensor:
        return torch.add(x, residual, alpha=self.part * self.decay)

    def encode(
        self, x: Tensor, state: Fed | None = None, when: EncodeContext = ALONE, out: Tensor | None = None
    ) -> tuple[Tensor, Fed]:
        """The wire of v = x + r. The state that is given is spent: its residual becomes the next one, in place.

        Raises NotFinite before anything has changed, also where the codec lets NaN and infinities pass.
        """
        residual = None if state is None else state.memory.residual
        if residual is None:
            residual = torch.zeros_like(x, dtype=wide(x.dtype))
        whole = residual.dtype is x.dtype and self.decay == self.part == 1
        encode_ = self.codec.encode_ if whole else self._encode_wide_
        wire, _ = encode_(x, residual, None, when, out)
        return wire, Fed(Residual(residual))

    def _encode_wide_(
        self, x: Tensor, residual: Tensor, state: None, when: EncodeContext, out: Tensor | None
    ) -> tuple[Tensor, None]:
        """The wire of v, rounded to x's dtype; decode(wire) leaves the residual, so the rounding is residual, too."""
        check_kind(x)
        v = self._fed(x.detach(), residual)
        check_finite(self.codec.facts.name, v)
        rounded = narrowed(v, x)
        wire, _ = self.codec.encode(rounded, None, when, out)
        torch.sub(v, decoded_alone(self.codec, wire, rounded, when), out=v)
        torch.add(v, residual, alpha=self.decay * (1 - self.part), out=residual)
        return wire, None

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext = ALONE) -> Tensor:
        """Decode by the codec."""
        return self.codec.decode(wire, like, when)

    def add_(self, wire: Tensor, out: Tensor, when: EncodeContext = ALONE) -> None:
        """Add by the codec."""
        self.codec.add_(wire, out, when)
