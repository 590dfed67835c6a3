"""Snapshots for scores: the elements of a shard when some number of batches was decided. No worker waits for a score.

shard's log  … push of batch 95 ─▶ 96 batches are decided: the weights are held, and the next update writes elsewhere …
evaluator    ──Show 96──▶ every copy       ◀──Shown 96── the first copy        scores it, while training goes on
             ──Show 97──▶ every copy       96 has been read, and is released   … ◀──Shown 192──

All copies of a shard hold the same snapshots, for they are taken at the same entries. The head shows one only when the
last copy has that entry, too: no loss of a process can undo a scored state. An evaluator that is slower than training
misses some; a copy keeps the newest `MOST` that were not shown yet, and in any case the last.
"""

from __future__ import annotations

from typing import NamedTuple

from polytempo.server.message import Entry, Install, Message, Outbox, Reshape, Show, Shown
from polytempo.server.shard.node import Node
from polytempo.server.shard.shard import Shard
from polytempo.server.tensors.holder import HeldElements

MOST = 3
"""The most snapshots kept before they are shown."""
_STEPS_BETWEEN_SCORES = 4


class ScorePoints(NamedTuple):
    """The numbers of decided batches with a score: each multiple of `every`, and `last`."""

    every: int
    last: int

    def crossed(self, before: int, after: int) -> int | None:
        """The highest point above `before` and not above `after`."""
        if before < self.last <= after:
            return self.last
        point = after // self.every * self.every
        return point if before < point < self.last else None

    def stands(self, number: int) -> bool:
        """True if `number` is a point."""
        return number > 0 and self.crossed(number - 1, number) is not None


def score_points(batches_per_epoch: int, num_batches: int, workers: int) -> ScorePoints:
    """Points at each epoch's end, or after as many epochs as make four steps of each worker: many workers make short
    ones."""
    epochs = max(1, -(-_STEPS_BETWEEN_SCORES * workers // batches_per_epoch))
    return ScorePoints(epochs * batches_per_epoch, num_batches)


class _Snapshot(NamedTuple):
    number: int
    entry: int
    """The last entry of the shard's log before it."""
    seconds: float
    held: HeldElements


class ScoreSnapshots:
    """The snapshots that one copy of a shard keeps. `on_entry` is for its `Node`."""

    def __init__(self, shard: Shard, points: ScorePoints) -> None:
        self._shard, self._points = shard, points
        self._kept: list[_Snapshot] = []
        """Ascending."""
        self._shown = -1
        """The highest that was shown, which may still be read."""
        self.now_s = 0.0
        """The arrival time of the present message."""
        self.begin()

    def begin(self) -> None:
        """The shard has got its state from another copy: if that is of a score point, keep it as that snapshot."""
        number = self._shard.decisions.batches
        if self._points.stands(number) and all(one.number != number for one in self._kept):
            self._keep(number)

    def on_entry(self, index: int, entry: Entry) -> None:
        """The shard has applied entry `index`."""
        if isinstance(entry, Reshape):  # snapshots of another layout do not fit the other shards' snapshots
            self._let_go([one for one in self._kept if one.number > self._shown])
            self.begin()
            return
        number = self._points.crossed(self._shard.decisions.batches_before, self._shard.decisions.batches)
        if number is not None:
            self._keep(number)

    def seen(self, number: int) -> None:
        """The evaluator has read all snapshots before `number`."""
        self._let_go([one for one in self._kept if one.number < number])

    def due(self, number: int, committed: int) -> Shown | None:
        """Snapshot `number` or the next one, if `committed` entries include one."""
        for one in self._kept:
            if one.number >= number and one.entry <= committed:
                self._shown = max(self._shown, one.number)
                held = one.held
                return Shown(self._shard.number, one.number, one.seconds, held.spans, held.values, held.running)
        return None

    def _keep(self, number: int) -> None:
        self._kept.append(_Snapshot(number, self._shard.index, self.now_s, self._shard.hold()))
        unseen = [one for one in self._kept if one.number > self._shown]
        if len(unseen) > MOST:
            self._let_go(unseen[:1])

    def _let_go(self, snapshots: list[_Snapshot]) -> None:
        for one in snapshots:
            self._kept.remove(one)
            one.held.release()


class Showing:
    """A `Node` that shows its shard's snapshots, too: the machine of a copy where there is an evaluator."""

    def __init__(self, node: Node, snapshots: ScoreSnapshots) -> None:
        self.node, self._snapshots = node, snapshots
        self._asked: tuple[int, int] | None = None
        """(evaluator, number) of the last `Show` that has no answer yet."""

    @property
    def finished(self) -> bool:
        """True if the node has finished."""
        return self.node.finished

    def receive(self, now_s: float, source: int, message: Message) -> Outbox:
        """Take a message and return the messages to send."""
        self._snapshots.now_s = now_s
        if isinstance(message, Show):
            self._asked = source, message.number
            self._snapshots.seen(message.number)
            return self._due()
        out = self.node.receive(now_s, source, message)
        if isinstance(message, Install):
            self._snapshots.begin()
        return out + self._due()

    def tick(self, now_s: float) -> Outbox:
        """The node's tick, and a snapshot that is due."""
        return self.node.tick(now_s) + self._due()

    def wait_s(self, now_s: float) -> float:
        """The node's waiting time."""
        return self.node.wait_s(now_s)

    def flops(self, message: Message) -> float:
        """The cost of `message`; showing is free."""
        return self.node.flops(message)

    def _due(self) -> Outbox:
        if self._asked is None or not self.node.is_head:
            return []
        evaluator, number = self._asked
        shown = self._snapshots.due(number, self.node.committed)
        if shown is None:
            return []
        self._asked = None
        return [(evaluator, shown)]
