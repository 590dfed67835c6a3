"""Bayesian optimisation in a unit box: a Gaussian process over what was measured, and where to measure next.

Source: J. Snoek, H. Larochelle, R. P. Adams, "Practical Bayesian optimization of machine learning algorithms", 2012,
section 2; C. E. Rasmussen, C. K. I. Williams, "Gaussian processes for machine learning", 2006, algorithm 2.1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_LENGTHS = np.geomspace(0.05, 2.0, 16)
_CANDIDATES = 2048
_XI = 0.01
"""How much better than the best a point must promise to be, in standard deviations of the scores."""


class Posterior(NamedTuple):
    """A Gaussian process that has seen n points of d numbers, with the kernel exp(-‖x - x'‖² / 2ℓ²)."""

    points: Array
    """(n, d)"""
    factor: Array
    """The lower Cholesky factor of the kernel matrix with noise, (n, n)."""
    weights: Array
    """That matrix's inverse times the scores, which have mean 0 and variance 1, (n,)."""
    length: float

    def at(self, where: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of the scores at `where`, (m, d); each (m,)."""
        kernel = _kernel(where, self.points, self.length)
        reduced = np.linalg.solve(self.factor, kernel.T)
        return kernel @ self.weights, np.sqrt(np.maximum(1.0 - (reduced**2).sum(0), 1e-12))


def fit(points: Array, scores: Array, noise: float) -> Posterior:
    """What the scores (n,) at `points` (n, d) say. `noise`: their standard deviation, where that of all scores is 1.

    The length ℓ is the one, of 16, under which the scores are the likeliest. Cost: 16 factorisations of n × n.
    """
    spread = scores.std()
    y = (scores - scores.mean()) / (spread if spread > 0 else 1.0)
    found = [_conditioned(points, y, noise, float(length)) for length in _LENGTHS]
    return max(found, key=lambda each: each[0])[1]


def next_point(posterior: Posterior, dims: int, random: np.random.Generator) -> Array:
    """Of 2048 points of the box the one whose expected improvement over the best mean is the largest, (d,)."""
    candidates = random.random((_CANDIDATES, dims))
    mean, deviation = posterior.at(candidates)
    best = posterior.at(posterior.points)[0].max()
    gain = mean - best - _XI
    z = gain / deviation
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    below = np.array([0.5 * math.erfc(-each / math.sqrt(2)) for each in z])
    chosen: Array = candidates[np.argmax(gain * below + deviation * density)]
    return chosen


def _conditioned(points: Array, y: Array, noise: float, length: float) -> tuple[float, Posterior]:
    """The logarithm of the scores' likelihood, but for a constant, and the posterior."""
    matrix = _kernel(points, points, length) + (noise**2 + 1e-9) * np.eye(len(points))
    factor: Array = np.linalg.cholesky(matrix).astype(np.float64, copy=False)
    weights: Array = np.linalg.solve(factor.T, np.linalg.solve(factor, y))
    likelihood = -0.5 * float(y @ weights) - float(np.log(np.diag(factor)).sum())
    return likelihood, Posterior(points, factor, weights, length)


def _kernel(a: Array, b: Array, length: float) -> Array:
    squares = ((a[:, None, :] - b[None, :, :]) ** 2).sum(-1)
    answer: Array = np.exp(-squares / (2 * length**2))
    return answer
