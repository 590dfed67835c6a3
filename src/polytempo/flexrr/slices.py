"""A worker's share of one clock, cut into slices, and the messages about them (see `flexrr.protocol`).

    share   [ 0 | 1 | 2 | 3 | … | 37 | 38 | 39 ]      its own worker begins here ▶      ◀ given away from here

The cut follows from (samples, slices) alone, so a slice is the same samples for every worker, and its id never changes.
"""

from __future__ import annotations

import msgspec

from polytempo.server.message import Message, Ticket


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """Samples `begin … end-1` of the share of worker `helpee` in `clock`. Equal slices are the same work."""

    helpee: int
    incarnation: int
    """The life of the helpee: clocks of an earlier life are other work."""
    clock: int
    number: int
    """The number of the slice in its share, from 0."""
    begin: int
    end: int

    @property
    def samples(self) -> int:
        """Samples in it."""
        return self.end - self.begin


def cut(helpee: int, incarnation: int, clock: int, samples: int, slices: int) -> list[Slice]:
    """A share of `samples` as `slices` ranges of nearly equal length (fewer where there are fewer samples)."""
    if samples < 1 or slices < 1:
        raise ValueError(f"a share needs at least one sample and one slice, got {samples} samples and {slices} slices")
    count = min(samples, slices)
    edges = [samples * i // count for i in range(count + 1)]
    return [Slice(helpee, incarnation, clock, i, edges[i], edges[i + 1]) for i in range(count)]


def ticket_of(piece: Slice, ticket: int, slices: int) -> int:
    """The shards' number for a slice of the batch `ticket`: `slices` + 1 numbers for each batch.

    All workers of a run must use the same `slices`. No push uses the number of the batch's own ticket as well.
    """
    if not 0 <= piece.number < slices:
        raise ValueError(f"slice {piece.number} of a batch in {slices} slices; every worker must cut alike")
    return ticket * (slices + 1) + piece.number


def closing_of(ticket: int, slices: int) -> int:
    """The batch's last number. Once it is pushed, all slices of the batch are at the shards, or in this push."""
    return ticket * (slices + 1) + slices


class Progress(Message, frozen=True, eq=False):
    """The sender has done `fraction` of its share of `clock`. 1.0: all of it is covered."""

    incarnation: int
    clock: int
    fraction: float
    asks: bool = False
    """True if the sender waits for the receiver, and asks for an answer once the receiver is covered."""


class DoThis(Message, frozen=True, eq=False):
    """The sender gives these slices to the receiver's life `incarnation`. A repeat also asks for their state."""

    incarnation: int
    slices: tuple[Slice, ...]
    ticket: Ticket | None = None
    """The ticket of their batch, where batches are dealt."""


class BegunHelping(Message, frozen=True, eq=False):
    """The sender has begun with `slice`; the rest is its own progress. Refuses a `Cancel`."""

    slice: Slice
    incarnation: int
    clock: int
    fraction: float


class Helped(Message, frozen=True, eq=False):
    """The gradient of `slice` is pushed, and reaches the shards if the sender lives. Refuses a `Cancel`."""

    slice: Slice


class Cancel(Message, frozen=True, eq=False):
    """The sender wants `slice` back if the receiver (in life `incarnation`) has not begun it."""

    incarnation: int
    slice: Slice


class CancelGranted(Message, frozen=True, eq=False):
    """The sender returns `slice`: it has not begun it and never does."""

    slice: Slice
