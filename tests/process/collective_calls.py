"""Every collective of torch.distributed as a call of a rank: mirrored by gloo, or impossible there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

SIZE = 3
GATHER_SINGLE = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER_SINGLE = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Older versions of torch have only the older names."""
Answer = Sequence[Tensor]
Call = Callable[[Any, int], Answer]
"""A collective in a group, called by a rank; returns the rank's result."""


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers with exact sums in every order."""
    random = torch.Generator().manual_seed(rank + 1)
    return torch.randint(1, 5, shape, generator=random).to(dtype)


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
    """Every object collective, as one number each."""
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
    """Averages with the exact values -7/3, 7/3 and 5/3 (three ranks), everywhere and of one's own piece."""

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
    """A rank's part of these averages."""
    sign = -1 if dtype in SIGNED else 1
    return torch.tensor([[sign * 4, 1, 5], [sign * 2, 2, 0], [sign * 1, 4, 0]][rank], dtype=dtype)


def averages(dtype: torch.dtype) -> Callable[[int], Answer]:
    """NCCL's averages: the sum, divided, rounded toward zero."""
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
"""Collectives that gloo lacks (at least in some versions), and the ranks' results."""


def attempted(call: Call, group: Any, rank: int, expected: Answer) -> str:
    """The error; "" without one."""
    try:
        found = call(group, rank)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if len(found) == len(expected) and all(map(torch.equal, found, expected)):
        return ""
    return f"{found} instead of {expected}"
