"""Reductions of `polytempo.horovod.torch` on real processes: values and errors at 2 and at 4 ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import polytempo.horovod.torch as hvd
from horovod_checks import FLOATS, INTEGERS, Checks, equal, refused, values

pytestmark = pytest.mark.process

CHECKS = Checks()


@CHECKS.check
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


@CHECKS.check
def all_reduces_of_what_lies_apart(rank: int, size: int) -> None:
    mine = values(rank).t()
    equal(hvd.allreduce(mine, op=hvd.Sum), sum(values(r) for r in range(size)).t())
    hvd.allreduce_(mine, op=hvd.Sum)
    equal(mine, sum(values(r) for r in range(size)).t())


@CHECKS.check
def factors(rank: int, size: int) -> None:
    for dtype in (torch.int32, *FLOATS):
        total = torch.stack([(values(r, torch.float64) * 2.5).to(dtype).double() for r in range(size)]).sum(0)
        answer = hvd.allreduce(values(rank, dtype), op=hvd.Sum, prescale_factor=2.5, postscale_factor=0.5)
        equal(answer, (total * 0.5).to(dtype))


@CHECKS.check
def adasum(rank: int, size: int) -> None:
    apart = torch.zeros(size).index_fill_(0, torch.tensor([rank]), 3.0)
    equal(hvd.allreduce(apart, op=hvd.Adasum), torch.full((size,), 3.0))
    equal(hvd.allreduce(torch.ones(4), op=hvd.Adasum), torch.ones(4))
    pair = hvd.grouped_allreduce([apart, torch.ones(4)], op=hvd.Adasum)
    equal(pair, [torch.full((size,), 3.0), torch.ones(4)])
    refused(ValueError, "floating-point", lambda: hvd.allreduce(torch.ones(3, dtype=torch.int32), op=hvd.Adasum))


@CHECKS.check
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


@CHECKS.check
def large_tensors_beside_small_ones(rank: int, size: int) -> None:
    """Large tensors are fused, but not copied; on the last rank the large one is not contiguous."""
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


@CHECKS.check
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


@CHECKS.check
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


@CHECKS.check
def sparse(rank: int, size: int) -> None:
    rows = torch.tensor([[rank, size]])
    mine = torch.sparse_coo_tensor(rows, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), (size + 1, 2), check_invariants=True)
    expected = torch.tensor([[1.0, 2.0]] * size + [[3.0 * size, 4.0 * size]])
    equal(hvd.synchronize(hvd.sparse_allreduce_async(mine, "sparse", hvd.Sum)).to_dense(), expected)
    equal(hvd.sparse_allreduce_async(mine, "sparse", hvd.Average)().to_dense(), expected / size)
    refused(ValueError, "MAX", lambda: hvd.sparse_allreduce_async(mine, "sparse", hvd.Max))


@CHECKS.check
def compression(rank: int, size: int) -> None:
    mine = torch.full((4,), rank + 1 / 3)
    answer = hvd.allreduce(mine, compression=hvd.Compression.fp16, op=hvd.Sum)
    expected = torch.stack([torch.full((4,), r + 1 / 3).half().float() for r in range(size)]).sum(0)
    assert answer.dtype == torch.float32
    equal(answer, expected)
    assert hvd.allreduce(values(rank, torch.int32), compression=hvd.Compression.fp16, op=hvd.Max).dtype == torch.int32


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_of(name: str, size: int) -> None:
    CHECKS.passed(name, size)
