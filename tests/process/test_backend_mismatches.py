"""The backend "polytempo": where the calls of ranks do not match, an error names both calls and ranks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from polytempo.core.errors import Mismatch
from polytempo.engines.processes.worker import RankInfo, Result
from process.backend_group import run
from process.collective_calls import SIZE

pytestmark = pytest.mark.process


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
"""The calls of rank 0 and rank 1 at the same time, and the error's words."""


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
"""The last rank's argument, where the others add up a sparse tensor of shape (5, 4) with 1 sparse dimension."""


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
