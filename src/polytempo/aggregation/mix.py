"""Gossip: each rank mixes with its neighbours of the step's graph, and no one talks to everyone.

Source: X. Lian et al., "Can decentralized algorithms outperform centralized algorithms?", 2017.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from polytempo.aggregation.graphs import Graph, Neighbours, check_graph, mixing_neighbours
from polytempo.core import Bundle, Cost, Exchange, Port, Sent, Transform
from polytempo.core.arithmetic.addition import add_
from polytempo.core.arithmetic.kernel_use import KernelUse
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
    check_graph(graph)

    async def mixed_by(port: Port, bundle: Bundle, state: MixState) -> Bundle:
        found = mixing_neighbours(graph, state.step, port.size)
        return bundle.with_flat(
            await weighted_sum(port, bundle.flat, found.sources[port.rank], found.listeners[port.rank])
        )

    async def apply(port: Port, bundle: Bundle, state: MixState) -> tuple[Bundle | None, MixState]:
        after = MixState(state.step + 1)
        return (bundle if port.size == 1 else await mixed_by(port, bundle, state)), after

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        """In the graph's first step."""
        return Cost((Exchange("mix", sum_cost(mixing_neighbours(graph, 0, num_ranks), num_bytes(parameters))),))

    return Transform(lambda parameters: MixState(0), apply, idle_alone=True, cost=cost, beside=mixed_by)


async def weighted_sum(port: Port, flat: Tensor, sources: Mapping[int, float], listeners: Sequence[int]) -> Tensor:
    """Σⱼ Wᵢⱼ xⱼ at rank i of its `sources` j, with their weights, told to its `listeners`; `flat`, its own xᵢ, stays as
    it is. See `mix` for the order of messages."""
    rank = port.rank
    coming = {i: await port.start(port.recv(flat, i)) for i in _behind(port, sources) if i != rank}

    async def term(j: int) -> Tensor:
        return flat if j == rank else await coming.pop(j)

    sending, in_turn = [], flat.nbytes >= _IN_TURN_BYTES
    for to in _behind(port, listeners):
        sending.append(await port.start(port.send(flat, to)))
        opposite = (2 * rank - to) % port.size
        if in_turn and opposite in coming:
            await coming[opposite]
            await sending[-1]
    first, *others = sorted(sources)
    mixed = await _times(port, await term(first), sources[first])
    for j in others:
        add_(mixed, await term(j), sources[j])
    for work in sending:
        await work
    return mixed


async def _times(port: Port, values: Tensor, weight: float) -> Tensor:
    """weight · values, in memory of its own; counted on clusters whose kernels were measured."""
    uses = (KernelUse("scale", 1, values.nbytes),)
    return await port.compute(lambda: values if values.is_meta else values * weight, 0.0, uses=uses)


def _behind(port: Port, ranks: Iterable[int]) -> list[int]:
    """In the order in which they come after this rank."""
    return sorted(ranks, key=lambda other: (other - port.rank) % port.size)


def sum_cost(found: Neighbours, message_bytes: int) -> Sent:
    """What all ranks send for one `weighted_sum`."""
    listeners = [len(each) for each in found.listeners]
    edges = sum(listeners)
    return Sent(edges, edges * message_bytes, busiest_bytes=max(listeners) * message_bytes, rounds=1 if edges else 0)
