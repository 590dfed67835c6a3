"""Values drawn as -s, 0 or s, and what s is. See `terngrad`."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from polytempo.compression.encoding.draw import happens


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
