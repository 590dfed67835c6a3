"""`ElasticPlace`: this process's place in an elastic run of `polytempo horovodrun`, over all groups that it is in.

join ── Ready ──▶ launcher ── view ──▶ the group of this generation ──▶ a session of Horovod
close, join ── Report (which commits it has) ──▶ launcher ──▶ the next view, in the same process
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

from polytempo.core import PolytempoError
from polytempo.engines.join.rendezvous import Rendezvous
from polytempo.horovod.runtime.operation import HorovodInternalError
from polytempo.membership.member import ElasticMember
from polytempo.membership.message import GroupView, Ready
from polytempo.runs.elastic.generation_group import GroupConnections, joined_group, sockets
from polytempo.runs.elastic.member_board import MemberBoard
from polytempo.worlds import ProcessWorld

MEETING, LIFE = "POLYTEMPO_HOROVOD_MEETING", "POLYTEMPO_HOROVOD_LIFE"
"""The variables by which the launcher tells a process where the run meets, and its number in it."""
_MOST_TRIES = 100
"""So many groups in a row that cannot be formed have another reason than lost processes."""

T = TypeVar("T")


class ElasticPlace:
    """`keep` is called where a commit is to be finished that another process has made: it saves the state as it is."""

    def __init__(self, url: str, life: int) -> None:
        self._rendezvous = Rendezvous.joined(url)
        self._board, self._member = MemberBoard(self._rendezvous, life), ElasticMember(life)
        self._stack = ExitStack()
        self._view: GroupView | None = None
        self.keep: Callable[[], None] = lambda: None

    def join(self, timeout_s: float, make: Callable[[ProcessWorld, Callable[[], None]], T]) -> T:
        """What `make` makes of the next group's world, and of a function that raises where the group is broken.

        Groups that break before it has made it are left, and the next one is waited for, at most `_MOST_TRIES` of them.

        Raises SystemExit(0) where this process is no longer needed. Errors: PolytempoError after the last of them.
        """
        tries = 0
        while True:
            self.close()
            first = self._view is None
            self._board.say(Ready(self._board.life) if first else self._member.report(leaving=self._board.leaving))
            order = self._board.next()
            if not isinstance(order, GroupView):
                print("polytempo: this process is no longer needed", file=sys.stderr)
                raise SystemExit(0)
            if self._member.enter(order) == "finish":
                self.keep()
                self._member.stepped()
            self._view = order
            try:
                before = sockets()
                joined = joined_group(self._rendezvous.store, order, self._board, timeout_s)
                world = self._stack.enter_context(joined)
                made = make(world, self._board.check)
                self._stack.callback(GroupConnections(before, self._board.sees_break).close)
                return made
            except (PolytempoError, HorovodInternalError, RuntimeError, OSError) as error:
                print(f"polytempo: group {order.generation} could not be formed: {error}", file=sys.stderr)
                tries += 1
                if tries >= _MOST_TRIES:
                    raise PolytempoError(f"{tries} groups in a row could not be formed, the last: {error}") from error

    def close(self) -> None:
        """Leave the group. The launcher is not told: either this process ends, or it joins again."""
        self._stack.close()

    # ------------------------------------------------------------------ commits

    def wishes(self) -> tuple[bool, bool]:
        """Whether the group is to stop for others to join, and whether this process is to leave."""
        wishes = self._board.wishes()
        return wishes.stop, wishes.leave

    def begins_commit(self) -> None:
        """This process holds what is to be committed."""
        self._member.exchanged()

    def drops_commit(self) -> None:
        """What this process holds is not yet all that is to be committed."""
        self._member.dropped()

    def has_committed(self) -> None:
        """All processes hold it, and this one has saved it."""
        self._member.stepped()

    def has_synchronized(self) -> None:
        """The state of the group's first process is here."""
        assert self._view is not None
        if not self._member.stateful:
            self._member.taken_over(self._view.step)
