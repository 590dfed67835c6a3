"""`Mapping`: a shared file in this process's address space, at an address of our choice.

Python's `mmap` lets the system choose. There are two reasons to choose: large pages need addresses in whole 2 MiB, and
some processors look up addresses in the first-level cache by a hash, so arenas that begin at addresses of equal hash
evict each other's lines wherever their tensors are read side by side (ten times as slow, where it was measured).
"""

from __future__ import annotations

import ctypes
import itertools
import os
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

from polytempo.native.address_space import address_space_advice

_LARGE_PAGE_BYTES = 2 << 20
_NUM_PLACES = 64
"""Mappings begin at different multiples of 2 MiB, modulo this many."""
_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MADV_REMOVE, _MADV_HUGEPAGE = 9, 14

_places = itertools.count()


class Mapping:
    """`num_bytes` of the file `descriptor`, readable and writable. Unmapped with the last reference."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        slack = _LARGE_PAGE_BYTES * (_NUM_PLACES + 1)
        reserved = _map(None, num_bytes + slack, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        place = next(_places) % _NUM_PLACES
        period = _LARGE_PAGE_BYTES * _NUM_PLACES
        self.base = reserved + (place * _LARGE_PAGE_BYTES - reserved) % period
        self.num_bytes = num_bytes
        try:
            _map(self.base, num_bytes, _PROT_READ | _PROT_WRITE, _MAP_SHARED | _MAP_FIXED, descriptor)
        except OSError:
            _unmap(reserved, num_bytes + slack)
            raise
        weakref.finalize(self, _unmap, reserved, num_bytes + slack).atexit = False

    def prefer_large_pages(self) -> None:
        """Ask for pages of 2 MiB. Systems that have none for shared memory ignore it."""
        _libc().madvise(self.base, self.num_bytes, _MADV_HUGEPAGE)

    def give_back(self, offset: int, num_bytes: int) -> bool:
        """Free the memory of whole pages; they read as zeros from now on. False where the system cannot."""
        return int(_libc().madvise(self.base + offset, num_bytes, _MADV_REMOVE)) == 0

    def array(self, offset: int, num_bytes: int, released: Callable[[], None] | None = None) -> Any:
        """The bytes as an object that torch can build on. It keeps the mapping alive. `released`: called at its end."""
        array = (ctypes.c_char * num_bytes).from_address(self.base + offset)
        weakref.finalize(array, _end, self, released).atexit = False
        return array


def _end(mapping: Mapping, released: Callable[[], None] | None) -> None:
    """The arguments of a finalizer, so also the mapping, live as long as the object that it watches."""
    if released is not None:
        released()


def _map(address: int | None, num_bytes: int, protection: int, flags: int, descriptor: int) -> int:
    found = _libc().mmap(address, num_bytes, protection, flags, descriptor, 0)
    if found is None or found == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        said = f"cannot map {num_bytes} bytes of shared memory: {os.strerror(code)}"
        advice = address_space_advice(said)
        raise OSError(code, f"{said}. {advice}" if advice else said)
    return int(found)


def _unmap(address: int, num_bytes: int) -> None:
    _libc().munmap(address, num_bytes)


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype, libc.mmap.argtypes = pointer, (pointer, size, number, number, number, ctypes.c_long)
    libc.munmap.restype, libc.munmap.argtypes = number, (pointer, size)
    libc.madvise.restype, libc.madvise.argtypes = number, (pointer, size, number)
    return libc
