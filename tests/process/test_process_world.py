"""The process world performs every operation as the virtual world does: same answers, same bytes, same errors."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polytempo as pt
from polytempo.cluster import Cluster, Link
from polytempo.collectives import native, ring
from polytempo.core import Bundle, Mismatch, PeerLost, Port, Program, TimedOut
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo, Result
from polytempo.worlds import ProcessWorld, VirtualWorld
from process.crew import together

pytestmark = pytest.mark.process

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]


def numbers(port: Port, count: int = 6, dtype: torch.dtype = torch.float32) -> Tensor:
    """Whole numbers that name their rank, so that sums are exact in any order."""
    return torch.arange(count).to(dtype) + 10 * port.rank


async def all_reduce(port: Port) -> Any:
    return (await port.all_reduce(numbers(port))).tolist()


async def all_gather(port: Port) -> Any:
    return [piece.tolist() for piece in await port.all_gather(numbers(port).view(2, 3))]


async def reduce_scatter(port: Port) -> Any:
    return (await port.reduce_scatter(numbers(port))).tolist()


def dealt(port: Port) -> tuple[list[Tensor], list[Tensor]]:
    """Rank r has i numbers for rank i, and so gets r from each rank."""
    pieces = [torch.full((to,), 10.0 * port.rank + to) for to in range(port.size)]
    return pieces, [torch.empty(port.rank) for _ in range(port.size)]


async def all_to_all(port: Port) -> Any:
    return [piece.tolist() for piece in await port.all_to_all(*dealt(port))]


async def broadcast(port: Port) -> Any:
    return [(await port.broadcast(numbers(port), source)).tolist() for source in range(port.size)]


async def barrier(port: Port) -> Any:
    for _ in range(2):
        await port.barrier()
    return "together"


async def shift(port: Port) -> Any:
    """Each rank passes its buffer to the next."""
    if port.size == 1:
        return None
    sending = await port.start(port.send(numbers(port), (port.rank + 1) % port.size))
    received = await port.recv(torch.empty(6), (port.rank - 1) % port.size)
    await sending
    return received.tolist()


async def tags_and_channels(port: Port) -> Any:
    """Four messages from 0 to 1, received in another order than sent."""
    doors = [(port, 3), (port, 1), (port.on_channel(4), 1), (port.on_channel(4).on_channel(2), 1)]
    if port.size > 1 and port.rank == 0:
        works = [await port.start(door.send(torch.tensor([i]), 1, tag)) for i, (door, tag) in enumerate(doors)]
        for work in works:
            await work
    if port.rank == 1:
        return [int(await door.recv(torch.tensor([0]), 0, tag)) for door, tag in reversed(doors)]
    return None


async def in_the_order_of_sending(port: Port) -> Any:
    if port.size == 1:
        return None
    if port.rank == 0:
        for i in range(5):
            await port.send(torch.tensor([i]), 1)
    return [int(await port.recv(torch.tensor([0]), 0)) for _ in range(5)] if port.rank == 1 else None


async def subgroup(port: Port) -> Any:
    """The first two ranks in the opposite order."""
    if port.size == 1 or port.rank > 1:
        return None
    pair = port.among([1, 0])
    gathered = [piece.tolist() for piece in await pair.all_gather(numbers(port, 2))]
    scattered = (await pair.reduce_scatter(numbers(port, 2))).tolist()
    exchanged = [piece.tolist() for piece in await pair.all_to_all(*dealt(pair))]
    given = (await pair.broadcast(numbers(port, 2), source=0)).tolist()
    total = (await pair.all_reduce(numbers(port, 2))).tolist()
    await pair.barrier()
    return [pair.rank, gathered, scattered, exchanged, given, total]


async def another_subgroup(port: Port) -> Any:
    """Rank 0 has a group more than rank 2."""
    if port.size < 3 or port.rank == 1:
        return None
    return (await port.among([0, 2]).all_reduce(numbers(port, 2))).tolist()


async def alone(port: Port) -> Any:
    own = port.among([port.rank])
    total = await own.all_reduce(numbers(port))
    return [
        total.tolist(),
        (await own.reduce_scatter(total)).tolist(),
        [t.tolist() for t in await own.all_gather(total)],
        [t.tolist() for t in await own.all_to_all([total], [total])],
    ]


async def empty(port: Port) -> Any:
    nothing = torch.empty(0)
    answers = [await port.all_reduce(nothing), await port.broadcast(nothing), *await port.all_gather(nothing)]
    answers.append(await port.reduce_scatter(nothing))
    if port.size > 1 and port.rank < 2:
        other = 1 - port.rank
        sending = await port.start(port.send(nothing, other))
        answers.append(await port.recv(nothing, other))
        await sending
    return [list(answer.shape) for answer in answers]


async def dtypes(port: Port) -> Any:
    answers = []
    for dtype in DTYPES:
        total = await port.all_reduce(numbers(port, 3, dtype))
        gathered = await port.all_gather(numbers(port, 2, dtype))
        given = await port.broadcast(numbers(port, 2, dtype), port.size - 1)
        assert {total.dtype, gathered[0].dtype, given.dtype} == {dtype}
        answers.append([total.tolist(), [piece.tolist() for piece in gathered], given.tolist()])
    flags = [piece.tolist() for piece in await port.all_gather(torch.tensor([port.rank == 0]))]
    return [*answers, flags]


async def shapes(port: Port) -> Any:
    """Matrices, numbers without dims, and buffers that are not contiguous."""
    scalar = await port.all_reduce(torch.tensor(1.0 + port.rank))
    across = await port.all_gather(numbers(port).view(2, 3).t())
    if port.size > 1 and port.rank == 0:
        await port.send(numbers(port).view(2, 3).t(), 1)
    received = (await port.recv(torch.empty(2, 3).t(), 0)).tolist() if port.rank == 1 else None
    return [scalar.tolist(), [piece.tolist() for piece in across], received]


async def started(port: Port) -> Any:
    """Three collectives under way together, awaited backwards, and one of them twice."""
    works = [await port.start(port.on_channel(i).all_reduce(numbers(port) * (i + 1))) for i in range(3)]
    answers = [(await work).tolist() for work in reversed(works)]
    return [*answers, (await works[0]).tolist()]


async def started_coroutine(port: Port) -> Any:
    async def twice(number: int) -> Tensor:
        own = port.on_channel(number)
        return await own.all_reduce(await own.all_reduce(numbers(port)))

    works = [await port.start(twice(number)) for number in range(2)]
    return [(await work).tolist() for work in works]


async def compute_and_now(port: Port) -> Any:
    before = await port.now()
    answer = await port.compute(lambda: 6 * 7, flops=10.0)
    return [answer, before <= await port.now()]


async def errors_reach_the_program(port: Port) -> Any:
    async def failing() -> None:
        await port.compute(lambda: 1, 1.0)
        raise KeyError("inside")

    work = await port.start(failing())
    caught = []
    for _ in range(2):
        try:
            await work
        except KeyError as error:
            caught.append(str(error))
    try:
        await port.compute(lambda: 1 // 0, 1.0)
    except ZeroDivisionError:
        caught.append("division")
    return caught


PROGRAMS: list[Callable[[Port], Program[Any]]] = [
    all_reduce,
    all_gather,
    reduce_scatter,
    all_to_all,
    broadcast,
    barrier,
    shift,
    tags_and_channels,
    in_the_order_of_sending,
    subgroup,
    another_subgroup,
    alone,
    empty,
    dtypes,
    shapes,
    started,
    started_coroutine,
    compute_and_now,
    errors_reach_the_program,
]


@cache
def performed(num_ranks: int) -> list[dict[str, Any]]:
    """Each rank's answers and traced bytes for every program, on real processes."""

    def work(world: ProcessWorld) -> Result:
        found = {}
        for program in PROGRAMS:
            world.begin()
            answer = world.drive(program(world.port))
            found[program.__name__] = [answer, world.trace.bytes_sent[world.rank]]
        return found

    return together(num_ranks, work)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_both_worlds_answer_alike_and_count_the_same_bytes(
    program: Callable[[Port], Program[Any]], num_ranks: int
) -> None:
    outcome = VirtualWorld(Cluster(Link(1e-5, 1e9), workers_per_host=4), num_ranks).run(program)
    for rank, found in enumerate(performed(num_ranks)):
        assert found[program.__name__] == [outcome.results[rank], outcome.trace.bytes_sent[rank]]


def test_the_bytes_are_those_of_the_formulas() -> None:
    """24 bytes from each of three ranks: a ring sends 2·(N-1)/N of them, a gather (N-1), a scatter (N-1)/N."""
    sent = [[found[name][1] for found in performed(3)] for name in ("all_reduce", "all_gather", "reduce_scatter")]
    assert sent == [[32] * 3, [48] * 3, [16] * 3]
    assert [found["shift"][1] for found in performed(3)] == [24] * 3


def test_the_native_mean_equals_the_rings_to_rounding() -> None:
    def work(world: ProcessWorld) -> Result:
        torch.manual_seed(world.rank)
        values = torch.randn(1000)
        merged = []
        for route in (native, ring):
            answer, _ = world.drive(pt.aggregation.mean(route).apply(world.port, Bundle({"w": values.clone()}), None))
            assert answer is not None
            merged.append(answer.flat)
        assert (merged[0] - merged[1]).norm() <= 1e-6 * merged[1].norm()
        return merged[1].tolist()

    first, second, third = together(3, work)
    assert first == second == third


# --- deadlines and lost peers


def leave_together(world: ProcessWorld) -> None:
    """Leave together, without the pairs that a deadline has closed. To open a pipe waits for its other end."""
    pipe = Path(os.environ["POLYTEMPO_RENDEZVOUS"]) / "left"
    with suppress(FileExistsError):
        os.mkfifo(pipe)
    os.close(os.open(pipe, os.O_WRONLY if world.rank else os.O_RDONLY))


def test_a_deadline_is_kept_and_the_error_says_what_waited() -> None:
    def work(world: ProcessWorld) -> Result:
        async def program() -> list[Any]:
            await world.port.mark(7)
            waited = time.monotonic()
            try:
                await world.port.within(0.4).recv(torch.empty(3), 1 - world.port.rank, tag=5)
            except TimedOut as error:
                waited = time.monotonic() - waited
                return [waited, error.rank, error.step, error.operation, error.timeout_s, str(error)]
            return []

        said = world.drive(program())
        leave_together(world)
        return said

    for rank, (waited_s, *said) in enumerate(together(2, work)):
        assert 0.3 < waited_s < 20, "the world's own deadline"
        operation = f"recv from rank {1 - rank} (tag 5)"
        text = f"rank {rank}, step 7: timed out: {operation} did not finish within 0.4 s"
        assert said == [rank, 7, operation, 0.4, text]


def test_the_worlds_own_deadline_holds_where_none_is_asked_for() -> None:
    def serve(rank_info: RankInfo) -> Result:
        world = pt.init(timeout_s=2, quiet=True)

        async def program() -> str:
            pair = world.port.among([1, 0])
            await pair.barrier()
            try:
                if world.rank == 0:
                    await pair.all_reduce(torch.zeros(1))
            except TimedOut as error:
                return str(error)
            return "did not come"

        said = world.drive(program())
        leave_together(world)
        return said

    text = "rank 0, step 0: timed out: all_reduce among 2 ranks did not finish within 2 s (rank 1 did not come)"
    assert launch(serve, 2, threads=1, timeout_s=30) == [text, "did not come"]


def test_ranks_that_do_different_things_are_told_so() -> None:
    def work(world: ProcessWorld) -> Result:
        async def program() -> str:
            try:
                await world.port.broadcast(torch.zeros(1), source=world.rank)
            except Mismatch as error:
                return str(error)
            return ""

        return world.drive(program())

    for text in together(2, work):
        assert isinstance(text, str)
        for rank in range(2):
            assert re.search(rf"rank {rank} (is )?in call \d+: broadcast\(1 elements of float32, root {rank}\)", text)


def test_a_lost_peer_is_an_error_at_the_await(tmp_path: Path) -> None:
    def work(world: ProcessWorld) -> Result:
        async def program() -> None:
            await world.port.mark(3)
            await world.port.barrier()
            if world.rank == 1:
                os._exit(5)
            for name, operation in (
                ("recv", world.port.recv(torch.empty(2), 1)),
                ("all_reduce", world.port.all_reduce(torch.ones(2))),
                ("send", world.port.send(torch.empty(2**22), 1)),
            ):
                try:
                    await operation
                except PeerLost as error:
                    (tmp_path / name).write_text(f"{error.rank} {error.step} {error.operation} {error.peer}")

        world.drive(program())
        return None

    with pytest.raises(pt.errors.WorkerDied, match="rank 1 of 2 ended without a result") as died:
        together(2, work)
    assert died.value.rank == 1
    assert died.value.exit_code == 5
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "recv": "0 3 recv from rank 1 (tag 0) 1",
        "all_reduce": "0 3 all_reduce among 2 ranks 1",
        "send": "0 3 send to rank 1 (tag 0) 1",
    }
