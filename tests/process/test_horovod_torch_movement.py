"""Moving tensors by `polytempo.horovod.torch`, and all asynchronous forms, at 2 and at 4 ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import polytempo.horovod.torch as hvd
from horovod_checks import FLOATS, INTEGERS, Checks, equal, refused, values

pytestmark = pytest.mark.process

CHECKS = Checks()


@CHECKS.check
def gathers(rank: int, size: int) -> None:
    for dtype in (*INTEGERS, *FLOATS, torch.bool):
        mine = values(rank, dtype, (rank, 3))
        expected = torch.cat([values(r, dtype, (r, 3)) for r in range(size)])
        equal(hvd.allgather(mine), expected)
    pair = hvd.grouped_allgather([torch.full((rank + 1,), rank), torch.full((2, 2), rank)], name="pair")
    equal(pair[0], torch.cat([torch.full((r + 1,), r) for r in range(size)]))
    equal(pair[1], torch.cat([torch.full((2, 2), r) for r in range(size)]))
    assert hvd.allgather(torch.empty(0, 2)).shape == (0, 2)


@CHECKS.check
def broadcasts(rank: int, size: int) -> None:
    for root, dtype in itertools.product(range(size), (*INTEGERS, *FLOATS, torch.bool)):
        mine = values(rank, dtype)
        equal(hvd.broadcast(mine, root), values(root, dtype))
        equal(mine, values(rank, dtype))
        assert hvd.broadcast_(mine, root) is mine
        equal(mine, values(root, dtype))
    apart = values(rank).t()
    hvd.broadcast_(apart, 1)
    equal(apart, values(1).t())


@CHECKS.check
def deals(rank: int, size: int) -> None:
    splits = [rank + to for to in range(size)]
    mine = torch.cat([torch.full((rank + to, 2), 10 * rank + to) for to in range(size)])
    expected = torch.cat([torch.full((r + rank, 2), 10 * r + rank) for r in range(size)])
    for given in (splits, torch.tensor(splits, dtype=torch.int32)):
        answer, received = hvd.alltoall(mine, given)
        equal(answer, expected)
        equal(received, torch.tensor([r + rank for r in range(size)], dtype=torch.int32))
    even = hvd.alltoall(torch.arange(2 * size) + 100 * rank)
    equal(even, torch.cat([torch.arange(2 * rank, 2 * rank + 2) + 100 * r for r in range(size)]))
    refused(ValueError, "equal parts", lambda: hvd.alltoall(torch.ones(size + 1)))
    for wrong in (torch.ones(size), torch.ones(size, 1, dtype=torch.int32), [1] * (size + 1), [-1] + [1] * (size - 1)):
        refused(
            ValueError, "splits" if isinstance(wrong, Tensor) else "split into", lambda w=wrong: hvd.alltoall(mine, w)
        )
    at = torch.arange(size + 2.0).requires_grad_()  # two rows stay
    answer, received = hvd.alltoall(at, [1] * size)
    equal(answer.detach(), torch.full((size,), float(rank)))
    answer.sum().backward()
    equal(at.grad, torch.tensor([1.0] * size + [0.0, 0.0]))
    none, received = hvd.alltoall(torch.ones(2, 3), [2] + [0] * (size - 1))
    assert none.shape == ((2 * size, 3) if rank == 0 else (0, 3))
    assert received.tolist() == [2 * (rank == 0)] * size


@CHECKS.check
def reduce_scatters(rank: int, size: int) -> None:
    whole = sum(values(r, shape=(2 * size + 1, 3)) for r in range(size))
    mine = values(rank, shape=(2 * size + 1, 3))
    start, rows = 2 * rank + min(rank, 1), 2 + (rank < 1)
    equal(hvd.reducescatter(mine, op=hvd.Sum), whole[start : start + rows])
    equal(hvd.reducescatter(mine), whole[start : start + rows] / size)
    scaled = hvd.reducescatter(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25)
    equal(scaled, whole[start : start + rows] / 2)
    equal(mine, values(rank, shape=(2 * size + 1, 3)))
    pair = hvd.grouped_reducescatter([mine, torch.ones(size, dtype=torch.int64)], op=hvd.Sum)
    equal(pair, [whole[start : start + rows], torch.full((1,), size)])
    equal(hvd.synchronize(hvd.reducescatter_async(torch.ones(1), op=hvd.Max)), torch.ones(int(rank == 0)))
    for dtype in (torch.float32, torch.int32):
        whole = torch.ones(size, dtype=dtype)
        refused(hvd.HorovodInternalError, "adasum", lambda w=whole: hvd.reducescatter(w, op=hvd.Adasum))
    part = hvd.reducescatter(mine, None, hvd.Compression.none, hvd.Sum, hvd.global_process_set, 2.0, 0.5)
    assert part.shape == (rows, 3)


@CHECKS.check
def asynchronous_forms(rank: int, size: int) -> None:
    """All begun before one is waited for; in place where their name ends so."""
    total, mine = sum(values(r) for r in range(size)), values(rank)
    alone, first, second, sent = mine.clone(), mine.clone(), mine.double(), mine.clone()
    rows = [1] * (size - 1) + [2]
    dealt = values(rank, shape=(size + 1, 2))
    handles = {
        "allreduce": hvd.allreduce_async_(alone, op=hvd.Sum, name="forms"),
        "group": hvd.grouped_allreduce_async_([first, second], op=hvd.Average, name="forms.group"),
        "broadcast": hvd.broadcast_async_(sent, size - 1, name="forms"),
        "alltoall": hvd.alltoall_async(dealt, rows, name="forms"),
        "gather": hvd.grouped_allgather_async([mine[:1], mine[:rank]], name="forms.gather"),
        "scatter": hvd.grouped_reducescatter_async([dealt, dealt * 2], name="forms.scatter", op=hvd.Max),
    }
    found = {name: hvd.synchronize(handle) for name, handle in reversed(handles.items())}
    assert found["allreduce"] is alone
    equal(alone, total)
    assert found["group"][0] is first
    equal(found["group"], [total / size, total.double() / size])
    assert found["broadcast"] is sent
    equal(sent, values(size - 1))
    output, received = found["alltoall"]
    count = rows[rank]
    equal(output, torch.cat([values(r, shape=(size + 1, 2))[rank : rank + count] for r in range(size)]))
    assert received.tolist() == [count] * size
    equal(found["gather"][0], torch.cat([values(r)[:1] for r in range(size)]))
    equal(found["gather"][1], torch.cat([values(r)[:r] for r in range(size)]))
    largest = torch.stack([values(r, shape=(size + 1, 2)) for r in range(size)]).amax(0)
    start, rows_here = (0, 2) if rank == 0 else (rank + 1, 1)
    equal(found["scatter"], [largest[start : start + rows_here], 2 * largest[start : start + rows_here]])


@CHECKS.check
def forms_that_are_refused(rank: int, size: int) -> None:
    complex_ones, apart = torch.ones(2, dtype=torch.complex64), hvd.ProcessSet([0])
    for call in (
        hvd.grouped_allreduce_async_,
        hvd.grouped_allgather_async,
        hvd.grouped_reducescatter_async,
        hvd.grouped_allreduce_,
    ):
        refused(ValueError, "at least one tensor", lambda call=call: call([]))
    for call in (hvd.allreduce_, hvd.allreduce_async_, hvd.reducescatter_async):
        refused(ValueError, "complex", lambda call=call: call(complex_ones, op=hvd.Product))
    for call in (hvd.allgather_async, hvd.allreduce_async_, hvd.alltoall_async, hvd.barrier):
        given = () if call is hvd.barrier else (torch.ones(2),)
        refused(ValueError, "not registered", lambda call=call, given=given: call(*given, process_set=apart))
    refused(ValueError, "not registered", lambda: hvd.broadcast_async_(torch.ones(1), 0, process_set=apart))
    refused(hvd.HorovodInternalError, "root rank", lambda: hvd.synchronize(hvd.broadcast_async_(torch.ones(1), -1)))
    refused(ValueError, "sum of 4", lambda: hvd.synchronize(hvd.alltoall_async(torch.ones(4), [9])))
    refused(ValueError, "not registered", lambda: hvd.SyncBatchNorm(3, process_set=apart).train()(torch.ones(2, 3)))
    refused(ValueError, "7 is not a valid", lambda: hvd.allreduce(torch.ones(1), op=7))
    refused(ValueError, "list of ranks", lambda: hvd.ProcessSet("01"))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_of(name: str, size: int) -> None:
    CHECKS.passed(name, size)
