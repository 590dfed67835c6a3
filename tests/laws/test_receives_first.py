"""A law of every exchange of messages: a rank that sends, and receives later on, has a receive posted already.

A transport moves a message when its receiver has asked for it. Where ranks send before they ask, a full-duplex link
carries one direction after the other: 449 ms instead of 248 for 2.67 MB each way at 100 Mbit/s over gloo.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import CLUSTER
from laws.catalogue import ROUTES
from polytempo.aggregation import Graph, adasum, complete, exponential_graph, low_rank, mix, random_pairs, ring_graph
from polytempo.collectives import halving_doubling, hierarchical, ring, tree
from polytempo.compression import bf16, through
from polytempo.core import Bundle, Op, Port, Program, Transform
from polytempo.core.op import Recv, Send
from polytempo.worlds import VirtualWorld
from polytempo.worlds.virtual.clockwork import Flight

Exchange = Callable[[Port, Tensor], Program[Any]]


class Watched(VirtualWorld):
    """Notes, for each rank in the order of its operations, a receive (None) or a send: whether a receive is open."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.noted: dict[int, list[bool | None]] = defaultdict(list)
        self._receives: dict[int, list[Flight]] = defaultdict(list)

    def _issue(self, rank: int, op: Op[Any]) -> Flight:
        if isinstance(op, Send):
            self.noted[rank].append(any(not flight.done for flight in self._receives[rank]))
        flight = super()._issue(rank, op)
        if isinstance(op, Recv):
            self.noted[rank].append(None)
            self._receives[rank].append(flight)
        return flight


def too_late(exchange: Exchange, num_ranks: int, workers_per_host: int = 1, numel: int = 65) -> list[int]:
    """The ranks that send with no receive posted, and receive afterwards."""

    async def program(port: Port) -> None:
        await exchange(port, torch.ones(numel, device="meta"))

    world = Watched(replace(CLUSTER, workers_per_host=workers_per_host), num_ranks)
    assert world.run(program).unreceived == 0
    return [
        rank
        for rank, noted in world.noted.items()
        if any(posted is False and None in noted[place:] for place, posted in enumerate(noted))
    ]


def by(transform: Transform) -> Exchange:
    """A transform, applied to a matrix."""

    async def exchange(port: Port, buffer: Tensor) -> None:
        given = Bundle({"w": torch.ones(buffer.numel(), 2)})
        await transform.apply(port, given, transform.init(given.copy()))

    return exchange


GRAPHS: list[Graph] = [ring_graph, complete, exponential_graph, random_pairs()]
EXCHANGES: dict[str, Exchange] = {
    **{route.__name__: route for route in [*ROUTES, hierarchical(tree), hierarchical(halving_doubling)]},
    **{f"mix({graph.__name__})": by(mix(graph)) for graph in GRAPHS},
    "adasum": by(adasum()),
    "low_rank(ring)": by(low_rank(rank=1, route=ring)),
    "through(bf16, ring)": by(through(bf16(), route=ring)),
}


@pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)
def test_receives_are_posted_before_sends(exchange: Exchange) -> None:
    for num_ranks in range(2, 10):
        for workers_per_host in (1, 2, 3):
            assert too_late(exchange, num_ranks, workers_per_host) == [], (num_ranks, workers_per_host)


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.__name__)
def test_large_buffers_are_mixed_one_neighbour_after_the_other(graph: Graph) -> None:
    for num_ranks in range(2, 8):
        assert too_late(by(mix(graph)), num_ranks, numel=1 << 16) == [], num_ranks


async def send_first(port: Port, buffer: Tensor) -> None:
    """The wrong order, which routes had before."""
    sending = await port.start(port.send(buffer, (port.rank + 1) % port.size))
    await port.recv(buffer, (port.rank - 1) % port.size)
    await sending


def test_the_law_finds_an_exchange_that_sends_first() -> None:
    assert too_late(send_first, 4) == [0, 1, 2, 3]
