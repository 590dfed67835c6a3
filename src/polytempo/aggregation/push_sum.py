"""Push-sum: gossip over a directed graph, in which some ranks hear of more others than they tell.

Source: M. Assran, N. Loizou, N. Ballas and M. Rabbat, "Stochastic gradient push for distributed deep learning", 2019.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.aggregation.graphs import Graph, neighbours, pushing_matrix
from polytempo.aggregation.mix import sum_cost, weighted_sum
from polytempo.core import Bundle, Cost, Exchange, Port, Transform
from polytempo.core.anchor import AnchorState
from polytempo.core.cost import num_bytes

_WEIGHT_BYTES = 8


class PushSumState(NamedTuple):
    """How often ranks have pushed, and where that has brought them: a rank's numerator x was w z then."""

    step: int
    weights: Tensor
    """w of all ranks, float64, shape (N,); empty before the first exchange."""
    last: AnchorState
    """z after the last exchange."""


def push_sum(graph: Graph) -> Transform:
    """xᵢ ← Σⱼ Pᵢⱼ xⱼ, wᵢ ← Σⱼ Pᵢⱼ wⱼ, zᵢ = xᵢ / wᵢ, with the P of `graph` at this step, whose columns sum to 1.

    z are the parameters; what has moved them since is added to x. Σᵢ xᵢ stays, and Σᵢ wᵢ = N, so every z tends to the
    mean. Running statistics sᵢ become Σⱼ Pᵢⱼ wⱼ sⱼ / Σⱼ Pᵢⱼ wⱼ. Where another number of ranks goes on, all w are
    1 again.
    Cost: as `mix`; memory for one more copy of the parameters. The graph is known to all ranks, so each computes all w
    itself, and none is sent.
    """

    def begin(port: Port, state: PushSumState) -> tuple[Tensor, Tensor]:
        """(P, w) before the exchange."""
        known = len(state.weights) == port.size
        weights = state.weights if known else torch.ones(port.size, dtype=torch.float64)
        return torch.tensor(list(pushing_matrix(graph, state.step, port.size)), dtype=torch.float64), weights

    async def apply(port: Port, bundle: Bundle, state: PushSumState) -> tuple[Bundle | None, PushSumState]:
        if port.size == 1:
            return bundle, state._replace(step=state.step + 1)
        matrix, weights = begin(port, state)
        known = len(state.weights) == port.size
        owed = float(weights[port.rank]) - 1  # x = w z + what has moved z since
        x = bundle.flat.add(state.last.anchor.flat, alpha=owed) if known and owed else bundle.flat
        mixed = await _mixed(port, x, matrix)
        weights = matrix @ weights
        z = mixed / float(weights[port.rank])
        return bundle.with_flat(z), PushSumState(
            state.step + 1, weights, AnchorState(bundle.with_flat(z.clone()), None)
        )

    async def beside(port: Port, bundle: Bundle, state: PushSumState) -> Bundle:
        matrix, weights = begin(port, state)
        shares = matrix * weights
        return bundle.with_flat(await _mixed(port, bundle.flat, shares / shares.sum(1, keepdim=True)))

    def init(parameters: Bundle) -> PushSumState:
        return PushSumState(0, torch.ones(0, dtype=torch.float64), AnchorState(parameters.copy(), None))

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        """In the graph's first step."""
        size = num_bytes(parameters)
        return Cost(
            (Exchange("push_sum", sum_cost(neighbours(pushing_matrix(graph, 0, num_ranks)), size)),),
            memory_bytes=size + _WEIGHT_BYTES * num_ranks,
        )

    return Transform(init, apply, idle_alone=True, cost=cost, beside=beside)


async def _mixed(port: Port, flat: Tensor, weights: Tensor) -> Tensor:
    """Σⱼ Wᵢⱼ xⱼ at rank i."""
    sources = {j: weight for j, weight in enumerate(weights[port.rank].tolist()) if weight}
    hearing: list[int] = weights[:, port.rank].nonzero().flatten().tolist()
    return await weighted_sum(port, flat, sources, [rank for rank in hearing if rank != port.rank])
