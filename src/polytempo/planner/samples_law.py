"""`SamplesLaw`: the samples that a strategy needs to a target, as a function of the samples of a step.

    E(B) = E_min + S_min B = S_min (𝓑 + B),   𝓑 = E_min / S_min

E_min are the samples that tiny batches need, S_min the steps that huge ones need: the law of the noise scale. Measured
at two or more batches of short runs with few workers, it gives the need of more workers: B counts all workers' samples.

Source: S. McCandlish, J. Kaplan, D. Amodei et al., "An empirical model of large-batch training", 2018, equation 2.11.
Deviations: the learning rate is the job's own at every batch, not tuned for each; staleness and periods have no term,
but are in E_min and S_min, because each strategy has a law of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from statistics import fmean
from typing import NamedTuple

_LEAST_NOISE = 0.05
"""Runs of equal arguments and other seeds differ by so much at least, as a part of their samples."""
_PRIOR_DEGREES = 2
"""A guessed deviation counts as so many degrees of freedom."""
_PRIOR_NOISE = 0.15


class SamplesTrial(NamedTuple):
    """A run with real gradients, until the target or for so long that the strategy cannot win."""

    family: str
    workers: int
    batch_size: int
    global_batch: int
    seed: int
    samples: int
    """Samples up to the score that reached the target, or to the end of the trial."""
    before: int
    """Samples up to the score before."""
    reached: bool
    failed: str | None = None
    """The error that ended the run early, such as divergence."""


class SamplesLaw(NamedTuple):
    """The law of one strategy, one job and one target."""

    e_min: float
    s_min: float

    def samples(self, global_batch: float) -> float:
        """E_min + S_min B."""
        return self.e_min + self.s_min * global_batch

    @property
    def noise_scale(self) -> float:
        """𝓑 = E_min / S_min, in samples; infinite if larger batches cost nothing."""
        return self.e_min / self.s_min if self.s_min > 0 else math.inf


def fitted(points: Sequence[tuple[float, float]]) -> SamplesLaw:
    """Least squares of the logarithms over (B, samples), with E_min and S_min from 0 on.

    For a given 𝓑 the best S_min is the geometric mean of samples / (𝓑 + B); 𝓑 is the best of a grid. With one B it is
    E_min alone. Errors: ValueError for no point.
    """
    if not points:
        raise ValueError("a law of samples needs at least one run that reached the target")
    batches, logs = [batch for batch, _ in points], [math.log(samples) for _, samples in points]
    level = fmean(logs)
    best, best_law = _squares(logs, level), SamplesLaw(math.exp(level), 0.0)
    for noise_scale in _noise_scales(min(batches), max(batches)):
        shifted = [log - math.log(noise_scale + batch) for log, batch in zip(logs, batches, strict=True)]
        level = fmean(shifted)
        if (squares := _squares(shifted, level)) < best:
            best, best_law = squares, SamplesLaw(math.exp(level) * noise_scale, math.exp(level))
    return best_law


def _squares(values: Sequence[float], level: float) -> float:
    return sum((value - level) ** 2 for value in values)


def _noise_scales(least: float, most: float) -> list[float]:
    """0, and from a quarter of the smallest batch to 64 times the largest, two steps for each doubling.

    Beyond, a law cannot be told from a law without S_min. Empty for one batch.
    """
    if least == most:
        return []
    steps = math.ceil(2 * math.log2(256 * most / least))
    return [0.0, *(least / 4 * 2 ** (step / 2) for step in range(steps + 1))]


def middle(trial: SamplesTrial) -> float:
    """The estimated samples at the crossing of the target: the middle between two scores."""
    return (trial.before + trial.samples) / 2


def deviation(families: Sequence[Sequence[SamplesTrial]]) -> float:
    """The deviation of runs from their laws, as a part of their samples, common to all families.

    A guess of 15 % counts as two degrees of freedom, and less than 5 % is not believed.
    """
    squares, degrees = _PRIOR_DEGREES * _PRIOR_NOISE**2, float(_PRIOR_DEGREES)
    for trials in families:
        points = [(float(each.global_batch), middle(each)) for each in trials]
        law = fitted(points)
        squares += sum(math.log(samples / law.samples(batch)) ** 2 for batch, samples in points)
        degrees += max(0, len(points) - (2 if law.s_min and law.e_min else 1))
    return max(_LEAST_NOISE, math.sqrt(squares / degrees))


def drawn_laws(trials: Sequence[SamplesTrial], noise: float, draws: int, random: Random) -> list[SamplesLaw]:
    """Other likely laws: fitted to trials that are each moved by `noise`, and within their two scores."""
    return [
        fitted(
            [
                (
                    each.global_batch,
                    random.uniform(each.before, each.samples) * math.exp(random.gauss(0.0, noise)),
                )
                for each in trials
            ]
        )
        for _ in range(draws)
    ]
