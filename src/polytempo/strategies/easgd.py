"""Elastic averaging SGD: workers explore alone, each on a spring to a center at the server."""

from __future__ import annotations

from polytempo.core import Strategy, call_name, identity
from polytempo.core.rule import Service, UpdateRule
from polytempo.server.rules.elastic import elastic, elastic_share
from polytempo.server.service import served
from polytempo.server.worker.transforms import exchange


def easgd(
    period: int = 4, alpha: float | None = None, beta: float = 0.9, shards: int = 1, replicas: int = 0
) -> Strategy:
    """Every worker steps alone with the job's optimizer; every `period` steps it and the center draw nearer.

    d = α (x - x̃); x ← x - d at the worker, x̃ ← x̃ + d at the server (x̃, the center, is the resulting model).
    Without `alpha` α = β/λ with λ workers. With Nesterov momentum it is EAMSGD but for the point that the spring pulls:
    torch keeps x + δv (δ: momentum, v: velocity) where the paper's algorithm 2 keeps x, and d is of x + δv.

    Weight decay and schedule are of the workers' own steps, with the rate at each batch's place in the run; the center
    moves by d alone. A worker that dies loses its exploration since its last exchange.

    Cost: the parameters there and a difference back, every τ = `period` steps. The worker waits for them.

    Source: S. Zhang, A. Choromanska and Y. LeCun, "Deep learning with elastic averaging SGD", NIPS 2015, algorithms 1
    and 2. There a gradient of before the exchange is applied after it; here a worker steps first and exchanges then.
    """
    return served(
        call_name(easgd, locals()),
        Service(
            elastic_share(beta) if alpha is None else elastic(alpha),
            shards=shards,
            replicas=replicas,
            optimizer=UpdateRule("sgd"),  # it never steps: the center moves by d only
        ),
        gradients=identity(),
        parameters=exchange(period),
    )
