"""`Arenas`: memory that all processes of a run on one host share, an arena for each node.

launcher   makes the arenas, then forks          arena 0 │ arena 1 │ arena 2 │ …   address space; pages once touched
node n     cuts its tensors from arena n         `empty(n, …)`
any node   reads and writes them in place        message: (arena, offset, shape, dtype) ─▶ `resolve`

The arenas have no name in any file system, and are gone with the last process that has them.
"""

from __future__ import annotations

import fcntl
import os
import threading
import weakref
from bisect import bisect_right

import torch
from torch import Tensor

from polytempo.native.arena import Arena


class Arenas:
    """`num_arenas` arenas of `num_bytes` of address space each. Make them before forking the processes that share them.

    Only one process at a time cuts tensors from an arena, the first that asks for one. A node that is started again
    gets an arena of its own, for others may still read the old one: let `num_arenas` be larger than the nodes are many.
    """

    def __init__(self, num_arenas: int, num_bytes: int) -> None:
        if num_arenas < 1 or num_bytes < 1:
            raise ValueError(f"needs at least one arena of at least one byte, got {num_arenas} of {num_bytes}")
        self._arenas = [_Inherited(num_bytes) for _ in range(num_arenas)]
        by_base = sorted(range(num_arenas), key=lambda i: self._arenas[i].base)
        self._numbers = by_base
        self._bases = [self._arenas[i].base for i in by_base]

    def close(self) -> None:
        """Close the arenas' files in this process. Tensors over their memory keep it; nothing more is found in it."""
        for arena in self._arenas:
            arena.close()
        self._arenas, self._bases, self._numbers = [], [], []

    def __len__(self) -> int:
        return len(self._arenas)

    def empty(self, arena: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A flat tensor of zeros in `arena`, which belongs to this process from now on.

        The memory is free again when the last tensor over it in *this* process is gone.
        Errors: RuntimeError if a living process has the arena; MemoryError if the arena or the machine is full.
        """
        return self._known(arena).adopted().empty(numel, dtype)

    def reference(self, tensor: Tensor) -> tuple[int, int] | None:
        """(arena, offset) of a contiguous tensor in an arena; None for any other."""
        begin = tensor.data_ptr()
        place = bisect_right(self._bases, begin) - 1
        if place < 0 or not tensor.numel():
            return None
        number = self._numbers[place]
        offset = begin - self._bases[place]
        end = offset + tensor.numel() * tensor.element_size()
        return (number, offset) if end <= self._arenas[number].num_bytes else None

    def resolve(self, arena: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor there. Errors: ValueError if it would not be in the arena, or not aligned for `dtype`."""
        within = self._known(arena)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if offset < 0 or offset % dtype.itemsize or offset + num_bytes > within.num_bytes:
            raise ValueError(
                f"{num_bytes} bytes of {dtype} at {offset} are not in arena {arena} of {within.num_bytes} bytes"
            )
        return within.tensor(offset, shape, dtype)

    def _known(self, arena: int) -> _Inherited:
        if not self._arenas:
            raise ValueError("the arenas are closed")
        if not 0 <= arena < len(self._arenas):
            raise ValueError(f"there are arenas 0 to {len(self._arenas) - 1}, not {arena}")
        return self._arenas[arena]


class _Inherited(Arena):
    """An arena that a forked child may make its own."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self._owner = -1
        self.close = weakref.finalize(self, os.close, self._descriptor)
        """Close the file; mapped memory stays. Otherwise that happens with the last reference."""

    def adopted(self) -> _Inherited:
        """This arena, owned by this process. RuntimeError where a living process owns it."""
        if self._owner != os.getpid():
            try:  # a record lock: children do not inherit it, and the kernel takes it from the dead
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:
                raise RuntimeError("a living process has this arena; give each node an arena of its own") from error
            self._owner, self._lock = os.getpid(), threading.Lock()
        return self
