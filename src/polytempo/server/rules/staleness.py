"""Factors of the learning rate of an update: by the staleness τ of its gradient, and by the number of workers.

τ is the number of updates between the version of the weights that a gradient was computed on (j) and the version that
it meets (i): τ = i - j. The rate and not the gradient: Adam, AdamW and Adagrad divide gradients by their size, so a
constant 1/τ would cancel, and weight decay would not be divided.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp

from polytempo.core.calls.call_name import call_name
from polytempo.core.rule import Add, Arrival, Drop, Rate, Situation, Staleness


def constant(tau: int) -> float:
    """1: every gradient has the same rate, however stale."""
    return 1.0


def inverse(tau: int) -> float:
    """1/τ, and 1 for τ = 0, so that 0 and 1 count the same.

    Source: W. Zhang, S. Gupta, X. Lian and J. Liu, "Staleness-aware async-SGD for distributed deep learning",
    IJCAI 2016, section 3.
    """
    return 1 / tau if tau > 0 else 1.0


def power(p: float) -> Staleness:
    """1/τᵖ, and 1 for τ = 0: milder than `inverse` with p < 1, sterner with p > 1."""
    if p < 0:
        raise ValueError(f"power needs p >= 0, got {p}; with p < 0 stale gradients would count more than fresh ones")

    def scale(tau: int) -> float:
        return float(tau**-p) if tau > 0 else 1.0

    return _named(scale, call_name(power, locals()))


def exponential(rate: float) -> Staleness:
    """exp(-rate τ). With many workers learning stops: at τ of some hundreds the rate is practically 0.

    That is why Zhang et al. (see `inverse`) rejected it. It is here for comparison, and for few workers.
    """
    if rate < 0:
        raise ValueError(f"exponential needs rate >= 0, got {rate}; with rate < 0 stale gradients would count more")

    def scale(tau: int) -> float:
        return exp(-rate * tau)

    return _named(scale, call_name(exponential, locals()))


def cutoff(limit: int) -> Staleness:
    """1 up to τ = `limit`, and 0 beyond: rules drop a gradient of rate 0, and the answer to its worker says so."""
    if limit < 0:
        raise ValueError(f"cutoff needs limit >= 0 updates, got {limit}")

    def scale(tau: int) -> float:
        return 1.0 if tau <= limit else 0.0

    return _named(scale, call_name(cutoff, locals()))


def weighed(arrival: Arrival, situation: Situation, scale: Staleness) -> Add | Drop:
    """The action for a gradient that has arrived: add it with the rate of its τ, or drop it if that is 0.

    It is dropped and not added with rate 0, since such an update would still change momentum and Adam's moments.
    """
    rate = scale(situation.version - arrival.basis)
    return Add(arrival.worker, rate=rate) if rate else Drop(arrival.worker, "stale")


def _named(scale: Staleness, name: str) -> Staleness:
    """`scale` with a name, which a rule's name shows."""
    scale.__name__ = name
    return scale


def alone(workers: int) -> int:
    """Each gradient is an update."""
    return 1


def rate_of(rate: float | None, together: Callable[[int], int] = alone) -> Rate:
    """`rate` for any number of workers; without it c/λ, where an update is of c = `together`(λ) gradients.

    A synchronous step of λ workers moves the weights by η times the mean of λ gradients: each of them by η/λ. Where c
    gradients are an update there are λ/c of them meanwhile, so with c/λ each gradient counts as in the synchronous
    step, and the learning rate of a job is good for both. With one worker it is 1.
    """
    if rate is not None and not rate > 0:
        raise ValueError(f"rate multiplies the job's learning rate, so it must be above 0, got {rate}")
    return lambda workers: together(workers) / workers if rate is None else rate
