"""Weights of batches: a step's gradient is Σ wᵢ gᵢ / Σ wᵢ, over all ranks and micro-batches.

w = samples                            the default: the mean over samples
w = batch["mask"].sum()                the mean over tokens, where texts are unequally long

gᵢ is the gradient of a loss that is the mean over wᵢ of its batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

BatchWeight = Callable[[Any], Any]
"""The weight of a batch: a number from 0, or a tensor of one element."""


def weight_of(weigh: BatchWeight, batch: Any) -> float:
    """The batch's weight. ValueError for another value than a number from 0."""
    return checked_weight(weigh(batch))


def checked_weight(given: Any) -> float:
    """`given` as a number. ValueError for NaN, infinities, numbers below 0, and tensors of several elements."""
    expected = (
        "expected a number from 0, such as the batch's tokens that count: weight=lambda batch: batch['mask'].sum()"
    )
    try:
        value = float(given)
    except (TypeError, ValueError, RuntimeError):
        shape = getattr(given, "shape", None)
        shown = f"{given!r}" if shape is None else f"a tensor of shape {tuple(shape)}"
        raise ValueError(f"weight(batch) returned {shown}; {expected}") from None
    if not 0 <= value < math.inf:
        raise ValueError(f"weight(batch) returned {value:g}; {expected}")
    return value
