"""Straggler distributions: how the time of one computation varies. Each returns a factor on its duration."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

_Factor = Callable[[Random, int], float]


def constant() -> _Factor:
    """Every computation takes exactly its time."""
    return lambda random, host: 1.0


def uniform(spread: float = 0.5) -> _Factor:
    """Uniform in [1 - spread, 1 + spread]; mean 1."""
    if not 0 <= spread <= 1:
        raise ValueError(f"spread must be in [0, 1], got {spread}")
    return lambda random, host: random.uniform(1 - spread, 1 + spread)


def exponential() -> _Factor:
    """Exponential with mean 1: the heaviest of the usual models (the maximum of N has mean H_N)."""
    return lambda random, host: random.expovariate(1.0)


def lognormal(sigma: float = 0.3) -> _Factor:
    """exp(sigma · Z) with Z standard normal; median 1."""
    if sigma < 0:
        raise ValueError(f"sigma must be >= 0, got {sigma}")
    return lambda random, host: random.lognormvariate(0.0, sigma)


def occasional(probability: float = 0.02, factor: float = 5.0) -> _Factor:
    """`factor` times longer with the given probability: "2 % of steps take 5×"."""
    if not 0 <= probability <= 1 or factor < 1:
        raise ValueError(f"needs probability in [0, 1] and factor >= 1, got {probability} and {factor}")
    return lambda random, host: factor if random.random() < probability else 1.0


def slow_host(host: int = 0, factor: float = 2.0, others: _Factor | None = None) -> _Factor:
    """Workers on `host` take `factor` times as long; `others` varies all hosts on top of that."""
    if factor <= 0:
        raise ValueError(f"factor must be positive, got {factor}")
    vary = others or constant()
    return lambda random, at: vary(random, at) * (factor if at == host else 1.0)
