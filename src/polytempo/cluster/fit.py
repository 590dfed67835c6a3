"""Speeds of kernels from the times of computations: least squares without negative speeds.

    seconds of a sample  ≈  Σ over its kernels  calls · call_s + num_bytes · byte_s + flops · flop_s

Each sample counts by its relative error, so a short one counts as much as a long one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.cluster.computing_time import KernelSpeed
from polytempo.core.arithmetic.kernel_use import Uses

_LEAST_S = 1e-9


class Sample(NamedTuple):
    """Kernels of one computation, and its time."""

    uses: Uses
    seconds: float


def fitted(samples: Sequence[Sample]) -> dict[str, KernelSpeed]:
    """The speeds of all kernels that the samples name. Kernels that occur together are fitted together."""
    found: dict[str, KernelSpeed] = {}
    for group in _groups(samples):
        found |= _fitted(group)
    return found


def _fitted(samples: Sequence[Sample]) -> dict[str, KernelSpeed]:
    kernels = list(dict.fromkeys(use.kernel for sample in samples for use in sample.uses))
    place = {kernel: 3 * i for i, kernel in enumerate(kernels)}
    rows = torch.zeros(len(samples), 3 * len(kernels), dtype=torch.float64)
    for row, sample in zip(rows, samples, strict=True):
        for use in sample.uses:
            row[place[use.kernel] : place[use.kernel] + 3] += torch.tensor(use[1:], dtype=torch.float64)
    seconds = torch.tensor([max(sample.seconds, _LEAST_S) for sample in samples], dtype=torch.float64)
    solved = nonnegative(rows / seconds[:, None], torch.ones_like(seconds))
    errors = ((rows @ solved - seconds).abs() / seconds).tolist()
    speeds = {}
    for kernel in kernels:
        own = [e for e, sample in zip(errors, samples, strict=True) if any(u.kernel == kernel for u in sample.uses)]
        call_s, byte_s, flop_s = solved[place[kernel] : place[kernel] + 3].tolist()
        speeds[kernel] = KernelSpeed(call_s, byte_s, flop_s, median(own))
    return speeds


def nonnegative(matrix: Tensor, target: Tensor) -> Tensor:
    """x ≥ 0 with the least ‖matrix · x - target‖². `matrix` has shape (rows, columns).

    Columns are scaled to length 1 before. Source: C. Lawson and R. Hanson, "Solving least squares problems", 1974,
    chapter 23.
    """
    length = matrix.norm(dim=0)
    scaled = matrix / torch.where(length > 0, length, 1)
    x = torch.zeros(matrix.shape[1], dtype=matrix.dtype)
    free = torch.zeros(len(x), dtype=torch.bool)
    for _ in range(3 * len(x) + 1):
        slope = scaled.T @ (target - scaled @ x)
        slope[free | (length == 0)] = 0
        if float(slope.max()) <= 1e-12:
            break
        free[int(slope.argmax())] = True
        while True:
            best = torch.zeros_like(x)
            best[free] = torch.linalg.lstsq(scaled[:, free], target[:, None], driver="gelsd").solution[:, 0]
            below = free & (best <= 0)
            if not bool(below.any()):
                break
            step = float((x[below] / (x[below] - best[below])).min())
            x = x + step * (best - x)
            free &= x > 1e-15
        x = best
    return x / torch.where(length > 0, length, 1)


def _groups(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples that have kernels in common, directly or by others, together."""
    root: dict[str, str] = {}

    def find(kernel: str) -> str:
        while root.setdefault(kernel, kernel) != kernel:
            kernel = root[kernel]
        return kernel

    for sample in samples:
        for use in sample.uses[1:]:
            root[find(use.kernel)] = find(sample.uses[0].kernel)
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[find(sample.uses[0].kernel)].append(sample)
    return list(groups.values())
