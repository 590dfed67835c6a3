"""Push-sum: gossip over a directed graph, in which some ranks hear of more others than they tell.

Source: M. Assran, N. Loizou, N. Ballas and M. Rabbat, "Stochastic gradient push for distributed deep learning", 2019.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.aggregation.graphs import Graph, Neighbours, check_graph, pushing_neighbours
from polytempo.aggregation.mix import sum_cost, weighted_sum
from polytempo.core import Bundle, Cost, Exchange, Port, Transform
from polytempo.core.arithmetic.anchor import AnchorState
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
    check_graph(graph)

    def begin(port: Port, state: PushSumState) -> tuple[Neighbours, Tensor]:
        """(P, w) before the exchange."""
        known = len(state.weights) == port.size
        weights = state.weights if known else _ones(port.size)
        return pushing_neighbours(graph, state.step, port.size), weights

    async def apply(port: Port, bundle: Bundle, state: PushSumState) -> tuple[Bundle | None, PushSumState]:
        if port.size == 1:
            return bundle, state._replace(step=state.step + 1)
        found, weights = begin(port, state)
        known = len(state.weights) == port.size
        missing = float(weights[port.rank]) - 1  # x = w z + what has moved z since
        moved = known and missing and not bundle.flat.is_meta
        x = bundle.flat.add(state.last.anchor.flat, alpha=missing) if moved else bundle.flat
        mixed = await weighted_sum(port, x, found.sources[port.rank], found.listeners[port.rank])
        weights = _pushed(graph, state.step, weights)
        z = mixed if mixed.is_meta else mixed / float(weights[port.rank])
        return bundle.with_flat(z), PushSumState(
            state.step + 1, weights, AnchorState(bundle.with_flat(z.clone()), None)
        )

    async def beside(port: Port, bundle: Bundle, state: PushSumState) -> Bundle:
        found, weights = begin(port, state)
        shares = {j: part * float(weights[j]) for j, part in found.sources[port.rank].items()}
        total = sum(shares.values())
        sources = {j: share / total for j, share in shares.items()}
        return bundle.with_flat(await weighted_sum(port, bundle.flat, sources, found.listeners[port.rank]))

    def init(parameters: Bundle) -> PushSumState:
        return PushSumState(0, torch.ones(0, dtype=torch.float64), AnchorState(parameters.copy(), None))

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        """In the graph's first step."""
        size = num_bytes(parameters)
        return Cost(
            (Exchange("push_sum", sum_cost(pushing_neighbours(graph, 0, num_ranks), size)),),
            memory_bytes=size + _WEIGHT_BYTES * num_ranks,
        )

    return Transform(init, apply, idle_alone=True, cost=cost, beside=beside)


@lru_cache(maxsize=4)
def _ones(size: int) -> Tensor:
    """w before the first exchange, one tensor for all ranks of a virtual world. Do not write to it."""
    return torch.ones(size, dtype=torch.float64)


@lru_cache(maxsize=4)
def _pushed(graph: Graph, step: int, before: Tensor) -> Tensor:
    """w after the exchange of `step`, from w. Tensors are known by identity here, and the ranks of a virtual world have
    the same ones, so they share one answer."""
    weights = before.tolist()
    found = pushing_neighbours(graph, step, len(weights))
    after = [sum(part * weights[j] for j, part in row.items()) for row in found.sources]
    return torch.tensor(after, dtype=torch.float64)
