"""Factors of the learning rate of an update: by the staleness τ of its gradient, and by the number of workers.

τ is the number of updates between the version of the weights that a gradient was computed on (j) and the version that
it meets (i): τ = i - j. The rate and not the gradient: Adam, AdamW and Adagrad divide gradients by their size, so a
constant 1/τ would cancel, and weight decay would not be divided.
"""

from __future__ import annotations

from collections.abc import Callable
from math import cos, exp, isfinite, log2, pi

from polytempo.core.calls.call_name import call_name
from polytempo.core.calls.typed_arguments import check_real, check_whole
from polytempo.core.rule import Add, Arrival, Drop, Rate, Situation, Staleness

__all__ = ["gate", "power"]


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
    """1/τᵖ, and 1 for τ = 0: an argument `scale` of asynchronous strategies, such as `async_sgd(scale=power(2))`.

    p < 1 divides the rate by less than `inverse`, p > 1 by more; `power(1)` is `inverse` to the bit. A factor below
    10⁻³⁰⁰ is 0: rules drop such a gradient.

    Errors: ValueError unless p is positive and finite.
    """
    if not (p > 0 and isfinite(p)):
        raise ValueError(f"power needs a finite p > 0, got {p}; scale=constant has one rate for every staleness")
    p = float(p)

    def scale(tau: int) -> float:
        if tau <= 1:
            return 1.0
        return 1 / tau**p if p * log2(tau) < _MOST_BITS else 0.0

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


def gate(decay: float, limit: int) -> Staleness:
    """γ(τ) exp(-α τ): 1 for τ = 0, and 0 from τ = `limit` on; such as `async_diloco(scale=gate(0.1, 8))`.

    γ(τ) = (1 + cos(π τ/T))/2 for τ < T, else 0, with T = `limit` and α = `decay`. A gradient of rate 0 is dropped, and
    counts among the dropped ones of the run. With `decay` = 0 it is γ alone.

    Source: V. Shah and J. Sun, "Cosine-gated Adam-decay", arXiv 2605.09126, 2026. Its abstract has the product, the
    cosine and its end; this curve from 1 to 0 is ours. There it multiplies a movement before the moments of an outer
    Adam; here it is a factor of the rate, as every scale.

    Errors: ValueError for a negative or infinite decay, and for a limit that is not a whole number or below 1.
    """
    check_real(decay=decay)
    check_whole(limit=limit)
    if not (decay >= 0 and isfinite(decay)):
        raise ValueError(
            f"gate needs a finite decay >= 0, got {decay}; with decay < 0 stale gradients would count more"
        )
    if limit < 1:
        raise ValueError(f"gate needs limit >= 1 update, got {limit}; with less it would drop every gradient")
    decay = float(decay)

    def scale(tau: int) -> float:
        return (1 + cos(pi * tau / limit)) / 2 * exp(-decay * tau) if tau < limit else 0.0

    return _named(scale, call_name(gate, locals()))


def weighed(arrival: Arrival, situation: Situation, scale: Staleness) -> Add | Drop:
    """The action for a gradient that has arrived: add it with the rate of its τ, or drop it if that is 0.

    It is dropped and not added with rate 0, since such an update would still change momentum and Adam's moments.
    """
    rate = scale(situation.version - arrival.basis)
    return Add(arrival.worker, rate=rate) if rate else Drop(arrival.worker, "stale")


_MOST_BITS = 1_000
"""The largest exponent of 2 in τᵖ: a float holds 1,023."""
_NAMED: dict[str, Staleness] = {"constant": constant, "inverse": inverse}


def _named(scale: Staleness, name: str) -> Staleness:
    """`scale` with a name, which a rule's name shows."""
    scale.__name__ = name
    return scale


def scale_of(given: str | Staleness) -> Staleness:
    """The function that a strategy's `scale` names: "constant", "inverse", or a function such as `power(2)`.

    Errors: ValueError for another name; TypeError for other values.
    """
    if callable(given):
        return given
    if not isinstance(given, str):
        raise TypeError(f"scale is a name or a function of the staleness, got {given!r}; write scale=power({given})")
    if given not in _NAMED:
        raise ValueError(f"scale must be one of {', '.join(_NAMED)}, power(p), gate(decay, limit), got {given!r}")
    return _NAMED[given]


def alone(workers: int) -> int:
    """Each gradient is an update."""
    return 1


def rate_of(rate: float | None, together: Callable[[int], int] = alone, scale: str | Staleness = constant) -> Rate:
    """`rate` for any number of workers; without it c/λ, where an update is of c = `together`(λ) gradients.

    A synchronous step of λ workers moves the weights by η times the mean of λ gradients: each of them by η/λ. Where c
    gradients are an update there are λ/c of them meanwhile, so with c/λ each gradient counts as in the synchronous
    step, and the learning rate of a job is good for both. With one worker it is 1.

    The staleness that is usual is about m = ⌈λ/c⌉, and there s = `scale` divides the rate already. So the factor is
    c/λ / s(m), at most 1: 1 for `inverse`, and 1/√λ for `power(0.5)` where each gradient is an update.
    """
    if rate is not None and not rate > 0:
        raise ValueError(f"rate multiplies the job's learning rate, so it must be above 0, got {rate}")
    factor = scale_of(scale)

    def shared(workers: int) -> float:
        gradients = together(workers)
        share = gradients / workers
        return share / max(share, factor(-(-workers // gradients)))

    return shared if rate is None else lambda workers: rate
