"""The virtual clock, as stories with literal times: 100 bytes take 1 s on the network, and 0.25 s to get there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers import CLUSTER, payload
from polytempo.core import Port
from polytempo.worlds import VirtualWorld

Story = Callable[[Port], Awaitable[object]]
X = payload(100)


def times(num_ranks: int, story: Story, workers_per_host: int = 1) -> list[float | None]:
    """The time of each rank's end of its part of the story."""

    async def program(port: Port) -> float:
        await story(port)
        return await port.now()

    cluster = replace(CLUSTER, workers_per_host=workers_per_host)
    return VirtualWorld(cluster, num_ranks).run(program).results


def test_a_computation_takes_its_flops_at_the_clusters_speed() -> None:
    assert times(1, lambda port: port.compute(lambda: None, flops=500.0)) == [0.5]


def test_computations_of_one_rank_follow_each_other_even_when_begun_together() -> None:
    async def story(port: Port) -> None:
        first = await port.start(port.compute(lambda: None, flops=500.0))
        second = await port.start(port.compute(lambda: None, flops=250.0))
        await second
        assert await port.now() == 0.75
        await first

    assert times(1, story) == [0.75]


def test_a_message_leaves_when_it_is_sent_and_arrives_a_latency_later() -> None:
    assert times(2, lambda port: port.send(X, 1) if port.rank == 0 else port.recv(X, 0)) == [1.0, 1.25]


def test_messages_queue_at_the_senders_end() -> None:
    async def story(port: Port) -> None:
        if port.rank:
            await port.recv(X, 0)
        else:
            for work in [await port.start(port.send(X, to)) for to in (1, 2, 3)]:
                await work

    assert times(4, story) == [3.0, 1.25, 2.25, 3.25]


def test_messages_queue_at_the_receivers_end_while_their_senders_go_on() -> None:
    async def story(port: Port) -> None:
        if port.rank:
            return await port.send(X, 0)
        for source in (1, 2, 3):
            await port.recv(X, source)
            assert await port.now() == source + 0.25

    assert times(4, story) == [3.25, 1.0, 1.0, 1.0]


def test_the_message_whose_first_byte_is_there_first_goes_first() -> None:
    """Rank 1 computes 0.5 s and then sends; rank 2 sends immediately; rank 0 waits for rank 1 first."""

    async def story(port: Port) -> None:
        if port.rank == 0:
            await port.recv(X, 1)
            assert await port.now() == 2.25, "0.25 until the first byte, 1 for rank 2's message, 1 for its own"
            await port.recv(X, 2)
        else:
            await port.compute(lambda: None, flops=500.0 if port.rank == 1 else 0.0)
            await port.send(X, 0)

    assert times(3, story) == [2.25, 1.5, 1.0]


def test_links_are_full_duplex_and_pairs_do_not_disturb_each_other() -> None:
    async def story(port: Port) -> None:
        work = await port.start(port.send(X, port.rank ^ 1))
        await port.recv(X, port.rank ^ 1)
        await work

    assert times(4, story) == [1.25, 1.25, 1.25, 1.25]


def test_two_ranks_of_one_host_share_its_link() -> None:
    story = lambda port: port.send(X, port.rank + 2) if port.rank < 2 else port.recv(X, port.rank - 2)  # noqa: E731
    assert times(4, story, workers_per_host=2) == [1.0, 2.0, 1.25, 2.25]
    assert times(4, story, workers_per_host=1) == [1.0, 1.0, 1.25, 1.25]


def test_ranks_of_one_host_talk_through_its_memory_each_pair_for_itself() -> None:
    """100 bytes at 200 bytes/s, 0.125 s latency."""
    story = lambda port: port.send(X, port.rank + 1) if port.rank % 2 == 0 else port.recv(X, port.rank - 1)  # noqa: E731
    assert times(4, story, workers_per_host=4) == [0.5, 0.625, 0.5, 0.625]


def test_computation_hides_a_message() -> None:
    async def story(port: Port) -> None:
        if port.rank == 0:
            work = await port.start(port.send(X, 1))
            await port.compute(lambda: None, flops=1500.0)
            await work
        else:
            work_in = await port.start(port.recv(X, 0))
            await port.compute(lambda: None, flops=500.0)
            await work_in

    assert times(2, story) == [1.5, 1.25]


def test_a_started_coroutine_runs_beside_the_program() -> None:
    async def relay(port: Port) -> Tensor:
        await port.send(X, 1 - port.rank)
        return await port.recv(X, 1 - port.rank)

    async def story(port: Port) -> None:
        work = await port.start(relay(port))
        await port.compute(lambda: None, flops=3000.0)
        assert torch.equal(await work, X)

    assert times(2, story) == [3.0, 3.0]


def test_work_may_be_awaited_twice_and_by_two() -> None:
    async def story(port: Port) -> None:
        work = await port.start(port.compute(lambda: "answer", flops=500.0))

        async def second() -> str:
            return await work

        other = await port.start(second())
        assert [await work, await work, await other, await other] == ["answer"] * 4

    assert times(1, story) == [0.5]


def test_a_collective_begins_when_its_last_member_is_there() -> None:
    """Rank 2 is 2 s late; a ring of 3 then takes 4 rounds of 0.25 s + 40 bytes."""

    async def story(port: Port) -> None:
        await port.compute(lambda: None, flops=2000.0 if port.rank == 2 else 0.0)
        await port.all_reduce(payload(120))

    assert times(3, story) == pytest.approx([2.0 + 4 * (0.25 + 0.4)] * 3)


def test_messages_match_by_tag_and_channel_in_the_order_of_sending() -> None:
    async def program(port: Port) -> list[int]:
        inner = port.on_channel(0)
        if port.rank == 0:
            for value, (door, tag) in enumerate([(port, 0), (port, 1), (inner, 0), (port, 0)]):
                await door.send(torch.tensor([value]), 1, tag=tag)
            return []
        like = torch.tensor([0])
        return [int(await door.recv(like, 0, tag=t)) for door, t in [(inner, 0), (port, 1), (port, 0), (port, 0)]]

    assert VirtualWorld(CLUSTER, 2).run(program).results[1] == [2, 1, 0, 3]


def test_what_was_never_received_is_counted_even_if_it_is_still_on_its_way() -> None:
    async def program(port: Port) -> None:
        if port.rank == 0:
            await port.send(X, 1)
            await port.send(X, 1)
        else:
            await port.recv(X, 0)

    assert VirtualWorld(CLUSTER, 2).run(program).unreceived == 1


def test_a_world_runs_one_program() -> None:
    async def program(port: Port) -> float:
        return await port.now()

    world = VirtualWorld(CLUSTER, 1)
    world.run(program)
    with pytest.raises(ValueError, match="runs one program; make another VirtualWorld for another run"):
        world.run(program)
