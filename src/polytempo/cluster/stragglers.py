"""Straggler distributions: how the time of a step's computations varies. Each returns a factor on their duration."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from polytempo.cluster.slow_spells import CorrelatedStragglers

Draw = Callable[[Random, int], float]
"""`(random, host) -> factor`: how many times longer than at full speed a worker computes, in one of its steps."""

Stragglers = Draw | CorrelatedStragglers
"""Draws that depend on nothing before, or on earlier draws (`slow_spells`, `correlated`)."""


def constant() -> Draw:
    """Every step takes exactly its time. The one function that says so: a cluster with it has no stragglers."""
    return _exactly


def _exactly(random: Random, host: int) -> float:
    return 1.0


def uniform(spread: float = 0.5) -> Draw:
    """Uniform in [1 - spread, 1 + spread]; mean 1."""
    if not 0 <= spread <= 1:
        raise ValueError(f"spread must be in [0, 1], got {spread}")
    return lambda random, host: random.uniform(1 - spread, 1 + spread)


def exponential() -> Draw:
    """Exponential with mean 1: the heaviest of the usual models (the maximum of N has mean H_N)."""
    return lambda random, host: random.expovariate(1.0)


def lognormal(sigma: float = 0.3) -> Draw:
    """exp(sigma · Z) with Z standard normal; median 1."""
    if sigma < 0:
        raise ValueError(f"sigma must be >= 0, got {sigma}")
    return lambda random, host: random.lognormvariate(0.0, sigma)


def occasional(probability: float = 0.02, factor: float = 5.0) -> Draw:
    """`factor` times longer with the given probability: "2 % of steps take 5×"."""
    if not 0 <= probability <= 1 or factor < 1:
        raise ValueError(f"needs probability in [0, 1] and factor >= 1, got {probability} and {factor}")
    return lambda random, host: factor if random.random() < probability else 1.0


def slow_host(host: int = 0, factor: float = 2.0, others: Stragglers | None = None) -> Draw:
    """Workers on `host` take `factor` times as long; `others` varies all hosts on top of that."""
    if factor <= 0:
        raise ValueError(f"factor must be positive, got {factor}")
    if isinstance(others, CorrelatedStragglers):
        raise ValueError("slow_host multiplies independent draws; give others=lognormal() or another one of these")
    vary = constant() if others is None else others
    return lambda random, at: vary(random, at) * (factor if at == host else 1.0)
