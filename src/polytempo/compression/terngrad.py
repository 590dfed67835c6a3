"""TernGrad: each value is -s, 0 or s, at random; with one s for all ranks the wires can be added as numbers.

    one rank's wire    s (float32) | t + 1, 2 bits each: 16 in a word          sum of N ranks, s agreed before
    wire for a sum     t + 1, in bits for 0 … 2N each, whole ones in a word    Σ t + N in each place: no place overflows

Source: W. Wen, C. Xu, F. Yan, C. Wu, Y. Wang, Y. Chen, H. Li, "TernGrad: ternary gradients to reduce communication in
distributed deep learning", 2017, equations 1 to 3 (ternary), 9 (clipping), and section 3 (shared scaler).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import sqrt

import torch
from torch import Tensor

from polytempo.compression.draw import draw_key, happens
from polytempo.compression.fields import num_words, packed, unpacked, whole_fields
from polytempo.compression.values import fitted, flat_f32, opened, refused, room
from polytempo.core import ALONE, CodecState, EncodeContext, Law
from polytempo.core.call_name import codec_name
from polytempo.core.checks import check_real, check_whole
from polytempo.native import codes_drawn
from polytempo.native.codes_drawn import Fields, is_native


@dataclass(frozen=True)
class TernGrad:
    """See `terngrad`."""

    clip: float | None
    seed: int
    summable: bool = True
    sparse: bool = False
    fixed: bool = True
    passes_nonfinite: bool = False
    flops: float = 25.0

    @cached_property
    def name(self) -> str:
        """As a person would write it."""
        return codec_name(terngrad, self)

    @property
    def law(self) -> Law:
        """Unbiased without clipping: E‖t - v‖² = s‖v‖₁ - ‖v‖² ≤ (√n - 1) / 2 · ‖v‖², where s is this tensor's own."""
        clip = self.clip
        if clip:
            return Law("conserving", lambda like: 1 + clip**2 / 8 if clip <= 4 else clip - 1)
        return Law("unbiased", lambda like: max(0.0, (sqrt(like.numel()) - 1) / 2))

    def init(self, like: Tensor) -> CodecState:
        """Nothing to remember."""
        return None

    def wire_dtype(self, like: Tensor, terms: int = 1) -> torch.dtype:
        """Words, which add."""
        return torch.int32

    def wire_bytes(self, like: Tensor, terms: int = 1) -> int:
        """About ⌈log₂(2N + 1)⌉ bits an element, and 4 bytes for one rank's own s."""
        return 4 * (_head(terms) + num_words(_fields(terms), like.numel()))

    def statistic(self, x: Tensor, state: CodecState) -> float | None:
        """s: the smaller of max |x| and clip · √(mean of x²). Raises NotFinite."""
        own = self._own(flat_f32(x), None)
        if own is None:
            raise refused(self.name, x)
        return own

    def encode(
        self, x: Tensor, state: CodecState = None, when: EncodeContext = ALONE, out: Tensor | None = None
    ) -> tuple[Tensor, CodecState]:
        """Two passes: s, and ternaries. Raises NotFinite, and ValueError where wires are added without an agreed s."""
        flat = flat_f32(x)
        own = self._own(flat, None)
        if own is None:
            raise refused(self.name, x)
        wire, words, scaler = self._begun(x, own, when, out)
        fields, key = _fields(when.terms), draw_key(self.seed, when)
        if is_native(words, flat):
            codes_drawn.terngrad_encode(flat, None, own, scaler, fields, key, words)
        else:
            words.copy_(packed(fields, ternaries(flat, own, scaler, key) + 1))
        return wire, state

    def encode_(
        self,
        x: Tensor,
        residual: Tensor,
        state: CodecState = None,
        when: EncodeContext = ALONE,
        out: Tensor | None = None,
    ) -> tuple[Tensor, CodecState]:
        """The same of v = x + residual; what clipping cut off is owed, too."""
        x = x.detach()
        if not is_native(out, x, residual):
            return self._encoded_apart(x, residual, when, out), state
        own = self._own(x, residual)
        if own is None:
            raise refused(self.name, x, residual)
        wire, words, scaler = self._begun(x, own, when, out)
        fields, key = _fields(when.terms), draw_key(self.seed, when)
        codes_drawn.terngrad_encode(x, residual, own, scaler, fields, key, words)
        return wire, state

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext = ALONE) -> Tensor:
        """s · (Σ fields - N)."""
        words, scaler = self._opened(wire, like, when)
        fields = _fields(when.terms)
        if is_native(words, like):
            out = torch.empty_like(like)
            codes_drawn.terngrad_decode(words, out, scaler, when.terms, fields, add=False)
            return out
        counts = unpacked(fields, words, like.numel()) - when.terms
        exact = torch.float64 if like.dtype is torch.float64 else torch.float32  # so that nothing of a sum is lost
        return fitted(counts.to(exact) * scaler, like)

    def add_(self, wire: Tensor, out: Tensor, when: EncodeContext = ALONE) -> None:
        """out += s · (Σ fields - N)."""
        words, scaler = self._opened(wire, out, when)
        if is_native(words, out):
            codes_drawn.terngrad_decode(words, out, scaler, when.terms, _fields(when.terms), add=True)
        else:
            out.add_(self.decode(wire, out, when))

    def _encoded_apart(self, x: Tensor, residual: Tensor, when: EncodeContext, out: Tensor | None) -> Tensor:
        """`encode_` by torch. A wire for a sum cannot be decoded alone, so the ternaries are at hand."""
        v = x + residual
        flat = flat_f32(v)
        own = self._own(flat, None)
        if own is None:
            raise refused(self.name, v)
        wire, words, scaler = self._begun(x, own, when, out)
        given = ternaries(flat, own, scaler, draw_key(self.seed, when))
        words.copy_(packed(_fields(when.terms), given + 1))
        residual.copy_(v - fitted(given.to(torch.float32) * scaler, v))
        return wire

    def _own(self, x: Tensor, residual: Tensor | None) -> float | None:
        """This rank's s of v = x + residual; None where v is not finite."""
        if is_native(None, x):
            return codes_drawn.terngrad_scaler(x, residual, self.clip or 0.0)
        return own_scaler(x, self.clip or 0.0)

    def _begun(self, x: Tensor, own: float, when: EncodeContext, out: Tensor | None) -> tuple[Tensor, Tensor, float]:
        """Memory for the wire, its part for the ternaries, and s: the agreed one, where there is one."""
        if when.terms > 1 and when.agreed is None:
            raise ValueError(
                f"wires of {self.name} can be added only if all ranks have one s; give the largest `statistic` of all "
                "ranks as EncodeContext(agreed=…), or use route=all_gather"
            )
        scaler = own if when.agreed is None else _as_f32(when.agreed)
        wire = room(self.name, self.wire_bytes(x, when.terms), x, out).view(torch.int32)
        head = _head(when.terms)
        wire[:head].view(torch.float32).fill_(scaler)
        return wire, wire[head:], scaler

    def _opened(self, wire: Tensor, like: Tensor, when: EncodeContext) -> tuple[Tensor, float]:
        """The ternaries' part of a wire, and s."""
        wire = opened(self.name, self.wire_bytes(like, when.terms), like, wire).view(torch.int32)
        head = _head(when.terms)
        if head:
            return wire[head:], float(wire[:head].view(torch.float32))
        if when.agreed is None:
            raise ValueError(
                f"a sum of {when.terms} wires of {self.name} needs their s: give it as EncodeContext(agreed=…)"
            )
        return wire, _as_f32(when.agreed)


def own_scaler(flat: Tensor, clip: float) -> float | None:
    """The smaller of max |v| and clip · √(mean of v²) of a flat float32 tensor; clip 0: max |v|. None: not finite."""
    if not flat.numel():
        return 0.0
    if not flat.isfinite().all():
        return None
    largest = float(flat.abs().max())
    limit = clip * sqrt(float(flat.to(torch.float64).square().mean()))
    return _as_f32(min(limit, largest) if clip > 0 else largest)


def ternaries(flat: Tensor, own: float, scaler: float, key: int) -> Tensor:
    """-1, 0 or 1 (int64) for each value: its sign with probability min(|v|, own) / scaler."""
    # A number as the divisor would be taken for its reciprocal on CUDA, which rounds in another way.
    odds = flat.abs().clamp(max=min(own, scaler)) / flat.new_full((), scaler or 1.0)
    given = happens(odds, key)
    return torch.where(flat < 0, -given, given)


def terngrad(clip: float | None = 2.5, seed: int = 0) -> TernGrad:
    """tᵢ = s · sign(gᵢ) · bᵢ, where bᵢ is 1 with probability |gᵢ| / s, else 0, and s = max |g| of this tensor.

    Before that, g is clipped to ±clip · σ (None or 0: not), for one large gᵢ would make s and so the variance large.
    Unclipped, E t = g and E‖t‖² = s‖g‖₁, which is at most (1 + √n) / 2 · ‖g‖². With clipping E t is the clipped g:
    biased, by what is cut off; and E‖t‖² ≤ clip · ‖g‖², whatever n.

    Law for clip = c: E‖t - g‖² ≤ (1 + c²/8) ‖g‖² where c ≤ 4, else (c - 1) ‖g‖². For with σ = 1 an element of |gᵢ| = a
    adds c a - a² if a ≤ c, else (a - c)² < a². The worst g is one large element that is cut off nearly whole, and many
    small ones of c/4, for which c a - 2a² is greatest; beyond c = 4 many of 1. All of that is more than ‖g‖², so
    `feedback` refuses this codec.

    Ranks that share s, the largest of all (`statistic`), send whole numbers: their wires are added by an all-reduce,
    and the sum is exactly that of the ternaries, times s. Then s is not on the wire, and E‖t‖² = s‖g‖₁ holds with the
    shared s.

    Cost: alone, 2 bits an element and 4 bytes; for a sum of N, ⌈log₂(2N + 1)⌉ bits an element (3 up to N = 3, 4 up to
    7, 5 up to 15; as many of them as fit into 32). Encoding reads g twice. Raises ValueError for a clip < 0 and where a
    sum has no agreed s, and NotFinite for NaN, infinities, and float64 values beyond float32's range. Other dtypes are
    encoded as float32.

    Deviations: σ is taken around zero, √(mean of g²), for around the mean a tensor of equal entries would be clipped to
    nothing. Each tensor is a layer. Probabilities are multiples of 2^-30.
    """
    check_real(clip=0 if clip is None else clip)
    check_whole(seed=seed)
    if clip is not None and not clip >= 0:
        raise ValueError(f"clip must be a number of standard deviations >= 0, or None, got {clip}")
    return TernGrad(clip, seed)


def _fields(terms: int) -> Fields:
    return whole_fields((2 * terms).bit_length())


def _head(terms: int) -> int:
    """Words before the ternaries: a rank's own s."""
    return 1 if terms == 1 else 0


def _as_f32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))
