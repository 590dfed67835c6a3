"""Kernels of codecs that draw (native/codes_drawn.h), on flat contiguous float32 tensors of the CPU.

Encoders answer -1, or an element of the first bucket or chunk with NaN or an infinity; then the residual is as it was,
and the wire is to be thrown away.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

from torch import Tensor

from polytempo.native.kernels.codes_dense import address
from polytempo.native.library import required


class Fields(NamedTuple):
    """The layout of codes of `width` bits in a lane: `positions` codes in `words` words of 32 bits (codes_drawn.h)."""

    width: int
    positions: int
    words: int


class _Fields(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in Fields._fields]


@cache
def _native(fields: Fields) -> _Fields:
    return _Fields(*fields)


def qsgd_encode(
    x: Tensor, residual: Tensor | None, bucket: int, levels: int, fields: Fields, key: int, wire: Tensor
) -> int:
    """The wire of v = x + residual, and residual ← v - decoded; None: of x. Cost: x and residual read twice, then."""
    return int(
        required().pt_qsgd_encode(
            *(x.data_ptr(), address(residual), x.numel(), bucket, levels),
            *(ctypes.byref(_native(fields)), key, wire.data_ptr()),
        )
    )


def qsgd_decode(wire: Tensor, out: Tensor, bucket: int, levels: int, fields: Fields, add: bool) -> None:
    """Add the decoded numbers to out, or write them over it."""
    required().pt_qsgd_decode(
        wire.data_ptr(), out.data_ptr(), out.numel(), bucket, levels, ctypes.byref(_native(fields)), int(add)
    )


def terngrad_scaler(x: Tensor, residual: Tensor | None, clip: float) -> float | None:
    """The smaller of max |v| and clip · √(mean of v²), for clip > 0; None where v has NaN or an infinity."""
    scaler = ctypes.c_float()
    unfinite: int = required().pt_terngrad_scaler(
        x.data_ptr(), address(residual), x.numel(), clip, ctypes.addressof(scaler)
    )
    return None if unfinite >= 0 else scaler.value


def terngrad_encode(
    x: Tensor, residual: Tensor | None, own: float, scaler: float, fields: Fields, key: int, words: Tensor
) -> None:
    """Fields of t + 1, t being sign(v) with probability min(|v|, own) / scaler, else 0."""
    required().pt_terngrad_encode(
        *(x.data_ptr(), address(residual), x.numel(), own, scaler),
        *(ctypes.byref(_native(fields)), key, words.data_ptr()),
    )


def terngrad_decode(words: Tensor, out: Tensor, scaler: float, terms: int, fields: Fields, add: bool) -> None:
    """Add scaler · (field - terms) to out, or write it over out."""
    required().pt_terngrad_decode(
        words.data_ptr(), out.data_ptr(), out.numel(), scaler, terms, ctypes.byref(_native(fields)), int(add)
    )


def natural_encode(x: Tensor, residual: Tensor | None, key: int, wire: Tensor) -> int:
    """The wire of v = x + residual, and residual ← v - decoded; None: of x."""
    return int(required().pt_natural_encode(x.data_ptr(), address(residual), x.numel(), key, wire.data_ptr()))


def natural_decode(wire: Tensor, out: Tensor, add: bool) -> None:
    """Add the decoded numbers to out, or write them over it."""
    required().pt_natural_decode(wire.data_ptr(), out.data_ptr(), out.numel(), int(add))
