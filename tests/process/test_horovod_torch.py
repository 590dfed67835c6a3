"""`polytempo.horovod.torch` on real processes: values, errors and gradients of every function at 2 and at 4 ranks.

The ranks of one size are started once and make all checks, one after the other; each check is a test of its own.
"""

from __future__ import annotations

import itertools
import re
import traceback
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import polytempo.horovod.torch as hvd
from polytempo.engines.launch import launch
from polytempo.engines.worker import RankInfo, Result
from polytempo.horovod import run

pytestmark = pytest.mark.process

LOADED = (torch._dynamo,)
"""Slow to load: once here instead of once in every worker."""
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Check = Callable[[int, int], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Make it one of the checks."""
    CHECKS[function.__name__] = function
    return function


def equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def refused(error: type[Exception], words: str, call: Callable[[], Any]) -> None:
    """`call` raises `error`, whose message has `words`."""
    with pytest.raises(error, match=re.escape(words)):
        call()


def values(rank: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (3, 5)) -> Tensor:
    """Small whole numbers, others on each rank."""
    return torch.randint(1, 5, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


# ---------------------------------------------------------------------- reductions


@check
def all_reduces_of_every_dtype(rank: int, size: int) -> None:
    for dtype in INTEGERS + FLOATS:
        mine = values(rank, dtype)
        given = torch.stack([values(r, torch.float64) for r in range(size)])
        expected = {
            hvd.Sum: given.sum(0),
            hvd.Average: given.mean(0) if dtype in FLOATS else given.mean(0).trunc(),
            hvd.Min: given.amin(0),
            hvd.Max: given.amax(0),
            hvd.Product: given.prod(0),
        }
        for op, answer in expected.items():
            before = mine.clone()
            equal(hvd.allreduce(mine, op=op), answer.to(dtype))
            equal(mine, before)
            assert hvd.allreduce_(mine, op=op) is mine
            equal(mine, answer.to(dtype))
            mine = before
    equal(hvd.allreduce(values(rank)), sum(values(r) for r in range(size)) / size)
    equal(hvd.allreduce(values(rank), average=False), sum(values(r) for r in range(size)))
    equal(hvd.allreduce(torch.tensor(rank + 1j), op=hvd.Sum), torch.tensor(sum(range(size)) + size * 1j))
    assert hvd.allreduce(torch.empty(0, 3)).shape == (0, 3)
    equal(hvd.allreduce(torch.tensor(float(rank)), op=hvd.Max), torch.tensor(size - 1.0))


@check
def all_reduces_of_what_lies_apart(rank: int, size: int) -> None:
    mine = values(rank).t()
    equal(hvd.allreduce(mine, op=hvd.Sum), sum(values(r) for r in range(size)).t())
    hvd.allreduce_(mine, op=hvd.Sum)
    equal(mine, sum(values(r) for r in range(size)).t())


@check
def factors(rank: int, size: int) -> None:
    for dtype in (torch.int32, *FLOATS):
        total = torch.stack([(values(r, torch.float64) * 2.5).to(dtype).double() for r in range(size)]).sum(0)
        answer = hvd.allreduce(values(rank, dtype), op=hvd.Sum, prescale_factor=2.5, postscale_factor=0.5)
        equal(answer, (total * 0.5).to(dtype))


@check
def adasum(rank: int, size: int) -> None:
    apart = torch.zeros(size).index_fill_(0, torch.tensor([rank]), 3.0)
    equal(hvd.allreduce(apart, op=hvd.Adasum), torch.full((size,), 3.0))
    equal(hvd.allreduce(torch.ones(4), op=hvd.Adasum), torch.ones(4))
    pair = hvd.grouped_allreduce([apart, torch.ones(4)], op=hvd.Adasum)
    equal(pair, [torch.full((size,), 3.0), torch.ones(4)])
    refused(ValueError, "floating-point", lambda: hvd.allreduce(torch.ones(3, dtype=torch.int32), op=hvd.Adasum))


@check
def groups_of_several_dtypes(rank: int, size: int) -> None:
    mine = [values(rank), values(rank, torch.float64, (2,)), values(rank, torch.int64, ())]
    expected = [sum(values(r, t.dtype, tuple(t.shape)) for r in range(size)) for t in mine]
    equal(hvd.grouped_allreduce(mine, op=hvd.Sum, name="mixed"), expected)
    handle = hvd.grouped_allreduce_async(mine, op=hvd.Sum, name="mixed")
    equal(hvd.synchronize(handle), expected)
    answer = hvd.grouped_allreduce_(mine, op=hvd.Sum)
    assert all(a is m for a, m in zip(answer, mine, strict=True))
    equal(mine, expected)
    refused(ValueError, "at least one tensor", lambda: hvd.grouped_allreduce_async([]))


@check
def large_tensors_beside_small_ones(rank: int, size: int) -> None:
    """They are fused, but not copied; on the last rank the large one does not lie in one piece."""
    shape = (400, 500)
    large = values(rank, shape=shape[::-1]).t() if rank == size - 1 else values(rank, shape=shape)
    given = [values(rank), large, values(rank, torch.float64, shape), values(rank, shape=(7,))]
    first = [values(r) for r in range(size)]
    second = [values(r, shape=shape[::-1]).t() if r == size - 1 else values(r, shape=shape) for r in range(size)]
    third = [values(r, torch.float64, shape) for r in range(size)]
    fourth = [values(r, shape=(7,)) for r in range(size)]
    expected = [torch.stack(each).mean(0) for each in (first, second, third, fourth)]
    equal(hvd.grouped_allreduce(given, name="large"), expected)
    assert hvd.grouped_allreduce_(given, name="large")[1] is large
    equal(given, expected)


@check
def random_orders(rank: int, size: int) -> None:
    """Each rank submits the same names in an order of its own, several rounds, some in groups."""
    names = [f"order.{number}" for number in range(60)]
    for turn in range(4):
        order = np.random.default_rng(100 * turn + rank).permutation(len(names))
        handles = {}
        for number in order:
            kind = number % 4
            tensor = torch.full((int(number) % 7 + 1, 2), float(rank + number + turn))
            if kind == 0:
                handles[number] = hvd.allgather_async(tensor, names[number])
            elif kind == 1:
                handles[number] = hvd.broadcast_async(tensor, int(number) % size, names[number])
            else:
                handles[number] = hvd.allreduce_async(tensor, name=names[number], op=hvd.Sum)
        for number in np.random.default_rng(rank).permutation(len(names)):
            rows, base = int(number) % 7 + 1, float(number + turn)
            answer = hvd.synchronize(handles[number])
            if number % 4 == 0:
                equal(answer[:, 0], torch.cat([torch.full((rows,), base + r) for r in range(size)]))
            elif number % 4 == 1:
                equal(answer, torch.full((rows, 2), base + int(number) % size))
            else:
                equal(answer, torch.full((rows, 2), size * base + sum(range(size))))


@check
def polls(rank: int, size: int) -> None:
    gate = torch.zeros(1)
    if rank:
        hvd.broadcast_(gate, 0, "gate")
    handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="polled")
    if not rank:
        assert not hvd.poll(handle), "the others have not submitted it"
        hvd.broadcast_(gate, 0, "gate")
    while not hvd.poll(handle):
        pass
    assert not all(hvd.poll(hvd.allreduce_async(torch.ones(1), name=f"polled.{place}")) for place in range(10))
    equal(hvd.synchronize(handle), torch.full((3,), float(size)))
    assert hvd.synchronize(handle) is None
    refused(ValueError, "not known", lambda: hvd.poll(handle))


@check
def sparse(rank: int, size: int) -> None:
    rows = torch.tensor([[rank, size]])
    mine = torch.sparse_coo_tensor(rows, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), (size + 1, 2), check_invariants=True)
    expected = torch.tensor([[1.0, 2.0]] * size + [[3.0 * size, 4.0 * size]])
    equal(hvd.synchronize(hvd.sparse_allreduce_async(mine, "sparse", hvd.Sum)).to_dense(), expected)
    equal(hvd.sparse_allreduce_async(mine, "sparse", hvd.Average)().to_dense(), expected / size)
    refused(ValueError, "MAX", lambda: hvd.sparse_allreduce_async(mine, "sparse", hvd.Max))


@check
def compression(rank: int, size: int) -> None:
    mine = torch.full((4,), rank + 1 / 3)
    answer = hvd.allreduce(mine, compression=hvd.Compression.fp16, op=hvd.Sum)
    expected = torch.stack([torch.full((4,), r + 1 / 3).half().float() for r in range(size)]).sum(0)
    assert answer.dtype == torch.float32
    equal(answer, expected)
    assert hvd.allreduce(values(rank, torch.int32), compression=hvd.Compression.fp16, op=hvd.Max).dtype == torch.int32


# ---------------------------------------------------------------------- moving tensors


@check
def gathers(rank: int, size: int) -> None:
    for dtype in (*INTEGERS, *FLOATS, torch.bool):
        mine = values(rank, dtype, (rank, 3))
        expected = torch.cat([values(r, dtype, (r, 3)) for r in range(size)])
        equal(hvd.allgather(mine), expected)
    pair = hvd.grouped_allgather([torch.full((rank + 1,), rank), torch.full((2, 2), rank)], name="pair")
    equal(pair[0], torch.cat([torch.full((r + 1,), r) for r in range(size)]))
    equal(pair[1], torch.cat([torch.full((2, 2), r) for r in range(size)]))
    assert hvd.allgather(torch.empty(0, 2)).shape == (0, 2)


@check
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


@check
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


@check
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


# ---------------------------------------------------------------------- gradients


def slope(call: Callable[[Tensor], Tensor], at: Tensor, weights: Tensor, rank: int, size: int) -> Tensor:
    """The gradient of Σ over ranks of ⟨weights of the rank, result of the rank⟩, by finite differences."""
    answer = torch.zeros_like(at)
    for owner in range(size):
        for place in range(int(hvd.broadcast(torch.tensor(at.numel()), owner))):
            ends = []
            for shift in (1e-3, -1e-3):
                moved = at.clone()
                if rank == owner:
                    moved.view(-1)[place] += shift
                ends.append(hvd.allreduce((call(moved) * weights).sum().detach(), op=hvd.Sum))
            if rank == owner:
                answer.view(-1)[place] = (ends[0] - ends[1]) / 2e-3
    return answer


@check
def gradients(rank: int, size: int) -> None:
    """Of all ranks' results together; Horovod's allgather and broadcast give 1/N of it, its reducescatter N times."""
    rows = [1] * (size - 1) + [2]
    cases: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
        "sum": (lambda x: hvd.allreduce(x, op=hvd.Sum, name="gradient"), 1),
        "average": (lambda x: hvd.allreduce(x, prescale_factor=3.0, postscale_factor=0.5), 1),
        "group": (lambda x: torch.cat(hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)), 1),
        "allgather": (lambda x: hvd.allgather(x[: rank + 1], name="gather"), 1 / size),
        "broadcast": (lambda x: hvd.broadcast(x, 1), 1 / size),
        "alltoall": (lambda x: hvd.alltoall(x, rows)[0], 1),
        "even alltoall": (lambda x: hvd.alltoall(x[:size]), 1),
        "reducescatter": (lambda x: hvd.reducescatter(x, op=hvd.Average), size),
        "summing reducescatter": (lambda x: hvd.reducescatter(x, op=hvd.Sum, postscale_factor=0.5), size),
    }
    for name, (call, factor) in cases.items():
        at = values(rank, torch.float64, (size + 1, 2)).requires_grad_()
        result = call(at)
        weights = values(50 + rank, torch.float64, tuple(result.shape))
        (found,) = torch.autograd.grad((result * weights).sum(), at)
        expected = factor * slope(call, at.detach(), weights, rank, size)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    at = torch.ones(3, requires_grad=True)
    refused(ValueError, "MAX has no gradient", hvd.allreduce(at, op=hvd.Max).sum().backward)


@check
def gradients_of_groups_and_in_process_sets(rank: int, size: int) -> None:
    """Ranks outside the set keep their tensor, whose gradient is the identity's."""
    part = hvd.add_process_set(list(range(1, size)))
    inside, others = part.included(), max(size - 1, 1)

    def within(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: call(x) if inside else x * 1.0

    def pair(x: Tensor) -> Tensor:
        return torch.cat(hvd.grouped_allgather([x[: rank + 1], x], name="pair"))

    cases: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
        "grouped allgather": (pair, 1 / size),
        "grouped reducescatter": (lambda x: torch.cat(hvd.grouped_reducescatter([x, x * x])), size),
        "scaled group": (lambda x: torch.cat(hvd.grouped_allreduce([x, x], prescale_factor=0.5, name="scaled")), 1),
        "allreduce in a set": (within(lambda x: hvd.allreduce(x, process_set=part, name="part")), 1),
        "allgather in a set": (within(lambda x: hvd.allgather(x, process_set=part)), 1 / others if inside else 1),
        "broadcast in a set": (within(lambda x: hvd.broadcast(x, 1, process_set=part)), 1 / others if inside else 1),
        "reducescatter in a set": (within(lambda x: hvd.reducescatter(x, process_set=part)), others if inside else 1),
        "alltoall in a set": (within(lambda x: hvd.alltoall(x[:others], process_set=part)), 1),
    }
    for name, (call, factor) in cases.items():
        at = values(rank, torch.float64, (size + 1, 2)).requires_grad_()
        result = call(at)
        weights = values(70 + rank, torch.float64, tuple(result.shape))
        (found,) = torch.autograd.grad((result * weights).sum(), at)
        expected = factor * slope(call, at.detach(), weights, rank, size)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    for compressor in (hvd.Compression.fp16, hvd.Compression.bf16):
        at = torch.full((2,), 1.0 + rank, requires_grad=True)
        (hvd.allreduce(at, compression=compressor, op=hvd.Sum) * (1.0 + rank)).sum().backward()
        equal(at.grad, torch.full((2,), sum(range(size + 1)) * 1.0))
    assert hvd.remove_process_set(part)


@check
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


@check
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
    refused(hvd.HorovodInternalError, "add up", lambda: hvd.synchronize(hvd.alltoall_async(torch.ones(4), [9])))
    refused(ValueError, "not registered", lambda: hvd.SyncBatchNorm(3, process_set=apart).train()(torch.ones(2, 3)))
    refused(ValueError, "7 is not a valid", lambda: hvd.allreduce(torch.ones(1), op=7))
    refused(ValueError, "list of ranks", lambda: hvd.ProcessSet("01"))


# ---------------------------------------------------------------------- disagreement


@check
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
    error: tuple[type[Exception], str] = (ValueError, "sum is 4") if odd else (hvd.HorovodInternalError, "add up")
    refused(*error, lambda: hvd.alltoall(torch.ones(4), [1] * (size - 1) + [7 * odd], "splits"))
    refused(hvd.HorovodInternalError, "without dimensions", lambda: hvd.allgather(torch.tensor(1.0)))


@check
def a_name_that_is_under_way(rank: int, size: int) -> None:
    handle = hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
    if rank == 0:
        refused(ValueError, "'allreduce.twice'", lambda: hvd.allreduce_async(torch.ones(2), name="twice"))
        hvd.barrier(hvd.global_process_set)
    else:
        hvd.barrier()
    equal(hvd.synchronize(handle), torch.full((2,), float(size)))


@check
def what_is_not_supported(rank: int, size: int) -> None:
    refused(ValueError, "meta are not supported", lambda: hvd.allreduce(torch.ones(2, device="meta")))
    refused(ValueError, "supersedes", lambda: hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum))
    refused(ValueError, "MPI is not enabled", hvd.mpi_threads_supported)
    refused(ValueError, "complex", lambda: hvd.allreduce(torch.ones(2, dtype=torch.complex64), op=hvd.Max))


# ---------------------------------------------------------------------- ranks


@check
def places(rank: int, size: int) -> None:
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (rank, size, rank, size)
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous(), hvd.is_initialized()) == (0, 1, True, True)
    assert (hvd.gloo_built(), hvd.gloo_enabled(), hvd.mpi_built(), hvd.mpi_enabled()) == (True, True, False, False)
    assert not any((hvd.nccl_built(), hvd.cuda_built(), hvd.rocm_built(), hvd.ddl_built(), hvd.ccl_built()))
    hvd.init()  # does nothing


@check
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


@check
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


# ---------------------------------------------------------------------- parameters and values


@check
def parameters_of_one_rank(rank: int, size: int) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    torch.manual_seed(1)
    expected = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).state_dict()
    if rank == 1:
        model.load_state_dict(expected)
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    assert all(torch.equal(found, expected[name]) for name, found in model.state_dict().items())
    nn.init.constant_(model[0].weight, float(rank))
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    equal(model[0].weight.detach(), torch.zeros(2, 3))
    refused(ValueError, "invalid params", lambda: hvd.broadcast_parameters(3, 0))  # type: ignore[arg-type]
    refused(ValueError, "named_parameters", lambda: hvd.broadcast_parameters([(1, 2)], 0))  # type: ignore[list-item]
    nn.init.constant_(model[0].weight, float(rank))
    hvd.broadcast_parameters(list(model.parameters()), root_rank=1)
    equal(model[0].weight.detach(), torch.ones(2, 3))


@check
def optimizer_states_of_one_rank(rank: int, size: int) -> None:
    """The root has made a step, the others none."""
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1 * (rank + 1), momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.1 * (rank + 1)),
        lambda p: torch.optim.Adagrad(p, lr=0.1 * (rank + 1)),
    ):
        parameter = nn.Parameter(torch.ones(3))
        optimizer = make([parameter])
        if rank == 0:
            parameter.grad = torch.arange(3.0)
            optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert optimizer.param_groups[0]["lr"] == 0.1
        found = {key: torch.as_tensor(value) for key, value in optimizer.state[parameter].items() if value is not None}
        assert found
        for key in sorted(found):
            equal(hvd.broadcast(found[key], 0), found[key])
    frozen, free = nn.Parameter(torch.ones(1), requires_grad=False), nn.Parameter(torch.ones(2))
    hvd.broadcast_optimizer_state(torch.optim.SGD([frozen, free], lr=0.1), 0)
    assert frozen.grad is None
    equal(free.grad, torch.zeros(2))
    lbfgs = torch.optim.LBFGS([nn.Parameter(torch.ones(1))])
    refused(ValueError, "LBFGS", lambda: hvd.broadcast_optimizer_state(lbfgs, 0))


@check
def plain_values(rank: int, size: int) -> None:
    value = {"a": [1, 2.5, None, (True, b"x")], 3: {"deep": {1, 2}}, "big": 1 << 80, "t": torch.arange(6).view(2, 3)}
    found = hvd.broadcast_object(value if rank == 1 else None, root_rank=1, name="value")
    assert list(found) == list(value)
    for key in value:
        assert torch.equal(found[key], value[key]) if key == "t" else found[key] == value[key]
    assert hvd.broadcast_object_fn(0)("first" if rank == 0 else None) == "first"
    everything = hvd.allgather_object({"rank": rank, "text": "x" * rank})
    assert everything == [{"rank": r, "text": "x" * r} for r in range(size)]
    refused(TypeError, "no pickle", lambda: hvd.broadcast_object(object() if rank == 0 else None, 0))
    refused(TypeError, "rank 1", lambda: hvd.allgather_object(object() if rank == 1 else 1))


# ---------------------------------------------------------------------- training


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(6, 4, generator=random).double(), torch.randn(6, 3, generator=random).double()


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    inputs, targets = batch(rank, step)
    return (model(inputs) - targets).pow(2).mean()


def alone(size: int, passes: int = 1, scale: float = 1.0, steps: int = 3) -> list[Tensor]:
    """One process that makes the steps of all ranks: gradients are the mean over ranks, the sum over passes."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for each in range(passes):
            for rank in range(size):
                (loss(model, rank, step * passes + each) * (scale / size)).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def together(rank: int, passes: int = 1, steps: int = 3, **options: Any) -> list[Tensor]:
    model = net()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if options.pop("by_parameters", False):
        options["groups"] = [[model[0].weight, model[2].bias], [model[0].bias]]
    optimizer = hvd.DistributedOptimizer(
        plain, named_parameters=model.named_parameters(), backward_passes_per_step=passes, **options
    )
    assert isinstance(optimizer, torch.optim.SGD)
    for step in range(steps):
        optimizer.zero_grad()
        for each in range(passes):
            loss(model, rank, step * passes + each).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@check
def distributed_optimizers(rank: int, size: int) -> None:
    expected = alone(size)
    for options in (
        {},
        {"groups": 2},
        {"num_groups": 1},
        {"by_parameters": True},
        {"gradient_predivide_factor": 4.0},
    ):
        torch.testing.assert_close(together(rank, **options), expected)
    torch.testing.assert_close(together(rank, op=hvd.Sum), alone(size, scale=size))
    torch.testing.assert_close(together(rank, passes=2), alone(size, passes=2))
    torch.testing.assert_close(together(rank, compression=hvd.Compression.fp16), expected, rtol=5e-2, atol=5e-3)


@check
def clipping_between_synchronize_and_step(rank: int, size: int) -> None:
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    loss(model, rank, 0).backward()
    optimizer.synchronize()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    equal(hvd.broadcast(norm, 0), norm)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with optimizer.skip_synchronize():
        optimizer.step()
    moved = torch.cat([(p.detach() - b).view(-1) for p, b in zip(model.parameters(), before, strict=True)])
    torch.testing.assert_close(moved.norm(), torch.tensor(1e-3).double(), rtol=1e-3, atol=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.zero_grad()
        loss(model, rank, 1).backward()
        optimizer.synchronize()
        optimizer.step()
    assert any("skip_synchronize" in str(warning.message) for warning in caught)


@check
def misused_optimizers(rank: int, size: int) -> None:
    model = net()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    make = hvd.DistributedOptimizer
    refused(ValueError, "unique", lambda: make(plain, [("same", p) for p in model.parameters()]))
    refused(ValueError, "not named", lambda: make(plain, list(model.named_parameters())[1:]))
    refused(ValueError, "tuples", lambda: make(plain, model.parameters()))  # type: ignore[arg-type]
    refused(ValueError, "Average alone", lambda: make(plain, op=hvd.Sum, gradient_predivide_factor=2.0))
    refused(ValueError, "disjoint", lambda: make(plain, groups=[[model[0].weight], [model[0].weight]]))
    refused(ValueError, "at least 1", lambda: make(plain, backward_passes_per_step=0))
    optimizer = make(plain, model.named_parameters())
    loss(model, rank, 0).backward()
    refused(AssertionError, "backward_passes_per_step", lambda: loss(model, rank, 0).backward())
    refused(AssertionError, "zero_grad", optimizer.zero_grad)
    optimizer.step()
    refused(ValueError, "lists of parameters", lambda: make(plain, groups=[["a"]]))
    assert len(set(optimizer._parameter_names.values())) == len(list(model.parameters()))


@check
def closures(rank: int, size: int) -> None:
    """The gradients that a closure computes are reduced; one that computes none leaves those of before."""
    for computes in (True, False):
        model = net()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for step in range(3):
            value = loss(model, rank, step)
            if not computes:
                optimizer.zero_grad()
                value.backward()

            def closure(value: Tensor = value, optimizer: Any = optimizer, computes: bool = computes) -> Tensor:
                if computes:
                    optimizer.zero_grad()
                    value.backward()
                return value

            assert optimizer.step(closure) is value
        torch.testing.assert_close([p.detach() for p in model.parameters()], alone(size))


@check
def passes_that_change(rank: int, size: int) -> None:
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=3)
    for _ in range(2):
        loss(model, rank, 0).backward()
    optimizer.set_backward_passes_per_step(1)
    assert optimizer.backward_passes_per_step == 1
    optimizer.synchronize()
    gathered = hvd.allgather(torch.cat([p.grad.view(-1) for p in model.parameters()])[None])
    assert torch.equal(gathered, gathered[:1].expand_as(gathered))
    with optimizer.skip_synchronize():
        optimizer.step()


@check
def adasum_optimizers(rank: int, size: int) -> None:
    """Ranks with equal batches make the step of one rank alone."""
    model, single = net(), net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), op=hvd.Adasum
    )
    other = torch.optim.SGD(single.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        for each, made in ((model, optimizer), (single, other)):
            made.zero_grad()
            loss(each, 0, step).backward()
            made.step()
    torch.testing.assert_close(list(model.parameters()), list(single.parameters()))


@check
def embeddings(rank: int, size: int) -> None:
    for dense in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(size + 1, 2, sparse=True)
        before = table.weight.detach().clone()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters(), sparse_as_dense=dense
        )
        table(torch.tensor([rank, size])).sum().backward()
        optimizer.step()
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse
        expected = torch.full((size + 1, 2), 1 / size)
        expected[size] = 1.0
        equal(before - table.weight.detach(), expected)


@check
def optimizers_of_a_part(rank: int, size: int) -> None:
    part = hvd.add_process_set([0])
    assert torch.allclose(together(rank, process_set=part)[0], together_alone(rank)[0])
    hvd.remove_process_set(part)


def together_alone(rank: int) -> list[Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@check
def batch_norms(rank: int, size: int) -> None:
    """Ranks have other numbers of samples; the whole batch on one process is the truth, with its gradients."""
    rows = [3 + r for r in range(size)]
    whole = torch.randn(sum(rows), 4, 2, generator=torch.Generator().manual_seed(5)).double()
    ours, theirs = hvd.SyncBatchNorm(4).double(), nn.BatchNorm1d(4).double()
    for layer in (ours, theirs):
        nn.init.constant_(layer.weight, 1.5)
    mine = whole.split(rows)[rank].clone().requires_grad_()
    reference = whole.clone().requires_grad_()
    for _ in range(2):
        answer, expected = ours(mine), theirs(reference)
    torch.testing.assert_close(answer, expected.split(rows)[rank])
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    answer.pow(3).sum().backward()
    expected.pow(3).sum().backward()
    assert reference.grad is not None
    torch.testing.assert_close(mine.grad, reference.grad.split(rows)[rank])
    torch.testing.assert_close(hvd.allreduce(ours.weight.grad, op=hvd.Sum), theirs.weight.grad)
    ours.eval()
    theirs.eval()
    torch.testing.assert_close(ours(mine), theirs(mine))
    refused(ValueError, "2D", lambda: ours(torch.ones(3)))


# ---------------------------------------------------------------------- the tests


@cache
def outcomes(size: int) -> list[dict[str, str]]:
    """What each check said on each rank: nothing, or its traceback."""

    def work(_: RankInfo) -> Result:
        hvd.init()
        said = {}
        for name, made in CHECKS.items():
            try:
                made(hvd.rank(), hvd.size())
                said[name] = ""
            except BaseException:  # "did not raise" is no Exception
                said[name] = traceback.format_exc()
                break  # ranks are in different places now
        else:
            hvd.barrier()
        hvd.shutdown()
        return said

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "20")
        return launch(work, size, threads=1, timeout_s=150)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_of(name: str, size: int) -> None:
    for rank, said in enumerate(outcomes(size)):
        assert not said.get(name, "not made"), f"rank {rank}: {said.get(name, 'not made')}"


def test_run_answers_what_each_rank_returns() -> None:
    def work(base: int, *, times: int) -> tuple[int, Tensor]:
        hvd.init()
        return base + hvd.rank(), hvd.allreduce(torch.ones(2), op=hvd.Sum) * times

    found = run(work, (10,), {"times": 3}, np=2)
    assert [number for number, _ in found] == [10, 11]
    equal([tensor for _, tensor in found], [torch.full((2,), 6.0)] * 2)


def test_one_process_alone_is_a_world_of_one() -> None:
    def work() -> list[float]:
        hvd.init(process_sets="dynamic")
        hvd.barrier()
        first = hvd.allreduce(torch.ones(2))
        hvd.shutdown()
        assert not hvd.is_initialized()
        hvd.init()
        return [*first.tolist(), *hvd.allgather(torch.ones(1)).tolist(), float(hvd.join())]

    assert run(work, np=1) == [[1.0, 1.0, 1.0, 0.0]]


def test_ranks_begin_again_after_they_have_shut_down() -> None:
    def work() -> list[float]:
        found = []
        for turn in range(4):
            hvd.init(process_sets=[hvd.ProcessSet([turn % 2])])
            found.append(float(hvd.allreduce(torch.ones(1) * turn, op=hvd.Sum)))
            hvd.barrier()
            hvd.shutdown()
        with pytest.raises(ValueError, match="no two sets have the same"):
            hvd.init(process_sets=[hvd.ProcessSet([0]), hvd.ProcessSet([0])])
        return found

    assert run(work, np=2) == [[0.0, 2.0, 4.0, 6.0]] * 2


def test_before_init_every_function_says_what_to_do() -> None:
    for call in (hvd.rank, hvd.size, hvd.join, lambda: hvd.allreduce(torch.ones(1))):
        with pytest.raises(ValueError, match=r"hvd\.init"):
            call()
    assert not hvd.is_initialized()


def test_a_rank_that_shuts_down_ends_what_waits_for_it() -> None:
    def work() -> str:
        hvd.init(process_sets=[hvd.ProcessSet([0, 1])])
        if hvd.rank() == 1:
            hvd.shutdown()
            return ""
        try:
            hvd.allreduce(torch.ones(2), name="alone")
        except hvd.HorovodInternalError as error:
            return str(error)
        return "no error"

    found = run(work, np=3)
    assert all("rank 1 has shut down" in found[rank] for rank in (0, 2))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_whose_process_ends_is_named(victim: int) -> None:
    """The process of a rank that returns here ends at once: nothing is left that could say farewell."""

    def work(_: RankInfo) -> Result:
        hvd.init()
        hvd.allreduce(torch.ones(2), name="all")
        if hvd.rank() == victim:
            return ""
        try:
            hvd.allreduce(torch.ones(2), name="all")
        except hvd.HorovodInternalError as error:
            return str(error)
        return "no error"

    found = launch(work, 3, threads=1, timeout_s=60)
    assert all(f"rank {victim} is lost" in said for rank, said in enumerate(found) if rank != victim), found


def test_a_name_that_some_ranks_never_submit_ends_by_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "1")

    def work() -> str:
        hvd.init()
        mine = "one" if hvd.rank() else "other"
        try:
            hvd.allreduce(torch.ones(2), name=mine)
        except hvd.HorovodInternalError as error:
            return str(error)
        return "no error"

    for said in run(work, np=2):
        assert "was submitted by ranks" in said
        assert "and not by ranks" in said
