"""Messages between workers about their progress, and about slices that they give away. See `protocol`."""

from __future__ import annotations

from polytempo.flexrr.slices import Slice
from polytempo.server.message import Message, Ticket


class Progress(Message, frozen=True, eq=False):
    """The sender has done `fraction` of its share of `clock`. 1.0: all of it is covered."""

    incarnation: int
    clock: int
    fraction: float
    asks: bool = False
    """Whether the sender waits for the receiver, and asks for an answer once the receiver is covered."""


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
