"""Deadlines are raised at the `await`, with rank, step and operation; a deadlock names the waiting ranks and
messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import torch

from helpers import CLUSTER, payload
from polytempo.core import Deadlock, Port, TimedOut
from polytempo.core.op import Op
from polytempo.worlds import VirtualWorld

X = payload(100)


# ---------------------------------------------------------------------- deadlines


@pytest.mark.parametrize(
    ("call", "operation"),
    [
        (lambda port: port.recv(X, 0), "recv from rank 0 (tag 0)"),
        (lambda port: port.send(payload(1000), 0), "send to rank 0 (tag 0)"),
        (lambda port: port.all_reduce(X.clone()), "all_reduce among 2 ranks"),
    ],
)
def test_a_missed_deadline_is_raised_at_the_await(call: Callable[[Port], Op[object]], operation: str) -> None:
    async def program(port: Port) -> tuple[float, str, int, int] | None:
        if port.rank == 0:
            return None
        await port.mark(4)
        try:
            await call(port.within(2.0))
        except TimedOut as late:
            return await port.now(), str(late), late.rank, late.step
        return None

    text = f"rank 1, step 4: timed out: {operation} did not finish within 2 s"
    assert VirtualWorld(CLUSTER, 2).run(program).results[1] == (2.0, text, 1, 4)


def test_a_deadline_that_is_kept_does_not_move_the_clock() -> None:
    async def program(port: Port) -> None:
        await (port.within(1000.0).recv(X, 0) if port.rank else port.send(X, 1))

    assert VirtualWorld(CLUSTER, 2).run(program).seconds == 1.25


def test_a_late_message_is_for_the_next_recv() -> None:
    async def program(port: Port) -> tuple[int, float] | None:
        if port.rank == 0:
            await port.send(torch.full((100,), 7, dtype=torch.uint8), 1)
            return None
        with pytest.raises(TimedOut):
            await port.within(0.5).recv(X, 0)
        return int((await port.recv(X, 0))[0]), await port.now()

    outcome = VirtualWorld(CLUSTER, 2).run(program)
    assert outcome.results[1] == (7, 1.25)
    assert outcome.unreceived == 0


def test_a_deadline_counts_from_the_start_and_is_raised_where_the_work_is_awaited() -> None:
    async def program(port: Port) -> tuple[float, float] | None:
        if port.rank == 0:
            return None
        work = await port.start(port.within(1.0).recv(X, 0))
        await port.compute(lambda: None, flops=3000.0)
        began = await port.now()
        for _ in range(2):
            with pytest.raises(TimedOut):
                await work
        return began, await port.now()

    assert VirtualWorld(CLUSTER, 2).run(program).results[1] == (3.0, 3.0)


# ---------------------------------------------------------------------- deadlocks


def deadlock(story: Callable[[Port], Awaitable[object]], num_ranks: int) -> list[str]:
    async def program(port: Port) -> None:
        await story(port)

    with pytest.raises(Deadlock) as caught:
        VirtualWorld(CLUSTER, num_ranks).run(program)
    return str(caught.value).splitlines()


def test_a_deadlock_names_who_waits_for_what() -> None:
    async def story(port: Port) -> None:
        await port.mark(2 + port.rank)
        if port.rank < 2:
            await port.compute(lambda: None, flops=500.0)
            await port.recv(X, 1 - port.rank, tag=5)

    assert deadlock(story, 3) == [
        "deadlock at 0.500000 s: no rank can go on.",
        "  rank 0 waits for recv from rank 1 (tag 5) (step 2, since 0.500000 s)",
        "  rank 1 waits for recv from rank 0 (tag 5) (step 3, since 0.500000 s)",
    ]


def test_a_deadline_that_was_kept_is_not_the_time_of_a_deadlock() -> None:
    async def story(port: Port) -> None:
        if port.rank == 0:
            return await port.send(X, 1)
        await port.within(1000.0).recv(X, 0)
        await port.recv(X, 0)

    assert deadlock(story, 2) == [
        "deadlock at 1.250000 s: no rank can go on.",
        "  rank 1 waits for recv from rank 0 (tag 0) (step 0, since 1.250000 s)",
    ]


def test_a_deadlock_in_a_collective_names_who_is_not_there() -> None:
    async def story(port: Port) -> None:
        if port.rank in (0, 2):
            pending = await port.start(port.among([0, 2]).barrier())
            await port.all_reduce(X.clone())
            await pending
        if port.rank == 1:
            await port.recv(X, 3)

    assert deadlock(story, 4) == [
        "deadlock at 0.500000 s: no rank can go on.",
        "  rank 0 waits for all_reduce among 4 ranks, without ranks [1, 3] (step 0, since 0.000000 s)",
        "  rank 1 waits for recv from rank 3 (tag 0) (step 0, since 0.000000 s)",
        "  rank 2 waits for all_reduce among 4 ranks, without ranks [1, 3] (step 0, since 0.000000 s)",
    ]
