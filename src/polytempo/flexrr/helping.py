"""The helper's half: slices of others that this worker was given."""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from typing import NamedTuple

from polytempo.flexrr.message import BegunHelping, Cancel, CancelGranted, DoThis, Helped
from polytempo.flexrr.slices import Slice
from polytempo.server.message import Message, Ticket


class HeldSlices(Enum):
    """What a helper knows of a slice; a slice that it knows nothing of was never heard of."""

    QUEUED = auto()
    BEGUN = auto()
    HELPED = auto()
    RETURNED = auto()


class Position(NamedTuple):
    """How far a worker is with its own work, and in which life."""

    incarnation: int
    clock: int
    fraction: float


class Helping:
    """What becomes of each slice that was given to this worker, for as long as its helpee may ask.

    `capacity` slices may wait; more are given back at once.
    """

    def __init__(self, incarnation: int, capacity: int) -> None:
        self._incarnation = incarnation
        self._capacity = capacity
        self._held: dict[Slice, HeldSlices] = {}
        self._queue: deque[tuple[Slice, Ticket | None]] = deque()
        self._floor: dict[int, tuple[int, int]] = {}

    def at_clock(self, helpee: int, incarnation: int, clock: int) -> None:
        """`helpee` is at `clock`: all before it is settled, so forget it, and never begin it."""
        floor = (incarnation, clock)
        if floor <= self._floor.get(helpee, (-1, -1)):
            return
        self._floor[helpee] = floor
        self._held = {piece: held for piece, held in self._held.items() if not self._settled(piece)}
        self._queue = deque(entry for entry in self._queue if not self._settled(entry[0]))

    def do_this(self, source: int, message: DoThis, position: Position) -> list[Message]:
        """Take slices on; answer for those that were known already."""
        answers: list[Message] = []
        for piece in self._addressed(source, message.incarnation, message.slices):
            if piece not in self._held and len(self._queue) < self._capacity:
                self._held[piece] = HeldSlices.QUEUED
                self._queue.append((piece, message.ticket))
            elif piece not in self._held:
                self._held[piece] = HeldSlices.RETURNED
                answers.append(CancelGranted(piece))
            else:
                answers += self._answer(piece, position)
        return answers

    def cancel(self, source: int, message: Cancel, position: Position) -> list[Message]:
        """Give the slice back unless it has been begun. One that is unknown will not be begun when it comes."""
        answers: list[Message] = []
        for piece in self._addressed(source, message.incarnation, (message.slice,)):
            if self._held.get(piece, HeldSlices.QUEUED) is HeldSlices.QUEUED:
                self._held[piece] = HeldSlices.RETURNED
                self._queue = deque(entry for entry in self._queue if entry[0] != piece)
            answers += self._answer(piece, position)
        return answers

    def begin(self) -> tuple[Slice, Ticket | None] | None:
        """The slice that has waited longest: begun from now on."""
        if not self._queue:
            return None
        piece, ticket = self._queue.popleft()
        self._held[piece] = HeldSlices.BEGUN
        return piece, ticket

    def finish(self, piece: Slice) -> None:
        """Its gradient is pushed."""
        if not self._settled(piece):
            self._held[piece] = HeldSlices.HELPED

    def _answer(self, piece: Slice, position: Position) -> list[Message]:
        match self._held[piece]:
            case HeldSlices.BEGUN:
                return [BegunHelping(piece, *position)]
            case HeldSlices.HELPED:
                return [Helped(piece)]
            case HeldSlices.RETURNED:
                return [CancelGranted(piece)]
            case HeldSlices.QUEUED:
                return []

    def _addressed(self, source: int, incarnation: int, pieces: tuple[Slice, ...]) -> list[Slice]:
        """Those that their owner gave to this life of this worker, the clock that they are of being open."""
        if incarnation != self._incarnation:
            return []
        for piece in pieces:
            if piece.helpee == source:
                self.at_clock(source, piece.incarnation, piece.clock)
        return [piece for piece in pieces if piece.helpee == source and not self._settled(piece)]

    def _settled(self, piece: Slice) -> bool:
        return (piece.incarnation, piece.clock) < self._floor.get(piece.helpee, (-1, -1))
