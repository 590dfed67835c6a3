"""Ranks that disagree get errors with names before a wrong value is used; errors are raised at the `await`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from helpers import CLUSTER, payload
from polytempo.core import Deadlock, Mismatch, PeerLost, Port
from polytempo.core.op import Op
from polytempo.worlds import VirtualWorld

X = payload(100)


def test_a_message_of_another_shape_or_dtype_is_refused_by_name() -> None:
    async def program(port: Port) -> None:
        await port.mark(9)
        await (port.recv(torch.zeros(4), 0) if port.rank else port.send(torch.zeros(2, 3), 1))

    expected = r"rank 1, step 9: rank 0 sent \(2, 3\) torch.float32, but \(4,\) torch.float32 was expected"
    with pytest.raises(Mismatch, match=expected):
        VirtualWorld(CLUSTER, 2).run(program)


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        (
            [lambda port: port.all_reduce(torch.zeros(4)), lambda port: port.all_reduce(torch.zeros(5))],
            "rank 1 calls all_reduce((5,) torch.float32), but rank 0 calls all_reduce((4,) torch.float32)",
        ),
        (
            [lambda port: port.broadcast(torch.zeros(2), 0), lambda port: port.broadcast(torch.zeros(2), 1)],
            "rank 1 calls broadcast((2,) torch.float32 from rank 1), "
            "but rank 0 calls broadcast((2,) torch.float32 from rank 0)",
        ),
        (
            [lambda port: port.all_reduce(torch.zeros(2)), lambda port: port.barrier()],
            "rank 1 calls barrier(), but rank 0 calls all_reduce((2,) torch.float32)",
        ),
    ],
)
def test_ranks_that_disagree_are_all_told_and_none_gets_an_answer(
    calls: list[Callable[[Port], Op[object]]], text: str
) -> None:
    """Rank 2 agrees with rank 0, comes later, and gets the error all the same."""

    async def program(port: Port) -> str:
        await port.mark(6)
        if port.rank == 2:
            await port.compute(lambda: None, flops=9000.0)
        with pytest.raises(Mismatch) as clash:
            await calls[port.rank % 2](port)
        return str(clash.value)

    assert VirtualWorld(CLUSTER, 3).run(program).results == [f"step 6: {text} at the same place"] * 3


def test_it_does_not_matter_who_disagrees() -> None:
    async def program(port: Port) -> str:
        with pytest.raises(Mismatch) as clash:
            await port.all_reduce(torch.zeros(4 + port.rank // 3))
        return str(clash.value)

    text = (
        "rank 3 calls all_reduce((5,) torch.float32), but rank 0 calls all_reduce((4,) torch.float32) at the same place"
    )
    assert VirtualWorld(CLUSTER, 4).run(program).results == [f"step 0: {text}"] * 4


# ---------------------------------------------------------------------- errors


async def rank_1_fails(port: Port) -> str:
    await port.compute(lambda: None, flops=1000.0 * port.rank)
    if port.rank == 1:
        raise ZeroDivisionError("in rank 1")
    try:
        await port.barrier()
    except PeerLost as lost:
        return f"{await port.now():g} s, {lost}"
    return "went on"


def test_an_uncaught_error_is_raised_from_run() -> None:
    with pytest.raises(ZeroDivisionError, match="in rank 1"):
        VirtualWorld(CLUSTER, 3).run(rank_1_fails)


def test_for_the_others_a_rank_with_an_error_is_a_lost_peer() -> None:
    outcome = VirtualWorld(replace(CLUSTER, detection_s=0.5), 3).run(rank_1_fails, raises=False)
    lost = "step 0: barrier among 3 ranks cannot finish, rank 1 is lost"
    assert outcome.results == [f"1.5 s, rank 0, {lost}", None, f"2 s, rank 2, {lost}"]
    assert {rank: type(error) for rank, error in outcome.errors.items()} == {1: ZeroDivisionError}


def test_an_error_in_a_computation_is_raised_at_its_await_when_its_time_is_over() -> None:
    async def program(port: Port) -> float:
        with pytest.raises(ZeroDivisionError):
            await port.compute(lambda: 1 / 0, flops=500.0)
        return await port.now()

    assert VirtualWorld(CLUSTER, 1).run(program).results == [0.5]


def test_an_error_in_something_started_is_raised_where_it_is_awaited() -> None:
    async def fails() -> None:
        raise ZeroDivisionError

    async def program(port: Port) -> str:
        work = await port.start(fails())
        with pytest.raises(ZeroDivisionError):
            await work
        return "went on"

    assert VirtualWorld(CLUSTER, 1).run(program).results == ["went on"]


def test_a_deadlock_that_follows_an_error_shows_the_error_too() -> None:
    async def program(port: Port) -> None:
        if port.rank == 2:
            raise ZeroDivisionError
        await port.recv(X, 1 - port.rank)

    with pytest.raises(Deadlock) as caught:
        VirtualWorld(CLUSTER, 3).run(program)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_awaiting_what_is_no_operation_is_an_error_at_the_await() -> None:
    async def program(port: Port) -> str:
        with pytest.raises(TypeError, match=r"rank 0 awaited .* which is not an operation of a world"):
            await Op[None]()
        return "went on"

    assert VirtualWorld(CLUSTER, 1).run(program).results == ["went on"]
