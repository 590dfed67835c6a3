"""`Merge`: a pure function of what all ranks have."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

Merge = Callable[[Sequence[Tensor]], Tensor]
"""All ranks' flat buffers, each (numel,), in the order of ranks, to one.

A merge that looks at more than one coordinate at a time says so: `merge.coordinate_wise = False`.
"""
