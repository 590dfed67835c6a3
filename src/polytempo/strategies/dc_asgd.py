"""DC-ASGD: asynchronous SGD whose server corrects each gradient for the way the parameters have gone meanwhile."""

from __future__ import annotations

from polytempo.core import Strategy, call_name
from polytempo.core.rule import Service
from polytempo.server.rules.asynchronous import on_arrival
from polytempo.server.rules.corrections import compensate
from polytempo.server.rules.rate import rate_of
from polytempo.server.service import served


def dc_asgd(strength: float = 0.04, shards: int = 1, replicas: int = 0, rate: float | None = None) -> Strategy:
    """Every worker pulls, computes, pushes; θ ← θ - ρ η (g + s g⊙g⊙(θ - θ_read)), s = `strength`, with each gradient.

    The correction is about the gradient that the present θ would have given: a Taylor series to first order, with g⊙g
    in place of the Hessian's diagonal. With strength 0 it is `async_sgd`, and ρ = `rate` is what it is there: without
    it one over the number of workers; the paper's rule is `rate=1`, with a learning rate that fits.

    The correction is of the loss' gradient; weight decay, if the job's optimizer has it, is of the present θ.

    Cost: as `async_sgd`; a shard keeps the parameters that each worker has read last.

    Source: S. Zheng et al., "Asynchronous stochastic gradient descent with delay compensation", ICML 2017, equation 10
    (DC-ASGD-c). Its adaptive form is left out.
    """
    return served(
        call_name(dc_asgd, locals()),
        Service(on_arrival(), shards=shards, replicas=replicas, modifiers=(compensate(strength),), rate=rate_of(rate)),
    )
