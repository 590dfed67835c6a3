"""A channel: one process that listens, and others that connect to it with the run's keys; small messages both ways.

    agent  ChannelClient ── DEALER ─┐
    agent  ChannelClient ── DEALER ─┴▶ ROUTER  ChannelServer  head

Both ends are encrypted and authenticated by CURVE, and bounded: a message has at most `most_bytes`, a queue
`HIGH_WATER` messages. Anything but a message of the expected type is dropped and counted. Clients have the run's keys,
or each has its own (`known`); then a message comes with the name of the client that has sent it, and a client may
have as many bytes as `_WAITING` messages and an unfinished one, over all of its connections. One with more is closed.
"""

from __future__ import annotations

import math
import secrets
import time
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from polytempo.wire.context import end_context, monitor_of
from polytempo.wire.guard import ConnectionGuard, Known, watch_by_tcp
from polytempo.wire.keys import ClientKeys, Keys
from polytempo.wire.message_parts import MOST_FRAME_BYTES, PART_BYTES, Frame, cut, named, received
from polytempo.wire.unfinished import UnfinishedBytes

MOST_BYTES = 128 << 20
"""More than a result may have, which is the largest that travels (see `engines.processes.worker.MAX_RESULT_BYTES`)."""
HIGH_WATER = 10_000
_WAITING = 4
"""Messages that wait for their reader, of each client with a key of its own."""
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 1_000, 10_000
"""Heartbeats of the clients alone: a server answers them, and closes silent connections by TCP (see `watch_by_tcp`)."""
_HANDSHAKE_MS = 10_000
_RECONNECT_MS, _LONGEST_RECONNECT_MS = 50, 1_000
_PEER_BYTES = 16

In = TypeVar("In")
Out = TypeVar("Out")


class ChannelServer(Generic[In, Out]):
    """Listens at `tcp://host:port` (`*`: any free port) and takes messages of type `takes` from clients with the keys.

    Errors: ValueError where this host cannot listen there.
    """

    def __init__(
        self,
        address: str,
        keys: Keys,
        takes: type[In],
        *,
        known: Known | None = None,
        most_bytes: int = MOST_BYTES,
        high_water: int = HIGH_WATER,
    ) -> None:
        self._context = zmq.Context()
        self._decoder = msgspec.msgpack.Decoder(takes)
        self._most_bytes, self._most_parts = most_bytes, most_bytes // PART_BYTES + 2
        self._unfinished = None if known is None else UnfinishedBytes((_WAITING + 1) * most_bytes)
        self._router = _socket(self._context, zmq.ROUTER, address, high_water)
        if known is not None:
            self._router.rcvhwm = _WAITING
        watch_by_tcp(self._router, 1e-3 * _HEARTBEAT_TIMEOUT_MS)
        self._guard = ConnectionGuard(self._context, self._router, keys, known, self._unfinished)
        self._router.curve_server = True
        self._router.curve_secretkey = keys.server_secret
        self._router.router_mandatory = True
        self._router.router_handover = True  # a client may come back before the break of its connection is noticed
        self.malformed = 0
        """The number of malformed messages."""
        try:
            self._router.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"this host cannot listen at {address} ({error}); give an address of its own") from error
        self.address = self._router.get_string(zmq.LAST_ENDPOINT)
        """The address with the port."""

    @property
    def refused(self) -> int:
        """Connections that were not admitted: no keys, wrong keys, not ZeroMQ at all."""
        return self._guard.refused

    def send(self, peer: bytes, message: Out) -> bool:
        """Send without waiting; False where the peer is not connected or does not read."""
        return self.sent(peer, message) is True

    def sent(self, peer: bytes, message: Out) -> bool | None:
        """The same; None where the peer is not connected, False where it is and its queue is full."""
        try:
            self._router.send_multipart([peer, *cut(msgspec.msgpack.encode(message))], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError:
            return None
        return True

    def take(self, wait_s: float = 0.0) -> tuple[bytes, In] | None:
        """The next (peer, message); None if none comes within `wait_s`."""
        found = self.take_named(wait_s)
        return None if found is None else (found[0], found[2])

    def take_named(self, wait_s: float = 0.0) -> tuple[bytes, str, In] | None:
        """The next (peer, name, message); the name is the answer of `known` for its key ("" without `known`)."""
        until_s = time.monotonic() + wait_s
        while True:
            name, parts = self._received()
            if parts is not None and 2 <= len(parts) <= self._most_parts:
                with suppress(msgspec.DecodeError):
                    return bytes(parts[0]), name, self._decoder.decode(b"".join(parts[1:]))
            if parts is not None:
                self.malformed += 1
                continue
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return None
            self._router.poll(math.ceil(1e3 * left_s))

    def _received(self) -> tuple[str, list[Frame] | None]:
        if self._unfinished is not None:
            found = named(self._router, self._most_bytes, self._most_parts)
            if found is None:
                return "", None
            self._unfinished.taken(found.descriptor, found.name)
            return found.name, found.parts
        return "", received(self._router, self._most_bytes, self._most_parts)

    def close(self, linger_s: float = 0.0) -> None:
        """Let sent messages leave for `linger_s`, and close."""
        if not self._context.closed:
            self._router.disable_monitor()
            self._router.close(round(1e3 * linger_s))
            end_context(self._context)
            self._guard.join()


class ChannelClient(Generic[In, Out]):
    """Connects to the server at `address`, again and again where the connection breaks, and takes `takes`."""

    def __init__(self, address: str, keys: Keys | ClientKeys, takes: type[In], *, most_bytes: int = MOST_BYTES) -> None:
        self.address, self.connections = address, 0
        self._most_bytes, self._most_parts = most_bytes, most_bytes // PART_BYTES + 2
        self._context = zmq.Context()
        self._decoder = msgspec.msgpack.Decoder(takes)
        self._dealer = _socket(self._context, zmq.DEALER, address)
        self._dealer.heartbeat_ivl, self._dealer.heartbeat_timeout = _HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS
        self._dealer.routing_id = b"a" + secrets.token_bytes(_PEER_BYTES - 1)  # ZeroMQ's own begin with a zero
        self._dealer.curve_serverkey = keys.server_public
        self._dealer.curve_publickey, self._dealer.curve_secretkey = keys.client_public, keys.client_secret
        events = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED
        self._monitor = monitor_of(self._dealer, events)
        self._parted_s: float | None = time.monotonic()
        self._dealer.connect(address)

    @property
    def parted_s(self) -> float:
        """Seconds without a connection, for all attempts since; 0 while there is one."""
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._parted_s, self.connections = None, self.connections + 1
            elif self._parted_s is None:
                self._parted_s = time.monotonic()
        return 0.0 if self._parted_s is None else time.monotonic() - self._parted_s

    def send(self, message: Out) -> bool:
        """Send without waiting; False where the line is full, because the server does not read."""
        try:
            self._dealer.send_multipart(cut(msgspec.msgpack.encode(message)), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def take(self, wait_s: float = 0.0) -> In | None:
        """The next message; None if none comes within `wait_s`."""
        if wait_s > 0 and not self._dealer.poll(math.ceil(1e3 * wait_s)):
            return None
        parts = received(self._dealer, self._most_bytes, self._most_parts)
        if parts is not None and len(parts) <= self._most_parts:
            with suppress(msgspec.DecodeError):
                return self._decoder.decode(b"".join(parts))
        return None

    def close(self, linger_s: float = 0.0) -> None:
        """Let sent messages leave for `linger_s`, and close."""
        if not self._context.closed:
            self._dealer.disable_monitor()
            self._monitor.close(0)
            self._dealer.close(round(1e3 * linger_s))
            end_context(self._context)


def _socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: zmq.SocketType, address: str, high_water: int = HIGH_WATER
) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = high_water
    socket.maxmsgsize = MOST_FRAME_BYTES
    socket.ipv6 = "[" in address
    socket.handshake_ivl = _HANDSHAKE_MS
    socket.reconnect_ivl, socket.reconnect_ivl_max = _RECONNECT_MS, _LONGEST_RECONNECT_MS
    return socket
