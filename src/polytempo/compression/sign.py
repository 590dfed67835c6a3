"""Signs alone: one bit for each element, and perhaps one number for all.

Source: J. Bernstein et al., "signSGD: compressed optimisation for non-convex problems", 2018, Algorithm 1 (±1);
S. P. Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", 2019, Algorithm 1
(‖v‖₁ / d · sign v, with feedback: EF-signSGD).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from polytempo.compression.int8 import computed, give_, refuse, refuse_sum
from polytempo.compression.one_bit import bits_loss, packed, to_float, unpacked, words_per_row
from polytempo.compression.values import check_kind, opened, room
from polytempo.core import ALONE, CodecState, EncodeContext, Law
from polytempo.core.call_name import codec_name
from polytempo.native import codes_dense as native


@dataclass(frozen=True)
class Sign:
    """See `sign`."""

    scaled: bool
    summable: bool = field(default=False, init=False)
    sparse: bool = field(default=False, init=False)
    fixed: bool = field(default=True, init=False)
    passes_nonfinite: bool = field(default=False, init=False)
    flops: float = field(default=3.0, init=False)

    @cached_property
    def name(self) -> str:
        """As a person would write it."""
        return codec_name(sign, self)

    @property
    def law(self) -> Law:
        """See `sign`."""
        if not self.scaled:
            return Law("conserving", lambda like: math.inf)
        return Law("contraction", lambda like: 1 - bits_loss(like.numel(), like))

    def init(self, like: Tensor) -> CodecState:
        """Nothing to remember."""
        return None

    def wire_dtype(self, like: Tensor, terms: int = 1) -> torch.dtype:
        """Bytes."""
        return torch.uint8

    def wire_bytes(self, like: Tensor, terms: int = 1) -> int:
        """4 for every 32 elements, and 4 for the scale."""
        return self._scale_bytes(like) + 4 * words_per_row(like.numel())

    def statistic(self, x: Tensor, state: CodecState) -> float | None:
        """Nothing to agree on."""
        return None

    def encode(
        self, x: Tensor, state: CodecState = None, when: EncodeContext = ALONE, out: Tensor | None = None
    ) -> tuple[Tensor, CodecState]:
        """Signs and scale."""
        check_kind(x)
        x = x.detach()
        wire, scale, words = self._room(x, out)
        if not x.numel():
            return wire, state
        x = x if self.scaled else _taking_turns(x, when)
        if native.fits(x):
            refuse_sum(self.name, x, None, native.sign_(x, None, scale, words))
            return wire, state
        flat = computed(x)
        refuse(self.name, flat)
        if scale is not None:
            scale.copy_(to_float(flat.double().abs().sum() / flat.numel()))
        words.copy_(packed((flat >= 0)[None]).view(-1))
        return wire, state

    def encode_(
        self,
        x: Tensor,
        residual: Tensor,
        state: CodecState = None,
        when: EncodeContext = ALONE,
        out: Tensor | None = None,
    ) -> tuple[Tensor, CodecState]:
        """As `encode` of v = x + residual; residual ← v - decode(wire)."""
        x = x.detach()
        if self.scaled and native.fits(x, residual) and x.numel():
            wire, scale, words = self._room(x, out)
            refuse_sum(self.name, x, residual, native.sign_(x, residual, scale, words))
            return wire, state
        wire, state = self.encode(x + residual, state, when, out)
        return give_(wire, x, residual, self.decode(wire, x, when)), state

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext = ALONE) -> Tensor:
        """±scale."""
        if native.fits(like) or not like.numel():
            found = torch.zeros_like(like)
            self.add_(wire, found)
            return found
        pair, words = self._pair(wire, like)
        bits = unpacked(words, 1, like.numel())
        return torch.where(bits, pair[1], pair[0]).view(like.shape).to(like.dtype)

    def add_(self, wire: Tensor, out: Tensor, when: EncodeContext = ALONE) -> None:
        """out += ±scale."""
        if not out.numel():
            return
        if native.fits(out):
            native.add_one_bit_(*self._pair(wire, out), out, out.numel())
        else:
            out.add_(self.decode(wire, out, when))

    def _scale_bytes(self, like: Tensor) -> int:
        return 4 if self.scaled and like.numel() else 0

    def _room(self, x: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        head = self._scale_bytes(x)
        wire = room(self.name, self.wire_bytes(x), x, out, torch.uint8)
        return wire, wire[:head].view(torch.float32)[0] if head else None, wire[head:]

    def _pair(self, wire: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """What bits 0 and 1 mean, and the words."""
        head = self._scale_bytes(like)
        wire = opened(self.name, self.wire_bytes(like), like, wire, torch.uint8)
        scale = wire[:head].view(torch.float32) if head else torch.ones(1, device=wire.device)
        return torch.cat([-scale, scale]), wire[head:]


def _taking_turns(x: Tensor, when: EncodeContext) -> Tensor:
    """x with ±1 in place of its zeros, as `sign` says; x itself, where it has none, which one pass finds out."""
    if int(torch.count_nonzero(x)) == x.numel():
        return x
    flat = x.reshape(-1).clone()
    for first in (0, 1):
        every_other = flat[first::2]
        every_other.masked_fill_(every_other == 0, 1 if (first + when.rank + when.step) % 2 else -1)
    return flat.view(x.shape)


def sign(scaled: bool = True) -> Sign:
    """x̂ = scale · (1 where v ≥ 0, else -1); scale = ‖v‖₁ / n over the tensor's n elements, or 1 where not `scaled`.

        wire  [ scale: float32, where scaled | bit j % 32 of word j / 32 is element j, the rest of the last word is 0 ]

    One bit has no word for 0. Where scaled, a zero's bit is 1: feedback takes back what that adds. Where not scaled, it
    is the parity of (element + `when.rank` + `when.step`). So the votes of an even number of ranks for an entry without
    a gradient are a tie, and those of an odd number are 1 and -1 in turn, step by step, which leads nowhere. What the
    owner of a stripe encodes again, a sum of such votes, changes its sign from step to step, too.

    Cost: 1 bit an element. With the native core one pass over memory, and two with a residual. Where not scaled, one
    more looks for zeros, and x is copied if it has any.

    Law where scaled: ‖x - x̂‖² = ‖x‖² - ‖x‖₁² / n ≤ (1 - 1/n) ‖x‖², a contraction; use it with `feedback`.
    Where not scaled x̂ promises nothing of x's size: it is one vote for each element, made for
    `pt.aggregation.vote`, whose answer is scaled by the learning rate alone. `feedback` refuses it: a residual would
    grow without limit where |x| > 1, and only oscillate by 1 where |x| is far below.

    Deviations: the papers' sign(0) is 0.
    Raises NotFinite for NaN and infinities; then everything is as it was.
    """
    return Sign(scaled)
