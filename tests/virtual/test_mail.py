"""Mailboxes under the virtual clock. 100 bytes take 1 s at each end of a link, and 0.25 s to get there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

import pytest

from helpers import CLUSTER, payload
from polytempo.cluster import Crash, Fault, KernelSpeed, Speeds
from polytempo.cluster.computing_time import MESSAGE
from polytempo.core import Deadlock, Port, Program, TimedOut
from polytempo.core.op import Take
from polytempo.worlds import VirtualWorld
from polytempo.worlds.trace import COMMUNICATION

Story = Callable[[Port], Program[object]]


@dataclass(frozen=True)
class Letter:
    """A message of 100 bytes, unless it says otherwise."""

    text: str
    num_bytes: int = 100


Taken = tuple[float, int, str]
"""A message's time of taking, its sender, and its text."""


async def taken(port: Port, wait_s: float | None = None) -> Taken | None:
    answer = await port.take(wait_s)
    if answer is None:
        return None
    source, letter = answer
    assert isinstance(letter, Letter)
    return await port.now(), source, letter.text


async def seconds(port: Port, number: float) -> None:
    await port.compute(lambda: None, flops=1000.0 * number)


def world(num_ranks: int, *faults: Fault) -> VirtualWorld:
    return VirtualWorld(replace(CLUSTER, faults=faults), num_ranks)


# ---------------------------------------------------------------------- times, by hand


def test_a_message_is_there_after_its_latency_and_its_bytes() -> None:
    async def program(port: Port) -> object:
        if port.rank == 0:
            await port.post(Letter("hello"), 1)
            return await port.now()
        return await taken(port)

    outcome = world(2).run(program)
    assert outcome.results == [1.0, (1.25, 0, "hello")]
    assert [(*event[:6], event.peer) for event in outcome.trace.events] == [
        (0, 0, "post", 100, 0.0, 1.0, 1),
        (1, 0, "take", 0, 0.0, 1.25, 0),
    ]
    assert {"post", "take"} <= COMMUNICATION


def test_a_message_that_the_processor_works_on_when_the_wait_ends_is_not_lost() -> None:
    """The message is there after 1.25 s, and its processor takes 2 s for it; a take waits for 0.5 s."""
    speeds = Speeds((("elementwise", KernelSpeed()), (MESSAGE, KernelSpeed(call_s=2.0))))

    async def program(port: Port) -> object:
        if port.rank == 0:
            return await port.post(Letter("hello"), 1)
        return [await taken(port, 0.5) for _ in range(4)]

    outcome = VirtualWorld(replace(CLUSTER, speeds=speeds), 2).run(program)
    assert outcome.results[1] == [None, None, (3.25, 0, "hello"), None]
    assert outcome.seconds == 3.75


def test_it_is_handed_over_as_it_is() -> None:
    letter = Letter("the same object")

    async def program(port: Port) -> object:
        if port.rank == 0:
            return await port.post(letter, 1)
        return await port.take()

    answer = world(2).run(program).results[1]
    assert isinstance(answer, tuple)
    assert answer[1] is letter


def test_posts_stand_in_line_at_the_senders_end() -> None:
    async def program(port: Port) -> object:
        if port.rank == 0:
            first, second = await port.start(port.post(Letter("a"), 1)), await port.start(port.post(Letter("b"), 2))
            await first
            await second
            return await port.now()
        return await taken(port)

    assert world(3).run(program).results == [2.0, (1.25, 0, "a"), (2.25, 0, "b")]


def test_nothing_waits_for_what_is_dispatched() -> None:
    async def program(port: Port) -> object:
        if port.rank == 0:
            await port.dispatch([(1, Letter("a")), (2, Letter("b"))])
            handed_over_s = await port.now()
            await seconds(port, 3.0)
            return handed_over_s
        return await taken(port)

    outcome = world(3).run(program)
    assert outcome.results == [0.0, (1.25, 0, "a"), (2.25, 0, "b")]
    posts = [(*event[:6], event.peer) for event in outcome.trace.events if event.op == "post"]
    assert posts == [(0, 0, "post", 100, 0.0, 1.0, 1), (0, 0, "post", 100, 0.0, 2.0, 2)]


def test_a_rank_that_dies_leaves_no_line_of_what_it_has_dispatched() -> None:
    async def program(port: Port) -> object:
        if port.rank == 0:
            await port.dispatch([(1, Letter("a"))])
            return await seconds(port, 9.0)
        return await taken(port, 5.0)

    outcome = world(2, Crash(0, at_s=0.5)).run(program)
    assert [event.op for event in outcome.trace.events if event.rank == 0] == []


def test_a_dispatch_to_a_node_that_does_not_exist_is_refused() -> None:
    async def program(port: Port) -> object:
        await port.dispatch([(7, Letter("lost"))])

    with pytest.raises(ValueError, match="there is no mailbox 7"):
        world(2).run(program)


def test_posts_stand_in_line_at_the_receivers_end() -> None:
    async def program(port: Port) -> object:
        if port.rank == 2:
            return [await taken(port), await taken(port)]
        await seconds(port, 0.5 * port.rank)
        return await port.post(Letter(f"from {port.rank}"), 2)

    assert world(3).run(program).results[2] == [(1.25, 0, "from 0"), (2.25, 1, "from 1")]


def test_a_post_and_a_send_share_the_link() -> None:
    async def program(port: Port) -> object:
        if port.rank == 0:
            await port.start(port.send(payload(100), 1))
            await port.post(Letter("behind"), 1)
            return await port.now()
        await port.recv(payload(100), 0)
        return await taken(port)

    assert world(2).run(program).results == [2.0, (2.25, 0, "behind")]


def test_within_a_host_it_goes_through_memory() -> None:
    async def program(port: Port) -> object:
        if port.rank == 0:
            return await port.post(Letter("near"), 1)
        return await taken(port)

    cluster = replace(CLUSTER, workers_per_host=2)  # 0.125 s, 200 bytes a second
    assert VirtualWorld(cluster, 2).run(program).results[1] == (0.625, 0, "near")


# ---------------------------------------------------------------------- order


@pytest.mark.parametrize(
    ("asks_s", "order"),
    [(0.0, [(0.875, 1, "near"), (1.25, 2, "far")]), (9.0, [(9.0, 1, "near"), (9.0, 2, "far")])],
)
def test_messages_are_taken_in_the_order_of_delivery(asks_s: float, order: list[Taken]) -> None:
    """The message from another host was posted first and is there last."""

    async def program(port: Port) -> object:
        if port.rank == 0:
            await seconds(port, asks_s)
            return [await taken(port), await taken(port)]
        if port.rank == 1:
            await seconds(port, 0.25)
            return await port.post(Letter("near"), 0)
        return await port.post(Letter("far"), 0)

    assert VirtualWorld(replace(CLUSTER, workers_per_host=2), 3).run(program).results[0] == order


def test_takers_of_one_rank_are_served_in_the_order_in_which_they_asked() -> None:
    async def program(port: Port) -> object:
        if port.rank == 0:
            for text in "abc":
                await port.post(Letter(text), 1)
            return None
        takers = [await port.start(taken(port)) for _ in range(3)]
        return [await taker for taker in reversed(takers)]

    assert world(2).run(program).results[1] == [(3.25, 0, "c"), (2.25, 0, "b"), (1.25, 0, "a")]


def test_one_may_post_to_oneself() -> None:
    async def program(port: Port) -> object:
        work = await port.start(port.post(Letter("note"), 0))
        answer = await taken(port)
        await work
        return answer

    assert world(1).run(program).results == [(0.625, 0, "note")]


# ---------------------------------------------------------------------- deadlines


@pytest.mark.parametrize(
    ("wait_s", "after_s", "answer"),
    [
        (0.0, 0.0, None),
        (1.0, 0.0, None),
        (2.0, 0.0, (1.25, 0, "hello")),
        (0.0, 2.0, (2.0, 0, "hello")),
        (None, 0.0, (1.25, 0, "hello")),
    ],
)
def test_a_taker_waits_no_longer_than_it_says(wait_s: float | None, after_s: float, answer: Taken | None) -> None:
    async def program(port: Port) -> object:
        if port.rank == 0:
            return await port.post(Letter("hello"), 1)
        await seconds(port, after_s)
        found = await taken(port, wait_s)
        if found is None:
            assert await port.now() == wait_s
        return found

    assert world(2).run(program).results[1] == answer


def test_a_taker_that_has_given_up_takes_nothing() -> None:
    async def program(port: Port) -> object:
        if port.rank == 0:
            return await port.post(Letter("hello"), 1)
        return [await taken(port, 0.5), await taken(port, 0.5), await taken(port, 0.5)]

    assert world(2).run(program).results[1] == [None, None, (1.25, 0, "hello")]


def test_giving_up_leaves_a_line_without_a_peer() -> None:
    outcome = world(1).run(lambda port: taken(port, 0.5))
    assert [event[2:] for event in outcome.trace.events] == [("take", 0, 0.0, 0.5, -1)]


def test_a_deadline_that_nobody_needs_does_not_keep_the_world_going() -> None:
    async def program(port: Port) -> object:
        if port.rank == 0:
            return await port.post(Letter("hello"), 1)
        await port.start(port.take(500.0))
        await port.start(port.take(1000.0))
        return await seconds(port, 2.0)

    assert world(2).run(program).seconds == 2.0


def test_an_operations_own_timeout_is_an_error_and_not_an_answer() -> None:
    async def program(port: Port) -> object:
        with pytest.raises(TimedOut, match="take did not finish within 1 s"):
            await Take(timeout_s=1.0)
        return await port.now()

    assert world(1).run(program).results == [1.0]


@pytest.mark.parametrize("wait_s", [None, inf])
def test_who_waits_for_mail_that_nobody_posts_is_in_a_deadlock(wait_s: float | None) -> None:
    async def program(port: Port) -> None:
        if port.rank:
            await seconds(port, 3.0)
        else:
            await port.take(wait_s)

    with pytest.raises(Deadlock) as caught:
        world(2).run(program)
    assert str(caught.value).splitlines() == [
        "deadlock at 3.000000 s: no rank can go on.",
        "  rank 0 waits for take (step 0, since 0.000000 s)",
    ]


# ---------------------------------------------------------------------- an absent receiver


def test_what_is_posted_to_a_finished_node_is_lost_and_nobody_hears_of_it() -> None:
    async def program(port: Port) -> object:
        if port.rank:
            return None
        await port.post(Letter("too late"), 1)
        return await port.now()

    outcome = world(2).run(program)
    assert outcome.results == [1.0, None]
    assert outcome.unreceived == 0


@pytest.mark.parametrize(("posted_s", "left_s"), [(0.0, 1.0), (5.0, 6.0)])
def test_what_is_posted_to_a_node_that_dies_is_lost_and_nobody_hears_of_it(posted_s: float, left_s: float) -> None:
    async def program(port: Port) -> object:
        if port.rank:
            await seconds(port, 100.0)
            return await port.take(0.0)
        await seconds(port, posted_s)
        await port.post(Letter("hello"), 1)
        return await port.now()

    assert world(2, Crash(1, at_s=1.125)).run(program).results == [left_s, None]


def test_what_a_node_posted_before_it_died_still_arrives() -> None:
    async def program(port: Port) -> object:
        if port.rank:
            return [await taken(port, 5.0), await taken(port, 5.0)]
        await port.post(Letter("last words"), 1)
        return await seconds(port, 100.0)

    assert world(2, Crash(0, at_s=1.125)).run(program).results[1] == [(1.25, 0, "last words"), None]


@pytest.mark.parametrize("node", [2, -1])
def test_there_is_no_mailbox_beyond_the_world(node: int) -> None:
    async def program(port: Port) -> object:
        if port.rank == 0:
            with pytest.raises(ValueError, match=f"nodes 0 to 1; there is no mailbox {node}"):
                await port.post(Letter("hello"), node)
        return None

    assert world(2).run(program).errors == {}


# ---------------------------------------------------------------------- repeatability


def test_the_trace_repeats() -> None:
    async def program(port: Port) -> object:
        for step in range(5):
            await port.mark(step)
            await port.post(Letter("on", 10 * (1 + port.rank)), (port.rank + 1) % port.size)
            await port.take()
        return None

    assert world(3).run(program).trace.hash == world(3).run(program).trace.hash
