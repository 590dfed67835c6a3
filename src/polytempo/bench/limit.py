"""The limit: a C program that does nothing but the memory traffic of an all-reduce (`native/limit.cpp`)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polytempo.bench.machine import cores
from polytempo.core.errors import TimedOut
from polytempo.native.arena import ArenaAddress, own_arena, window
from polytempo.native.library import load, why_not

BLOCK_COUNT = 1 << 18
"""Elements of a slot of the staging: 1 MiB. Smaller ones cost barriers, larger ones leave the caches."""
MAX_RANKS = 64
_SPINS = 5000
_TIMEOUT_S = 60.0
_APART_BYTES = 68 << 10
"""Arenas begin at distances of whole GiB. Some processors look into their first cache by a hash that
such addresses share, and are ten times as slow then, so each rank's data begin somewhat later than those before."""


class _Place(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("rank", "size", "spins", "block_count")),
        ("lines", ctypes.c_void_p),
        *((name, ctypes.POINTER(ctypes.c_void_p)) for name in ("data", "staging")),
        *((name, ctypes.c_int64) for name in ("arrivals", "blocks")),
        ("timeout_s", ctypes.c_double),
    )


_i32, _i64, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "pt_limit_lines_bytes": (_i64, _i32),
    "pt_limit_barrier": (_i32, _pointer, _pointer, _i64),
    "pt_limit_direct": (_i32, _pointer, _i64, _pointer, _i64),
    "pt_limit_staged": (_i32, _pointer, _pointer, _i64, _pointer, _i64),
}


class Limit:
    """One rank's part. All ranks make it, and call it, together; `group` only helps them to find each other.

    `data`, shape (count,), f32, is this rank's tensor that the others can see. Errors: ValueError without the native
    core or with more than 64 ranks; TimedOut where a rank does not come within a minute.
    """

    def __init__(self, group: dist.ProcessGroup, count: int) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._library = _declared(self.size)
        arena = own_arena()
        apart = self.rank * _APART_BYTES // 4
        self.data = arena.empty(apart + count)[apart:]
        self._staging = arena.empty(apart + 2 * BLOCK_COUNT)[apart:]
        self._lines = arena.empty(self._library.pt_limit_lines_bytes(self.size), torch.uint8)
        mine = [arena.offset_of(tensor) for tensor in (self.data, self._staging, self._lines)]
        places = _told(group, [*arena.address, *mine])
        self._windows = [None if r == self.rank else window(ArenaAddress(*place[:4])) for r, place in enumerate(places)]
        bases = [arena.base if seen is None else seen.base for seen in self._windows]
        data, staging, lines = (
            [base + place[column] for base, place in zip(bases, places, strict=True)] for column in (4, 5, 6)
        )
        spins = _SPINS if self.size <= cores() else 0  # where ranks outnumber cores, the other one needs this core
        pointers = ctypes.c_void_p * self.size
        self._place = _Place(
            *(self.rank, self.size, spins, BLOCK_COUNT, lines[0]), pointers(*data), pointers(*staging), 0, 0, _TIMEOUT_S
        )

    def barrier(self, calls: int) -> list[float]:
        """Seconds of each of so many barriers."""
        return self._timed(calls, self._library.pt_limit_barrier)

    def direct(self, calls: int) -> list[float]:
        """Seconds of each of so many all-reduces of all ranks' `data`, in place."""
        return self._timed(calls, self._library.pt_limit_direct, self.data.numel())

    def staged(self, tensor: Tensor) -> Callable[[int], list[float]]:
        """The same for an f32 tensor that the others cannot see."""
        return lambda calls: self._timed(calls, self._library.pt_limit_staged, tensor.data_ptr(), tensor.numel())

    def _timed(self, calls: int, function: Callable[..., int], *arguments: int) -> list[float]:
        seconds = (ctypes.c_double * calls)()
        if function(ctypes.byref(self._place), *arguments, seconds, calls):
            raise TimedOut(self.rank, None, "the limit", _TIMEOUT_S)
        return list(seconds)


def missing() -> str | None:
    """The reason for a missing limit; None if there is one."""
    library = load()
    if library is None:
        return why_not()
    return None if hasattr(library, "pt_limit_direct") else "the native core was built without limit.cpp"


def _declared(size: int) -> Any:
    reason = missing()
    if reason:
        raise ValueError(f"the limit needs the native core: {reason}")
    if size > MAX_RANKS:
        raise ValueError(f"the limit is for at most {MAX_RANKS} ranks, and these are {size}")
    library = load()
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _told(group: dist.ProcessGroup, mine: list[Any]) -> list[list[int]]:
    """All ranks' numbers, in the order of ranks."""
    numbers = torch.tensor(mine, dtype=torch.int64)
    everyone = [torch.empty_like(numbers) for _ in range(group.size())]
    dist.all_gather(everyone, numbers, group=group)
    return [each.tolist() for each in everyone]
