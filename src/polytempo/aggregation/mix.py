"""Gossip: each rank mixes with its neighbours of the step's graph. No rank talks to all others.

`mix` needs an undirected graph. `push_sum` works on a directed one, where a rank may receive from more ranks than it
sends to.

Source: X. Lian et al., "Can decentralized algorithms outperform centralized algorithms?", 2017; for push-sum,
M. Assran, N. Loizou, N. Ballas and M. Rabbat, "Stochastic gradient push for distributed deep learning", 2019.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.aggregation.graphs import Graph, Neighbours, check_graph, mixing_neighbours, pushing_neighbours
from polytempo.core import Bundle, Cost, Exchange, Port, Promise, Sent, Transform
from polytempo.core.arithmetic.kernel_use import KernelUse
from polytempo.core.arithmetic.merge import add_
from polytempo.core.cost import num_bytes
from polytempo.core.state import AnchorState

_IN_TURN_BYTES = 1 << 18


class MixState(NamedTuple):
    """The number of mixes so far: graphs may change from step to step."""

    step: int


def mix(graph: Graph) -> Transform:
    """xᵢ ← Σⱼ Wᵢⱼ xⱼ with the doubly stochastic W of `graph` at this step.

    Neighbours are added in the order of ranks, so the result does not depend on their speed. Running statistics are
    mixed with the same neighbours by the same W.
    Cost: K bytes to each neighbour; memory for all neighbours' messages; one step. From 256 KiB on one after the other:
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
        """The cost of the graph's first step."""
        return Cost((Exchange("mix", sum_cost(mixing_neighbours(graph, 0, num_ranks), num_bytes(parameters))),))

    return Transform(lambda parameters: MixState(0), apply, Promise.SEPARABLE | Promise.IDLE_ALONE, cost, mixed_by)


async def weighted_sum(port: Port, flat: Tensor, sources: Mapping[int, float], listeners: Sequence[int]) -> Tensor:
    """Σⱼ Wᵢⱼ xⱼ at rank i of its `sources` j, with their weights; its own xᵢ, `flat`, goes to its `listeners` and
    stays. See `mix` for the order of messages."""
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
    """weight · values, in memory of its own; counted on clusters with measured kernels."""
    uses = (KernelUse("scale", 1, values.nbytes),)
    return await port.compute(lambda: values if values.is_meta else values * weight, 0.0, uses=uses)


def _behind(port: Port, ranks: Iterable[int]) -> list[int]:
    """Ranks in ascending order, beginning behind this one."""
    return sorted(ranks, key=lambda other: (other - port.rank) % port.size)


def sum_cost(found: Neighbours, message_bytes: int) -> Sent:
    """The messages of all ranks for one `weighted_sum`."""
    listeners = [len(each) for each in found.listeners]
    edges = sum(listeners)
    return Sent(edges, edges * message_bytes, busiest_bytes=max(listeners) * message_bytes, rounds=1 if edges else 0)


class MixedAnchor(NamedTuple):
    """The number of mixes so far, and this rank's outer momentum."""

    step: int
    velocity: Bundle


def mix_anchors(graph: Graph, lr: float = 0.7, momentum: float = 0.5) -> Transform:
    """v ← μ v + α ((φ̄ - θ̄) + (φ - φ̄)); φ ← φ - v; θ ← φ, with the means θ̄ and φ̄ of `graph` at this step.

    Each rank has an anchor φ of its own, its parameters after the last time, and mixes it as it mixes θ. α = `lr`,
    μ = `momentum`. Alone it is heavy ball on the movement. Cost: `mix` of twice the parameters; memory for φ and v.
    """
    check_graph(graph)
    if not lr > 0 or not 0 <= momentum < 1:
        raise ValueError(f"the outer optimizer needs lr > 0 and momentum in [0, 1), got {lr} and {momentum}")

    def init(parameters: Bundle) -> AnchorState:
        velocity = parameters.map(lambda flat: flat.new_zeros(flat.shape))
        return AnchorState(parameters.copy(), MixedAnchor(0, velocity))

    async def apply(port: Port, bundle: Bundle, state: AnchorState) -> tuple[Bundle | None, AnchorState]:
        anchor, (step, velocity) = state.anchor.flat, state.inner
        now, before = bundle.flat, anchor
        if port.size > 1:
            found = mixing_neighbours(graph, step, port.size)
            both = torch.cat([now, anchor])
            mixed = await weighted_sum(port, both, found.sources[port.rank], found.listeners[port.rank])
            now, before = mixed.split(anchor.numel())
        pull = (before - now) + (anchor - before)
        after = torch.add(velocity.flat * momentum, pull, alpha=lr)
        arrived = bundle.with_flat(anchor - after)
        return arrived, AnchorState(arrived.copy(), MixedAnchor(step + 1, bundle.with_flat(after)))

    async def beside(port: Port, bundle: Bundle, state: AnchorState) -> Bundle:
        found = mixing_neighbours(graph, state.inner.step, port.size)
        return bundle.with_flat(
            await weighted_sum(port, bundle.flat, found.sources[port.rank], found.listeners[port.rank])
        )

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        """The cost of the graph's first step."""
        size = num_bytes(parameters)
        if num_ranks == 1:
            return Cost(memory_bytes=2 * size)
        return Cost((Exchange("mix", sum_cost(mixing_neighbours(graph, 0, num_ranks), 2 * size)),), 2 * size)

    return Transform(init, apply, Promise.SEPARABLE, cost, beside)


_WEIGHT_BYTES = 8


class PushSumState(NamedTuple):
    """The number of pushes and their result; a rank's numerator x was w z then."""

    step: int
    weights: Tensor
    """w of all ranks, float64, shape (N,); empty before the first exchange."""
    last: AnchorState
    """z after the last exchange."""


def push_sum(graph: Graph) -> Transform:
    """xᵢ ← Σⱼ Pᵢⱼ xⱼ, wᵢ ← Σⱼ Pᵢⱼ wⱼ, zᵢ = xᵢ / wᵢ, with the P of `graph` at this step; its columns sum to 1.

    z are the parameters; their movement since is added to x. Σᵢ xᵢ stays, and Σᵢ wᵢ = N, so every z tends to the
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
        missing = float(weights[port.rank]) - 1  # x = w z + the movement of z since
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
        """The cost of the graph's first step."""
        size = num_bytes(parameters)
        return Cost(
            (Exchange("push_sum", sum_cost(pushing_neighbours(graph, 0, num_ranks), size)),),
            memory_bytes=size + _WEIGHT_BYTES * num_ranks,
        )

    return Transform(init, apply, Promise.SEPARABLE | Promise.IDLE_ALONE, cost, beside)


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
