"""The process group of one generation of an elastic run: joined when a view comes, left when it ends.

Its members meet at the run's store, under a prefix of the generation. A member that waits there for another one that
is lost stops waiting as soon as the launcher says so, and not at a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from polytempo.core import PolytempoError
from polytempo.engines.join.init import hosts_of_ranks
from polytempo.interop.autoload import register
from polytempo.interop.backend.options import Options
from polytempo.membership.message import GroupView
from polytempo.runs.elastic.group_connections import GroupConnections, sockets
from polytempo.runs.elastic.member_board import MemberBoard, Superseded
from polytempo.worlds import ProcessWorld, set_current

_WAIT_S = 0.001
_MOST_WAIT_S = 0.02


class WatchedStore(Store):
    """A store whose waits end with `Superseded` where `check` raises it. Keep a reference: torch holds none."""

    def __init__(self, inner: Any, check: Callable[[], None], timeout_s: float) -> None:
        super().__init__()
        self._inner, self._check, self._timeout_s = inner, check, timeout_s
        self._written, self._used = set[str](), set[str]()

    def set(self, key: str, value: Any) -> None:
        """As any store."""
        self._written.add(key)
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        """Waits for the key."""
        self.wait([key])
        return bytes(self._inner.get(key))

    def add(self, key: str, amount: int) -> int:
        """As any store."""
        self._written.add(key)
        return int(self._inner.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """As any store."""
        return bool(self._inner.check(keys))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """As any store."""
        self._written.add(key)
        return bytes(self._inner.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        """As any store."""
        return bool(self._inner.delete_key(key))

    def num_keys(self) -> int:
        """As any store."""
        return int(self._inner.num_keys())

    def set_timeout(self, timeout: timedelta) -> None:
        """How long waits last."""
        self._timeout_s = timeout.total_seconds()

    def has_extended_api(self) -> bool:
        """Nothing beyond the above."""
        return False

    def clone(self) -> Store:
        """It holds no connection of its own."""
        return self

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all `keys` are there. Raises Superseded, or TimeoutError after the deadline."""
        self._used.update(keys)
        until = time.monotonic() + (self._timeout_s if timeout is None else timeout.total_seconds())
        wait_s = _WAIT_S
        while not self._inner.check(keys):
            self._check()
            if time.monotonic() > until:
                raise TimeoutError(f"timed out waiting for {', '.join(keys)}")
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _MOST_WAIT_S)

    def clear(self, *, of_others: bool) -> None:
        """Remove the keys that were written here; of a group that is over, also others' that were read here."""
        with suppress(RuntimeError):  # the launcher has ended, and the store with it
            for key in self._written | (self._used if of_others else set()):
                self._inner.delete_key(key)


@contextmanager
def joined_group(store: Store, view: GroupView, board: MemberBoard, timeout_s: float) -> Iterator[ProcessWorld]:
    """The world of `view`'s members, in which this process is the rank of its life.

    Where `board` says that a member is lost, forming the group raises `Superseded`, and waits for others in it raise
    `PeerLost`. However it is left, the process is free for another group afterwards.
    """
    rank, size = view.members.index(board.life), len(view.members)
    register()
    watched, before = WatchedStore(store, board.check, timeout_s), sockets()
    connections: GroupConnections | None = None
    try:
        try:
            dist.init_process_group(
                "cpu:polytempo,cuda:nccl" if torch.cuda.is_available() else "polytempo",
                store=PrefixStore(f"generation/{view.generation}", watched),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
                pg_options=None if torch.cuda.is_available() else Options(while_connecting=board.check),
            )
            connections = GroupConnections(before, board.sees_break)
            world = ProcessWorld(rank, hosts_of_ranks())
        except PolytempoError:
            raise
        except (RuntimeError, OSError) as error:  # of torch and the system, where a member is lost meanwhile
            raise Superseded(f"generation {view.generation} could not be formed: {error}") from error
        set_current(world)
        try:
            yield world
        finally:
            world.forget_groups()
    finally:
        if connections is not None:
            connections.close()
        set_current(None)
        if dist.is_initialized():
            dist.destroy_process_group()
        watched.clear(of_others=rank < 2)  # a lost member cannot
        distributed_c10d._world.group_count = 0  # part of the names in the store; what failed has counted already
