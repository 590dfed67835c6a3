"""A snapshot of a run with a parameter server that loses its launcher, and with it the coordinator.

launcher   keeps its part of snapshot `number` up to date           the number is above all that it orders
           is lost
hosts      see it within seconds, and send every copy of a shard `SAVE_AND_LEAVE`
copies     workers push their present gradients; no batch is dealt, so the shards come to rest, all at one step
           the first copy of each shard saves under `number`; the others leave once that is done
           then all processes of the host end, and `resume` goes on from snapshot `number`

A shard applies nothing after it has begun to save, so it holds every push that it has acknowledged. If a first copy is
gone as well, the next copy saves: acknowledged pushes are in all copies.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from typing import Final, Protocol

from polytempo.core.system.url_path import Place
from polytempo.server.loop import Machine
from polytempo.server.message import Message, Outbox
from polytempo.server.shard.node import Node
from polytempo.server.snapshots.snapshot import begun, complete_part

SAVE_AND_LEAVE: Final = signal.SIGUSR2
"""The signal of a host's agent to copies of shards when the launcher is lost."""
_REST_S = 0.5
"""A shard that has applied nothing for so long is at rest."""
_LONGEST_S = 3.0
"""A first copy saves after this time in any case, the next copy after twice this time, and so on."""
_LOOK_S = 0.05
_STOOD_STILL_S, _DOUBT_S = 2.0, 60.0
"""A launcher that has not looked for so long may have been stopped; if it was lost, its run ends within that time."""
_SPAN = 1_000_000


class Saves(Protocol):
    """Keeps the launcher's parts of snapshots, as `SnapshotSaves` does."""

    def write(self, number: int, now_s: float) -> object:
        """Write the part of snapshot `number`."""

    def remove(self, number: int) -> None:
        """Remove it."""

    def discard(self, number: int) -> None:
        """Remove the shards' parts of it."""


def number_after(last: int) -> int:
    """The number of this snapshot for a run that goes on from snapshot `last` (0: from none)."""
    return (last // _SPAN + 1) * _SPAN


class LauncherPart:
    """Keeps the launcher's part of snapshot `number` on the disk, at most `every_s` old.

    Parts of shards with that number are removed as long as this process lives: a host that was cut off has taken it
    for lost, and the run has gone on without that host. They stay for a while after this process has stood still,
    because then the others have lost it.
    """

    def __init__(self, saves: Saves, number: int, every_s: float = 1.0) -> None:
        self.number, self._saves, self._every_s = number, saves, every_s
        self._next_s = self._removes_from_s = -math.inf

    def look(self, now_s: float) -> None:
        """Write the part if the interval is over."""
        if now_s < self._next_s:
            return
        if self._next_s > -math.inf and now_s - self._next_s > _STOOD_STILL_S:
            self._removes_from_s = now_s + _DOUBT_S
        self._next_s = now_s + self._every_s
        if now_s >= self._removes_from_s:
            self._saves.discard(self.number)
        self._saves.write(self.number, now_s)

    def remove(self) -> None:
        """Remove all parts: the run has come to its end."""
        self._saves.discard(self.number)
        self._saves.remove(self.number)


class LeavingCopy:
    """The machine of a copy of a shard, `machine` around `node`, that can be ordered to save and leave.

    `save()` writes snapshot `number` of the shard to `folder`.
    """

    def __init__(self, machine: Machine, node: Node, folder: Place, number: int, save: Callable[[], None]) -> None:
        self._machine, self._node, self._folder, self._number, self._save = machine, node, folder, number, save
        self._ordered = self._left = False
        self._since_s = self._rest_since_s = math.inf
        self._look_s = 0.0
        self._index = -1
        """The entries that had been applied at the last look."""

    def order(self, *_: object) -> None:
        """Save and leave from now on. It is a handler of signals, so it may run at any place."""
        self._ordered = True

    @property
    def finished(self) -> bool:
        """True if the machine has finished."""
        return self._left or self._machine.finished

    def receive(self, now_s: float, source: int, message: Message) -> Outbox:
        """The machine's answer."""
        return self._machine.receive(now_s, source, message)

    def tick(self, now_s: float) -> Outbox:
        """Look if it is time to save, and let the machine tick."""
        if self._ordered and not self.finished:
            self._look(now_s)
        return [] if self.finished else self._machine.tick(now_s)

    def wait_s(self, now_s: float) -> float:
        """The machine's wait; after the order, at most until the next look."""
        if not self._ordered:
            return self._machine.wait_s(now_s)
        due_s = 0.0 if self._since_s == math.inf else self._look_s - now_s
        return max(0.0, min(self._machine.wait_s(now_s), due_s))

    def flops(self, message: Message) -> float:
        """The machine's flops."""
        return self._machine.flops(message)

    def _look(self, now_s: float) -> None:
        node = self._node
        self._look_s = now_s + _LOOK_S
        if self._since_s == math.inf:
            self._since_s = now_s
        if node.index != self._index:
            self._index, self._rest_since_s = node.index, now_s
        if node.blank or node.node not in node.chain:
            self._left = True
            return
        place = node.chain.index(node.node)
        at_rest = place == 0 and now_s - self._rest_since_s >= _REST_S
        if place and begun(self._folder, self._number, node.shard.number):
            self._left = complete_part(self._folder, self._number, node.shard.number)
        elif at_rest or now_s - self._since_s >= (1 + place) * _LONGEST_S:
            self._save()
            self._left = True
