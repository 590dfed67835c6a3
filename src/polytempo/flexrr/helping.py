"""The helper's half of the protocol: slices of other workers that this worker got."""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from typing import NamedTuple

from polytempo.flexrr.slices import BegunHelping, Cancel, CancelGranted, DoThis, Helped, Slice
from polytempo.server.message import Message, Ticket


class HelpState(Enum):
    """The state of a slice at its helper; an unknown slice has none."""

    QUEUED = auto()
    BEGUN = auto()
    HELPED = auto()
    RETURNED = auto()


class Position(NamedTuple):
    """A worker's progress with its own share of `clock`, and the number of its life."""

    incarnation: int
    clock: int
    fraction: float


class Helping:
    """The slices that this worker got, for as long as their helpees may ask about them.

    `capacity` slices may wait; slices above it are returned when they come.
    """

    def __init__(self, incarnation: int, capacity: int) -> None:
        self._incarnation = incarnation
        self._capacity = capacity
        self._held: dict[Slice, HelpState] = {}
        self._queue: deque[tuple[Slice, Ticket | None]] = deque()
        self._floor: dict[int, tuple[int, int]] = {}

    def at_clock(self, helpee: int, incarnation: int, clock: int) -> None:
        """Forget slices of clocks before `clock`, the helpee's present one, and begin none of them."""
        floor = (incarnation, clock)
        if floor <= self._floor.get(helpee, (-1, -1)):
            return
        self._floor[helpee] = floor
        self._held = {piece: held for piece, held in self._held.items() if not self._settled(piece)}
        self._queue = deque(entry for entry in self._queue if not self._settled(entry[0]))

    def do_this(self, source: int, message: DoThis, position: Position) -> list[Message]:
        """Queue new slices; answer for known ones."""
        answers: list[Message] = []
        for piece in self._addressed(source, message.incarnation, message.slices):
            if piece not in self._held and len(self._queue) < self._capacity:
                self._held[piece] = HelpState.QUEUED
                self._queue.append((piece, message.ticket))
            elif piece not in self._held:
                self._held[piece] = HelpState.RETURNED
                answers.append(CancelGranted(piece))
            else:
                answers += self._answer(piece, position)
        return answers

    def cancel(self, source: int, message: Cancel, position: Position) -> list[Message]:
        """Return the slice unless it has begun. An unknown slice is not begun when it comes."""
        answers: list[Message] = []
        for piece in self._addressed(source, message.incarnation, (message.slice,)):
            if self._held.get(piece, HelpState.QUEUED) is HelpState.QUEUED:
                self._held[piece] = HelpState.RETURNED
                self._queue = deque(entry for entry in self._queue if entry[0] != piece)
            answers += self._answer(piece, position)
        return answers

    def begin(self) -> tuple[Slice, Ticket | None] | None:
        """Begin the slice that has waited longest; None if none waits."""
        if not self._queue:
            return None
        piece, ticket = self._queue.popleft()
        self._held[piece] = HelpState.BEGUN
        return piece, ticket

    def finish(self, piece: Slice) -> None:
        """Note that the gradient of `piece` is pushed."""
        if not self._settled(piece):
            self._held[piece] = HelpState.HELPED

    def _answer(self, piece: Slice, position: Position) -> list[Message]:
        match self._held[piece]:
            case HelpState.BEGUN:
                return [BegunHelping(piece, *position)]
            case HelpState.HELPED:
                return [Helped(piece)]
            case HelpState.RETURNED:
                return [CancelGranted(piece)]
            case HelpState.QUEUED:
                return []

    def _addressed(self, source: int, incarnation: int, pieces: tuple[Slice, ...]) -> list[Slice]:
        """The slices from `source` for this life of this worker, in clocks that are still open."""
        if incarnation != self._incarnation:
            return []
        for piece in pieces:
            if piece.helpee == source:
                self.at_clock(source, piece.incarnation, piece.clock)
        return [piece for piece in pieces if piece.helpee == source and not self._settled(piece)]

    def _settled(self, piece: Slice) -> bool:
        return (piece.incarnation, piece.clock) < self._floor.get(piece.helpee, (-1, -1))
