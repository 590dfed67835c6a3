"""QSGD: each bucket of values on a few equidistant levels of its norm, rounded up or down at random.

    wire    step of bucket 0 | step of bucket 1 | … (float32) | codes level + s of w bits, as in `encoding.fields`

Source: D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic, "QSGD: communication-efficient SGD via gradient
quantization and encoding", 2017, section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import inf, sqrt
from types import ModuleType

import torch
from torch import Tensor

from polytempo.compression.encoding.coded import Coded, Kernels, WireSize
from polytempo.compression.encoding.draw import draw_key, drawn_kernels, given_values, happens
from polytempo.compression.encoding.fields import dense_fields, num_words, packed, unpacked
from polytempo.compression.encoding.values import check_f32, fitted, opened, refused, room
from polytempo.compression.kernels import on_device
from polytempo.core import EncodeContext, Facts, Law
from polytempo.core.calls.call_name import codec_name
from polytempo.core.calls.typed_arguments import check_whole
from polytempo.native.kernels import codes_dense, codes_drawn
from polytempo.native.kernels.codes_drawn import Fields

MOST_LEVELS = 32767
"""Codes of 16 bits."""

_LARGEST = torch.finfo(torch.float32).max


def qsgd(levels: int = 7, bucket: int = 128, seed: int = 0) -> Coded:
    """Q(vᵢ) = ‖v‖₂ · sign(vᵢ) · ξᵢ / s, where ξᵢ is one of the two whole numbers around s |vᵢ| / ‖v‖₂.

    v is a bucket of consecutive elements, s is `levels`, and ξᵢ is drawn so that E Q(v) = v; then
    E‖Q(v) - v‖² ≤ min(n / s², √n / s) · ‖v‖² for a bucket of n, 1.6 for the defaults. No
    feedback is needed, and where the bound is 1 or more it is refused: the residual would grow from step to step.

    Cost: 4 / bucket + w / 8 bytes an element, w = ⌈log₂(2s + 1)⌉: 7 levels make 4 bits, 1 makes 2, 127 make 8.
    Raises ValueError for levels outside 1 … 32767 or a bucket < 1, and NotFinite for NaN, infinities, and float64
    values beyond float32's range. Other dtypes are encoded as float32; a 16-bit x̂ beyond its range becomes its end.

    Deviations: codes have a fixed number of bits, instead of Elias' variable ones, which pay where most levels are 0.
    In place of the norm travels ‖v‖₂ / s, in float32 and rounded up, so that no value is beyond the last level
    (rounding to nearest would bias the largest) and none is lost where the norm is denormal; a norm beyond float32
    counts as its largest number. Probabilities are multiples of 2^-30.

    Agrees with the public numpy version of the formula (XJiaoLEE/PPGC, train/QSGD.py, which prints
    quantize([0, 1, 0.5, 0.2, -0.3, -0.9], 1)): the same uniform numbers make the same levels.
    """
    check_whole(levels=levels, bucket=bucket, seed=seed)
    if not 1 <= levels <= MOST_LEVELS:
        raise ValueError(f"levels must be between 1 and {MOST_LEVELS}, got {levels}; for more, fp16() is as small")
    if bucket < 1:
        raise ValueError(f"bucket must be a number of elements >= 1, got {bucket}")
    return Coded(Qsgd(levels, bucket, seed), _KERNELS)


@dataclass(frozen=True)
class Qsgd:
    """See `qsgd`."""

    levels: int
    bucket: int
    seed: int

    @cached_property
    def facts(self) -> Facts:
        """The bound is lemma 3.1 of the paper, for a bucket: min(n / s², √n / s)."""
        name = codec_name(qsgd, self)
        return Facts(name, Law("unbiased", self._variance), flops=30.0, draws=True)

    def _variance(self, like: Tensor) -> float:
        n, s = min(self.bucket, like.numel()), self.levels
        return min(n / s**2, sqrt(n) / s)

    @cached_property
    def fields(self) -> Fields:
        """Codes from 0 to 2s, in as few bits as hold them."""
        return dense_fields((2 * self.levels).bit_length())

    def size(self, like: Tensor, terms: int = 1) -> WireSize:
        """4 bytes a bucket, and about w / 8 an element."""
        return WireSize(4 * (-(-like.numel() // self.bucket_of(like)) + num_words(self.fields, like.numel())))

    def encode(self, x: Tensor, when: EncodeContext) -> Tensor:
        """Steps, and levels drawn."""
        flat, bucket = check_f32(self.facts.name, x), self.bucket_of(x)
        steps = steps_between_levels(flat, bucket, self.levels)
        codes = levels_drawn(
            flat, steps.repeat_interleave(bucket)[: flat.numel()], self.levels, draw_key(self.seed, when)
        )
        return torch.cat([part.view(torch.uint8) for part in (steps, packed(self.fields, codes + self.levels))])

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext) -> Tensor:
        """level · step."""
        wire, bucket = opened(self.facts.name, self.size(like).num_bytes, like, wire, torch.uint8), self.bucket_of(like)
        head = 4 * -(-like.numel() // bucket)
        steps = wire[:head].view(torch.float32).repeat_interleave(bucket)[: like.numel()]
        levels = unpacked(self.fields, wire[head:].view(torch.int32), like.numel()) - self.levels
        return fitted(levels.to(torch.float32) * steps, like)

    def bucket_of(self, like: Tensor) -> int:
        """Elements of a bucket of that tensor."""
        return max(1, min(self.bucket, like.numel()))


def steps_between_levels(flat: Tensor, bucket: int, levels: int) -> Tensor:
    """‖v‖₂ / s of each bucket of a flat float32 tensor, summed in float64 and rounded up to float32."""
    padded = flat.new_zeros(-(-flat.numel() // bucket) * bucket, dtype=torch.float64)
    padded[: flat.numel()] = flat
    exact = padded.view(-1, bucket).square().sum(dim=1).sqrt() / levels
    exact = exact.clamp(max=_LARGEST / levels * (1 - 2.0**-22))
    steps = exact.to(torch.float32)
    return torch.where(steps < exact, torch.nextafter(steps, torch.full_like(steps, inf)), steps)


def levels_drawn(flat: Tensor, steps: Tensor, levels: int, key: int) -> Tensor:
    """The signed level (int64) of each value, given its bucket's step."""
    place = flat.abs() / torch.where(steps == 0, 1, steps)
    below = place.floor()
    level = (below.to(torch.int64) + happens(place - below, key)).clamp(max=levels)
    return torch.where(flat < 0, -level, level)


def _kernels(of: ModuleType, fits: Callable[..., bool] = codes_dense.fits) -> Kernels:
    """The kernels that a module has, for tensors that `fits` takes."""

    def encode(encoding: Qsgd, x: Tensor, residual: Tensor | None, when: EncodeContext, out: Tensor | None) -> Tensor:
        wire = room(encoding.facts.name, encoding.size(x).num_bytes, x, out, torch.uint8)
        layout = (encoding.bucket_of(x), encoding.levels, encoding.fields, draw_key(encoding.seed, when))
        if of.qsgd_encode(given_values(x, residual), residual, *layout, wire) >= 0:
            raise refused(encoding.facts.name, x, residual)
        return wire

    def decode(encoding: Qsgd, wire: Tensor, out: Tensor, when: EncodeContext, *, add: bool) -> None:
        wire = opened(encoding.facts.name, encoding.size(out).num_bytes, out, wire, torch.uint8)
        of.qsgd_decode(wire, out, encoding.bucket_of(out), encoding.levels, encoding.fields, add=add)

    return drawn_kernels(encode, decode, fits)


_KERNELS = _kernels(codes_drawn).or_else(_kernels(on_device, on_device.fits))
