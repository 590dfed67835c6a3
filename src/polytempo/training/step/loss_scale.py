"""`LossScale`: the factor of a `GradScaler`, and the ranks' agreement on skipped steps.

scaler.scale(loss).backward()    .grad = S g
exchange                         S g ─ / S ─▶ g ─ transform ─▶ answer ─ · S ─▶ .grad      S may change, g may not
scaler.step(optimizer)           .grad / S, and no step where that holds an infinity: on all ranks or on none
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from polytempo.collectives import tree
from polytempo.core import Bundle, Port

_STEPS = (GradScaler.step.__code__, GradScaler._maybe_opt_step.__code__)
_MOST_FRAMES = 12


class LossScale:
    """The scale of one scaler, on one rank."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        self._overflowed = False

    def take_off_(self, bundle: Bundle) -> None:
        """bundle ← bundle / S. A bundle that is not finite becomes zeros: this step will be skipped."""
        flat = bundle.flat.mul_(1.0 / self._scaler.get_scale())
        if not bool(flat.isfinite().all()):
            self._overflowed = True
            flat.zero_()

    def put_on_(self, answer: Bundle) -> Bundle:
        """answer ← S · answer."""
        answer.flat.mul_(self._scaler.get_scale())
        return answer

    def look(self, parameters: Iterable[nn.Parameter]) -> None:
        """Remember whether a gradient is not finite. One pass over them."""
        self._overflowed = self._overflowed or not all(bool(g.isfinite().all()) for g in _gradients(parameters))

    async def agree(self, port: Port, parameters: Iterable[nn.Parameter]) -> None:
        """Make all gradients infinite on all ranks if a gradient of any rank was not finite, so that all scalers skip
        alike.

        All ranks call it. Cost: one number to all.
        """
        overflowed, self._overflowed = self._overflowed, False
        if port.size > 1:
            overflowed = bool((await tree(port, torch.tensor([float(overflowed)]))).any())
        if overflowed:
            for gradient in _gradients(parameters):
                gradient.fill_(torch.inf)


def facts(scaler: GradScaler | None) -> list[float] | None:
    """The settings that ranks must share, so that their scalers stay alike."""
    if scaler is None:
        return None
    return [scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()]


def calls_step() -> bool:
    """True if a `GradScaler` calls `optimizer.step` now. It leaves no other trace."""
    frame: Any = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return False
        if frame.f_code in _STEPS:
            return True
        frame = frame.f_back
    return False


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    found = [parameter.grad.detach() for parameter in parameters if parameter.grad is not None]
    return [gradient if gradient.layout == torch.strided else gradient._values() for gradient in found]
