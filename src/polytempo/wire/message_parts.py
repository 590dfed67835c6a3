"""Messages in parts: no frame on a line over TCP is larger than `PART_BYTES`.

ZeroMQ takes memory for a whole frame before it knows whether the other end has the run's keys, so a stranger can
make it hold the largest frame (see `wire.guard`). It also encrypts a whole frame before it sends any of it: of
several parts one is encrypted while another travels.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import zmq

Frame = bytes | memoryview
"""One part of a ZeroMQ message."""

PART_BYTES = 128 << 10
MOST_FRAME_BYTES = PART_BYTES + 256
"""A part with the bytes that encryption adds (33)."""


def cut(data: Frame, part_bytes: int = PART_BYTES) -> list[Frame]:
    """`data` as parts of its memory; one empty part where it is empty."""
    view = memoryview(data)
    return [view[begin : begin + part_bytes] for begin in range(0, len(view), part_bytes)] or [data]


def received(socket: zmq.Socket[bytes], most_bytes: int, most_parts: int) -> list[Frame] | None:
    """The next message's parts, the first of them whole, without waiting; None where there is none.

    ZeroMQ keeps the parts of a message that has not ended, without a bound: only holders of keys send some, and
    `unfinished` bounds them where these need not be trusted.

    Of a message with too many parts it keeps one part too many, of one with too many bytes (the first part aside) only
    the first part: both are then malformed.
    """
    try:
        part = socket.recv(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    return _rest(socket, part, most_bytes, most_parts)


class Named(NamedTuple):
    """A message of a peer that the guard knows."""

    name: str
    """The guard's name for its key ("": it gave none)."""
    descriptor: int
    """The number of the connection."""
    parts: list[Frame]


def named(socket: zmq.Socket[bytes], most_bytes: int, most_parts: int) -> Named | None:
    """The same, and its sender."""
    try:
        part = socket.recv(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    name, descriptor = "", -1
    with suppress(zmq.ZMQError):  # it has no such property
        name = str(part.get("User-Id"))
    with suppress(zmq.ZMQError, ValueError):  # not every libzmq tells it
        descriptor = int(part.get(zmq.SRCFD))
    return Named(name, descriptor, _rest(socket, part, most_bytes, most_parts))


def _rest(socket: zmq.Socket[bytes], part: zmq.Frame, most_bytes: int, most_parts: int) -> list[Frame]:
    parts: list[Frame] = [part.buffer]
    num_bytes = 0
    while part.more:
        part = socket.recv(copy=False)
        num_bytes += len(part)
        if num_bytes > most_bytes:
            del parts[1:]
        elif len(parts) <= most_parts:
            parts.append(part.buffer)
    return parts
