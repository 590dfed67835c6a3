"""`Common`: memory of a group's first rank that all its members map; and tensors placed in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polytempo.native.group import Group

_LINE_BYTES = 64


class Common:
    """`num_bytes` of zeros that all members see. Every member makes it, with the same number.

    It stays until all members have left the group, or until all have called `release`.
    Raises MemoryError on every member when the first one has no more memory.
    """

    def __init__(self, group: Group, num_bytes: int) -> None:
        self._group, self._block = group, None
        self.offset = -1
        failure: MemoryError | None = None
        if group.rank == 0:
            try:
                self._block = group.arena.allocate(num_bytes)
                self.offset = self._block.offset
                group._blocks.append(self._block)
            except MemoryError as error:
                failure = error
        self.offset = gathered_numbers(group, [self.offset])[0][0]
        if self.offset < 0:
            raise failure or MemoryError(f"rank {group.names[0]} has no shared memory for {num_bytes} bytes")

    @property
    def address(self) -> int:
        """The address of its first byte in this process."""
        return self._group.bases[0] + self.offset

    def tensor(self, offset: int, like: Tensor) -> Tensor:
        """A tensor of the shape, dtype and strides of `like`, `offset` bytes from the beginning."""
        window, count = self._group.windows[0], like.numel()
        if not count:
            return torch.empty_like(like)
        if window is not None:
            return shaped_like(window.tensor(self.offset + offset, (count,), like.dtype), like)
        return shaped_like(self._group.arena.tensor(self.offset + offset, (count,), like.dtype), like)

    def release(self) -> None:
        """Free the memory, after a barrier: no member may read it any more."""
        self._group.barrier()
        if self._block is not None:
            self._group._blocks.remove(self._block)
            self._group.arena.free(self._block)
            self._block = None


def gathered_numbers(group: Group, numbers: Sequence[int]) -> list[list[int]]:
    """The numbers of each member, by rank. All members call it."""
    mine = torch.tensor(numbers, dtype=torch.int64)
    gathered = [torch.empty_like(mine) for _ in range(group.size)]
    group.exchange("all_gather", [mine], gathered)
    return [one.tolist() for one in gathered]


def layout(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Offsets of tensors one behind the other, each on a cache line of its own, and the bytes of all."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.numel() * tensor.element_size() // _LINE_BYTES) * _LINE_BYTES
    return offsets, end


def shaped_like(flat: Tensor, like: Tensor) -> Tensor:
    """`flat`, shape (numel,), with the shape of `like`, and its strides where they leave no gaps."""
    return flat.as_strided(like.shape, torch.empty_like(like, device="meta").stride())
