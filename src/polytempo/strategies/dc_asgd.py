"""DC-ASGD: asynchronous SGD; the server corrects each gradient for the parameters' movement meanwhile."""

from __future__ import annotations

from polytempo.core import Strategy, call_name
from polytempo.core.rule import Service, Staleness
from polytempo.server.rules.asynchronous import on_arrival
from polytempo.server.rules.corrections import compensate
from polytempo.server.rules.staleness import rate_of, scale_of
from polytempo.server.service import served


def dc_asgd(
    strength: float = 0.04,
    shards: int = 1,
    replicas: int = 0,
    rate: float | None = None,
    mean_square: float | None = None,
    scale: str | Staleness = "constant",
) -> Strategy:
    """Every worker pulls, computes, pushes; θ ← θ - ρ η (g + s g⊙g⊙(θ - θ_read)), s = `strength`, with each gradient.

    The correction is about the gradient that the present θ would have given: a Taylor series to first order, with g⊙g
    in place of the Hessian's diagonal. With strength 0 it is `async_sgd`, and ρ = `rate` is as there: without it one
    over the number of workers; the paper's rule is `rate=1`, with a learning rate that fits.

    With `mean_square` m (DC-ASGD-a) s is divided by √(v + 10⁻⁷) for each parameter, v ← m v + (1 - m) g⊙g, so that it
    need not be tuned to the gradients' size: the paper's is s = 2, m = 0.95. The job's optimizer must then be SGD.

    `scale`: the factor of the rate by the staleness, as in `async_sgd`, after the correction.

    The correction is of the loss' gradient; weight decay, if the job's optimizer has it, is of the present θ.

    Cost: as `async_sgd`; a shard keeps the parameters that each worker has read last, and v.

    Source: S. Zheng et al., "Asynchronous stochastic gradient descent with delay compensation", ICML 2017, equations 10
    (DC-ASGD-c) and 14 (DC-ASGD-a).
    """
    return served(
        call_name(dc_asgd, locals(), brief=("mean_square", "scale")),
        Service(
            on_arrival(scale_of(scale)),
            shards=shards,
            replicas=replicas,
            modifiers=(compensate(strength, mean_square),),
            rate=rate_of(rate, scale=scale),
        ),
    )
