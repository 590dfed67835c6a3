"""`RateRange`: smoothed losses of steps with a growing learning rate, and the rates that they suggest.

loss │──────╮                   steepest: the loss falls fastest in a step
     │       ╲steepest     ╱    least:    the loss is least
     │        ╲___least___╱     suggested: the smaller of steepest and least / 10
     └──────────────────────▶ rate, logarithmic
"""

from __future__ import annotations

import math

from polytempo.training.tuning.trial import exceeds

_SMOOTHS = 0.7
_WORSE = 0.5
"""The test is over when the loss is above its least value by more than this part of it."""
_BELOW_LEAST = 10.0


class RateRange:
    """The steps of a range test so far, in their order."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.losses: list[float] = []
        """Smoothed: Σ 0.7ᵏ (1 - 0.7) · the loss k steps before, divided by 1 - 0.7ⁿ."""
        self._smoothed = 0.0
        self.diverged = False
        """True if the loss grew, or was not finite, before the largest rate."""

    def add(self, rate: float, loss: float) -> bool:
        """Take the loss of a step, computed before its update. True if the test is over."""
        if self.diverged or not math.isfinite(loss):
            self.diverged = True
            return True
        self._smoothed = _SMOOTHS * self._smoothed + (1 - _SMOOTHS) * loss
        self.rates.append(rate)
        self.losses.append(self._smoothed / (1 - _SMOOTHS ** (len(self.losses) + 1)))
        last, least = self.losses[-1], min(self.losses)
        self.diverged = exceeds(last, least, _WORSE) and last > self.losses[0]
        return self.diverged

    def check(self, job: str) -> None:
        """ValueError without a single loss."""
        if not self.losses:
            raise ValueError(f"job {job}: the loss is not finite in the first step; look at its data and its model")

    @property
    def least(self) -> float:
        """The rate of the least loss: near the largest rate that learns."""
        return self.rates[self.losses.index(min(self.losses))]

    @property
    def steepest(self) -> float:
        """The rate of the step with the largest fall of the loss, at most `least`."""
        end = self.losses.index(min(self.losses))
        falls = [before - after for before, after in zip(self.losses[:end], self.losses[1 : end + 1], strict=True)]
        return self.rates[falls.index(max(falls))] if falls else self.rates[0]

    @property
    def suggested(self) -> float:
        """The smaller one of `steepest` and a tenth of `least`."""
        return min(self.steepest, self.least / _BELOW_LEAST)


def growing_rates(lowest: float, highest: float, steps: int) -> list[float]:
    """`steps` rates from `lowest` to `highest`, each by the same factor above the one before."""
    return [lowest * (highest / lowest) ** (step / max(1, steps - 1)) for step in range(steps)]
