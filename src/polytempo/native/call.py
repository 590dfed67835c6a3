"""Calls as ranks announce them: the numbers of the native core, their names, and errors for its statuses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Protocol

import torch

from polytempo.core.errors import Mismatch, PeerLost, PolytempoError, TimedOut

DTYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int8: 4,
    torch.uint8: 5,
    torch.int16: 6,
    torch.int32: 7,
    torch.int64: 8,
    torch.bool: 9,
}
"""The dtypes that can be reduced, by their numbers in the core."""

_ALL = sorted({found for found in vars(torch).values() if isinstance(found, torch.dtype)} - DTYPES.keys(), key=str)
MOVED = DTYPES | {dtype: number for number, dtype in enumerate(_ALL, 10)}
"""The dtypes that can be moved: all of torch's. The core compares the numbers, so ranks must run the same torch."""
NOTHING = -1
"""The dtype of a call that neither sends nor receives a tensor."""

OPS = {"sum": 0, "average": 1, "min": 2, "max": 3, "product": 4, "band": 5, "bor": 6, "bxor": 7}
KINDS = (
    "barrier",
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
    "step",
)


PLAIN, INTEGER_AVERAGE = range(2)
"""A mark for a fact that the core cannot see: a sum of integers is divided afterwards."""
_SHAPE_BITS, _DIMS_BITS, _HASHED = 56, 4, 15


@lru_cache(maxsize=4096)
def form_of(shape: Sequence[int], mark: int = PLAIN) -> int:
    """Shape and mark as one number, which all ranks compare: mark, number of dimensions, and their sizes.

    Sizes get equally many of 56 bits. A shape that does not fit is hashed.
    """
    bits = _SHAPE_BITS // max(1, len(shape))
    dims, packed = len(shape), 0
    for size in shape:
        packed = packed << bits | size
    if dims >= _HASHED or any(size >> bits for size in shape):
        dims = _HASHED
        packed = int.from_bytes(blake2b(repr(tuple(shape)).encode(), digest_size=_SHAPE_BITS // 8).digest())
    return (mark << _DIMS_BITS | dims) << _SHAPE_BITS | packed


def _shape_in(form: int) -> str:
    """The shape in words; "" where it is only the number of elements, or does not fit."""
    dims = form >> _SHAPE_BITS & (1 << _DIMS_BITS) - 1
    if dims in (0, 1, _HASHED):
        return ""
    bits = _SHAPE_BITS // dims
    sizes = [form >> bits * place & (1 << bits) - 1 for place in reversed(range(dims))]
    return f" of shape ({', '.join(map(str, sizes))})"


class NativeCall(ctypes.Structure):
    """A call that a rank announces."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("number", "count", "extra", "form")),
        *((name, ctypes.c_int32) for name in ("kind", "dtype", "op", "root")),
    )

    def __str__(self) -> str:
        kind = KINDS[self.kind]
        mark = self.form >> _SHAPE_BITS + _DIMS_BITS
        elements = f"{self.count} elements of {name_of(self.dtype)}{_shape_in(self.form)}"
        details = [elements] if kind != "barrier" else []
        if kind in ("all_reduce", "reduce", "reduce_scatter"):
            op = "average" if mark == INTEGER_AVERAGE else list(OPS)[self.op]
            details.insert(0, op + " by a tree" * self.extra)
        if kind in ("broadcast", "reduce", "gather", "scatter"):
            details.append(f"root {self.root}")
        return f"call {self.number}: {kind}({', '.join(details)})"


def name_of(code: int) -> str:
    """The name of the dtype with that number."""
    return next((str(dtype).removeprefix("torch.") for dtype, number in MOVED.items() if number == code), "no dtype")


FINE, LOST, LATE, MISMATCH, BROKEN = range(5)
"""The statuses."""

LOST_WHY = "Connection closed by peer: its process has ended, or it has left the group"
"""The reason of a lost peer, in the words of torch's own backends: scripts search for them."""


class GroupFacts(Protocol):
    """A group (`native.group.Group`), as errors describe it."""

    rank: int
    names: list[int]

    @property
    def culprit(self) -> int:
        """The rank that broke the group."""

    def missing(self) -> list[int]:
        """The ranks that have not come."""

    def expecting(self, sent: ctypes.c_int64, expected: ctypes.c_int64) -> int:
        """The rank that expects other bytes than the culprit sends, and how many; -1: none does."""

    def call_of(self, rank: int) -> NativeCall:
        """The call that a rank has announced."""


def failure(group: GroupFacts, status: int, what: str, timeout_s: float) -> PolytempoError:
    """The error for the call `what`, which ended with LOST, LATE or MISMATCH."""
    me, culprit = group.names[group.rank], group.culprit
    if status == LATE:
        missing = ", ".join(str(group.names[rank]) for rank in group.missing())
        return TimedOut(me, None, what, timeout_s, f"rank {missing} did not come")
    if status == MISMATCH:
        return Mismatch(
            f"ranks do different things at the same time: {_disagreement(group, culprit)}; all ranks of a group "
            "must make the same calls in the same order, with equal shapes and dtypes"
        )
    return PeerLost(me, None, what, group.names[culprit], LOST_WHY)


def repeated(group: GroupFacts, first: PolytempoError, what: str) -> PolytempoError:
    """The error for the call `what` in a group that broke before, with the error `first`: one of the same kind."""
    me, reason = group.names[group.rank], f"the group broke in an earlier call: {first}"
    match first:
        case Mismatch():
            return Mismatch(f"rank {me}: {what} cannot begin; {reason}")
        case TimedOut(timeout_s=timeout_s):
            return TimedOut(me, None, what, timeout_s, reason)
        case _:
            return PeerLost(me, None, what, group.names[group.culprit], reason)


def _disagreement(group: GroupFacts, culprit: int) -> str:
    """The ranks that disagree, and their calls."""
    sent, expected = ctypes.c_int64(), ctypes.c_int64()
    expecting = group.expecting(sent, expected)
    mine, me = group.call_of(group.rank), group.names[group.rank]
    if expecting < 0:
        return f"rank {me} is in {mine}, rank {group.names[culprit]} in {group.call_of(culprit)}"
    to = "itself and" if expecting == culprit else f"rank {group.names[expecting]}, which"
    return f"in {mine}, rank {group.names[culprit]} sends {sent.value} bytes to {to} expects {expected.value}"
