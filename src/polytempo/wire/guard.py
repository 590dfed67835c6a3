"""`ConnectionGuard`: admits connections with the run's keys, counts refused ones, and bounds the others.

ZeroMQ asks it about every new connection (ZAP, rfc.zeromq.org/spec/27), and reports accepted connections and finished
handshakes. It has a thread of its own, so that nodes connect while their programs compute.

    accepted ──▶ at most `MOST_STRANGERS` wait, each with at most one part's bytes (`message_parts`) ─ keys ─▶ admitted
                      └── the oldest is closed for a new one; all are, where descriptors run short

It does not subscribe to failed handshakes: to report one, libzmq (4.3.5) overwrites its own note of the error, and then
sometimes leaves the connection open but dead instead of closing it.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from polytempo.core.system import descriptors
from polytempo.wire.context import monitor_of
from polytempo.wire.descriptor_copy import descriptor_copy
from polytempo.wire.keys import Keys
from polytempo.wire.unfinished import LOOK_S, UnfinishedBytes

Known = Callable[[bytes], str | None]
"""The name of the peer that has a public key of 32 bytes; None for a stranger. Called in the guard's thread."""
_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"polytempo"
_JOIN_S = 5.0
MOST_STRANGERS = 32
"""Connections of one socket that have not shown keys. A handshake takes a few round trips, and is tried again."""
_SPARE = 64
"""So few descriptors left, and none of them is for a stranger."""
_WELCOME_BYTES = 270
"""A server has sent less after a greeting (64), a welcome (170) and an error (12), more after accepting keys (301)."""
_SENT = struct.Struct("@Q")
_SENT_AT = 200
"""The offset of `tcpi_bytes_sent` in Linux's `struct tcp_info`."""


class ConnectionGuard:
    """Guards `socket`, which must not be bound yet. Ends when the context ends."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        keys: Keys | None,
        known: Known | None = None,
        unfinished: UnfinishedBytes | None = None,
    ) -> None:
        """`known`: the name of the peer with a public key, in place of the run's one client key. `unfinished`: bounds
        the bytes of peers with keys."""
        self._unfinished = unfinished
        self._come = self._let_in = 0
        self._client, self._known = keys.client if keys is not None else None, known
        self._strangers = Strangers(descriptors.raised())
        self._monitor = monitor_of(socket, zmq.Event.ACCEPTED | zmq.Event.HANDSHAKE_SUCCEEDED)
        self._questions: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._questions.linger = self._monitor.linger = 0
        self._questions.bind(_ZAP)
        if keys is not None:
            socket.zap_domain = _DOMAIN
            socket.zap_enforce_domain = True
        self._thread = threading.Thread(target=self._stand, name="polytempo-guard", daemon=True)
        self._thread.start()

    @property
    def refused(self) -> int:
        """Connections that were not admitted, and unfinished handshakes."""
        return max(0, self._come - self._let_in)

    def join(self) -> None:
        """Wait for the guard's end; call it after the context has ended."""
        self._thread.join(_JOIN_S)

    def _stand(self) -> None:
        poller = zmq.Poller()
        poller.register(self._questions, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        look_at_s = 0.0
        try:
            while True:
                ready = dict(poller.poll(None if self._unfinished is None else round(1e3 * LOOK_S)))
                if self._monitor in ready:
                    self._hear(parse_monitor_message(self._monitor.recv_multipart()))
                if self._questions in ready:
                    self._questions.send_multipart(self._answer(self._questions.recv_multipart()))
                if self._unfinished is not None and time.monotonic() >= look_at_s:
                    self._unfinished.look()
                    look_at_s = time.monotonic() + LOOK_S
        except zmq.ContextTerminated:
            pass
        finally:
            self._questions.close()
            self._monitor.close()

    def _hear(self, report: Mapping[str, Any]) -> None:
        self._let_in += report["event"] == zmq.Event.HANDSHAKE_SUCCEEDED
        if report["event"] == zmq.Event.ACCEPTED:
            self._come += 1
            if self._unfinished is not None:
                self._unfinished.come(report["value"])
            if self._client is not None or self._known is not None:
                self._strangers.come(report["value"], int(report["endpoint"].rpartition(b":")[2]))

    def _answer(self, question: list[bytes]) -> list[bytes]:
        """Yes to the run's client key, or to known ones, no to all else. A known peer's messages carry its name."""
        version, number, domain, _, _, mechanism, *credentials = question  # ZeroMQ itself asks, not the peer
        name: str | None = None
        if mechanism == b"CURVE" and domain == _DOMAIN and len(credentials) == 1:
            [key] = credentials
            name = self._known(key) if self._known is not None else "" if key == self._client else None
        status, text = (b"400", b"unknown key") if name is None else (b"200", b"OK")
        return [version, number, status, text, (name or "").encode(), b""]


class Strangers:
    """Accepted connections, the oldest first; at most `MOST_STRANGERS` of them have not shown keys.

    ZeroMQ owns their descriptors, and may close one at any time: each look takes a copy of the descriptor, and believes
    it where its ends are the connection's. `limit`: the number of descriptors that this process may have.
    On Linux alone: elsewhere the system does not say how far a handshake is, and only time bounds them.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._here: deque[tuple[int, Any]] = deque()

    def come(self, descriptor: int, port: int) -> None:
        """A connection was accepted at `port`. Close the oldest that have no keys, where they are too many."""
        if sys.platform != "linux":
            return
        with suppress(OSError), descriptor_copy(descriptor) as connection:  # it may have gone already
            if connection.getsockname()[1] == port:
                self._here.append((descriptor, connection.getpeername()))
        most = 0 if descriptor >= self._limit - _SPARE else MOST_STRANGERS
        while len(self._here) > most:
            _close_unless_known(*self._here.popleft())


def _close_unless_known(descriptor: int, peer: Any) -> None:
    with suppress(OSError), descriptor_copy(descriptor) as connection:
        if connection.getpeername() == peer and not _has_keys(connection):
            connection.shutdown(socket.SHUT_RDWR)


def _has_keys(connection: socket.socket) -> bool:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SENT_AT + _SENT.size)
    return len(info) < _SENT_AT + _SENT.size or _SENT.unpack_from(info, _SENT_AT)[0] > _WELCOME_BYTES


_IDLE_S, _PROBE_S, _MOST_PROBES = 10, 5, 4
"""TCP's questions to the other end of a connection without traffic: after so long, so often, so many times."""


def watch_by_tcp(socket: zmq.Socket[bytes], unconfirmed_s: float) -> None:
    """Close a connection of `socket` where no sent byte is confirmed for `unconfirmed_s`, or after 30 idle seconds.

    For sockets with mail that may wait to be read, instead of ZeroMQ's heartbeats: where such a connection breaks,
    libzmq 4.3.5 aborts the whole process at its next heartbeat ("Assertion failed: !_io_error").
    """
    socket.tcp_keepalive, socket.tcp_keepalive_cnt = 1, _MOST_PROBES
    socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl = _IDLE_S, _PROBE_S
    socket.tcp_maxrt = round(1e3 * unconfirmed_s)
