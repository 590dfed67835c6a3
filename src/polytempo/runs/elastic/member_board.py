"""The board of an elastic run: messages that its launcher and its members leave for each other at a `Rendezvous`.

member of life L    up/L/0, up/L/1, …   ──▶ launcher          each a message of `membership.message`, or a row of
launcher            down/L/0, down/L/1, … ──▶ member          metrics, as JSON; read once, in order, and not kept
"""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec

from polytempo.core import PolytempoError
from polytempo.engines.join.rendezvous import Rendezvous
from polytempo.membership.message import Dismiss, End, GroupView, Interrupt, Leave, MembershipMessage, Ready, Report
from polytempo.training.elastic.commit_point import Wishes

_LOOK_S = 0.02
"""A member looks for news at this interval while it trains."""
_WAIT_S = 0.005
"""The same while it waits for a view."""


class Row(MembershipMessage, frozen=True):
    """A row of metrics of the view's first member."""

    life: int
    row: dict[str, Any]


class Formed(MembershipMessage, frozen=True):
    """The first member of a view has applied a step in it: the run goes on."""

    life: int
    generation: int


class SaveAndEnd(MembershipMessage, frozen=True):
    """The run has to leave: its members save the same step, and end."""


Said = Ready | Report | Row | Formed
Told = GroupView | Interrupt | Leave | Dismiss | End | SaveAndEnd


def group_prefix(generation: int) -> str:
    """The prefix of the keys of a generation's group."""
    return f"generation/{generation}"


class Superseded(PolytempoError):
    """The group that this member is in, or forms, has no future: others are lost, or want to join."""


class LauncherBoard:
    """The launcher's side."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._written: dict[int, int] = {}
        self._read: dict[int, int] = {}

    def tell(self, life: int, order: Told) -> None:
        """Leave a message for a member."""
        number = self._written.get(life, 0)
        self._rendezvous.set(f"down/{life}/{number}", msgspec.json.encode(order).decode())
        self._written[life] = number + 1

    def heard(self, life: int) -> list[Said]:
        """The messages of a process since the last look."""
        found: list[Said] = []
        while (text := self._rendezvous.take(f"up/{life}/{self._read.get(life, 0)}")) is not None:
            self._read[life] = self._read.get(life, 0) + 1
            found.append(msgspec.json.decode(text, type=Said))
        return found

    def forget(self, life: int) -> None:
        """Remove messages from and to a process that has ended."""
        self.heard(life)
        unread = self._written.pop(life, 0) - 1
        while unread >= 0 and self._rendezvous.take(f"down/{life}/{unread}") is not None:
            unread -= 1
        self._read.pop(life, None)

    def forget_group(self, generation: int) -> None:
        """Remove the keys of a group that all its members have left."""
        self._rendezvous.clear(f"{group_prefix(generation)}/")


class MemberBoard:
    """The side of one member, which looks for news without waiting while it trains."""

    def __init__(self, rendezvous: Rendezvous, life: int) -> None:
        self.life = life
        self._rendezvous = rendezvous
        self._written = self._read = 0
        self._looked_s = 0.0
        self._orders: list[GroupView | Dismiss | End] = []
        self._interrupted = self._broken = 0
        self._looking = threading.Lock()
        self._saves = False
        self.leaving = False
        """True if this member has to leave: a signal sets it, too."""
        self.generation = 0
        """The generation of the last view."""

    def say(self, message: Said) -> None:
        """Leave a message for the launcher."""
        self._rendezvous.set(f"up/{self.life}/{self._written}", msgspec.json.encode(message).decode())
        self._written += 1

    def leave(self, *_: Any) -> None:
        """Handle SIGTERM: leave at the next border of steps."""
        self.leaving = True

    def wishes(self) -> Wishes:
        """The wishes of this member, from the launcher's messages and from signals."""
        if time.monotonic() - self._looked_s >= _LOOK_S:
            self.look()
        return Wishes(stop=self.superseded, leave=self.leaving, save=self._saves, broken=self.is_broken)

    @property
    def superseded(self) -> bool:
        """True if the present generation has to end, as far as this member has looked."""
        return self._interrupted >= self.generation or bool(self._orders)

    @property
    def is_broken(self) -> bool:
        """True if the present generation has lost a member: it is useless to wait for all."""
        return self._broken >= self.generation or bool(self._orders)

    def sees_break(self) -> bool:
        """Look for news, and return `is_broken`."""
        self.look()
        return self.is_broken

    def check(self) -> None:
        """Look for news, and raise `Superseded` if the present generation has lost a member."""
        self.look()
        if self.is_broken:
            raise Superseded(f"generation {self.generation} has lost a member")

    def next(self) -> GroupView | Dismiss | End:
        """Wait for the next view, or the end. The launcher's end ends the waiting, and this process."""
        while not self._orders:
            time.sleep(_WAIT_S)
            self.look()
        order = self._orders.pop(0)
        if isinstance(order, GroupView):
            self.generation = order.generation
        return order

    def look(self) -> None:
        """Read new messages. Any thread may."""
        with self._looking:
            self._looked_s = time.monotonic()
            while (text := self._rendezvous.take(f"down/{self.life}/{self._read}")) is not None:
                self._read += 1
                self._take(msgspec.json.decode(text, type=Told))

    def _take(self, order: Told) -> None:
        if isinstance(order, Interrupt):
            self._interrupted = max(self._interrupted, order.generation)
            self._broken = max(self._broken, order.generation * order.broken)
        elif isinstance(order, Leave):
            self.leaving = True
        elif isinstance(order, SaveAndEnd):
            self._saves = True
        else:
            self._orders.append(order)
