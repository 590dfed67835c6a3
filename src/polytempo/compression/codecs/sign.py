"""Signs alone: one bit for each element, and perhaps one number for all.

Source: J. Bernstein et al., "signSGD: compressed optimisation for non-convex problems", 2018, Algorithm 1 (±1);
S. P. Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", 2019, Algorithm 1
(‖v‖₁ / d · sign v, with feedback: EF-signSGD).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from polytempo.compression.encoding.coded import Coded, Kernels, WireSize, from_zeros, room_for
from polytempo.compression.encoding.fields import bits_loss, packed_bits, to_float, unpacked_bits, words_per_row
from polytempo.compression.encoding.values import check_finite, computed, opened, refuse
from polytempo.core import EncodeContext, Facts, Law
from polytempo.core.calls.call_name import codec_name
from polytempo.native.kernels import codes_dense
from polytempo.native.kernels.codes_dense import fits


def sign(scaled: bool = True) -> Coded:
    """x̂ = scale · (1 where v ≥ 0, else -1); scale = ‖v‖₁ / n over the tensor's n elements, or 1 where not `scaled`.

        wire  [ scale: float32, where scaled | bit j % 32 of word j / 32 is element j, the rest of the last word is 0 ]

    One bit has no word for 0. Where scaled, a zero's bit is 1: feedback takes that back. Where not scaled, it
    is the parity of (element + `when.rank` + `when.step`). So the votes of an even number of ranks for an entry without
    a gradient are a tie, and an odd number of votes gives 1 and -1 in turn, step by step, which leads nowhere. A sum of
    such votes that a stripe's owner encodes again changes its sign from step to step, too.

    Cost: 1 bit an element. With the native core one pass over memory, and two with a residual. Where not scaled, one
    more looks for zeros, and x is copied if it has any.

    Law where scaled: ‖x - x̂‖² = ‖x‖² - ‖x‖₁² / n ≤ (1 - 1/n) ‖x‖², a contraction; use it with `feedback`.
    Where not scaled x̂ promises nothing of x's size: it is one vote for each element, made for
    `pt.aggregation.vote`: the learning rate alone scales its answer. `feedback` refuses it: a residual would
    grow without limit where |x| > 1, and only oscillate by 1 where |x| is far below.

    Deviations: the papers' sign(0) is 0.
    Raises NotFinite for NaN and infinities; then everything is as it was.
    """
    return Coded(Sign(scaled), _SIGN if scaled else _VOTE)


@dataclass(frozen=True)
class Sign:
    """See `sign`."""

    scaled: bool

    @cached_property
    def facts(self) -> Facts:
        """See `sign` for the proof of the bound."""
        law = Law("contraction", lambda like: 1 - bits_loss(like.numel(), like))
        return Facts(
            codec_name(sign, self), law if self.scaled else Law("conserving", lambda like: math.inf), flops=3.0
        )

    def row_length(self, like: Tensor) -> int:
        """The tensor is one row."""
        return like.numel()

    def size(self, like: Tensor, terms: int = 1) -> WireSize:
        """4 bytes for every 32 elements, and 4 for the scale."""
        return WireSize(self._scale_bytes(like) + 4 * words_per_row(like.numel()))

    def parts(self, wire: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """The scale (1,), or (0,) where there is none, and the words."""
        wire = opened(self.facts.name, self.size(like).num_bytes, like, wire, torch.uint8)
        head = self._scale_bytes(like)
        return wire[:head].view(torch.float32), wire[head:]

    def pairs(self, wire: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """The values of bits 0 and 1, and the words."""
        scale, words = self.parts(wire, like)
        scale = scale if scale.numel() else torch.ones(1, device=wire.device)
        return torch.cat([-scale, scale]), words

    def encode(self, x: Tensor, when: EncodeContext) -> Tensor:
        """Scale and signs."""
        flat = computed(self.turned(x, when))
        check_finite(self.facts.name, flat)
        words = packed_bits((flat >= 0)[None]).view(-1)
        if not self._scale_bytes(x):
            return words
        scale = to_float(flat.double().abs().sum() / flat.numel())
        return torch.cat([scale.view(1).view(torch.uint8), words])

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext) -> Tensor:
        """±scale."""
        pair, words = self.pairs(wire, like)
        bits = unpacked_bits(words, 1, like.numel())
        return torch.where(bits, pair[1], pair[0]).view(like.shape).to(like.dtype)

    def turned(self, x: Tensor, when: EncodeContext) -> Tensor:
        """x with ±1 in place of its zeros, where not scaled; x itself, where it has none, which one pass finds out."""
        if self.scaled or int(torch.count_nonzero(x)) == x.numel():
            return x
        flat = x.reshape(-1).clone()
        for first in (0, 1):
            every_other = flat[first::2]
            every_other.masked_fill_(every_other == 0, 1 if (first + when.rank + when.step) % 2 else -1)
        return flat.view(x.shape)

    def _scale_bytes(self, like: Tensor) -> int:
        return 4 if self.scaled and like.numel() else 0


def _fits_some(*tensors: Tensor) -> bool:
    return tensors[0].numel() > 0 and fits(*tensors)


def _fits_alone(x: Tensor, residual: Tensor | None = None) -> bool:
    return residual is None and _fits_some(x)


def _encode(encoding: Sign, x: Tensor, residual: Tensor | None, when: EncodeContext, out: Tensor | None) -> Tensor:
    wire = room_for(encoding, x, out)
    scale, words = encoding.parts(wire, x)
    given = encoding.turned(x, when)
    bad = codes_dense.sign_(given, residual, scale if scale.numel() else None, words)
    refuse(encoding.facts.name, bad, given, residual)
    return wire


def _add_(encoding: Sign, wire: Tensor, out: Tensor, when: EncodeContext) -> None:
    pair, words = encoding.pairs(wire, out)
    codes_dense.add_one_bit_(pair, words, out, encoding.row_length(out))


_SIGN = Kernels(_fits_some, _add_, from_zeros(_add_), _fits_some, _encode)
_VOTE = Kernels(_fits_some, _add_, from_zeros(_add_), _fits_alone, _encode)
"""The kernels of `sign(scaled=False)`. Its zeros take turns: with a residual it has to see the sum first."""
