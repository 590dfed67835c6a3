"""The backend "polytempo": every collective of torch.distributed, with gloo's values in the same processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from torch.utils.data import DataLoader

from polytempo.core.errors import Mismatch
from polytempo.engines.launch import launch
from polytempo.engines.worker import RankInfo, Result
from polytempo.interop.backend.work import Lane, Queued
from shared_memory import segments

pytestmark = pytest.mark.process

SIZE = 3
GATHER_SINGLE = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER_SINGLE = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Older versions of torch have only the older names."""
Answer = Sequence[Tensor]
Call = Callable[[Any, int], Answer]
"""A collective in a group, called by a rank; answers what the rank then has."""


def begin(rank_info: RankInfo, name: str = "store", timeout_s: float = 30) -> None:
    """Join the default group."""
    store = dist.FileStore(str(rank_info.rendezvous / name), rank_info.size)
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group("polytempo", store=store, rank=rank_info.rank, world_size=rank_info.size, timeout=limit)


def run(num_ranks: int, work: Callable[[RankInfo], Result]) -> list[Any]:
    """What `work` returns on each rank, in a default group."""

    def joined(rank_info: RankInfo) -> Result:
        begin(rank_info)
        try:
            return work(rank_info)
        finally:
            dist.destroy_process_group()

    return launch(joined, num_ranks, threads=1, timeout_s=40)


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers, whose sums are exact in every order."""
    random = torch.Generator().manual_seed(rank + 1)
    return torch.randint(1, 5, shape, generator=random).to(dtype)


# --------------------------------------------------------------------------------------------------------- the table


def all_reduce(op: Any = ReduceOp.SUM, dtype: torch.dtype = torch.float32, count: int = 1000) -> Call:
    def call(group: Any, rank: int) -> Answer:
        tensor = values(rank, count, dtype=dtype)
        dist.all_reduce(tensor, op, group=group)
        return [tensor]

    return call


def all_reduce_of_columns(group: Any, rank: int) -> Answer:
    whole = values(rank, 30, 40)
    dist.all_reduce(whole.t()[::2], group=group)
    return [whole]


def all_reduce_of_complex(group: Any, rank: int) -> Answer:
    tensor = torch.complex(values(rank, 50), values(rank + 10, 50))
    dist.all_reduce(tensor, group=group)
    return [tensor]


def all_reduce_of_sparse(group: Any, rank: int) -> Answer:
    indices = torch.tensor([[rank, 2, rank], [0, rank, 0]])
    tensor = torch.sparse_coo_tensor(indices, values(rank, 3, 4), (5, 4, 4), check_invariants=True)
    dist.all_reduce(tensor, group=group)
    return [tensor.to_dense()]


def reduce(group: Any, rank: int) -> Answer:
    tensor = values(rank, 5000)
    dist.reduce(tensor, dst=1, group=group)
    return [tensor] if rank == 1 else []


def broadcast(dtype: torch.dtype, count: int = 1000) -> Call:
    def call(group: Any, rank: int) -> Answer:
        tensor = values(rank, count).to(dtype)
        dist.broadcast(tensor, src=2, group=group)
        return [tensor.view(torch.uint8)]

    return call


def broadcast_of_columns(group: Any, rank: int) -> Answer:
    whole = values(rank, 30, 40)
    dist.broadcast(whole.t()[1:3], src=1, group=group)
    return [whole]


def all_gather(group: Any, rank: int) -> Answer:
    into = [torch.zeros(7, 3) for _ in range(SIZE)]
    dist.all_gather(into, values(rank, 7, 3), group=group)
    return into


def all_gather_of_columns(group: Any, rank: int) -> Answer:
    whole = torch.zeros(4, SIZE)
    into = [whole[:, i] for i in range(SIZE)]
    dist.all_gather(into, values(rank, 4, 2)[:, 1], group=group)
    return [whole]


def all_gather_single(group: Any, rank: int) -> Answer:
    into = torch.zeros(SIZE * 40, 50)
    GATHER_SINGLE(into, values(rank, 40, 50), group=group)
    return [into]


def gather(group: Any, rank: int) -> Answer:
    into = [torch.zeros(7) for _ in range(SIZE)] if rank == 2 else None
    dist.gather(values(rank, 7), into, dst=2, group=group)
    return into or []


def scatter(group: Any, rank: int) -> Answer:
    into = torch.zeros(7)
    dist.scatter(into, [values(i, 7) for i in range(SIZE)] if rank == 1 else None, src=1, group=group)
    return [into]


def reduce_scatter(group: Any, rank: int) -> Answer:
    into = torch.zeros(2001)
    dist.reduce_scatter(into, [values(10 * rank + i, 2001) for i in range(SIZE)], group=group)
    return [into]


def reduce_scatter_single(group: Any, rank: int) -> Answer:
    into = torch.zeros(11, 2)
    SCATTER_SINGLE(into, values(rank, SIZE * 11, 2), group=group)
    return [into]


def all_to_all(group: Any, rank: int) -> Answer:
    into = [torch.zeros(1 + rank + i) for i in range(SIZE)]
    dist.all_to_all(into, [values(10 * rank + i, 1 + rank + i) for i in range(SIZE)], group=group)
    return into


def all_to_all_single(group: Any, rank: int) -> Answer:
    into = torch.zeros(SIZE * 2, 5)
    dist.all_to_all_single(into, values(rank, SIZE * 2, 5), group=group)
    return [into]


def all_to_all_of_unequal_rows(group: Any, rank: int) -> Answer:
    sent, expected = [rank * i for i in range(SIZE)], [rank * i for i in range(SIZE)]
    into = torch.zeros(sum(expected), 5)
    dist.all_to_all_single(into, values(rank, sum(sent), 5), expected, sent, group=group)
    return [into]


def barrier(group: Any, rank: int) -> Answer:
    dist.barrier(group=group)
    return []


def objects(group: Any, rank: int) -> Answer:
    """All of the object collectives, as one number each."""
    all_of_them: list[Any] = [None] * SIZE
    dist.all_gather_object(all_of_them, {"rank": rank, "text": "x" * rank}, group=group)
    at_one: list[Any] | None = [None] * SIZE if rank == 1 else None
    dist.gather_object((rank, 5), at_one, dst=1, group=group)
    spread: list[Any] = [{"a": 1}, "b"] if rank == 0 else [None, None]
    dist.broadcast_object_list(spread, src=0, group=group)
    part: list[Any] = [None]
    dist.scatter_object_list(part, [[i, "c"] for i in range(SIZE)] if rank == 0 else None, src=0, group=group)
    text = repr([all_of_them, at_one, spread, part])
    return [torch.tensor([ord(letter) for letter in text])]


def several_sent(group: Any, rank: int) -> Answer:
    into = torch.zeros(3000)
    following, before = (rank + 1) % SIZE, (rank - 1) % SIZE
    operations = [
        dist.P2POp(dist.isend, values(rank, 3000), following, group),
        dist.P2POp(dist.irecv, into, before, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [into]


def sent_of_columns(group: Any, rank: int) -> Answer:
    whole = torch.zeros(20, 30)
    if rank == 0:
        dist.send(values(0, 30, 20)[:, 3], 1, group=group)
    if rank != 1:
        return []
    dist.recv(whole.t()[:, 5], 0, group=group)
    return [whole]


def from_anyone(group: Any, rank: int) -> Answer:
    if rank:
        dist.send(torch.tensor([rank * 10]), 0, group=group, tag=4)
        return []
    found = []
    for _ in range(SIZE - 1):
        into = torch.zeros(1, dtype=torch.int64)
        source = dist.recv(into, group=group, tag=4)
        found.append([source, int(into)])
    return [torch.tensor(sorted(found))]


def tags_out_of_order(group: Any, rank: int) -> Answer:
    if rank == 0:
        for work in [dist.isend(values(tag, 1000 * tag), 1, group, tag) for tag in (1, 2, 3)]:
            work.wait()
    if rank != 1:
        return []
    into = {tag: torch.zeros(1000 * tag) for tag in (3, 1, 2)}
    for tag, tensor in into.items():
        dist.recv(tensor, 0, group, tag)
    return list(into.values())


def coalesced(group: Any, rank: int) -> Answer:
    tensors = [values(rank, count) for count in (3, 500, 1)]
    with dist._coalescing_manager(group=group, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    manager.wait()
    return tensors


def coalesced_pieces(group: Any, rank: int) -> Answer:
    gathered = [torch.zeros(SIZE * count) for count in (3, 500)]
    with dist._coalescing_manager(group=group):
        for into in gathered:
            GATHER_SINGLE(into, values(rank, into.numel() // SIZE), group=group)
    scattered = [torch.zeros(count) for count in (3, 500)]
    with dist._coalescing_manager(group=group):
        for into in scattered:
            SCATTER_SINGLE(into, values(rank, into.numel() * SIZE), group=group)
    return [*gathered, *scattered]


OPS = {"sum": ReduceOp.SUM, "min": ReduceOp.MIN, "max": ReduceOp.MAX, "product": ReduceOp.PRODUCT}
BITS = {"and": ReduceOp.BAND, "or": ReduceOp.BOR, "exclusive or": ReduceOp.BXOR}
DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64)
MOVED = (torch.float32, torch.bool)

TABLE: dict[str, Call] = {
    **{f"all_reduce, {name}": all_reduce(op) for name, op in OPS.items()},
    **{f"all_reduce, bits, {name}": all_reduce(op, torch.int32) for name, op in BITS.items()},
    **{f"all_reduce of {dtype}": all_reduce(dtype=dtype) for dtype in DTYPES},
    **{f"all_reduce of {count}": all_reduce(count=count) for count in (1, 5, 100_003)},
    **{f"broadcast of {dtype}": broadcast(dtype) for dtype in MOVED},
    **{
        call.__name__: call
        for call in (
            *(all_reduce_of_complex, all_reduce_of_sparse, reduce),
            *(all_gather, all_gather_of_columns, all_gather_single, gather, scatter, reduce_scatter),
            *(reduce_scatter_single, all_to_all_single, all_to_all_of_unequal_rows, barrier),
            *(objects, several_sent, tags_out_of_order),
            *(coalesced, coalesced_pieces),
        )
    },
}


def every_other_column(a: Tensor, b: Any) -> Tensor:
    """The odd columns of `a` between the even ones of `b`."""
    return torch.stack([b[:, ::2], a[:, 1::2]], dim=2).flatten(1)


SIGNED, UNSIGNED = (torch.int8, torch.int16, torch.int32, torch.int64), (torch.uint8,)


def average_of_integers(dtype: torch.dtype) -> Call:
    """Averages whose exact values are -7/3, 7/3 and 5/3 (three ranks), everywhere and of one's own piece."""

    def call(group: Any, rank: int) -> Answer:
        mine = integers(rank, dtype)
        whole, piece = mine.clone(), torch.zeros(1, dtype=dtype)
        dist.all_reduce(whole, ReduceOp.AVG, group=group)
        strided = torch.stack([mine, mine], dim=1)
        dist.all_reduce(strided[:, 1], ReduceOp.AVG, group=group)
        SCATTER_SINGLE(piece, mine, ReduceOp.AVG, group=group)
        at_one = mine.clone()
        dist.reduce(at_one, 1, ReduceOp.AVG, group=group)
        return [whole, strided[:, 1], piece, at_one] if rank == 1 else [whole, strided[:, 1], piece]

    return call


def integers(rank: int, dtype: torch.dtype) -> Tensor:
    """What a rank gives to these averages."""
    sign = -1 if dtype in SIGNED else 1
    return torch.tensor([[sign * 4, 1, 5], [sign * 2, 2, 0], [sign * 1, 4, 0]][rank], dtype=dtype)


def averages(dtype: torch.dtype) -> Callable[[int], Answer]:
    """What NCCL makes of them: the sum, divided, rounded toward zero."""
    found = torch.tensor([-2 if dtype in SIGNED else 2, 2, 1], dtype=dtype)
    return lambda rank: [found, found, found[rank : rank + 1], *([found] if rank == 1 else [])]


WITHOUT_GLOO: dict[str, tuple[Call, Callable[[int], Answer]]] = {
    "average": (all_reduce(ReduceOp.AVG), lambda rank: [sum(values(i, 1000) for i in range(SIZE)) / SIZE]),  # type: ignore[list-item]
    **{f"average of {dtype}": (average_of_integers(dtype), averages(dtype)) for dtype in (*SIGNED, *UNSIGNED)},
    "bool": (all_reduce(dtype=torch.bool), lambda rank: [torch.ones(1000, dtype=torch.bool)]),
    "complex": (broadcast(torch.complex64), lambda rank: [values(2, 1000).to(torch.complex64).view(torch.uint8)]),
    "int16": (broadcast(torch.int16), lambda rank: [values(2, 1000, dtype=torch.int16).view(torch.uint8)]),
    "float8": (
        broadcast(torch.float8_e4m3fn),
        lambda rank: [values(2, 1000, dtype=torch.float8_e4m3fn).view(torch.uint8)],
    ),
    "nothing, all_reduce": (all_reduce(count=0), lambda rank: [torch.zeros(0)]),
    "nothing, broadcast": (broadcast(torch.float32, 0), lambda rank: [torch.zeros(0, dtype=torch.uint8)]),
    "columns, all_reduce": (
        all_reduce_of_columns,
        lambda rank: [every_other_column(values(rank, 30, 40), sum(values(i, 30, 40) for i in range(SIZE)))],
    ),
    "columns, broadcast": (
        broadcast_of_columns,
        lambda rank: [
            torch.cat([values(i, 30, 40)[:, a:b] for i, a, b in ((rank, 0, 1), (1, 1, 3), (rank, 3, 40))], 1)
        ],
    ),
    "unequal pieces, all_to_all": (
        all_to_all,
        lambda rank: [values(10 * i + rank, 1 + rank + i) for i in range(SIZE)],
    ),
    "from anyone": (from_anyone, lambda rank: [torch.tensor([[1, 10], [2, 20]])] if rank == 0 else []),
    "sent of columns": (
        sent_of_columns,
        lambda rank: (
            [torch.zeros(30, 20).index_copy(1, torch.tensor([5]), values(0, 30, 20)[:, 3:4]).t()] if rank == 1 else []
        ),
    ),
}
"""What gloo cannot do (or not on every version), and what the ranks then have."""


def attempted(call: Call, group: Any, rank: int, expected: Answer) -> str:
    """What is wrong; nothing, if it went well."""
    try:
        found = call(group, rank)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if len(found) == len(expected) and all(map(torch.equal, found, expected)):
        return ""
    return f"{found} instead of {expected}"


@pytest.fixture(scope="module")
def wrong() -> list[dict[str, str]]:
    """For each rank what is wrong with each call of the tables."""

    def work(rank_info: RankInfo) -> Result:
        gloo = dist.new_group(backend="gloo")
        mirrored = {
            name: attempted(call, dist.group.WORLD, rank_info.rank, call(gloo, rank_info.rank))
            for name, call in TABLE.items()
        }
        return mirrored | {
            name: attempted(call, dist.group.WORLD, rank_info.rank, expected(rank_info.rank))
            for name, (call, expected) in WITHOUT_GLOO.items()
        }

    return run(SIZE, work)


@pytest.mark.parametrize("name", [*TABLE, *WITHOUT_GLOO])
def test_a_collective_has_gloos_values(name: str, wrong: list[dict[str, str]]) -> None:
    assert [rank[name] for rank in wrong] == [""] * SIZE


# ---------------------------------------------------------------------------------------------------- several at once


def test_async_collectives_run_in_the_order_of_issue_whatever_is_waited_for_first() -> None:
    def work(rank_info: RankInfo) -> Result:
        sums = [torch.full((1 + 700 * i,), float(rank_info.rank + i)) for i in range(20)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in sums]
        spread = torch.full((5,), float(rank_info.rank))
        last = dist.broadcast(spread, src=1, async_op=True)
        doubled = works[3].get_future().then(lambda future: future.value()[0] * 2).wait()
        last.wait()
        for each in reversed(works):
            each.wait()
        right = all(bool((tensor == 3 + 3 * i).all()) for i, tensor in enumerate(sums))
        done = all(each.is_completed() and each.is_success() for each in works)
        return [right, done, bool((spread == 1).all()), bool((doubled == 24).all()), works[5].result()[0] is sums[5]]

    assert run(3, work) == [[True] * 5] * 3


def test_groups_may_be_used_in_opposite_orders_when_something_is_in_flight() -> None:
    def work(rank_info: RankInfo) -> Result:
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        first, second = groups if rank_info.rank == 0 else groups[::-1]
        tensors = [torch.ones(50_000) for _ in range(4)]
        for _ in range(30):
            works = [
                dist.all_reduce(tensor.fill_(1), group=group, async_op=True)
                for tensor, group in zip(tensors, (first, second) * 2, strict=True)
            ]
            for each in reversed(works):
                each.wait()
            waiting = dist.all_reduce(tensors[0], group=first, async_op=True)
            dist.all_reduce(tensors[1], group=second)
            waiting.wait()
        return [float(tensor.mean()) for tensor in tensors]

    assert run(2, work) == [[4, 4, 2, 2]] * 2


def test_a_wrong_call_in_flight_is_told_where_it_is_waited_for() -> None:
    def work(rank_info: RankInfo) -> Result:
        each = dist.all_reduce(torch.zeros(3 + rank_info.rank), async_op=True)
        told = []
        for wait in (each.wait, each.get_future().wait):
            try:
                wait()
            except Mismatch as error:
                told.append(str(error))
            except RuntimeError as error:  # a future's error has passed through C++
                told.append(str(error))
        return [*told, each.is_success()]

    for first, second, success in run(2, work):
        assert "3 elements" in first
        assert "4 elements" in first
        assert "4 elements" in second
        assert not success


def reduced(tensor: Tensor, op: Any = ReduceOp.SUM) -> Callable[[], object]:
    return lambda: dist.all_reduce(tensor, op)


ONE_AND_THE_OTHER: dict[str, tuple[Callable[[], object], Callable[[], object], str, str]] = {
    "shapes": (
        *(reduced(torch.zeros(2, 3)), reduced(torch.zeros(3, 2))),
        *("6 elements of float32 of shape (2, 3))", "6 elements of float32 of shape (3, 2))"),
    ),
    "complex": (
        *(reduced(torch.zeros(4, dtype=torch.complex64)), reduced(torch.zeros(8))),
        *("8 elements of float32 of shape (4, 2))", "8 elements of float32)"),
    ),
    "average of integers": (
        *(reduced(torch.zeros(4, dtype=torch.int64)), reduced(torch.zeros(4, dtype=torch.int64), ReduceOp.AVG)),
        *("all_reduce(sum, 4 elements of int64)", "all_reduce(average, 4 elements of int64)"),
    ),
    "shapes, broadcast": (
        *(lambda: dist.broadcast(torch.zeros(2, 3), 0), lambda: dist.broadcast(torch.zeros(6), 0)),
        *("6 elements of float32 of shape (2, 3), root 0)", "6 elements of float32, root 0)"),
    ),
    "shapes, reduce_scatter": (
        lambda: dist.reduce_scatter(torch.zeros(2, 3), [torch.zeros(2, 3)] * 2),
        lambda: dist.reduce_scatter(torch.zeros(3, 2), [torch.zeros(3, 2)] * 2),
        *("6 elements of float32 of shape (2, 3))", "6 elements of float32 of shape (3, 2))"),
    ),
}
"""What rank 0 and rank 1 call at the same time, and the words for it."""


@pytest.mark.parametrize("what", ONE_AND_THE_OTHER)
def test_ranks_that_give_different_tensors_of_equal_bytes_are_told(what: str) -> None:
    *calls, first, second = ONE_AND_THE_OTHER[what]

    def work(rank_info: RankInfo) -> Result:
        try:
            calls[rank_info.rank]()  # type: ignore[operator]
        except Mismatch as error:
            return str(error)
        return ""

    for told in run(2, work):
        assert first in told
        assert second in told


def test_an_all_to_all_mismatch_names_sender_and_receiver() -> None:
    def work(rank_info: RankInfo) -> Result:
        told = []
        for group, (sender, receiver) in [(dist.new_group(), (2, 0)), (dist.new_group(), (1, 1))]:
            sends = [torch.zeros(2 + ((rank_info.rank, to) == (sender, receiver))) for to in range(SIZE)]
            try:
                dist.all_to_all([torch.zeros(2) for _ in range(SIZE)], sends, group=group)
            except Mismatch as error:
                told.append(str(error))
        return told

    for two, one in run(SIZE, work):
        assert "rank 2 sends 12 bytes to rank 0, which expects 8;" in two
        assert "rank 1 sends 12 bytes to itself and expects 8;" in one


def test_a_mismatch_that_is_never_awaited_is_what_the_next_call_raises() -> None:
    def work(rank_info: RankInfo) -> Result:
        lost = dist.all_reduce(torch.zeros(3 + rank_info.rank), async_op=True)
        told = []
        for call in (dist.barrier, lambda: dist.all_gather([torch.zeros(1)] * 2, torch.zeros(1))):
            try:
                call()
            except Mismatch as error:
                told.append(str(error))
        return [*told, lost.is_success()]

    for first, second, success in run(2, work):
        assert first.startswith("rank ")
        for told in (first, second):
            assert "3 elements" in told
            assert "4 elements" in told
            assert "earlier call" in told
        assert not success


def test_errors_hold_the_words_that_scripts_look_for() -> None:
    def work(rank_info: RankInfo) -> Result:
        late, gone = dist.new_group(timeout=timedelta(seconds=0.2)), dist.new_group()
        told = []
        for group, waits in ((late, rank_info.rank == 0), (gone, rank_info.rank == 0)):
            if not waits:
                if group is gone:
                    group.shutdown()  # type: ignore[union-attr]
                continue
            try:
                dist.all_reduce(torch.zeros(1), group=group)
            except RuntimeError as error:
                told.append(str(error))
        dist.barrier()
        return told

    (late, gone), _ = run(2, work)
    assert "timed out" in late
    assert "Connection closed by peer" in gone


def sparse(shape: tuple[int, ...], sparse_dims: int) -> Tensor:
    """One entry, in the first place."""
    indices = torch.zeros(sparse_dims, 1, dtype=torch.int64)
    return torch.sparse_coo_tensor(indices, torch.ones(1, *shape[sparse_dims:]), shape, check_invariants=True)


DIFFERENT: dict[str, tuple[tuple[int, ...], int, Any, str]] = {
    "shape": ((6, 4), 1, ReduceOp.SUM, "sum of float32 (6, 4) with 1 sparse dimensions"),
    "sparse dimensions": ((5, 4), 2, ReduceOp.SUM, "sum of float32 (5, 4) with 2 sparse dimensions"),
    "operation": ((5, 4), 1, ReduceOp.AVG, "average of float32 (5, 4) with 1 sparse dimensions"),
}
"""What the last rank adds up, where the others add up a sparse tensor of shape (5, 4) with 1 sparse dimension."""


def test_sparse_tensors_that_do_not_match_are_told_on_every_rank() -> None:
    def work(rank_info: RankInfo) -> Result:
        told = []
        for shape, sparse_dims, op, _ in DIFFERENT.values():
            last = rank_info.rank == rank_info.size - 1
            tensor = sparse(shape, sparse_dims) if last else sparse((5, 4), 1)
            try:
                dist.all_reduce(tensor, op if last else ReduceOp.SUM)
            except Mismatch as error:
                told.append(str(error))
        return told

    for answer in run(3, work):
        for (*_, words), told in zip(DIFFERENT.values(), answer, strict=True):
            assert "rank 0 asks for the sum of float32 (5, 4) with 1 sparse dimensions" in told
            assert f"rank 2 for the {words};" in told


def test_a_lanes_thread_leaves_the_number_of_threads_as_it_is() -> None:
    def work(rank_info: RankInfo) -> Result:
        torch.set_num_threads(3)
        lane, served = Lane(lambda: False), threading.Event()
        lane.issue(served.set, None, blocking=False)
        served.wait()
        lane.close()
        later: list[int] = []
        asking = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        asking.start()
        asking.join()
        return later

    assert launch(work, 1, threads=1, timeout_s=40) == [[3]]


def test_a_call_that_control_c_interrupts_counts_as_made() -> None:
    made: list[str] = []

    def interrupted() -> None:
        made.append("first")
        raise KeyboardInterrupt

    lane = Lane(lambda: False)
    first = Queued(lane, interrupted, None)
    second = Queued(lane, lambda: made.append("second"), None)
    lane._queue.extend([first, second])  # not issued: the lane's thread would take them
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            first.wait()
    assert first.is_completed()
    assert not first.is_success()
    assert second.wait()
    assert first.get_future().done()
    assert (made, list(lane._queue)) == (["first", "second"], [])


def test_sub_groups_count_their_own_ranks() -> None:
    def work(rank_info: RankInfo) -> Result:
        groups = {members: dist.new_group(list(members)) for members in ((0, 2), (2, 1), (1,))}
        found: list[Any] = []
        for members, group in groups.items():
            if rank_info.rank not in members:
                continue
            tensor = torch.tensor([float(rank_info.rank)])
            dist.all_reduce(tensor, group=group)
            spread = torch.tensor([rank_info.rank])
            dist.broadcast(spread, src=members[-1], group=group)
            gathered: list[Any] = [None] * len(members)
            dist.all_gather_object(gathered, rank_info.rank, group=group)
            if len(members) == 2:
                passed = torch.tensor([rank_info.rank])
                if rank_info.rank == members[0]:
                    dist.send(passed, members[1], group=group)
                else:
                    dist.recv(passed, members[0], group=group)
                gathered.append(int(passed))
            found.append([float(tensor), int(spread), gathered])
        return found

    assert run(3, work) == [
        [[2.0, 2, [0, 2, 0]]],
        [[3.0, 1, [1, 2, 2]], [1.0, 1, [1]]],
        [[2.0, 2, [0, 2, 0]], [3.0, 1, [1, 2, 2]]],
    ]


# ---------------------------------------------------------------------------------------------------------- messages


def test_a_large_message_goes_out_while_its_sender_waits_for_something_else() -> None:
    def work(rank_info: RankInfo) -> Result:
        tensor = torch.full((2 << 20,), float(rank_info.rank + 1))
        if rank_info.rank == 0:
            sent = dist.isend(tensor, 1)
            dist.barrier()
            sent.wait()
            return sent.is_completed()
        dist.recv(tensor, 0)
        dist.barrier()
        return bool((tensor == 1).all())

    assert run(2, work) == [True, True]


def test_a_large_message_waits_for_a_receiver_that_is_busy_elsewhere() -> None:
    def work(rank_info: RankInfo) -> Result:
        tensor, total = torch.full((2 << 20,), float(rank_info.rank + 1)), torch.ones(3)
        if rank_info.rank == 0:
            sent = dist.isend(tensor, 1)
            dist.all_reduce(total)
            sent.wait()
        else:
            dist.all_reduce(total)
            received = dist.irecv(tensor, 0)
            received.wait()
        return [float(tensor.mean()), float(total.mean())]

    assert run(2, work) == [[1, 2], [1, 2]]


def test_both_may_send_before_either_receives() -> None:
    def work(rank_info: RankInfo) -> Result:
        mine, theirs = torch.full((1 << 20,), float(rank_info.rank)), torch.zeros(1 << 20)
        received = dist.irecv(theirs, 1 - rank_info.rank)
        sent = dist.isend(mine, 1 - rank_info.rank)
        sent.wait()
        received.wait()
        return [float(theirs.mean()), received._source_rank()]

    assert run(2, work) == [[1, 1], [0, 0]]


# ------------------------------------------------------------------------------------------------ beginnings and ends


def test_a_monitored_barrier_names_who_is_missing() -> None:
    def work(rank_info: RankInfo) -> Result:
        group: Any = dist.new_group()
        dist.monitored_barrier()
        dist.monitored_barrier(dist.new_group(backend="gloo"))
        dist.monitored_barrier(group)
        answer = ""
        if rank_info.rank != 1:
            try:
                dist.monitored_barrier(group, timedelta(seconds=0.3), wait_all_ranks=True)
            except RuntimeError as error:
                answer = str(error)
        dist.barrier()
        return answer

    answers = run(3, work)
    for rank in (0, 2):
        assert "timed out" in answers[rank]
        assert "Rank 1 failed to pass monitoredBarrier in 300 ms" in answers[rank]


def test_what_makes_no_sense_is_refused_before_anything_is_sent() -> None:
    def work(rank_info: RankInfo) -> Result:
        refused = []
        for tensor, op in (
            (torch.zeros(2), ReduceOp.BAND),
            (torch.zeros(2, dtype=torch.bool), ReduceOp.AVG),
            (torch.zeros(2, dtype=torch.float8_e4m3fn), ReduceOp.SUM),
        ):
            try:
                dist.all_reduce(tensor, op)
            except ValueError as error:
                refused.append(str(error))
        dist.barrier()
        return refused

    band, average, small = run(2, work)[0]
    assert band == "band is for integers and bool, and this tensor is torch.float32"
    assert average == "average is for numbers, and this tensor is torch.bool; convert it to a float first"
    assert "cannot compute sum of torch.float8_e4m3fn" in small


def test_a_second_group_begins_where_the_first_was_destroyed() -> None:
    def work(rank_info: RankInfo) -> Result:
        found = []
        for turn in range(3):
            dist.destroy_process_group()
            begin(rank_info, f"again-{turn}")
            tensor = torch.tensor([float(turn + rank_info.rank)])
            dist.all_reduce(tensor)
            found.append(float(tensor))
        return found

    assert run(2, work) == [[1, 3, 5]] * 2


def test_data_loaders_fork_after_the_group_is_there() -> None:
    def work(rank_info: RankInfo) -> Result:
        total = torch.zeros(1)
        for _ in range(2):
            for part in DataLoader(torch.arange(40.0), batch_size=10, num_workers=2):  # type: ignore[arg-type]
                part_sum = part.sum().reshape(1)
                each = dist.all_reduce(part_sum, async_op=True)
                each.wait()
                total += part_sum
        return float(total)

    assert run(2, work) == [2 * 2 * 780] * 2


LEAVING = """
import os, sys, tempfile, warnings
from datetime import timedelta
warnings.simplefilter("error")
import torch
import torch.distributed as dist
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
torch.set_num_threads(1)

def joined(rank, folder):
    limit = timedelta(seconds=20)
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    dist.init_process_group("polytempo", store=store, rank=rank, world_size=2, timeout=limit)
    dist.all_reduce(torch.ones(100_000), async_op=True).wait()
    return dist.isend(torch.ones(2 << 20), 1) if rank == 0 else None

def leave(rank, how):
    if how == "a collective in flight":
        return dist.all_reduce(torch.ones(5), async_op=True) if rank == 0 else None
    if how == "a message in flight":
        return dist.irecv(torch.ones(5), 1 - rank, tag=7)
    if how == "an error":
        raise KeyError("on purpose")

for how in sys.stdin:  # each way in a process of its own, which ends as any interpreter does
    how, folder = how.strip(), tempfile.mkdtemp(dir=sys.argv[1])
    child = os.fork()
    if child == 0:
        for descriptor, name in enumerate(("out", "error"), 1):
            os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT), descriptor)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), folder, flush=True)
else:
    sys.exit()
rank = 0 if os.fork() else 1
try:
    sent = joined(rank, folder)
    kept = leave(rank, how)
finally:
    if rank == 0:
        _, status = os.wait()
        print("other", os.waitstatus_to_exitcode(status))
"""


@pytest.fixture(scope="module")
def leaving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """An interpreter that has loaded torch, and forks for each way to leave that it reads."""
    command = [sys.executable, "-c", LEAVING, str(tmp_path_factory.mktemp("leaving"))]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as process:
        yield process
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("how", ["nothing", "a collective in flight", "a message in flight", "an error"])
def test_who_ends_without_leaving_leaves_nothing_and_does_not_hang(how: str, leaving: subprocess.Popen[str]) -> None:
    assert leaving.stdin is not None
    assert leaving.stdout is not None
    before = segments()
    print(how, file=leaving.stdin, flush=True)
    code, folder = leaving.stdout.readline().split()
    out, error = (Path(folder, name).read_text() for name in ("out", "error"))
    expected = 1 if how == "an error" else 0
    assert (int(code), out) == (expected, f"other {expected}\n"), error
    assert "Fatal" not in error
    assert error.count("KeyError: 'on purpose'") == 2 * expected
    assert segments() == before
