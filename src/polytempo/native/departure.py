"""Departure of a process from its groups: at their end, at its own end, and in forked children, which do not belong.

Memory that other members may still read is freed later, by `sweep`.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from polytempo.native.arena import Arena, Block, Window


class JoinedGroup(Protocol):
    """A group (`native.group.Group`) with this process as a member."""

    rank: int
    names: list[int]
    _library: Any

    def leave(self) -> None:
        """Leave the group."""


class Remains(NamedTuple):
    """The resources of a group that this process has left: other members may still read its memory."""

    library: Any
    handle: int
    arena: Arena
    blocks: list[Block]
    windows: list[Window | None]
    """The control block is read until all others have left, so it has to stay mapped."""


class _Forked:
    """Replaces the native core in a forked child, which must not act as the rank of its parent."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            f"this is a forked child of rank {self._rank}: it is not a member of the group; use the group in the "
            "process that made it, or start workers by spawn"
        )


_leaving: deque[Remains] = deque()
_present: weakref.WeakSet[JoinedGroup] = weakref.WeakSet()


def add(group: JoinedGroup) -> None:
    """`group` is left when this process ends, and cut off in its forked children."""
    _present.add(group)


def _cut_off() -> None:
    """Take a forked child out of its parent's groups; it frees none of their memory."""
    _leaving.clear()
    for group in list(_present):
        group._library = _Forked(group.names[group.rank])


os.register_at_fork(after_in_child=_cut_off)


@atexit.register
def _leave_all() -> None:
    """Leave all groups at the end of the process; nothing is freed, since threads may still use it."""
    for group in list(_present):
        group.leave()


def close(remains: Remains, owner: int) -> None:
    """Leave the group; free the memory as soon as all others have left, too."""
    if os.getpid() != owner:
        return
    remains.library.pt_group_leave(remains.handle)
    _leaving.append(remains)
    sweep()


def sweep() -> None:
    """Free the memory of groups that all members have left.

    Each entry is taken out before it is examined: another thread, or the garbage collector, may come here meanwhile.
    """
    for _ in range(len(_leaving)):
        try:
            left = _leaving.popleft()
        except IndexError:
            return
        if not left.library.pt_group_empty(left.handle):
            _leaving.append(left)
            continue
        left.library.pt_group_close(left.handle)
        free_all(left.arena, left.blocks)


def allocate_all(arena: Arena, sizes: Sequence[int]) -> list[Block]:
    """Blocks of these sizes, all or none."""
    blocks: list[Block] = []
    try:
        for num_bytes in sizes:
            blocks.append(arena.allocate(num_bytes))
    except MemoryError:
        free_all(arena, blocks)
        raise
    return blocks


def free_all(arena: Arena, blocks: Sequence[Block]) -> None:
    """Free this process's blocks."""
    for block in blocks:
        arena.free(block)
