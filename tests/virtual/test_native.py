"""The collectives that a world performs itself: answers, counted bytes, seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import CLUSTER
from polytempo.core import Mismatch, Port
from polytempo.core.op import Op
from polytempo.worlds import Outcome, VirtualWorld


def mine(port: Port) -> Tensor:
    """4 bytes x 6: 10·rank + 0, 1, 2, 3, 4, 5."""
    return torch.arange(6.0) + 10 * port.rank


def performed(call: Callable[[Port], Op[Any]], num_ranks: int = 3) -> Outcome[Any]:
    async def program(port: Port) -> Any:
        return await call(port)

    return VirtualWorld(CLUSTER, num_ranks).run(program)


def values(outcome: Outcome[Any]) -> list[Any]:
    """Each rank's answer as lists of numbers."""
    results: list[Any] = list(outcome.results)
    return [torch.stack(r).tolist() if isinstance(r, list) else r.tolist() for r in results]


def test_answers() -> None:
    assert values(performed(lambda port: port.all_reduce(mine(port)))) == [[30, 33, 36, 39, 42, 45]] * 3
    assert values(performed(lambda port: port.reduce_scatter(mine(port)))) == [[30, 33], [36, 39], [42, 45]]
    assert values(performed(lambda port: port.broadcast(mine(port), 2))) == [[20, 21, 22, 23, 24, 25]] * 3
    gathered = values(performed(lambda port: port.all_gather(mine(port)[:2])))
    assert gathered == [[[0, 1], [10, 11], [20, 21]]] * 3
    assert performed(lambda port: port.barrier()).results == [None] * 3


def test_a_group_answers_in_the_order_of_its_positions() -> None:
    async def program(port: Port) -> tuple[list[list[float]], list[float], list[float]] | None:
        if port.rank == 1:
            return None
        group = port.among([2, 0])
        gathered = [each.tolist() for each in await group.all_gather(mine(port)[:1])]
        slice_of_sum = await group.reduce_scatter(mine(port)[:2])
        told = await group.broadcast(mine(port)[:1], source=0)
        return gathered, slice_of_sum.tolist(), told.tolist()

    results = VirtualWorld(CLUSTER, 3).run(program).results
    assert results == [([[20], [0]], [22], [20]), None, ([[20], [0]], [20], [20])]


def test_answers_are_memory_of_their_own() -> None:
    results: list[Any] = list(performed(lambda port: port.all_reduce(mine(port))).results)
    results[0].zero_()
    assert results[1].tolist() == results[2].tolist() == [30, 33, 36, 39, 42, 45]


# bytes from each of 5 ranks with K = 40, seconds with α = 0.25 and B = 100
@pytest.mark.parametrize(
    ("call", "sent_bytes", "seconds"),
    [
        (lambda port: port.all_reduce(torch.zeros(10)), [64] * 5, 8 * (0.25 + 0.08)),
        (lambda port: port.reduce_scatter(torch.zeros(10)), [32] * 5, 4 * (0.25 + 0.08)),
        (lambda port: port.all_gather(torch.zeros(10)), [160] * 5, 4 * (0.25 + 0.4)),
        (lambda port: port.all_to_all([torch.zeros(2)] * 5, [torch.zeros(2)] * 5), [32] * 5, 4 * (0.25 + 0.08)),
        (lambda port: port.broadcast(torch.zeros(10)), [120, 0, 40, 0, 0], 3 * (0.25 + 0.4)),
        (lambda port: port.broadcast(torch.zeros(10), 3), [40, 0, 0, 120, 0], 3 * (0.25 + 0.4)),
        (lambda port: port.barrier(), [0] * 5, 6 * 0.25),
    ],
    ids=["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "broadcast from 3", "barrier"],
)
def test_bytes_and_seconds(call: Callable[[Port], Op[Any]], sent_bytes: list[int], seconds: float) -> None:
    outcome = performed(call, 5)
    assert [outcome.trace.bytes_sent[rank] for rank in range(5)] == sent_bytes
    assert outcome.seconds == pytest.approx(seconds)


# elements that rank i gives to rank j; bytes through the busiest link, one way, with α = 0.25 and B = 100
@pytest.mark.parametrize(
    ("dealt", "busiest_bytes"),
    [
        ([[0, 10], [10, 0]], 40),
        ([[9, 10], [10, 9]], 40),
        ([[0, 5, 5, 5], [5, 0, 5, 5], [5, 5, 0, 5], [5, 5, 5, 0]], 60),
        ([[0, 0, 10], [0, 0, 10], [0, 0, 0]], 80),
        ([[0, 1, 1], [20, 0, 30], [1, 1, 0]], 200),
        ([[50, 1], [1, 50]], 4),
    ],
    ids=["own empty, of 2", "own as long, of 2", "own empty, of 4", "all to one", "one to all", "own the longest"],
)
@pytest.mark.parametrize("last", [0, 1])
def test_an_all_to_all_takes_what_the_busiest_link_carries(
    dealt: list[list[int]], busiest_bytes: int, last: int
) -> None:
    """Own pieces travel nowhere, and it does not matter who comes last."""
    num_ranks = len(dealt)

    async def program(port: Port) -> float:
        if port.rank == last:
            await port.compute(lambda: None, CLUSTER.flops_per_s)
        begun_s = await port.now()
        await port.all_to_all(
            [torch.zeros(numel) for numel in dealt[port.rank]], [torch.zeros(row[port.rank]) for row in dealt]
        )
        return await port.now() - begun_s

    outcome = VirtualWorld(CLUSTER, num_ranks).run(program)
    assert outcome.results[last] == pytest.approx((num_ranks - 1) * 0.25 + busiest_bytes / 100)
    others = [sum(row) - row[rank] for rank, row in enumerate(dealt)]
    assert [outcome.trace.bytes_sent[rank] for rank in range(num_ranks)] == [4 * numel for numel in others]


@pytest.mark.parametrize("num_ranks", range(1, 18))
def test_a_broadcast_sends_the_buffer_once_to_every_other_rank(num_ranks: int) -> None:
    outcome = performed(lambda port: port.broadcast(torch.zeros(10)), num_ranks)
    assert sum(outcome.trace.bytes_sent.values()) == 40 * (num_ranks - 1)
    assert outcome.trace.bytes_sent[0] == 40 * (num_ranks - 1).bit_length()


def test_alone_every_collective_is_free() -> None:
    calls: list[Callable[[Port], Op[Any]]] = [
        lambda port: port.all_reduce(mine(port)),
        lambda port: port.all_gather(mine(port)),
        lambda port: port.reduce_scatter(mine(port)),
        lambda port: port.all_to_all([mine(port)], [mine(port)]),
        lambda port: port.broadcast(mine(port)),
        lambda port: port.barrier(),
    ]
    for call in calls:
        outcome = performed(call, 1)
        assert (outcome.seconds, outcome.trace.bytes_sent[0]) == (0.0, 0)


def test_an_all_to_all_in_which_two_ranks_disagree_names_them() -> None:
    with pytest.raises(Mismatch, match="all_to_all: rank 0 sends 1 elements to rank 1, which expects 2"):
        performed(lambda port: port.all_to_all([torch.zeros(1)] * 2, [torch.zeros(1 + port.rank)] * 2), 2)


def test_every_member_of_an_all_to_all_that_cannot_be_hears_of_it() -> None:
    async def program(port: Port) -> str:
        try:
            await port.all_to_all([torch.zeros(1)] * 2, [torch.zeros(1 + port.rank)] * 2)
        except Mismatch as error:
            return str(error)
        return "went on"

    text = "all_to_all: rank 0 sends 1 elements to rank 1, which expects 2"
    assert VirtualWorld(CLUSTER, 2).run(program).results == [text, text]


def test_a_host_of_its_own_is_priced_by_its_memory() -> None:
    async def program(port: Port) -> None:
        await port.all_reduce(torch.zeros(10))

    one_host = replace(CLUSTER, workers_per_host=2)
    assert VirtualWorld(one_host, 2).run(program).seconds == pytest.approx(2 * (0.125 + 20 / 200))
    assert VirtualWorld(one_host, 4).run(program).seconds == pytest.approx(6 * (0.25 + 10 / 100))


@pytest.mark.parametrize("pieces", [2, 5, 10])
def test_collectives_under_way_together_share_the_bandwidth(pieces: int) -> None:
    async def program(port: Port) -> None:
        works = [await port.start(port.all_reduce(torch.zeros(300 // pieces))) for _ in range(pieces)]
        for work in works:
            await work

    whole = performed(lambda port: port.all_reduce(torch.zeros(300)))
    assert VirtualWorld(CLUSTER, 3).run(program).seconds == pytest.approx(whole.seconds)


def test_a_message_waits_for_a_collective_on_its_link() -> None:
    async def program(port: Port) -> None:
        work = await port.start(port.all_reduce(torch.zeros(75)))  # 300 bytes: 4 rounds of 0.25 + 1 s
        await port.compute(lambda: None, 1.0)
        if port.rank == 0:
            await port.send(torch.zeros(25), 1)
        if port.rank == 1:
            await port.recv(torch.zeros(25), 0)
            assert await port.now() == 4 + 0.25 + 1
        await work

    VirtualWorld(CLUSTER, 3).run(program)
