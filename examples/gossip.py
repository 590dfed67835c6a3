"""Gossip: no worker talks to all, and still all agree in the end.

No model here, only the mixing: sixteen ranks hold the numbers 0 to 15, and `mix(graph)`, the transform inside
`pt.strategies.gossip`, runs alone in a virtual world. How fast do they agree on the mean, 7.5?
"""

from __future__ import annotations

import torch

import polytempo as pt
from polytempo.aggregation import Graph, complete, exponential_graph, mix, random_pairs, ring_graph

RANKS, ROUNDS = 16, 8


def spreads(graph: Graph) -> list[float]:
    """Largest minus smallest value among the ranks after each round."""
    transform = mix(graph)

    async def program(port: pt.core.Port) -> list[float]:
        bundle = pt.core.Bundle({"x": torch.tensor([float(port.rank)])})
        state, seen = transform.init(bundle), [float(port.rank)]
        for _ in range(ROUNDS):
            answer, state = await transform.apply(port, bundle, state)
            bundle = answer or bundle  # a transform may answer None: no update in this step
            seen.append(float(bundle.flat))
        return seen

    outcome = pt.worlds.VirtualWorld(pt.cluster.ethernet(), RANKS).run(program)
    return [max(values) - min(values) for values in zip(*outcome.results, strict=True)]


for graph in (ring_graph, random_pairs(seed=0), exponential_graph, complete):
    print(f"{graph.__name__:22}" + "".join(f"{spread:8.3f}" for spread in spreads(graph)))
