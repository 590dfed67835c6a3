"""Local SGD: H steps alone, then the mean of the models; optimizers stay local."""

from __future__ import annotations

from polytempo.aggregation import mean
from polytempo.core import Route, Strategy, native, spelled
from polytempo.synchronization import every


def local_sgd(period: int = 8, route: Route = native) -> Strategy:
    """Every worker takes `period` steps of its own, then all continue from the mean of their models.

    θ ← Σᵢ (1/N) θᵢ at steps H, 2H, … ; momentum and other state stay with the worker.

    Cost: 1/H of synchronous SGD's communication.

    Source: S. U. Stich, "Local SGD converges fast and communicates little", 2019.
    """
    return Strategy(
        spelled("local_sgd", period=period, route=route),
        parameters=every(period, mean(route)),
        in_step=period == 1,
    )
