"""`Transfer`: a message between two ranks that is under way."""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol

from torch import Tensor

from polytempo.core.errors import Mismatch, PeerLost, TimedOut
from polytempo.native.call import FINE, LATE, LOST_WHY, MISMATCH, MOVED, name_of


class Opened(Protocol):
    """The group that a message is between (`native.group.Group`)."""

    rank: int
    names: list[int]
    timeout_s: float
    owner: int
    _library: Any
    _handle: Any


class Transfer:
    """A message under way. It holds its tensor until it is done."""

    __slots__ = ("__weakref__", "_end", "group", "pointer", "tensor", "what")

    def __init__(self, group: Opened, pointer: int, tensor: Tensor, what: str) -> None:
        self.group, self.pointer, self.tensor, self.what = group, pointer, tensor, what
        self._end = weakref.finalize(self, _forget, group, pointer)
        self._end.atexit = False

    def done(self) -> bool:
        """Whether it is finished, with or without an error."""
        return bool(self.group._library.pt_transfer_done(self.group._handle, self.pointer))

    @property
    def peer(self) -> int:
        """The other rank; -1 while nothing has come from anyone."""
        return int(self.group._library.pt_transfer_peer(self.pointer))

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it is finished. Errors: PeerLost, TimedOut, and Mismatch where sender and receiver disagree."""
        group, library = self.group, self.group._library
        limit_s = group.timeout_s if timeout_s is None else timeout_s
        status = library.pt_transfer_wait(group._handle, self.pointer, limit_s)
        if status == FINE:
            return
        me, peer = group.names[group.rank], group.names[self.peer] if self.peer >= 0 else None
        if status == LATE:
            raise TimedOut(me, None, self.what, limit_s)
        if status == MISMATCH:
            came = f"{library.pt_transfer_arrived_bytes(self.pointer)} bytes of "
            came += name_of(library.pt_transfer_arrived_dtype(self.pointer))
            wanted = f"{self.tensor.nbytes} bytes of {name_of(MOVED[self.tensor.dtype])}"
            raise Mismatch(f"rank {me}: {self.what} expects {wanted}, and rank {peer} sent {came}")
        raise PeerLost(me, None, self.what, peer, LOST_WHY)


def _forget(group: Opened, pointer: int) -> None:
    if os.getpid() == group.owner:  # in a forked child the lock may be held by a thread that it has not got
        group._library.pt_transfer_free(group._handle, pointer)
