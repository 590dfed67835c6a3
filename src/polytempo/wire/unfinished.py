"""`UnfinishedBytes`: closes connections that send a message without an end.

ZeroMQ holds the parts of a message until its last one has come, without a bound, and shows none of them. So the bytes
of each connection are counted by its TCP, from the last whole message that its reader took.

    taken               whole, not yet read      parts without an end
    ├───── message ─────┼──── message ───────────┼────────────────▶ more than `most_bytes` since `taken`: closed
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from contextlib import suppress
from typing import Any, NamedTuple

from polytempo.wire.descriptor_copy import descriptor_copy

LOOK_S = 0.25
"""Seconds between looks: a connection exceeds its bound by the bytes of so long at most."""
_BEAT_BYTES_PER_S = 256
"""More than heartbeats have."""
_RECEIVED = struct.Struct("@Q")
_RECEIVED_AT = 128
"""The offset of `tcpi_bytes_received` in Linux's `struct tcp_info`."""


class _Line(NamedTuple):
    peer: Any
    received: int
    """Bytes of the connection when its last whole message was taken."""
    at_s: float


class UnfinishedBytes:
    """The connections of a socket at `port`, and their bytes. On Linux alone: elsewhere the system does not count."""

    def __init__(self, most_bytes: int) -> None:
        """`most_bytes`: of all messages that may wait for their reader, and an unfinished one."""
        self._most = most_bytes
        self._lines: dict[int, _Line] = {}

    def come(self, descriptor: int) -> None:
        """A connection was accepted."""
        with suppress(OSError), descriptor_copy(descriptor) as line:
            self._lines[descriptor] = _Line(line.getpeername(), 0, time.monotonic())

    def taken(self, descriptor: int) -> None:
        """A whole message of the connection was read. Called in another thread than the rest."""
        known = self._lines.get(descriptor)
        if known is None:
            return
        with suppress(OSError), descriptor_copy(descriptor) as line:
            if line.getpeername() == known.peer:
                self._lines[descriptor] = known._replace(received=_received(line), at_s=time.monotonic())

    def look(self) -> None:
        """Close the connections with too many bytes, and forget the gone ones."""
        for descriptor, known in list(self._lines.items()):
            try:
                with descriptor_copy(descriptor) as line:
                    if line.getpeername() != known.peer:
                        raise OSError("another connection has the descriptor")
                    beats = _BEAT_BYTES_PER_S * (time.monotonic() - known.at_s)
                    if _received(line) - known.received > self._most + beats:
                        line.shutdown(socket.SHUT_RDWR)
            except OSError:
                if self._lines.get(descriptor) == known:
                    del self._lines[descriptor]


def _received(line: socket.socket) -> int:
    if sys.platform != "linux":
        return 0
    info = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + _RECEIVED.size)
    return int(_RECEIVED.unpack_from(info, _RECEIVED_AT)[0]) if len(info) >= _RECEIVED_AT + _RECEIVED.size else 0
