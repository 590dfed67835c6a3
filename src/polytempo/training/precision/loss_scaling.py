"""`LossScaling`: the factor of losses, and its changes after each step. Decisions only.

S = 2^16 ── a gradient overflows: no step, S / 2 ── 2,000 steps without: 2 S ──▶ …
"""

from __future__ import annotations

from typing import NamedTuple

from polytempo.core import NotFinite
from polytempo.spec.precision import Precision

_FIRST = 2.0**16
_GROWTH_INTERVAL = 2000
_MOST = 2.0**24
_LEAST = 2.0**-14
"""A gradient that overflows even so is beyond 10^9."""


class LossScaling(NamedTuple):
    """A loss scale and its history; the same on all workers of a run."""

    scale: float
    dynamic: bool
    good_steps: int = 0
    """Since the scale changed last."""
    skipped: int = 0

    @classmethod
    def of(cls, precision: Precision) -> LossScaling:
        """The scaling before the first step."""
        if precision.is_dynamic:
            return cls(_FIRST, dynamic=True)
        return cls(1.0 if precision.loss_scale is None else float(precision.loss_scale), dynamic=False)

    def after(self, *, overflowed: bool) -> LossScaling:
        """The scaling after a step with finite gradients, or that was left out because they `overflowed`."""
        if not self.dynamic:
            return self
        if overflowed:
            return self._replace(scale=self.scale / 2, good_steps=0, skipped=self.skipped + 1)
        if self.good_steps + 1 < _GROWTH_INTERVAL:
            return self._replace(good_steps=self.good_steps + 1)
        return self._replace(scale=min(2 * self.scale, _MOST), good_steps=0)

    def check(self, step: int) -> None:
        """Raise NotFinite where no scale is small enough: then it is not the scale that overflows."""
        if self.scale < _LEAST:
            raise NotFinite(
                "",
                None,
                float("inf"),
                "the gradient",
                step=step,
                advice=f"at a loss scale of {2 * self.scale:g}, too, and {self.skipped} steps were left out; look at "
                "the batch, the loss and the learning rate, or use bf16, which has the range of float32",
            )
