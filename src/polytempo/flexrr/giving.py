"""The helpee's half of the protocol: this worker's share of its clock, and the helpers that have slices of it."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from enum import Enum, auto
from math import inf
from typing import NamedTuple

from polytempo.flexrr.helping import Position
from polytempo.flexrr.reassignment import Reassignment
from polytempo.flexrr.slices import Cancel, DoThis, Slice, cut
from polytempo.server.message import Outbox, Ticket

_MOST_DOUBLINGS = 5


class Given(Enum):
    """The state of a slice that was given away."""

    OFFERED = auto()
    BEGUN = auto()
    RECALLED = auto()


@dataclass
class _Helper:
    position: Position
    asked_s: float = -inf
    tries: int = 0
    has_helped: bool = False


class _Place(NamedTuple):
    """A slice that life `incarnation` of `helper` has. Another life of it does not know the slice."""

    state: Given
    helper: int
    incarnation: int
    since_s: float


class Giving:
    """One worker's share of one clock at a time."""

    def __init__(self, worker: int, incarnation: int, parameters: Reassignment) -> None:
        self._worker = worker
        self._incarnation = incarnation
        self._parameters = parameters
        self._helpers: dict[int, _Helper] = {}
        self._given: dict[Slice, _Place] = {}
        self._mine: deque[Slice] = deque()
        self._returned: deque[Slice] = deque()
        self._contested: deque[Slice] = deque()
        self._open: set[Slice] = set()
        self._helped: dict[Slice, int] = {}
        self._total = 1
        self._is_behind = False
        self._idle_since_s: float | None = None
        self._ticket: Ticket | None = None
        self.clock = -1

    # ------------------------------------------------------------------ how far

    @property
    def covered(self) -> bool:
        """True when every slice is done, by this worker or by helpers."""
        return not self._open

    @property
    def fraction(self) -> float:
        """The part of the share that is done, by this worker or by helpers."""
        return 1 - len(self._open) / self._total

    @property
    def expects_back(self) -> bool:
        """True while a slice may come back that this worker must then do."""
        return any(place.state is not Given.BEGUN for place in self._given.values())

    @property
    def waits(self) -> bool:
        """True when only other workers still have slices."""
        return bool(self._given) and not self._num_left

    @property
    def _num_left(self) -> int:
        return len(self._mine) + len(self._returned) + len(self._contested)

    def deadline_s(self, pace_s: float) -> float:
        """The contest's time in seconds; infinite as long as this worker has a slice to do."""
        if not self.waits or self._idle_since_s is None:
            return inf
        return self._idle_since_s + self._parameters.patience * pace_s

    # ------------------------------------------------------------------ own work

    def start(self, clock: int, samples: int, ticket: Ticket | None) -> None:
        """A new share. Every slice of a ticket that is dealt again may have been applied, so each goes alone."""
        pieces = cut(self._worker, self._incarnation, clock, samples, self._parameters.slices)
        again = ticket is not None and ticket.again
        self.clock, self._ticket, self._total, self._open = clock, ticket, len(pieces), set(pieces)
        self._mine, self._contested = (deque(), deque(pieces)) if again else (deque(pieces), deque())
        self._is_behind, self._idle_since_s = False, None
        self._helped.clear()
        for helper in self._helpers.values():
            helper.has_helped, helper.asked_s, helper.tries = False, -inf, 0

    def begin(self) -> tuple[Slice, Ticket | None, bool] | None:
        """Return the next slice to do, its ticket, and whether its gradient must go alone."""
        for pieces in (self._returned, self._mine, self._contested):
            if pieces:
                self._idle_since_s = None
                return pieces.popleft(), self._ticket, pieces is self._contested
        return None

    def finish(self, piece: Slice) -> None:
        """Mark `piece` as done, by this worker or by another."""
        self._open.discard(piece)
        self._given.pop(piece, None)
        if piece in self._contested:
            self._contested.remove(piece)

    # ------------------------------------------------------------------ giving away

    def offer_to(self, now_s: float, helper: int, position: Position) -> Outbox:
        """Give slices from the end to a helper at `position`, if it is well ahead."""
        known = self._helpers.setdefault(helper, _Helper(position))
        known.position = max(known.position, position)
        ahead = known.position.clock + known.position.fraction - self.clock - (1 - self._num_left / self._total)
        self._is_behind |= ahead > self._parameters.behind
        if not self._is_behind or ahead <= 0 or self._has_unbegun(helper):
            return []
        is_done = known.position.clock + known.position.fraction >= self.clock + 1
        wanted = self._parameters.offer(first=not known.has_helped)
        if not is_done:
            wanted = min(wanted, int(ahead * self._total))
        pieces = self._from_the_end(wanted, 0 if is_done else 1)
        if not pieces:
            return []
        life = known.position.incarnation
        self._given |= {piece: _Place(Given.OFFERED, helper, life, now_s) for piece in pieces}
        known.asked_s, known.tries = now_s, 0
        return [(helper, DoThis(life, pieces, self._ticket))]

    def _has_unbegun(self, helper: int) -> bool:
        return any(place.helper == helper and place.state is not Given.BEGUN for place in self._given.values())

    def _from_the_end(self, wanted: int, stay: int) -> tuple[Slice, ...]:
        """Take at most a fair part of the rest, so that no helper is busy long after the others."""
        fair = max(1, len(self._mine) // (self._parameters.helpers + 1))
        return tuple(self._mine.pop() for _ in range(min(wanted, fair, len(self._mine) - stay)))

    def begun(self, helper: int, piece: Slice) -> None:
        """Note that a helper has begun with `piece`, so no other worker does."""
        if self._answers(helper, piece):
            self._helpers[helper].has_helped = True
            self._given[piece] = self._given[piece]._replace(state=Given.BEGUN)

    def granted(self, helper: int, piece: Slice) -> None:
        """Take a slice back. It is not given away again: only its first helper has promised not to begin it."""
        if self._answers(helper, piece) and self._given[piece].state is not Given.BEGUN:
            del self._given[piece]
            self._returned.append(piece)

    def helped(self, helper: int, piece: Slice) -> None:
        """Note that a helper's gradient is on its way to the shards."""
        if self._answers(helper, piece) or piece in self._contested:
            self.finish(piece)
            self._helped[piece] = helper

    def lost(self, helper: int) -> None:
        """Contest all slices of a lost helper: its pushes of this clock may be lost with it."""
        theirs = [piece for piece, place in self._given.items() if place.helper == helper]
        theirs += [piece for piece, by in self._helped.items() if by == helper]
        for piece in theirs:
            self._given.pop(piece, None)
            self._helped.pop(piece, None)
            self._open.add(piece)
            self._contested.append(piece)

    def _answers(self, helper: int, piece: Slice) -> bool:
        """True if `helper` has `piece`; its answer then also resets the repeats to it."""
        if piece not in self._given or self._given[piece].helper != helper:
            return False
        self._helpers[helper].tries = 0
        return True

    # ------------------------------------------------------------------ taking back

    def recall(self, now_s: float, pace_s: float) -> Outbox:
        """Ask back a slice that no helper has begun, once at most one is left to do: the last of the longest queue.

        A slice is not asked back in its first `pace_s`: an idle helper begins it as soon as the message comes.
        """
        states = [place.state for place in self._given.values()]
        if self._num_left > 1 or Given.RECALLED in states:
            return []
        waiting = [(piece, place) for piece, place in self._given.items() if place.state is Given.OFFERED]
        offered = [piece for piece, place in waiting if now_s >= place.since_s + pace_s]
        if not offered:
            return []
        counts = Counter(self._given[piece].helper for piece in offered)
        piece = max(reversed(offered), key=lambda piece: counts[self._given[piece].helper])
        place = self._given[piece] = self._given[piece]._replace(state=Given.RECALLED)
        return [(place.helper, Cancel(place.incarnation, piece))]

    def contest(self, now_s: float, pace_s: float) -> None:
        """Contest the slice that was given away first, after an idle wait that is longer than the work. The shards
        decide.
        """
        if not self.waits:
            return
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        elif now_s >= self.deadline_s(pace_s):
            piece = next(iter(self._given), None)
            if piece is not None:
                del self._given[piece]
                self._contested.append(piece)

    def ask_again(self, now_s: float) -> Outbox:
        """Repeat the messages that helpers have not answered."""
        outbox: Outbox = []
        for helper, life in dict.fromkeys((place.helper, place.incarnation) for place in self._given.values()):
            known = self._helpers[helper]
            if now_s < known.asked_s + self._parameters.retry_s * 2 ** min(known.tries, _MOST_DOUBLINGS):
                continue
            known.asked_s, known.tries = now_s, known.tries + 1
            theirs = [(piece, place.state) for piece, place in self._given.items() if place[1:3] == (helper, life)]
            recalled = [piece for piece, state in theirs if state is Given.RECALLED]
            others = tuple(piece for piece, state in theirs if state is not Given.RECALLED)
            outbox += [(helper, Cancel(life, piece)) for piece in recalled]
            outbox += [(helper, DoThis(life, others, self._ticket))] if others else []
        return outbox
