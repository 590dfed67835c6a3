"""Lost ranks and pauses, as stories. Death is noticed 0.5 s later; 100 bytes take 1 s, and 0.25 s to get there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from helpers import CLUSTER, payload
from polytempo.cluster import Crash, Fault, Pause
from polytempo.core import PeerLost, Port
from polytempo.worlds import Outcome, VirtualWorld

X = payload(100)
Heard = tuple[float, str] | None


def told(
    story: Callable[[Port], Awaitable[object]], *faults: Fault, num_ranks: int = 2, after_s: float = 0.0
) -> Outcome[Heard]:
    """The time of each living rank's news of a loss, and the error's words. The story begins at `after_s`, in step
    7."""

    async def program(port: Port) -> Heard:
        await port.mark(7)
        if port.rank:
            await port.compute(lambda: None, flops=1000.0 * after_s)
        try:
            await story(port)
        except PeerLost as lost:
            return await port.now(), str(lost)
        return None

    return VirtualWorld(replace(CLUSTER, detection_s=0.5, faults=faults), num_ranks).run(program)


async def long_life(port: Port) -> None:
    await port.compute(lambda: None, flops=100_000.0)


async def receive_from_0(port: Port) -> None:
    await (long_life(port) if port.rank == 0 else port.recv(X, 0))


async def send_to_0(port: Port) -> None:
    await (long_life(port) if port.rank == 0 else port.send(X, 0))


async def all_reduce(port: Port) -> None:
    if port.rank == 0:
        await long_life(port)
    await port.all_reduce(X.clone())


DIES_AT_2 = Crash(0, at_s=2.0)


@pytest.mark.parametrize(
    ("story", "begins_s", "hears_s", "operation"),
    [
        (receive_from_0, 0.0, 2.5, "recv from rank 0 (tag 0)"),
        (receive_from_0, 2.25, 2.5, "recv from rank 0 (tag 0)"),
        (receive_from_0, 9.0, 9.0, "recv from rank 0 (tag 0)"),
        (send_to_0, 2.25, 2.5, "send to rank 0 (tag 0)"),
        (send_to_0, 9.0, 9.0, "send to rank 0 (tag 0)"),
        (all_reduce, 0.0, 2.5, "all_reduce among 2 ranks"),
        (all_reduce, 2.25, 2.5, "all_reduce among 2 ranks"),
        (all_reduce, 9.0, 9.0, "all_reduce among 2 ranks"),
    ],
)
def test_a_lost_peer_is_noticed_once_and_known_from_then_on(
    story: Callable[[Port], Awaitable[object]], begins_s: float, hears_s: float, operation: str
) -> None:
    outcome = told(story, DIES_AT_2, after_s=begins_s)
    assert outcome.results == [None, (hears_s, f"rank 1, step 7: {operation} cannot finish, rank 0 is lost")]
    assert outcome.seconds == hears_s


def test_the_error_has_its_parts_as_fields() -> None:
    async def program(port: Port) -> tuple[int, int, str, int | None] | None:
        await port.mark(port.rank)
        try:
            await port.all_reduce(X.clone())
        except PeerLost as lost:
            return lost.rank, lost.step, lost.operation, lost.peer
        return None

    cluster = replace(CLUSTER, faults=(Crash(2, step=2),))
    operation = "all_reduce among 3 ranks"
    assert VirtualWorld(cluster, 3).run(program).results == [(0, 0, operation, 2), (1, 1, operation, 2), None]


def test_a_crash_at_a_step_happens_when_the_step_is_marked() -> None:
    async def story(port: Port) -> None:
        for step in range(10):
            await port.mark(step)
            await port.compute(lambda: None, flops=1000.0)
            await port.barrier()

    outcome = told(story, Crash(1, step=3), num_ranks=3)
    begun = [event.step for event in outcome.trace.events if event.rank == 1 and event.op == "compute"]
    assert begun == [7, 0, 1, 2]
    # a step takes 1 s and a barrier of 4 latencies, so rank 1 dies at 6 s, and the others know it when they get there
    assert outcome.results == [(7.0, at_barrier(0)), None, (7.0, at_barrier(2))]


def at_barrier(rank: int) -> str:
    return f"rank {rank}, step 3: barrier among 3 ranks cannot finish, rank 1 is lost"


def test_a_rank_that_dies_in_the_middle_of_a_computation_leaves_no_line_of_it() -> None:
    outcome = told(receive_from_0, DIES_AT_2)
    assert [event for event in outcome.trace.events if event.rank == 0] == []


def test_what_was_sent_before_the_death_arrives_if_nobody_has_noticed_yet() -> None:
    """Rank 0's message is out at 1.0 s and there at 1.25 s; rank 0 dies at 1.0 s."""

    async def story(port: Port) -> None:
        if port.rank == 0:
            await port.send(X, 1)
            return await long_life(port)
        await port.recv(X, 0)
        assert await port.now() == 1.25
        await port.recv(X, 0)

    outcome = told(story, Crash(0, at_s=1.0))
    assert outcome.results[1] == (1.5, "rank 1, step 7: recv from rank 0 (tag 0) cannot finish, rank 0 is lost")


def test_those_who_do_not_need_the_lost_rank_go_on() -> None:
    async def story(port: Port) -> None:
        if port.rank:
            await port.among([1, 2]).all_reduce(X.clone())
        else:
            await long_life(port)

    assert told(story, DIES_AT_2, num_ranks=3, after_s=9.0).results == [None, None, None]


def test_a_rank_that_has_finished_cannot_be_lost() -> None:
    async def story(port: Port) -> None:
        if port.rank == 0:
            await port.send(X, 1)
        else:
            await port.recv(X, 0)

    assert told(story, Crash(0, at_s=3.0), after_s=9.0).results == [None, None]


def test_a_crash_that_nobody_lives_to_see_does_not_move_the_clock() -> None:
    assert told(lambda port: port.barrier(), Crash(0, at_s=1000.0)).seconds == 0.5


def test_a_pause_delays_the_rank_and_whoever_waits_for_it() -> None:
    async def program(port: Port) -> list[float]:
        ends = []
        for step in range(3):
            await port.mark(step)
            await port.compute(lambda: None, flops=1000.0)
            await port.barrier()  # 2 latencies
            ends.append(await port.now())
        return ends

    cluster = replace(CLUSTER, faults=(Pause(1, step=1, seconds=4.0),))
    outcome = VirtualWorld(cluster, 2).run(program)
    assert outcome.results == [[1.5, 7.0, 8.5]] * 2
    paused = [event for event in outcome.trace.events if event.op == "pause"]
    assert [(e.rank, e.step, e.start_s, e.end_s) for e in paused] == [(1, 1, 1.5, 5.5)]
