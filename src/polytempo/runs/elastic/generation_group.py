"""The process group of one generation of an elastic run: joined when a view comes, left when it ends.

Its members meet at the run's store, under a prefix of the generation. A member that waits there for a lost one stops
waiting when the launcher reports the loss, and not at a deadline. In the group it waits inside gloo, which notices the
end of a connection and its deadline, nothing else:

launcher: a member is lost ──▶ board ──▶ a thread of each other member ── shutdown(2) ──▶ its main thread, inside gloo

A process that is killed ends its connections; a stopped host, or a host without a cable, does not.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from polytempo.core import PeerLost, PolytempoError, TimedOut
from polytempo.device import with_backend
from polytempo.engines.join.init import hosts_of_ranks
from polytempo.engines.join.keyed_store import KeyedStore
from polytempo.engines.join.rendezvous import Rendezvous
from polytempo.interop.autoload import register
from polytempo.interop.backend.create import Options
from polytempo.membership.member import ElasticMember
from polytempo.membership.message import End, GroupView, Ready
from polytempo.runs.elastic.member_board import MemberBoard, Superseded, group_prefix
from polytempo.training.elastic.elastic_training import Stopped
from polytempo.worlds import ProcessWorld, set_current

_LOOK_S = 0.1
_GRACE_S = 0.3
"""The time that a member has to notice the break of its group without help."""
_MOST_FRUITLESS = 50
"""So many groups in a row without a step have another reason than bad luck."""

T = TypeVar("T")


@contextmanager
def joined_group(store: KeyedStore, view: GroupView, board: MemberBoard, timeout_s: float) -> Iterator[ProcessWorld]:
    """The world of `view`'s members; this process is the rank of its life.

    When `board` has the loss of a member, forming the group raises `Superseded`, and waits for others in it raise
    `PeerLost`. The process is free for another group afterwards, also after an error.
    """
    rank, size = view.members.index(board.life), len(view.members)
    register()
    before = sockets()
    connections: GroupConnections | None = None
    with store.watched(board.check, timeout_s):
        try:
            try:
                dist.init_process_group(
                    with_backend("polytempo"),
                    store=PrefixStore(group_prefix(view.generation), store),
                    rank=rank,
                    world_size=size,
                    timeout=timedelta(seconds=timeout_s),
                    pg_options=Options(while_connecting=board.check),
                )
                connections = GroupConnections(before, board.sees_break)
                world = ProcessWorld(rank, hosts_of_ranks())
            except PolytempoError:
                raise
            except (RuntimeError, OSError) as error:  # of torch and the system, if a member is lost meanwhile
                raise Superseded(f"generation {view.generation} could not be formed: {error}") from error
            world.transport.making = partial(_making, connections, board)
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
            distributed_c10d._world.group_count = 0  # part of names in the store; a failed start has counted, too


@contextmanager
def _making(connections: GroupConnections, board: MemberBoard) -> Iterator[Options]:
    """A group of some members is made, such as an island: the same things end waits for it and in it."""
    before = sockets()
    try:
        yield Options(while_connecting=board.check)
    except PolytempoError:
        raise
    except (RuntimeError, OSError) as error:
        raise Superseded(f"a group in generation {board.generation} could not be formed: {error}") from error
    finally:
        connections.add(before)


def take_part(
    rendezvous: Rendezvous,
    board: MemberBoard,
    member: ElasticMember,
    timeout_s: float,
    enter: Callable[[GroupView], object],
    train: Callable[[ProcessWorld, GroupView], T],
) -> T | None:
    """Be `member` in all groups of the run, until its end. Returns the answer of `train` in the last group.

    `enter` is called with each view before the group is formed. Errors: an error of `train`, and the loss of a peer
    if it is the last of `_MOST_FRUITLESS` in a row without a step.
    """
    board.say(Ready(board.life))
    fruitless = 0
    result: T | None = None
    while True:
        order = board.next()
        if not isinstance(order, GroupView):
            return result if isinstance(order, End) else None
        before, result, finished = member.applied, None, False
        enter(order)
        try:
            with joined_group(rendezvous.store, order, board, timeout_s) as world:
                result = train(world, order)
                finished = True
        except (PeerLost, TimedOut, Stopped, Superseded) as error:
            print(f"generation {order.generation} ends after step {member.applied}: {error}", file=sys.stderr)
            if fruitless >= _MOST_FRUITLESS:
                raise
        fruitless = 0 if member.applied > before else fruitless + 1
        board.say(member.report(leaving=board.leaving, finished=finished))


def sockets() -> dict[int, int]:
    """The sockets of this process: inode → descriptor."""
    found = {}
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


class GroupConnections:
    """The sockets that this process has opened since `before`. A thread calls `is_broken` ten times a second."""

    def __init__(self, before: dict[int, int], is_broken: Callable[[], bool]) -> None:
        self._inodes: set[int] = set()
        self._is_broken, self._left = is_broken, threading.Event()
        self._thread: threading.Thread | None = None
        self.add(before)

    def add(self, before: dict[int, int]) -> None:
        """Take care of the sockets that this process has opened since `before`, too."""
        self._inodes = self._inodes | (sockets().keys() - before.keys())
        if self._inodes and self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="polytempo-connections", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Leave the connections as they are."""
        self._left.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._left.wait(_LOOK_S):
            if self._is_broken():
                if not self._left.wait(_GRACE_S):
                    self.shut_down()
                return

    def shut_down(self) -> None:
        """End the connections: waits for them fail, as if the other members had ended them."""
        for inode, descriptor in sockets().items():
            if inode in self._inodes:
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                    same = os.fstat(connection.fileno()).st_ino == inode
                    listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)  # gloo aborts without it
                    if same and not listens and connection.family in (socket.AF_INET, socket.AF_INET6):
                        connection.shutdown(socket.SHUT_RDWR)
