"""The factor on the job's learning rate for an update of the server, by the number of workers."""

from __future__ import annotations

from collections.abc import Callable

from polytempo.core.rule import Rate


def alone(workers: int) -> int:
    """Each gradient is an update."""
    return 1


def rate_of(rate: float | None, together: Callable[[int], int] = alone) -> Rate:
    """`rate` for any number of workers; without it c/λ, where an update is of c = `together`(λ) gradients.

    A synchronous step of λ workers moves the weights by η times the mean of λ gradients: each of them by η/λ. Where c
    gradients are an update there are λ/c of them meanwhile, so with c/λ each gradient counts what it counts in the
    synchronous step, and the learning rate of a job is good for both. With one worker it is 1.
    """
    if rate is not None and not rate > 0:
        raise ValueError(f"rate multiplies the job's learning rate, so it must be above 0, got {rate}")
    return lambda workers: together(workers) / workers if rate is None else rate
