"""Collectives that a world performs itself: their answers, and the closed forms of their cost.

All-reduce, all-gather and reduce-scatter are counted and priced as rings, as gloo and NCCL perform large ones; a
broadcast as a binomial tree; an all-to-all by the bytes that its busiest member sends to others, or gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polytempo.collectives import ring_price
from polytempo.core import Mismatch
from polytempo.core.op import AllGather, AllReduce, AllToAll, Barrier, Broadcast, Collective, ReduceScatter


def members_answers(ops: Sequence[Collective[Any]]) -> list[Any]:
    """Each member's answer, from all members' operations in the members' order. Sums add in that order."""
    match ops[0]:
        case AllReduce(buffer) | AllGather(buffer) | ReduceScatter(buffer) if buffer.is_meta:
            return empty_answers(ops, len(ops))
        case AllReduce():
            buffers = [op.buffer for op in ops if isinstance(op, AllReduce)]
            total = _sum(buffers)
            return [buffer.copy_(total) for buffer in buffers]  # which their owners have given away
        case ReduceScatter():
            total = _sum([op.buffer for op in ops if isinstance(op, ReduceScatter)])
            return [piece.clone() for piece in total.chunk(len(ops))]
        case AllGather(_, read_only):
            buffers = [op.buffer.clone() for op in ops if isinstance(op, AllGather)]
            return [list(buffers) if read_only else [buffer.clone() for buffer in buffers] for _ in ops]
        case AllToAll():
            return [list(each) for each in zip(*_dealt(ops), strict=True)]
        case Broadcast(_, source):
            given = next(op for op, member in zip(ops, ops[0].members, strict=True) if member == source)
            assert isinstance(given, Broadcast)
            return [given.buffer.clone() for _ in ops]
        case Barrier():
            return [None for _ in ops]
    raise TypeError(f"{ops[0]!r} is not a collective of a world")


def empty_answers(ops: Sequence[Collective[Any]], num_ranks: int) -> list[Any]:
    """The answers of some members, from their own operations: tensors without values, as of `num_ranks` like theirs."""
    match ops[0]:
        case AllReduce() | Broadcast():
            return [op.buffer for op in ops if isinstance(op, AllReduce | Broadcast)]
        case ReduceScatter():
            return [op.buffer[: len(op.buffer) // num_ranks] for op in ops if isinstance(op, ReduceScatter)]
        case AllGather():
            return [[op.buffer] * num_ranks for op in ops if isinstance(op, AllGather)]
        case AllToAll():
            return [list(op.likes) for op in ops if isinstance(op, AllToAll)]
    return [None for _ in ops]


def member_bytes(op: Collective[Any], rank: int) -> int:
    """Bytes that world rank `rank` sends for the operation."""
    num_ranks = len(op.members)
    match op:
        case AllReduce(buffer):
            return round(ring_price(num_ranks, num_bytes(buffer), 0.0, 1.0).busiest_bytes)
        case ReduceScatter(buffer):
            return num_bytes(buffer) * (num_ranks - 1) // num_ranks
        case AllGather(buffer):
            return num_bytes(buffer) * (num_ranks - 1)
        case AllToAll(pieces, _):
            return sum(num_bytes(p) for p, to in zip(pieces, op.members, strict=True) if to != rank)
        case Broadcast(buffer, source):
            distance_from_source = (op.members.index(rank) - op.members.index(source)) % num_ranks
            return num_children(distance_from_source, num_ranks) * num_bytes(buffer)
        case _:
            return 0


def num_rounds(op: Collective[Any]) -> int:
    """Messages that follow each other in the closed form of `members_seconds`."""
    num_ranks = len(op.members)
    match op:
        case AllReduce():
            return 2 * (num_ranks - 1)
        case ReduceScatter() | AllGather() | AllToAll():
            return num_ranks - 1
        case Broadcast():
            return (num_ranks - 1).bit_length()
        case _:
            return 2 * (num_ranks - 1).bit_length()


def message_bytes(op: Collective[Any]) -> int:
    """Bytes of a rank's contribution: its buffer, or its largest piece."""
    match op:
        case AllToAll(pieces, _):
            return max(map(num_bytes, pieces))
        case AllReduce(buffer) | ReduceScatter(buffer) | AllGather(buffer) | Broadcast(buffer, _):
            return num_bytes(buffer)
        case _:
            return 0


def members_bytes(ops: Sequence[Collective[Any]]) -> list[int]:
    """`member_bytes` of all members, from their operations in their order."""
    first, members = ops[0], ops[0].members
    if isinstance(first, Broadcast):
        num_ranks, root = len(ops), members.index(first.source)
        return [num_children((i - root) % num_ranks, num_ranks) * num_bytes(first.buffer) for i in range(num_ranks)]
    if isinstance(first, AllToAll):
        return [member_bytes(op, rank) for op, rank in zip(ops, members, strict=True)]
    return [member_bytes(first, members[0])] * len(ops)


def members_seconds(
    ops: Sequence[Collective[Any]], latency_s: float, bytes_per_s: float, positions: Sequence[int] | None = None
) -> float:
    """Seconds from the last member's arrival to the end, from all members' operations in the members' order.

    Or from the operations of the members at some `positions` alone, where all do alike (`worlds.virtual.symmetry`).
    """
    num_ranks = len(ops[0].members)
    rounds = (num_ranks - 1).bit_length()
    match ops[0]:
        case AllReduce(buffer):
            return ring_price(num_ranks, num_bytes(buffer), latency_s, bytes_per_s).seconds
        case ReduceScatter(buffer):
            return (num_ranks - 1) * (latency_s + num_bytes(buffer) / num_ranks / bytes_per_s)
        case AllGather(buffer):
            return (num_ranks - 1) * (latency_s + num_bytes(buffer) / bytes_per_s)
        case AllToAll():
            dealt = zip(positions or range(num_ranks), ops, strict=True)
            busiest_bytes = max(_dealt_bytes(op, i) for i, op in dealt if isinstance(op, AllToAll))
            return (num_ranks - 1) * latency_s + busiest_bytes / bytes_per_s
        case Broadcast(buffer, _):
            return rounds * (latency_s + num_bytes(buffer) / bytes_per_s)
        case _:
            return 2 * rounds * latency_s


def num_children(position: int, num_ranks: int) -> int:
    """The positions of a binomial tree that `position` hands the buffer on to, in number; the root is 0."""
    lowest_bit = position & -position or 1 << (num_ranks - 1).bit_length()
    return sum(position + (1 << k) < num_ranks for k in range(lowest_bit.bit_length() - 1))


def num_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's values."""
    return tensor.numel() * tensor.element_size()


def _dealt(ops: Sequence[Collective[Any]]) -> list[list[Tensor]]:
    """A row for each sender. Raises Mismatch where a receiver expects another length."""
    calls = [op for op in ops if isinstance(op, AllToAll)]
    for i, sender in enumerate(calls):
        for j, receiver in enumerate(calls):
            sent, expected = sender.pieces[j].numel(), receiver.likes[i].numel()
            if sent != expected:
                a, b = sender.members[i], sender.members[j]
                raise Mismatch(f"all_to_all: rank {a} sends {sent} elements to rank {b}, which expects {expected}")
    return [[piece.clone() for piece in call.pieces] for call in calls]


def _dealt_bytes(op: AllToAll, position: int) -> int:
    """The larger of the bytes that the member at `position` sends to and gets from others: links are duplex."""
    sent, got = (
        sum(num_bytes(piece) for other, piece in enumerate(pieces) if other != position)
        for pieces in (op.pieces, op.likes)
    )
    return max(sent, got)


def _sum(buffers: list[Tensor]) -> Tensor:
    """16-bit numbers are added in float32, and the sum is rounded once, as the native core does."""
    first = buffers[0]
    total = first.float() if first.dtype in (torch.bfloat16, torch.float16) else first.clone()
    for buffer in buffers[1:]:
        total.add_(buffer)
    return total.to(first.dtype)
