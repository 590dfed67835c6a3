"""`Membership`: who takes part, as the shards are told. Changes are numbered, and every shard notes each of them.

    change 7 ──Members──▶ shard 0 ──Noted──▶ known 7
             ──Members──▶ shard 1              known 6     ready: 6, for one shard may not have heard of change 7

A worker is dealt to when every shard knows it, and what a lost one held is dealt again when no shard takes it from it
any more.

**Where workers wait for each other** (`waits`) a newcomer is admitted only while nobody has a batch in hand. Otherwise
one shard could count it in the present step and another in the next, and two such workers, each a step ahead of the
other at one of two shards, would wait for each other for ever. So first the others finish what they have in hand
(`closing`: nobody is dealt a new batch; who has nothing in hand rests), then all are told at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection


class Membership:
    """`num_shards` shards, none of which knows anybody yet."""

    def __init__(self, num_shards: int, *, waits: bool) -> None:
        self.members: dict[int, int] = {}
        """The workers that take part, with their incarnations."""
        self.changes = 0
        self.known = [0] * num_shards
        """How many changes each shard has noted."""
        self.closing = False
        """Whether newcomers wait until nobody has a batch in hand."""
        self.leaving: dict[int, int] = {}
        """Lost workers -> the change that says so."""
        self._waits = waits
        self._told: dict[int, int] = {}
        self._resting: tuple[int, ...] = ()
        self._admitted: dict[int, int] = {}

    @property
    def ready(self) -> int:
        """The last change that every shard has noted."""
        return min(self.known)

    @property
    def is_settled(self) -> bool:
        """Whether every shard has noted every change."""
        return self.ready == self.changes

    def knows(self, worker: int) -> bool:
        """Whether every shard takes `worker` for a member that does not rest."""
        return self._admitted.get(worker, self.changes + 1) <= self.ready

    def change(
        self, resting: Collection[int], in_hand: Callable[[], Collection[int]]
    ) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]] | None:
        """What the shards are to be told now: the members, and who of them rests; None if that is nothing new.

        `resting`: whoever has nothing to do. `in_hand()`: who has a batch in hand.
        """
        rest = {worker for worker in resting if worker in self.members}
        if self._waits:
            new = [worker for worker in self.members if worker not in rest and not self._counts(worker)]
            busy = in_hand() if new else ()
            self.closing = bool(busy)
            if busy:
                rest.update(worker for worker in self.members if worker not in busy or worker in new)
        ordered = tuple(sorted(rest))
        awaited = any(since > self.changes for since in self.leaving.values())
        if self.members == self._told and ordered == self._resting and not awaited:
            return None
        self.changes += 1
        self._admitted = {
            worker: self._admitted[worker] if self._counts(worker) else self.changes
            for worker in self.members
            if worker not in rest
        }
        self._told, self._resting = dict(self.members), ordered
        return tuple(sorted(self.members.items())), ordered

    def note(self, shard: int, change: int) -> list[int]:
        """`shard` has noted `change`. Returns the lost workers of whom every shard knows now."""
        self.known[shard] = max(self.known[shard], change)  # answers may overtake each other
        ready = self.ready
        gone = [worker for worker, since in self.leaving.items() if since <= ready]
        for worker in gone:
            del self.leaving[worker]
        return gone

    def _counts(self, worker: int) -> bool:
        """Whether the shards were told that `worker`, in its present life, takes part."""
        return self._told.get(worker) == self.members[worker] and worker not in self._resting
