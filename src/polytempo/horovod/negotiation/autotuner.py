"""`Autotuner`: looks for the fusion threshold and the cycle time with the highest throughput. A machine without I/O.

operations ─▶ window: until a name has come `steps_per_sample` times; bytes/µs ─▶ the median of 5 is one score
scores ─▶ the first `warmup_samples` are forgotten; then the next point is measured, `max_samples` times; then the best

The next point comes from Bayesian optimisation in a unit box, by a Gaussian process over earlier scores.

Source: J. Snoek, H. Larochelle, R. P. Adams, "Practical Bayesian optimization of machine learning algorithms", 2012,
section 2; C. E. Rasmussen, C. K. I. Williams, "Gaussian processes for machine learning", 2006, algorithm 2.1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_WINDOWS = 5
_FUSION_BYTES = (64 << 10, 128 << 20)
_CYCLE_S = (1e-4, 2e-2)
_FIRST = ((0.25, 0.25), (0.75, 0.75), (0.75, 0.25), (0.25, 0.75))
"""Places in the box that are measured before the process has anything to say."""


class TunedSettings(NamedTuple):
    """The settings that are tuned."""

    fusion_bytes: int
    cycle_s: float


class AutotuneOptions(NamedTuple):
    """Horovod's variables HOROVOD_AUTOTUNE_*, and its defaults."""

    warmup_samples: int = 3
    steps_per_sample: int = 10
    max_samples: int = 20
    noise: float = 0.8
    """The share of chance in the spread of all scores."""
    tunes_fusion: bool = True
    tunes_cycle: bool = True
    seed: int = 0


class Autotuner:
    """Rank 0's. `start` holds in the beginning; settings that are not tuned keep its values.

    Thresholds from 64 KiB to 128 MiB and cycles from 0.1 to 20 ms, both on logarithmic scales. Each measured setting
    lasts for 5 windows. Deviation from Horovod: the best is the setting with the highest mean of the process, not the
    one with the highest single score, which chance may have raised.
    """

    def __init__(self, start: TunedSettings, options: AutotuneOptions) -> None:
        self.settings, self._options = start, options
        self.done = not (options.tunes_fusion or options.tunes_cycle)
        self.rows: list[tuple[TunedSettings, float]] = []
        """Scores for the log; who drives the machine takes them out. The last of all is the best."""
        self._random = np.random.default_rng(options.seed)
        self._start = start
        self._place = self._placed(start)
        self._tried: list[TunedSettings] = []
        self._points: list[Array] = []
        self._scores: list[float] = []
        self._warmup = options.warmup_samples
        self._windows: list[float] = []
        self._counts: Counter[str] = Counter()
        self._bytes = 0
        self._since_s: float | None = None

    def performed(self, names: Iterable[str], num_bytes: int, now_s: float) -> TunedSettings | None:
        """Operations of so many bytes have been performed. The new settings, if they change."""
        if self.done:
            return None
        if self._since_s is None:
            self._since_s = now_s
            return None
        self._bytes += num_bytes
        self._counts.update(names)
        if max(self._counts.values(), default=0) < self._options.steps_per_sample:
            return None
        self._windows.append(self._bytes / max(1e6 * (now_s - self._since_s), 1e-3))
        self._forget(now_s)
        if len(self._windows) < _WINDOWS:
            return None
        score, self._windows = median(self._windows), []
        if self._warmup > 0:
            self._warmup -= 1
            return None
        return self._scored(score)

    def _forget(self, now_s: float | None) -> None:
        self._bytes, self._since_s = 0, now_s
        self._counts.clear()

    def _scored(self, score: float) -> TunedSettings:
        self.rows.append((self.settings, score))
        self._tried.append(self.settings)
        self._points.append(self._place)
        self._scores.append(score)
        posterior = fit(np.array(self._points), np.array(self._scores), self._options.noise)
        tried = len(self._points)
        if tried >= self._options.max_samples:
            self.done = True
            best = int(np.argmax(posterior.at(posterior.points)[0]))
            self.settings = self._tried[best]
            self.rows.append((self.settings, self._scores[best]))
            return self.settings
        if tried <= len(_FIRST):
            self._place = self._kept(np.array(_FIRST[tried - 1]))
        else:
            self._place = self._kept(next_point(posterior, 2, self._random))
        self.settings = self._settings(self._place)
        self._forget(None)  # operations under way belong to neither setting
        return self.settings

    # ------------------------------------------------------------------ settings as places in the unit box

    def _kept(self, place: Array) -> Array:
        """`place`, with settings that are not tuned where they were."""
        start = self._placed(self._start)
        tunes = np.array([self._options.tunes_fusion, self._options.tunes_cycle])
        return np.where(tunes, place, start)

    def _placed(self, settings: TunedSettings) -> Array:
        fusion = _share(max(settings.fusion_bytes, 1), *_FUSION_BYTES)
        return np.array([fusion, _share(max(settings.cycle_s, 1e-9), *_CYCLE_S)])

    def _settings(self, place: Array) -> TunedSettings:
        return TunedSettings(
            round(_value(float(place[0]), *_FUSION_BYTES)) if self._options.tunes_fusion else self._start.fusion_bytes,
            _value(float(place[1]), *_CYCLE_S) if self._options.tunes_cycle else self._start.cycle_s,
        )


def _share(value: float, low: float, high: float) -> float:
    return min(max(math.log(value / low) / math.log(high / low), 0.0), 1.0)


def _value(share: float, low: float, high: float) -> float:
    return float(low * (high / low) ** share)


Array = NDArray[np.float64]

_LENGTHS = np.geomspace(0.05, 2.0, 16)
_CANDIDATES = 2048
_XI = 0.01
"""A point must promise to be so much better than the best, in standard deviations of the scores."""


class Posterior(NamedTuple):
    """A Gaussian process that has seen n points of d numbers, with the kernel exp(-‖x - x'‖² / 2ℓ²)."""

    points: Array
    """(n, d)"""
    factor: Array
    """The lower Cholesky factor of the kernel matrix with noise, (n, n)."""
    weights: Array
    """The inverse of that matrix times the scores, which have mean 0 and variance 1, (n,)."""
    length: float

    def at(self, where: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of the scores at `where`, (m, d); each (m,)."""
        kernel = _kernel(where, self.points, self.length)
        reduced = np.linalg.solve(self.factor, kernel.T)
        return kernel @ self.weights, np.sqrt(np.maximum(1.0 - (reduced**2).sum(0), 1e-12))


def fit(points: Array, scores: Array, noise: float) -> Posterior:
    """The posterior of the scores (n,) at `points` (n, d). `noise`: their standard deviation, if all scores have a
    standard deviation of 1.

    The length ℓ is the likeliest of 16 under the scores. Cost: 16 factorisations of n × n.
    """
    spread = scores.std()
    y = (scores - scores.mean()) / (spread if spread > 0 else 1.0)
    found = [_conditioned(points, y, noise, float(length)) for length in _LENGTHS]
    return max(found, key=lambda each: each[0])[1]


def next_point(posterior: Posterior, dims: int, random: np.random.Generator) -> Array:
    """The one of 2048 points of the box with the largest expected improvement over the best mean, (d,)."""
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
