"""Stochastic gradient push: gossip over directed graphs, where no worker waits for its receivers."""

from __future__ import annotations

from polytempo.aggregation import Graph, exponential_graph, push_sum
from polytempo.core import Strategy, call_name


def stochastic_gradient_push(graph: Graph = exponential_graph) -> Strategy:
    """Send parts of each worker's model, and of a weight, to its receivers in the graph, after each step.

    xᵢ ← Σⱼ Pᵢⱼ xⱼ, wᵢ ← Σⱼ Pᵢⱼ wⱼ, zᵢ = xᵢ / wᵢ; gradients are taken at z and applied to x. Only the columns of P must
    sum to 1, so any directed graph will do if each worker keeps a part: `random_targets()`, or the graphs of `gossip`;
    with these all w are 1 and it is `gossip`. The mean of the xᵢ moves by the mean of the updates.

    Running statistics (batch norm) go the same ways, by weight. Optimizers stay local. An evaluation is of the mean of
    the zᵢ. Elastic runs are refused: of a worker that is lost, a part of the sum would be lost.

    Cost: K bytes to each that the graph names, one message long; memory for one more copy of the parameters.

    Source: M. Assran, N. Loizou, N. Ballas and M. Rabbat, "Stochastic gradient push for distributed deep learning",
    2019, algorithm 1. Deviation: workers know the graph and compute all w, which the paper sends. Its overlapped form
    is left out.
    """
    return Strategy(call_name(stochastic_gradient_push, locals()), parameters=push_sum(graph), synchronized=False)
