"""What workers say to each other about their progress, and about slices that change hands. See `protocol`."""

from __future__ import annotations

from polytempo.flexrr.slices import Slice
from polytempo.server.message import Message, Ticket


class Progress(Message, frozen=True, eq=False):
    """I am this far: `fraction` of my share of `clock` is done. 1.0: all of it is covered."""

    incarnation: int
    clock: int
    fraction: float
    asks: bool = False
    """Answer if you are covered: I do not know it yet, and wait for you."""


class DoThis(Message, frozen=True, eq=False):
    """These slices of mine are yours (of you in life `incarnation`). Also asks, when repeated, what became of them."""

    incarnation: int
    slices: tuple[Slice, ...]
    ticket: Ticket | None = None
    """The batch that they are of, where batches are dealt."""


class BegunHelping(Message, frozen=True, eq=False):
    """I have begun with `slice`, and I am this far with my own work. Refuses a `Cancel`."""

    slice: Slice
    incarnation: int
    clock: int
    fraction: float


class Helped(Message, frozen=True, eq=False):
    """The gradient of `slice` is pushed, and will reach the shards if I live. Refuses a `Cancel`."""

    slice: Slice


class Cancel(Message, frozen=True, eq=False):
    """I want to do `slice` myself: give it back if you (in life `incarnation`) have not begun."""

    incarnation: int
    slice: Slice


class CancelGranted(Message, frozen=True, eq=False):
    """`slice` is yours again. I have not begun it and never shall."""

    slice: Slice
