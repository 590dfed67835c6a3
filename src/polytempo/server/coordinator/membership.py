"""`Membership`: which workers take part, as the shards learn it. Changes are numbered; every shard notes each of them.

    change 7 ──Members──▶ shard 0 ──Noted──▶ known 7
             ──Members──▶ shard 1              known 6     ready: 6, for shard 1 may not have change 7 yet

A worker gets tickets when every shard knows it. The tickets of a lost worker are dealt again when no shard accepts a
push of that life any more.

**Where workers wait for each other** (`waits`) a new worker is admitted only while no worker has a batch in hand.
Otherwise one shard could count it in the present step and another in the next, and two such workers, each a step ahead
of the other at one of two shards, would wait for each other for ever. So first the others finish the batches that they
have (`closing`: no worker gets a new batch; a worker without one rests), then one change admits all new workers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection


class Membership:
    """`num_shards` shards, which know no worker yet."""

    def __init__(self, num_shards: int, *, waits: bool) -> None:
        self.members: dict[int, int] = {}
        """The workers that take part, with their incarnations; changed by `join` and `leave`."""
        self.changes = 0
        self.known = [0] * num_shards
        """The number of changes that each shard has noted."""
        self.closing = False
        """True while new workers wait until no worker has a batch in hand."""
        self.leaving: dict[int, int] = {}
        """Lost workers -> the change that says so."""
        self._waits = waits
        self._announced: dict[int, int] = {}
        self._listed: tuple[tuple[int, int], ...] = ()  # the same, as it was said
        self._resting: set[int] = set()
        self._uncounted: set[int] = set()  # the members that no shard counts, so that not all need be searched
        self._admitted: dict[int, int] = {}
        self._touched = False

    def join(self, worker: int, incarnation: int) -> None:
        """`worker` takes part, in this life."""
        self.members[worker] = incarnation
        if self._announced.get(worker) != incarnation or worker in self._resting:
            self._uncounted.add(worker)
        self._touched = True

    def leave(self, worker: int) -> None:
        """`worker` takes part no more."""
        self.members.pop(worker, None)
        self._uncounted.discard(worker)
        self._touched = True

    @property
    def ready(self) -> int:
        """The last change that every shard has noted."""
        return min(self.known)

    @property
    def is_settled(self) -> bool:
        """True if every shard has noted every change."""
        return self.ready == self.changes

    def knows(self, worker: int) -> bool:
        """True if every shard knows `worker` as a member that does not rest."""
        return self._admitted.get(worker, self.changes + 1) <= self.ready

    def change(
        self, resting: Collection[int], in_hand: Callable[[], Collection[int]]
    ) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]] | None:
        """The next change to announce: the members, and which of them rest; None if neither has changed.

        `resting`: the workers that have nothing to do. `in_hand()`: the workers that have a batch in hand.
        """
        if not (self._touched or self._waits or resting or self._resting or self.leaving):
            return None
        rest = self.members.keys() & resting
        if self._waits:
            new = self._uncounted - rest
            busy = in_hand() if new else ()
            self.closing = bool(busy)
            if busy:
                rest |= (self.members.keys() - busy) | new
        awaited = any(since > self.changes for since in self.leaving.values())
        same = not self._touched or self.members == self._announced  # all are compared only where one has changed
        self._touched = False
        if same and rest == self._resting and not awaited:
            return None
        self.changes += 1
        self._admitted.update(dict.fromkeys(self._uncounted - rest, self.changes))
        for worker in rest - self._resting:
            self._admitted.pop(worker, None)
        if not same:
            self._admitted = {worker: at for worker, at in self._admitted.items() if worker in self.members}
            self._announced, self._listed = dict(self.members), tuple(sorted(self.members.items()))
        self._resting, self._uncounted = rest, set(rest)
        return self._listed, tuple(sorted(rest))

    def note(self, shard: int, change: int) -> list[int]:
        """`shard` has noted `change`. Returns the workers that every shard now knows to be lost."""
        self.known[shard] = max(self.known[shard], change)  # answers may overtake each other
        ready = self.ready
        gone = [worker for worker, since in self.leaving.items() if since <= ready]
        for worker in gone:
            del self.leaving[worker]
        return gone
