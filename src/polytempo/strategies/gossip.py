"""Gossip (D-PSGD): each worker averages with a few neighbours only."""

from __future__ import annotations

from polytempo.aggregation import Graph, mix, ring_graph
from polytempo.core import Strategy, call_name
from polytempo.synchronization import every, overlapped


def gossip(graph: Graph = ring_graph, period: int = 1, overlap: bool = False) -> Strategy:
    """Mix the model with the neighbours' models in the graph, after every `period` steps.

    θᵢ ← Σⱼ Wᵢⱼ θⱼ, W doubly stochastic. `graph` is `ring`, `exponential_graph`, `complete` or `random_pairs()`.

    Running statistics (batch norm) are mixed with the same neighbours by the same W. Optimizers stay local. No worker
    talks to others than its neighbours, but for an evaluation, which is of the mean of all models.

    In an elastic run W is the matrix of the present number of workers. Where one is lost the others mix immediately,
    their mean stays, and the lost worker's samples since it mixed last are dealt again. A newcomer gets the others'
    mean; when one leaves, the others move alike, so that the mean stays. All make sure at each mixing that all have
    their neighbours' models, by an all-reduce of 40 bytes.

    Cost: K bytes to each neighbour, one message long, for any number of workers; a second, small one for running
    statistics.

    Without `overlap` the mix follows the local step. With it models are mixed while the next gradient is computed at
    the unmixed one, as in the paper: θᵢ(k+1) = Σⱼ Wᵢⱼ θⱼ(k) - γ ∇fᵢ(θᵢ(k)). That takes memory for two more copies of
    the parameters, and elastic runs refuse it.

    Source: X. Lian et al., "Can decentralized algorithms outperform centralized algorithms?", 2017, algorithm 1.
    """
    meet = overlapped(mix(graph)) if overlap else mix(graph)
    name = call_name(gossip, locals(), brief=("overlap",))
    return Strategy(name, parameters=every(period, meet), synchronized=False)
