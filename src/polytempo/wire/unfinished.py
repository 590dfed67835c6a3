"""`UnfinishedBytes`: closes connections that send a message without an end.

ZeroMQ holds the parts of a message until its last one has come, without a bound, and shows none of them. So the bytes
of each connection are counted by its TCP, from the last whole message that its reader took.

    taken               whole, not yet read      parts without an end
    ├───── message ─────┼──── message ───────────┼────────────────▶ bytes since `taken`

A peer has at most `most_bytes` of them, over all of its connections. A connection is its peer's once a whole message
has named the peer; before it has at most `FIRST_BYTES`.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
import time
from contextlib import suppress
from typing import Any, NamedTuple

from polytempo.wire.descriptor_copy import descriptor_copy

LOOK_S = 0.25
"""Seconds between looks: a connection exceeds its bound by the bytes of so long at most."""
FIRST_BYTES = 64 << 10
"""A handshake and a first message."""
_BEAT_BYTES_PER_S = 256
"""More than heartbeats have."""
_RECEIVED = struct.Struct("@Q")
_RECEIVED_AT = 128
"""The offset of `tcpi_bytes_received` in Linux's `struct tcp_info`."""
_INFO_BYTES = _RECEIVED_AT + _RECEIVED.size
_LIBC = ctypes.PyDLL(None) if sys.platform == "linux" else None
"""Calls keep the interpreter's lock: each takes a microsecond, and giving the lock away may take milliseconds."""


class _Line(NamedTuple):
    peer: Any
    name: str
    """The peer's name ("": none of its messages was read yet)."""
    received: int
    """Bytes of the connection when its last whole message was taken."""
    at_s: float


class UnfinishedBytes:
    """The connections of a socket, and their bytes. On Linux alone: elsewhere the system does not count."""

    def __init__(self, most_bytes: int) -> None:
        """`most_bytes`: of all messages of a peer that may wait for their reader, and an unfinished one."""
        self._most, self._count = most_bytes, _ReceivedBytes()
        self._lines: dict[int, _Line] = {}

    def come(self, descriptor: int) -> None:
        """A connection was accepted."""
        with suppress(OSError), descriptor_copy(descriptor) as line:
            self._lines[descriptor] = _Line(line.getpeername(), "", 0, time.monotonic())

    def taken(self, descriptor: int, name: str) -> None:
        """A whole message of peer `name` was read from the connection. Called in another thread than the rest."""
        known = self._lines.get(descriptor)
        if known is None:
            return
        with suppress(OSError), descriptor_copy(descriptor) as line:
            if line.getpeername() == known.peer:
                found = _ReceivedBytes().of(descriptor)  # this is another thread
                self._lines[descriptor] = known._replace(name=name, received=found, at_s=time.monotonic())

    def look(self) -> None:
        """Close the connections with too many bytes, and forget the gone ones. Cost: a microsecond a connection."""
        now_s, of_peers = time.monotonic(), dict[str, list[tuple[int, int]]]()
        for descriptor, known in list(self._lines.items()):
            try:
                beats = int(_BEAT_BYTES_PER_S * (now_s - known.at_s))
                unfinished = self._count.of(descriptor) - known.received - beats
            except OSError:
                self._forget(descriptor, known)
                continue
            if known.name:
                of_peers.setdefault(known.name, []).append((unfinished, descriptor))
            elif unfinished > min(FIRST_BYTES, self._most):
                self._close(descriptor, known)
        for lines in of_peers.values():
            total = sum(max(0, unfinished) for unfinished, _ in lines)
            for unfinished, descriptor in sorted(lines, reverse=True):
                if total <= self._most:
                    break
                total -= unfinished
                self._close(descriptor, self._lines[descriptor])

    def _close(self, descriptor: int, known: _Line) -> None:
        """Close a connection, if the descriptor is still its own."""
        try:
            with descriptor_copy(descriptor) as line:
                if line.getpeername() != known.peer:
                    raise OSError("another connection has the descriptor")
                line.shutdown(socket.SHUT_RDWR)
        except OSError:
            self._forget(descriptor, known)

    def _forget(self, descriptor: int, known: _Line) -> None:
        if self._lines.get(descriptor) == known:
            del self._lines[descriptor]


class _ReceivedBytes:
    """Reads the bytes that a connection has received, by memory of its own, which one thread may use at a time."""

    def __init__(self) -> None:
        self._info, self._length = ctypes.create_string_buffer(_INFO_BYTES), ctypes.c_uint32()
        self._to_length = ctypes.byref(self._length)

    def of(self, descriptor: int) -> int:
        """The bytes so far. OSError where there is no connection."""
        if _LIBC is None:
            return 0
        self._length.value = _INFO_BYTES
        if _LIBC.getsockopt(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, self._info, self._to_length):
            raise OSError("this is not a TCP connection")
        return int(_RECEIVED.unpack_from(self._info, _RECEIVED_AT)[0]) if self._length.value == _INFO_BYTES else 0
