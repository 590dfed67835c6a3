"""Hardsync: a step waits for every member."""

from __future__ import annotations

from polytempo.core.rule import Rule
from polytempo.server.rules.synchronous_step import stepwise


def hardsync() -> Rule:
    """θ ← θ - η Σ mᵢ gᵢ / Σ mᵢ once every member's gradient gᵢ of the step, of mᵢ samples, is there. None is stale.

    λ workers with μ samples each make the step of one worker with λμ: (1/λ) Σ gᵢ. A worker that leaves is not waited
    for; one that joins counts from the next step (`server.rules.synchronous_step`).

    Source: S. Gupta, W. Zhang and F. Wang, "Model accuracy and runtime tradeoff in distributed deep learning", 2015,
    section 3. There all have μ samples, and the sum is in the order of arrival.
    """
    return stepwise("hardsync()", lambda waiting, workers: len(waiting) == workers)
