"""Quasi-global momentum: gossip with a momentum of the mixed models' movement, not of a worker's own gradients."""

from __future__ import annotations

from polytempo.aggregation import Graph, mix, quasi_global, ring_graph
from polytempo.core import Strategy, call_name
from polytempo.synchronization import every


def quasi_global_momentum(graph: Graph = ring_graph, momentum: float = 0.5, smoothing: float = 0.9) -> Strategy:
    """Step on by the momentum after the optimizer's step, mix, and let the momentum follow the movement.

    x½ = xᵢ - η g - β uᵢ; xᵢ⁺ = Σⱼ Wᵢⱼ x½ⱼ; uᵢ ← μ uᵢ + (1 - μ) (xᵢ - xᵢ⁺), with β = `momentum` and μ = `smoothing`.
    The optimizer's own momentum acts within g; without one take the paper's 0.9. It helps where workers see different
    data. One worker alone has
    u ← (μ + β (1 - μ)) u + (1 - μ) ηg, a momentum too. With β = 0 it is `gossip(graph)`.

    In an elastic run it behaves as `gossip`; a newcomer gets the first worker's u.

    Cost: as `gossip`; memory for x and u.

    Source: T. Lin, S. P. Karimireddy, S. U. Stich and M. Jaggi, "Quasi-global momentum: accelerating decentralized deep
    learning on heterogeneous data", 2021, algorithm 1. Deviation: there u is divided by the learning rate of its step
    and multiplied by the next one's; here a change of the rate does not change past movement, and a rate of 0 is none.
    """
    return Strategy(
        call_name(quasi_global_momentum, locals()),
        parameters=every(1, quasi_global(mix(graph), momentum, smoothing)),
        synchronized=False,
    )
