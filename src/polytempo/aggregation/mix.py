"""Gossip: each rank mixes with its neighbours of the step's graph, and no one talks to everyone.

Source: X. Lian et al., "Can decentralized algorithms outperform centralized algorithms?", 2017.
"""

from __future__ import annotations

from typing import NamedTuple

from polytempo.aggregation.graphs import Graph, mixing_matrix
from polytempo.core import Bundle, Cost, Exchange, Port, Sent, Transform
from polytempo.core.cost import num_bytes

_IN_TURN_BYTES = 1 << 18


class MixState(NamedTuple):
    """How often a rank has mixed: graphs may change from step to step."""

    step: int


def mix(graph: Graph) -> Transform:
    """xᵢ ← Σⱼ Wᵢⱼ xⱼ with the doubly stochastic W of `graph` at this step.

    Neighbours are added in the order of ranks, so the result does not depend on who was faster. Running statistics are
    mixed with the same neighbours by the same W.
    Cost: K bytes to each neighbour; memory for what all neighbours send; one step. From 256 KiB on one after the other:
    a rank sends to the next listener, as far above it as the sender below it that it then waits for. So on a ring or a
    complete graph no two send to one rank at a time: TCP shares a link less well than one message after the other does.
    """

    async def mixed_by(port: Port, bundle: Bundle, state: MixState) -> Bundle:
        weights = mixing_matrix(graph, state.step, port.size)
        rank, flat = port.rank, bundle.flat
        others = [(rank + distance) % port.size for distance in range(1, port.size)]
        coming = {i: await port.start(port.recv(flat, i)) for i in others if weights[rank][i]}
        sending, in_turn = [], flat.nbytes >= _IN_TURN_BYTES
        for to in others:
            if weights[to][rank]:
                sending.append(await port.start(port.send(flat, to)))
                opposite = (2 * rank - to) % port.size
                if in_turn and opposite in coming:
                    await coming[opposite]
                    await sending[-1]
        mixed = flat.new_zeros(flat.shape)
        for j, weight in enumerate(weights[rank]):
            if weight:
                mixed.add_(flat if j == rank else await coming.pop(j), alpha=weight)
        for work in sending:
            await work
        return bundle.with_flat(mixed)

    async def apply(port: Port, bundle: Bundle, state: MixState) -> tuple[Bundle | None, MixState]:
        after = MixState(state.step + 1)
        return (bundle if port.size == 1 else await mixed_by(port, bundle, state)), after

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        """In the graph's first step."""
        weights = mixing_matrix(graph, 0, num_ranks)
        listeners = [sum(weights[to][rank] > 0 for to in range(num_ranks) if to != rank) for rank in range(num_ranks)]
        each, edges = num_bytes(parameters), sum(listeners)
        sent = Sent(edges, edges * each, busiest_bytes=max(listeners) * each, rounds=1 if edges else 0)
        return Cost((Exchange("mix", sent),))

    return Transform(lambda parameters: MixState(0), apply, idle_alone=True, cost=cost, beside=mixed_by)
