"""`Portions`: which replica computes which part of a batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress

_MOST_HOLDERS = 2


class Portions:
    """The portions 0 … count - 1 of one evaluation, each to be computed once.

    A replica has one at a time, so a fast one computes more of them. When none is left, replicas without work compute
    those that others have begun first, in a second copy: the first result counts.
    """

    def __init__(self, count: int) -> None:
        self._left = deque(range(count))
        self._held: dict[int, list[int]] = {}
        """Who computes what, in the order in which portions were dealt."""
        self._of: dict[int, int] = {}
        """The portion of each replica that computes."""
        self.losses: dict[int, float] = {}
        """Of the portions that are done."""
        self.count, self.copies = count, 0
        """How many portions there are, and how many second copies were begun."""

    @property
    def done(self) -> bool:
        """Whether all are."""
        return len(self.losses) == self.count

    def deal(self, replicas: Iterable[int]) -> list[tuple[int, int]]:
        """A portion for each of those replicas that has none, as far as there are some: (replica, portion)."""
        return [(replica, portion) for replica in replicas if (portion := self._next(replica)) is not None]

    def computed(self, replica: int, portion: int, loss: float) -> None:
        """A replica has done its portion."""
        self._of.pop(replica, None)
        if portion not in self.losses:
            self.losses[portion] = loss
            self._held.pop(portion, None)
            with suppress(ValueError):  # of a replica that was lost after it had done it
                self._left.remove(portion)

    def lost(self, replica: int) -> None:
        """A replica is gone; what it alone had is dealt again, first of all."""
        portion = self._of.pop(replica, None)
        if portion is None or portion in self.losses:
            return
        self._held[portion].remove(replica)
        if not self._held[portion]:
            del self._held[portion]
            self._left.appendleft(portion)

    def _next(self, replica: int) -> int | None:
        if replica in self._of:
            return None
        if self._left:
            portion = self._left.popleft()
        else:
            again = [each for each, holders in self._held.items() if len(holders) < _MOST_HOLDERS]
            if not again:
                return None
            portion, self.copies = again[0], self.copies + 1
        self._held.setdefault(portion, []).append(replica)
        self._of[replica] = portion
        return portion
