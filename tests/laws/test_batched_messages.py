"""A law of every exchange of messages: it ends on a transport that performs messages in batches, as NCCL does.

Each rank's batches follow each other, and one is over when all of its messages have met their other ends, in the order
of each pair of ranks. There are no tags.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from laws.test_receives_first import EXCHANGES, GRAPHS, Exchange, by
from polytempo.aggregation import mix
from polytempo.core import Port
from polytempo.worlds import ProcessWorld


class Message(NamedTuple):
    """One end of a message."""

    source: int
    to: int
    numel: int


class Recorder:
    """A rank's group: it notes batches of messages, and their works end immediately, as CUDA's do for the caller."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.batches: list[tuple[list[Message], list[Message]]] = []
        self._open = False

    def _start_coalescing(self) -> None:
        assert not self._open
        self._open = True
        self.batches.append(([], []))

    def _end_coalescing(self) -> Recorder:
        self._open = False
        return self

    def send(self, tensors: list[Tensor], to: int, tag: int) -> None:
        assert self._open, "a message without a batch has another communicator"
        self.batches[-1][0].append(Message(self.rank, to, tensors[0].numel()))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> None:
        assert self._open, "a message without a batch has another communicator"
        self.batches[-1][1].append(Message(source, self.rank, tensors[0].numel()))

    def wait(self, *limit: object) -> None:
        """The stream waits."""


def recorded(
    exchange: Exchange, num_ranks: int, workers_per_host: int, numel: int = 65, num_buckets: int = 1
) -> list[Recorder]:
    """The batches of every rank's part in the exchange."""
    found = []
    for rank in range(num_ranks):
        group = Recorder(rank)
        world = ProcessWorld(rank, [r // workers_per_host for r in range(num_ranks)], group=group)
        world.transport.unbatched = frozenset()
        launched = [world.launch(exchange(world.port.on_channel(i), torch.ones(numel))) for i in range(num_buckets)]
        for strand in launched:
            strand.wait()
        found.append(group)
    return found


def left_over(ranks: list[Recorder]) -> dict[int, list[Message]]:
    """The rest of the batch that never ends, by rank; empty where all end."""
    queues = [[(list(sends), list(recvs)) for sends, recvs in rank.batches] for rank in ranks]
    moved = True
    while moved:
        moved = False
        open_sends: dict[tuple[int, int], list[Message]] = defaultdict(list)
        for queue in queues:
            for message in queue[0][0] if queue else []:
                open_sends[message.source, message.to].append(message)
        for queue in queues:
            for expected in list(queue[0][1]) if queue else []:
                sends = open_sends[expected.source, expected.to]
                if sends:
                    assert sends[0] == expected
                    queues[expected.source][0][0].remove(sends.pop(0))
                    queue[0][1].remove(expected)
                    moved = True
        for queue in queues:
            while queue and queue[0] == ([], []):
                queue.pop(0)
                moved = True
    return {rank: [*queue[0][0], *queue[0][1]] for rank, queue in enumerate(queues) if queue}


MESSAGES = {name: exchange for name, exchange in EXCHANGES.items() if name != "native"}


@pytest.mark.parametrize("exchange", MESSAGES.values(), ids=MESSAGES)
def test_every_batch_ends(exchange: Exchange) -> None:
    for num_ranks in range(2, 10):
        for workers_per_host in (1, 2, 3):
            ranks = recorded(exchange, num_ranks, workers_per_host)
            assert any(rank.batches for rank in ranks)
            assert left_over(ranks) == {}, (num_ranks, workers_per_host)


def test_large_buffers_are_cut_on_their_way_and_every_batch_ends() -> None:
    for name in ("tree", "ring"):
        for num_ranks in (2, 5):
            assert left_over(recorded(EXCHANGES[name], num_ranks, 1, numel=1 << 18)) == {}
    for graph, num_ranks in product(GRAPHS, range(2, 7)):
        assert left_over(recorded(by(mix(graph)), num_ranks, 1, numel=1 << 16)) == {}


def test_a_pair_is_one_batch() -> None:
    async def exchange(port: Port, buffer: Tensor) -> None:
        other = 1 - port.rank
        await port.send_receive(buffer, other, like=buffer, source=other)

    ranks = recorded(exchange, 2, 1, numel=3)
    assert [rank.batches for rank in ranks] == [
        [([Message(0, 1, 3)], [Message(1, 0, 3)])],
        [([Message(1, 0, 3)], [Message(0, 1, 3)])],
    ]


def test_the_law_finds_ranks_that_receive_in_one_batch_and_send_in_the_next() -> None:
    async def one_by_one(port: Port, buffer: Tensor) -> None:
        other = 1 - port.rank
        await port.recv(buffer, other)
        await port.send(buffer, other)

    stuck = left_over(recorded(one_by_one, 2, 1, numel=3))
    assert stuck == {0: [Message(1, 0, 3)], 1: [Message(0, 1, 3)]}


@pytest.mark.parametrize("exchange", MESSAGES.values(), ids=MESSAGES)
def test_every_batch_of_buckets_that_are_exchanged_together_ends(exchange: Exchange) -> None:
    for num_ranks in range(2, 10):
        for workers_per_host in (1, 2, 3):
            assert left_over(recorded(exchange, num_ranks, workers_per_host, num_buckets=3)) == {}, num_ranks
