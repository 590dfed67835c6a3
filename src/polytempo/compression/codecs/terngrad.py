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

from polytempo.compression.encoding.coded import Coded, WireSize
from polytempo.compression.encoding.draw import draw_key, drawn_kernels, given_values, happens
from polytempo.compression.encoding.fields import num_words, packed, unpacked, whole_fields
from polytempo.compression.encoding.values import fitted, flat_f32, opened, refused, room
from polytempo.core import EncodeContext, Facts, Law
from polytempo.core.calls.call_name import codec_name
from polytempo.core.calls.typed_arguments import check_real, check_whole
from polytempo.native.kernels import codes_drawn
from polytempo.native.kernels.codes_dense import fits
from polytempo.native.kernels.codes_drawn import Fields


def terngrad(clip: float | None = 2.5, seed: int = 0) -> Coded:
    """tᵢ = s · sign(gᵢ) · bᵢ, where bᵢ is 1 with probability |gᵢ| / s, else 0, and s = max |g| of this tensor.

    Before that, g is clipped to ±clip · σ (None or 0: not), for one large gᵢ would make s and so the variance large.
    Unclipped, E t = g and E‖t‖² = s‖g‖₁, which is at most (1 + √n) / 2 · ‖g‖². With clipping E t is the clipped g:
    biased, by the cut; and E‖t‖² ≤ clip · ‖g‖², for all n.

    Law for clip = c: E‖t - g‖² ≤ (1 + c²/8) ‖g‖² where c ≤ 4, else (c - 1) ‖g‖². For with σ = 1 an element of |gᵢ| = a
    adds c a - a² if a ≤ c, else (a - c)² < a². The worst g is one large element that is cut off nearly whole, and many
    small ones of c/4, where c a - 2a² is greatest; beyond c = 4 many of 1. All of that is more than ‖g‖², so
    `feedback` refuses this codec.

    Ranks that share s, the largest of all (`statistic`), send whole numbers: their wires are added by an all-reduce,
    and the sum is exactly the ternaries' sum, times s. Then s is not on the wire, and E‖t‖² = s‖g‖₁ holds with the
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
    return Coded(TernGrad(clip, seed), _KERNELS)


@dataclass(frozen=True)
class TernGrad:
    """See `terngrad`."""

    clip: float | None
    seed: int

    @cached_property
    def facts(self) -> Facts:
        """Unbiased without clipping: E‖t - v‖² = s‖v‖₁ - ‖v‖² ≤ (√n - 1) / 2 · ‖v‖², where s is this tensor's own."""
        clip = self.clip
        law = Law("unbiased", lambda like: max(0.0, (sqrt(like.numel()) - 1) / 2))
        if clip:
            law = Law("conserving", lambda like: 1 + clip**2 / 8 if clip <= 4 else clip - 1)
        name = codec_name(terngrad, self)
        return Facts(name, law, flops=25.0, summable=True, draws=True, statistic=self.scaler)

    def scaler(self, x: Tensor) -> float:
        """s: the smaller of max |x| and clip · √(mean of x²). Raises NotFinite."""
        return scaler_of(self.facts.name, x, None, self.clip or 0.0)

    def size(self, like: Tensor, terms: int = 1) -> WireSize:
        """Some ⌈log₂(2N + 1)⌉ bits an element, in words that add, and 4 bytes for one rank's own s."""
        return WireSize(4 * (_head(terms) + num_words(self.fields(terms), like.numel())), torch.int32)

    def fields(self, terms: int) -> Fields:
        """Whole codes from 0 to 2 · terms."""
        return whole_fields((2 * terms).bit_length())

    def encode(self, x: Tensor, when: EncodeContext) -> Tensor:
        """s, and ternaries. Raises ValueError where wires are added without an agreed s."""
        own = self.scaler(x)
        wire = torch.empty(self.size(x, when.terms).num_bytes // 4, dtype=torch.int32, device=x.device)
        words, scaler = self.begun(wire, own, when)
        given = ternaries(flat_f32(x), own, scaler, draw_key(self.seed, when))
        words.copy_(packed(self.fields(when.terms), given + 1))
        return wire

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext) -> Tensor:
        """s · (Σ fields - N)."""
        words, scaler = self.opened(wire, like, when)
        counts = unpacked(self.fields(when.terms), words, like.numel()) - when.terms
        exact = torch.float64 if like.dtype is torch.float64 else torch.float32  # so that nothing of a sum is lost
        return fitted(counts.to(exact) * scaler, like)

    def begun(self, wire: Tensor, own: float, when: EncodeContext) -> tuple[Tensor, float]:
        """Put s on a wire, where it travels; the ternaries' part of it, and s: the agreed one, where there is one."""
        if when.terms > 1 and when.agreed is None:
            raise ValueError(
                f"wires of {self.facts.name} can be added only if all ranks have one s; give the largest `statistic` "
                "of all ranks as EncodeContext(agreed=…), or use route=all_gather"
            )
        scaler, head = own if when.agreed is None else as_f32(when.agreed), _head(when.terms)
        wire[:head].view(torch.float32).fill_(scaler)
        return wire[head:], scaler

    def opened(self, wire: Tensor, like: Tensor, when: EncodeContext) -> tuple[Tensor, float]:
        """The ternaries' part of a wire, and s."""
        wire = opened(self.facts.name, self.size(like, when.terms).num_bytes, like, wire).view(torch.int32)
        head = _head(when.terms)
        if head:
            return wire[head:], float(wire[:head].view(torch.float32))
        if when.agreed is None:
            raise ValueError(
                f"a sum of {when.terms} wires of {self.facts.name} needs their s: give it as EncodeContext(agreed=…)"
            )
        return wire, as_f32(when.agreed)


def _head(terms: int) -> int:
    """Words before the ternaries: a rank's own s."""
    return 1 if terms == 1 else 0


def scaler_of(codec: str, x: Tensor, residual: Tensor | None, clip: float) -> float:
    """TernGrad's own s of v = x + residual, by the kernel where there is one. Raises NotFinite."""
    given = given_values(x, residual)
    own = codes_drawn.terngrad_scaler(given, residual, clip) if fits(given) else own_scaler(given, clip)
    if own is None:
        raise refused(codec, x, residual)
    return own


def _encode(encoding: TernGrad, x: Tensor, residual: Tensor | None, when: EncodeContext, out: Tensor | None) -> Tensor:
    own = scaler_of(encoding.facts.name, x, residual, encoding.clip or 0.0)
    wire = room(encoding.facts.name, encoding.size(x, when.terms).num_bytes, x, out).view(torch.int32)
    words, scaler = encoding.begun(wire, own, when)
    fields, key = encoding.fields(when.terms), draw_key(encoding.seed, when)
    codes_drawn.terngrad_encode(given_values(x, residual), residual, own, scaler, fields, key, words)
    return wire


def _decode(encoding: TernGrad, wire: Tensor, out: Tensor, when: EncodeContext, *, add: bool) -> None:
    words, scaler = encoding.opened(wire, out, when)
    codes_drawn.terngrad_decode(words, out, scaler, when.terms, encoding.fields(when.terms), add=add)


_KERNELS = drawn_kernels(_encode, _decode)


def own_scaler(flat: Tensor, clip: float) -> float | None:
    """The smaller of max |v| and clip · √(mean of v²) of a flat float32 tensor; clip 0: max |v|. None: not finite."""
    if not flat.numel():
        return 0.0
    if not flat.isfinite().all():
        return None
    largest = float(flat.abs().max())
    limit = clip * sqrt(float(flat.to(torch.float64).square().mean()))
    return as_f32(min(limit, largest) if clip > 0 else largest)


def ternaries(flat: Tensor, own: float, scaler: float, key: int) -> Tensor:
    """-1, 0 or 1 (int64) for each value: its sign with probability min(|v|, own) / scaler."""
    # A number as the divisor would be taken for its reciprocal on CUDA, which rounds in another way.
    odds = flat.abs().clamp(max=min(own, scaler)) / flat.new_full((), scaler or 1.0)
    given = happens(odds, key)
    return torch.where(flat < 0, -given, given)


def as_f32(value: float) -> float:
    """Rounded to float32."""
    return float(torch.tensor(value, dtype=torch.float32))
