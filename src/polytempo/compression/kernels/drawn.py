"""Kernels of the codecs that draw. They take flat float32 values: tensors of other types and strides are copied so."""

from __future__ import annotations

from math import sqrt
from typing import Protocol

import torch
from torch import Tensor

from polytempo.compression.encoding.coded import Encoding, Kernels
from polytempo.compression.encoding.draw import draw_key, happens
from polytempo.compression.encoding.values import flat_f32, opened, refused, room
from polytempo.core import EncodeContext
from polytempo.native.kernels import codes_drawn
from polytempo.native.kernels.codes_drawn import Fields


class DrawnEncoding(Encoding, Protocol):
    """`natural`."""

    @property
    def seed(self) -> int:
        """What else draws depend on."""


class LevelEncoding(DrawnEncoding, Protocol):
    """`qsgd`."""

    @property
    def levels(self) -> int:
        """The largest."""

    @property
    def fields(self) -> Fields:
        """How levels lie in words."""

    def bucket_of(self, like: Tensor) -> int:
        """Elements of a bucket of that tensor."""


class TernaryEncoding(DrawnEncoding, Protocol):
    """`terngrad`."""

    @property
    def clip(self) -> float | None:
        """Standard deviations."""

    def fields(self, terms: int) -> Fields:
        """How ternaries lie in words."""

    def begun(self, wire: Tensor, own: float, when: EncodeContext) -> tuple[Tensor, float]:
        """Put s on a wire; the ternaries' part of it, and s."""

    def opened(self, wire: Tensor, like: Tensor, when: EncodeContext) -> tuple[Tensor, float]:
        """The ternaries' part of a wire, and s."""


def _encodes(x: Tensor, residual: Tensor | None = None) -> bool:
    if residual is None:
        return x.is_cpu and codes_drawn.is_native(None)
    return codes_drawn.is_native(None, x, residual)


def _decodes(like: Tensor) -> bool:
    return codes_drawn.is_native(None, like)


def _given(x: Tensor, residual: Tensor | None) -> Tensor:
    """What a kernel reads: with a residual x itself, which `_encodes` has let in."""
    return flat_f32(x) if residual is None else x


def _encode_natural(
    encoding: DrawnEncoding, x: Tensor, residual: Tensor | None, when: EncodeContext, out: Tensor | None
) -> Tensor:
    wire = room(encoding.facts.name, encoding.size(x).num_bytes, x, out)
    if codes_drawn.natural_encode(_given(x, residual), residual, draw_key(encoding.seed, when), wire) >= 0:
        raise refused(encoding.facts.name, x, residual)
    return wire


def _decode_natural(encoding: DrawnEncoding, wire: Tensor, like: Tensor, when: EncodeContext) -> Tensor:
    wire, out = opened(encoding.facts.name, encoding.size(like).num_bytes, like, wire), torch.empty_like(like)
    codes_drawn.natural_decode(wire, out, add=False)
    return out


def _add_natural_(encoding: DrawnEncoding, wire: Tensor, out: Tensor, when: EncodeContext) -> None:
    wire = opened(encoding.facts.name, encoding.size(out).num_bytes, out, wire)
    codes_drawn.natural_decode(wire, out, add=True)


NATURAL = Kernels(_decodes, _add_natural_, _decode_natural, _encodes, _encode_natural)


def _encode_qsgd(
    encoding: LevelEncoding, x: Tensor, residual: Tensor | None, when: EncodeContext, out: Tensor | None
) -> Tensor:
    wire = room(encoding.facts.name, encoding.size(x).num_bytes, x, out, torch.uint8)
    layout = (encoding.bucket_of(x), encoding.levels, encoding.fields, draw_key(encoding.seed, when))
    if codes_drawn.qsgd_encode(_given(x, residual), residual, *layout, wire) >= 0:
        raise refused(encoding.facts.name, x, residual)
    return wire


def _decode_qsgd(encoding: LevelEncoding, wire: Tensor, like: Tensor, when: EncodeContext) -> Tensor:
    out = torch.empty_like(like)
    _qsgd(encoding, wire, out, add=False)
    return out


def _add_qsgd_(encoding: LevelEncoding, wire: Tensor, out: Tensor, when: EncodeContext) -> None:
    _qsgd(encoding, wire, out, add=True)


def _qsgd(encoding: LevelEncoding, wire: Tensor, out: Tensor, *, add: bool) -> None:
    wire = opened(encoding.facts.name, encoding.size(out).num_bytes, out, wire, torch.uint8)
    codes_drawn.qsgd_decode(wire, out, encoding.bucket_of(out), encoding.levels, encoding.fields, add=add)


QSGD = Kernels(_decodes, _add_qsgd_, _decode_qsgd, _encodes, _encode_qsgd)


def scaler_of(codec: str, x: Tensor, residual: Tensor | None, clip: float) -> float:
    """TernGrad's own s of v = x + residual, by the kernel where there is one. Raises NotFinite."""
    given = _given(x, residual)
    if codes_drawn.is_native(None, given):
        own = codes_drawn.terngrad_scaler(given, residual, clip)
    else:
        own = own_scaler(given, clip)
    if own is None:
        raise refused(codec, x, residual)
    return own


def _encode_terngrad(
    encoding: TernaryEncoding, x: Tensor, residual: Tensor | None, when: EncodeContext, out: Tensor | None
) -> Tensor:
    own = scaler_of(encoding.facts.name, x, residual, encoding.clip or 0.0)
    wire = room(encoding.facts.name, encoding.size(x, when.terms).num_bytes, x, out).view(torch.int32)
    words, scaler = encoding.begun(wire, own, when)
    fields, key = encoding.fields(when.terms), draw_key(encoding.seed, when)
    codes_drawn.terngrad_encode(_given(x, residual), residual, own, scaler, fields, key, words)
    return wire


def _decode_terngrad(encoding: TernaryEncoding, wire: Tensor, like: Tensor, when: EncodeContext) -> Tensor:
    out = torch.empty_like(like)
    _terngrad(encoding, wire, out, when, add=False)
    return out


def _add_terngrad_(encoding: TernaryEncoding, wire: Tensor, out: Tensor, when: EncodeContext) -> None:
    _terngrad(encoding, wire, out, when, add=True)


def _terngrad(encoding: TernaryEncoding, wire: Tensor, out: Tensor, when: EncodeContext, *, add: bool) -> None:
    words, scaler = encoding.opened(wire, out, when)
    codes_drawn.terngrad_decode(words, out, scaler, when.terms, encoding.fields(when.terms), add=add)


TERNGRAD = Kernels(_decodes, _add_terngrad_, _decode_terngrad, _encodes, _encode_terngrad)


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
