"""`add_`: sums of tensors, with or without values."""

from __future__ import annotations

from torch import Tensor


def add_(total: Tensor, other: Tensor, alpha: float = 1.0) -> Tensor:
    """`total` += alpha · other. Without values there is nothing to do, for which torch takes 30 µs."""
    if total.is_meta:
        return total
    return total.add_(other) if alpha == 1 else total.add_(other, alpha=alpha)
