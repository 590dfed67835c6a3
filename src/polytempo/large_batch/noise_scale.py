"""The gradient noise scale: how large a batch may be before more samples bring little."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple


class Squares(NamedTuple):
    """Unbiased estimates from the norms of two mean gradients, over a small and over a large batch."""

    of_gradient: float
    """|G|², the squared norm of the true gradient; may be negative where noise outweighs it."""
    of_noise: float
    """tr Σ, the variance of one sample's gradient, summed over all parameters."""


def squares(small: float, small_batch: float, large: float, large_batch: float) -> Squares:
    """From |G_b|² and |G_B|², the squared norms of mean gradients over b and over B samples, b < B:

        |G|² = (B |G_B|² - b |G_b|²) / (B - b)        tr Σ = (|G_b|² - |G_B|²) / (1/b - 1/B)

    The large batch may contain the small ones, as one worker's gradient and the mean of all; then `small` may be the
    mean of |G_b|² over the workers. Errors: ValueError unless 0 < b < B.
    Source: S. McCandlish et al., "An empirical model of large-batch training", 2018, appendix A.1.
    """
    if not 0 < small_batch < large_batch:
        raise ValueError(f"one batch must be larger than the other, got {small_batch} and {large_batch} samples")
    of_gradient = (large_batch * large - small_batch * small) / (large_batch - small_batch)
    return Squares(of_gradient, (small - large) / (1 / small_batch - 1 / large_batch))


@dataclass
class NoiseScale:
    """Both estimates averaged over steps, each by itself, and then divided: a mean of quotients would be biased.

    `keeps`: the weight of what is known when a step is added; the first steps weigh as much as they should.
    """

    keeps: float = 0.99
    steps: int = 0
    _of_gradient: float = 0.0
    _of_noise: float = 0.0

    def add(self, found: Squares) -> None:
        """The estimates of one more step."""
        self._of_gradient = self.keeps * self._of_gradient + (1 - self.keeps) * found.of_gradient
        self._of_noise = self.keeps * self._of_noise + (1 - self.keeps) * found.of_noise
        self.steps += 1

    @property
    def mean(self) -> Squares:
        """The averages so far. Errors: ValueError before the first step."""
        if not self.steps:
            raise ValueError("no step has been added, so there is no noise scale yet")
        known = 1 - self.keeps**self.steps
        return Squares(self._of_gradient / known, self._of_noise / known)

    @property
    def simple(self) -> float:
        """B_simple = tr Σ / |G|², in samples; infinite where the gradient is not seen for noise."""
        of_gradient, of_noise = self.mean
        return of_noise / of_gradient if of_gradient > 0 else math.inf


def speed_up(batch: float, noise_scale: float) -> float:
    """How many times fewer steps a batch needs than a batch of one sample does, at best: (1 + 𝓑) / (1 + 𝓑/B).

        (S/S_min - 1) (E/E_min - 1) = 1        S steps, E = B·S samples

    With B = 𝓑 it takes twice the fewest steps and twice the fewest samples. Source: McCandlish et al., section 2.3.
    """
    return (1 + noise_scale) / (1 + noise_scale / batch)
