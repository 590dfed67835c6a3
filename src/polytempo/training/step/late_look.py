"""`LateLook`: a look at values on a device, without a wait of the host.

device   … backward of step s │ largest |x| of each tensor ── copy ─┐      backward of step s + 1 …
host     step s, noted                                              └────▶ read when step s + 1 is noted

The largest magnitude of a tensor is NaN or infinite exactly where one of its elements is. Cost: one pass over the
tensors, and a copy of one number for each. The host is at most a step ahead of the device.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.device import HostCopy, on_accelerator


class ValueKind(IntEnum):
    """Values that are looked at, in the order of a step."""

    BEFORE = 0
    """Parameters before a loss."""
    LOSS = 1
    GRADIENT = 2
    AFTER = 3
    """Parameters after the update."""


class _Noted(NamedTuple):
    """Copies under way of the largest magnitudes of tensors."""

    step: int
    rank: int
    kind: ValueKind
    names: list[str]
    copy: HostCopy


class BadStep(NamedTuple):
    """Values of one step of one rank that are not finite: the largest magnitude of each tensor, by kind and name."""

    step: int
    rank: int
    bad: dict[ValueKind, dict[str, float]]


class LateLook:
    """Notes values of steps on a device, and reads them when values of a later step are noted."""

    def __init__(self) -> None:
        self._noted: list[_Noted] = []

    def note(self, step: int, rank: int, kind: ValueKind, named: Iterable[tuple[str, Tensor]]) -> None:
        """Begin to look at the tensors on a device among `named`."""
        alike: dict[tuple[torch.dtype, torch.device], list[tuple[str, Tensor]]] = defaultdict(list)
        for name, tensor in named:
            if on_accelerator(tensor) and (values := _values(tensor)).numel():
                alike[values.dtype, values.device].append((name, values))
        for found in alike.values():
            largest = torch.stack(torch._foreach_norm([values for _, values in found], math.inf))
            self._noted.append(_Noted(step, rank, kind, [name for name, _ in found], HostCopy([largest])))

    def has(self, step: int, kind: ValueKind) -> bool:
        """True if such values of this step were noted, and not read."""
        return any((each.step, each.kind) == (step, kind) for each in self._noted)

    def read(self, but: int | None = None) -> list[BadStep]:
        """Steps with values that are not finite, in the order of their notes; step `but` is left to a later look."""
        due = [each for each in self._noted if each.step != but]
        self._noted = [each for each in self._noted if each.step == but]
        found: dict[tuple[int, int], BadStep] = {}
        for each in due:
            [largest] = each.copy.wait()
            if bool(largest.isfinite().all()):
                continue
            bad = found.setdefault((each.step, each.rank), BadStep(each.step, each.rank, {})).bad
            values = zip(each.names, largest.tolist(), strict=True)
            bad.setdefault(each.kind, {}).update((name, value) for name, value in values if not math.isfinite(value))
        return list(found.values())


def _values(tensor: Tensor) -> Tensor:
    """The floating-point values of a tensor; empty where it has none."""
    values = tensor.detach()
    if values.layout != torch.strided:
        values = values._values() if values.layout == torch.sparse_coo else values.to_dense()
    if not (values.is_floating_point() or values.is_complex()):
        return values.new_empty(0)
    return values if values.element_size() > 1 else values.float()
