"""The learning-rate range test: one short run whose rate grows in each step, until its loss does."""

from __future__ import annotations

import math
from typing import NamedTuple

from polytempo.spec.job import Data, Job
from polytempo.training.tuning.trial import Trial, exceeds

_SPAN = 1e3
"""The test goes from the job's rate divided by this to the job's rate times this."""
_SMOOTHS = 0.7
_WORSE = 0.5
"""Of the least loss above it: the run has left the range of rates that learn."""


class RangeTest(NamedTuple):
    """What it found: the rates of its steps, their smoothed losses, and the rate where the loss was least."""

    rates: list[float]
    losses: list[float]
    top: float
    """Near the largest rate that learns: the runs themselves need one up to some tens of times smaller."""
    samples: int


def range_test(job: Job, data: Data, *, batch: int, steps: int, seed: int = 0) -> RangeTest:
    """Train with a rate that grows by the same factor in each step, and stop when the loss grows.

    Errors: ValueError where the loss is not finite in the first step.
    Source: L. N. Smith, "Cyclical learning rates for training neural networks", 2017, section 3.3; the exponential
    growth is that of later practice.
    """
    trial = Trial(job, data, batch=batch, seed=seed, follows=False)
    rates, losses = [], list[float]()
    smoothed = 0.0
    for step in range(steps):
        rate = job.lr / _SPAN * (_SPAN * _SPAN) ** (step / max(1, steps - 1))
        for group in trial.optimizer.param_groups:
            group["lr"] = rate
        loss = trial.step()
        if not math.isfinite(loss):
            break
        smoothed = _SMOOTHS * smoothed + (1 - _SMOOTHS) * loss
        rates.append(rate)
        losses.append(smoothed / (1 - _SMOOTHS ** (step + 1)))
        if exceeds(losses[-1], min(losses), _WORSE) and losses[-1] > losses[0]:
            break
    if not losses:
        raise ValueError(f"job {job.name}: the loss is not finite in the first step; look at its data and its model")
    return RangeTest(rates, losses, rates[losses.index(min(losses))], trial.samples)
