"""Disagreement, process sets and ranks that join in `polytempo.horovod.torch`, at 2 and at 4 ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import polytempo.horovod.torch as hvd
from horovod_checks import FLOATS, Checks, equal, refused

pytestmark = pytest.mark.process

CHECKS = Checks()


@CHECKS.check
def disagreements(rank: int, size: int) -> None:
    """Each is an error on every rank, and names the tensor and a rank; the next operation works."""
    odd = rank == size - 1
    last = f"rank {size - 1}"
    cases: dict[str, Callable[[], Any]] = {
        "Mismatched shapes": lambda: hvd.allreduce(torch.ones(3 + odd), name="shape"),
        "Mismatched data types": lambda: hvd.allreduce(torch.ones(3, dtype=FLOATS[2 + odd]), name="dtype"),
        "Mismatched reduction operations": lambda: hvd.allreduce(
            torch.ones(3), op=hvd.Sum if odd else hvd.Max, name="op"
        ),
        "Mismatched root ranks": lambda: hvd.broadcast(torch.ones(3), int(odd), name="root"),
        "Mismatched prescale": lambda: hvd.allreduce(torch.ones(3), prescale_factor=1.0 + odd, name="factor"),
        "Mismatched shapes but for the first": lambda: hvd.allgather(torch.ones(2, 2 + odd), name="rest"),
        "Mismatched numbers of tensors": lambda: hvd.grouped_allreduce([torch.ones(1)] * (1 + odd), name="many"),
    }
    for words, call in cases.items():
        refused(hvd.HorovodInternalError, words, call)
        refused(hvd.HorovodInternalError, last, call)
        equal(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(size)))
    refused(hvd.HorovodInternalError, f"root rank {size}", lambda: hvd.broadcast(torch.ones(1), size))
    error: tuple[type[Exception], str] = (ValueError, "sum of 4") if odd else (hvd.HorovodInternalError, "add up")
    refused(*error, lambda: hvd.alltoall(torch.ones(4), [1] * (size - 1) + [7 * odd], "splits"))
    refused(hvd.HorovodInternalError, "without dimensions", lambda: hvd.allgather(torch.tensor(1.0)))


@CHECKS.check
def a_name_that_is_under_way(rank: int, size: int) -> None:
    handle = hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
    if rank == 0:
        refused(ValueError, "'allreduce.twice'", lambda: hvd.allreduce_async(torch.ones(2), name="twice"))
        hvd.barrier(hvd.global_process_set)
    else:
        hvd.barrier()
    equal(hvd.synchronize(handle), torch.full((2,), float(size)))


@CHECKS.check
def what_is_not_supported(rank: int, size: int) -> None:
    refused(ValueError, "tensors on meta have no values to send", lambda: hvd.allreduce(torch.ones(2, device="meta")))
    refused(ValueError, "supersedes", lambda: hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum))
    refused(ValueError, "MPI is not enabled", hvd.mpi_threads_supported)
    refused(ValueError, "complex", lambda: hvd.allreduce(torch.ones(2, dtype=torch.complex64), op=hvd.Max))


@CHECKS.check
def places(rank: int, size: int) -> None:
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (rank, size, rank, size)
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous(), hvd.is_initialized()) == (0, 1, True, True)
    assert (hvd.gloo_built(), hvd.gloo_enabled(), hvd.mpi_built(), hvd.mpi_enabled()) == (True, True, False, False)
    assert not any((hvd.nccl_built(), hvd.cuda_built(), hvd.rocm_built(), hvd.ddl_built(), hvd.ccl_built()))
    hvd.init()  # does nothing


@CHECKS.check
def joins(rank: int, size: int) -> None:
    """Rank r has r + 2 batches; the others' sums go on without it."""
    for step in range(rank + 2):
        there = [r for r in range(size) if r + 2 > step]
        equal(
            hvd.allreduce(torch.full((2,), 1.0 + rank), op=hvd.Sum, name="join"),
            torch.full((2,), float(sum(there) + len(there))),
        )
        if step > 3 and rank == size - 1:
            refused(hvd.HorovodInternalError, "join()", lambda: hvd.allgather(torch.ones(2), name="join"))
    assert hvd.join() == size - 1
    equal(hvd.allreduce(torch.ones(2), op=hvd.Sum, name="join"), torch.full((2,), float(size)))


@CHECKS.check
def process_sets(rank: int, size: int) -> None:
    refused(ValueError, "already", lambda: hvd.add_process_set(list(range(size))))
    for wrong in (["a"], [0.5], 3):
        refused(ValueError, "list of ranks", lambda w=wrong: hvd.ProcessSet(w))
    assert hvd.ProcessSet({1, 0}).ranks == [0, 1]
    refused(hvd.HorovodInternalError, "some of the ranks", lambda: hvd.add_process_set([size]))
    assert hvd.global_process_set.ranks == list(range(size))
    assert hvd.global_process_set.rank() == rank
    ranks = list(range(1, size))
    part = hvd.add_process_set(ranks[::-1])
    first = hvd.add_process_set(hvd.ProcessSet([0]))
    assert (part.ranks, part.size(), part.included()) == (ranks, size - 1, rank > 0)
    if part.included():
        assert part.rank() == rank - 1
        mine = torch.full((2,), rank + 1.0)
        for _ in range(2):
            equal(
                hvd.allreduce(mine, op=hvd.Sum, process_set=part, name="part"),
                torch.full((2,), sum(ranks) + size - 1.0),
            )
        equal(hvd.broadcast(mine, size - 1, process_set=part), torch.full((2,), float(size)))
        equal(hvd.allgather(mine[:1], process_set=part), torch.tensor(ranks) + 1.0)
        hvd.barrier(process_set=part)
        refused(hvd.HorovodInternalError, "root rank 0", lambda: hvd.broadcast(mine, 0, process_set=part))
    else:
        refused(ValueError, "cannot take part", lambda: hvd.allreduce(torch.ones(1), process_set=part))
        refused(ValueError, "is not in the process set", part.rank)
        equal(hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=first), torch.ones(1))
    refused(ValueError, "already", lambda: hvd.add_process_set([0]))
    assert hvd.remove_process_set(part)
    assert not hvd.remove_process_set(part)
    assert not hvd.remove_process_set(hvd.global_process_set)
    refused(ValueError, "not registered", lambda: hvd.allreduce(torch.ones(1), process_set=part))
    assert hvd.remove_process_set(first)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_of(name: str, size: int) -> None:
    CHECKS.passed(name, size)
