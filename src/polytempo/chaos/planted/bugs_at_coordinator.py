"""Bugs of the coordinator and its batch scheduler: membership, chains, and tickets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polytempo.server.coordinator.batch_scheduler import BatchScheduler
from polytempo.server.coordinator.coordinator import Coordinator
from polytempo.server.coordinator.supply import Evenly, Freely, Fresh
from polytempo.server.message import Beat, Deal, Outbox

Patches = list[tuple[Any, str, Any]]


def blank_copy_promoted() -> Patches:
    """A copy that has just joined stands first in its chain, before it has the state."""
    beat = Coordinator._beat

    def wrong(self: Coordinator, now_s: float, source: int, message: Beat) -> Outbox:
        joins = self._chains._starting.get(source)
        if joins is not None:
            self.chains[joins] = tuple(reversed(self.chains[joins]))
            out = beat(self, now_s, source, message)
            self.chains[joins] = tuple(reversed(self.chains[joins]))
            return out + self._new_epoch(now_s)
        return beat(self, now_s, source, message)

    return [(Coordinator, "_beat", wrong)]


def epoch_not_raised() -> Patches:
    """A chain changes, and the epoch stays the same."""
    new_epoch = Coordinator._new_epoch

    def wrong(self: Coordinator, now_s: float) -> Outbox:
        self.epoch -= 1
        return new_epoch(self, now_s)

    return [(Coordinator, "_new_epoch", wrong)]


def loss_not_announced() -> Patches:
    """The coordinator does not announce to the shards that a worker is lost."""
    notify = Coordinator._notify_shards

    def wrong(self: Coordinator, now_s: float) -> Outbox:
        announced = self._membership._announced
        return [] if set(announced) > set(self.members) else notify(self, now_s)

    return [(Coordinator, "_notify_shards", wrong)]


def dealt_before_admitted() -> Patches:
    """A worker gets work before every shard knows of it."""
    deals = Coordinator._deals

    def wrong(self: Coordinator, now_s: float) -> Outbox:
        membership = self._membership
        knows, membership.knows = membership.knows, lambda worker: worker in self.members  # type: ignore[method-assign]
        out = deals(self, now_s)
        membership.knows = knows  # type: ignore[method-assign]
        return out

    return [(Coordinator, "_deals", wrong)]


def dealt_twice() -> Patches:
    """Now and then the ticket that was dealt last is dealt to the next one, too."""
    freely, evenly = Freely.take, Evenly.take

    def takes_freely(self: Freely, worker: int, end: int) -> Fresh | None:
        if self.frontier % 7 == 3 and not getattr(self, "twice", False):
            self.twice = True  # type: ignore[attr-defined]  # the bug's own memory
            self.frontier -= 1
        return freely(self, worker, end)

    def takes_evenly(self: Evenly, worker: int, end: int) -> Fresh | None:
        fresh = evenly(self, worker, end)
        return fresh if fresh is None or fresh.number % 7 != 3 else Fresh(fresh.number - 1)

    return [(Freely, "take", takes_freely), (Evenly, "take", takes_evenly)]


def tickets_of_the_dead_forgotten() -> Patches:
    """The tickets of a lost worker are not dealt again."""
    lose = BatchScheduler.lose

    def wrong(self: BatchScheduler, worker: int) -> None:
        life = self._workers.get(worker)
        if life is not None:
            life.held.clear()
        lose(self, worker)

    return [(BatchScheduler, "lose", wrong)]


def done_before_acknowledged() -> Patches:
    """A ticket counts as done when its worker calls for the next one."""
    ask = BatchScheduler.ask

    def wrong(self: BatchScheduler, worker: int, incarnation: int, sequence: int, done: Sequence[int]) -> Deal | None:
        life = self._workers.get(worker)
        if life is not None and sequence > life.sequence:
            done = (*done, *life.held)
        return ask(self, worker, incarnation, sequence, done)

    return [(BatchScheduler, "ask", wrong)]


def promoted_from_outside() -> Patches:
    """A lost head is replaced by a node that was never in the chain."""
    lose = Coordinator.lose

    def wrong(self: Coordinator, now_s: float, node: int) -> Outbox:
        for shard, chain in enumerate(self.chains):
            if len(chain) > 1 and chain[0] == node:
                self.chains[shard] = (node, self.chains[shard - 1][-1])
        return lose(self, now_s, node)

    return [(Coordinator, "lose", wrong)]
