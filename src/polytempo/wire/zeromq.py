"""`Mailbox`: one node's mail over ZeroMQ; `TwoEnds`: its mail by files and by TCP.

node 3   DEALER ──┐                       Every node binds one ROUTER, where its mail arrives, and connects a
node 5   DEALER ──┴▶ ROUTER   node 0      DEALER to each node that it writes to. The DEALER's routing id is
node 0   DEALER ───▶ ROUTER   node 3      the sender's number.

Processes that may write: on `ipc://` all that may enter the folder, which must be this user's alone; on `tcp://`
all that have the run's keys (CURVE; the number of a connection's messages makes a replayed or spliced one fail).
Without keys only loopback addresses are allowed: any user of the host can write there.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
import stat
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from polytempo.server.message import Message
from polytempo.wire.context import end_context
from polytempo.wire.frames import FrameLimits, Malformed, References, decode, encode
from polytempo.wire.guard import ConnectionGuard, watch_by_tcp
from polytempo.wire.keys import Keys
from polytempo.wire.memory import keep_memory
from polytempo.wire.message_parts import MOST_FRAME_BYTES, PART_BYTES, Frame, received

_NUMBER = re.compile(rb"0|[1-9][0-9]{0,8}")
_LENT_BYTES = 65536
"""Frames from this size on are lent to ZeroMQ, shorter ones copied (its own default threshold)."""
_UNCONFIRMED_S = 30.0
_HANDSHAKE_MS = 10_000
_RECONNECT_MS, _LONGEST_RECONNECT_MS = 20, 1_000


@dataclass
class MailCounts:
    """Numbers of messages and connections of a mailbox."""

    posted: int = 0
    taken: int = 0
    dropped: int = 0
    """Not sent: the line to the node was full, or no address of it is known."""
    malformed: int = 0
    """Arrived and refused: no message, or without a valid sender."""
    refused: int = 0
    """Connections not admitted: no keys, wrong keys, not ZeroMQ at all (and unfinished handshakes)."""


@dataclass
class _Peer:
    socket: zmq.Socket[bytes]
    references: References | None
    part_bytes: int | None
    lent: deque[zmq.MessageTracker] = field(default_factory=deque)


class Mailbox:
    """The mail of node `node`, arriving at `address`: `ipc:///folder/name`, or `tcp://127.0.0.1:*` (any free port).

    `references`: memory shared on this host; tensors in it travel as references over `ipc://`. `high_water` bounds
    messages under way to each node and from it, `num_nodes` the senders' numbers. Make it after forking, and use it in
    one thread. `keeps_memory`: see `wire.memory`; it is for processes that are the node's alone.
    Errors: ValueError for an address that is open to others than the keys' owners.
    """

    def __init__(
        self,
        node: int,
        address: str,
        keys: Keys | None = None,
        limits: FrameLimits | None = None,
        *,
        references: References | None = None,
        high_water: int = 256,
        num_nodes: int = 1 << 16,
        keeps_memory: bool = False,
    ) -> None:
        self.node, self.limits = node, limits or FrameLimits()
        self._counts = MailCounts()
        self._keys, self._references = keys, references
        self._high_water, self._num_nodes = high_water, num_nodes
        self._local = checked(address, keys is not None)
        self._peers: dict[int, _Peer] = {}
        if keeps_memory:
            keep_memory()
        self._context = zmq.Context()
        self._guard: ConnectionGuard | None = None
        self._file: Path | None = None
        self._router = self._socket(zmq.ROUTER, address)
        try:
            if not self._local:
                self._guard = ConnectionGuard(self._context, self._router, keys)
            self._router.router_handover = True  # a node that is started again takes the place of its former life
            if keys is not None:
                self._router.curve_server = True
                self._router.curve_secretkey = keys.server_secret
            self._router.bind(address)
            if self._local:
                self._file = Path(address.removeprefix("ipc://"))
        except BaseException:
            self.close()
            raise
        self.address = self._router.get_string(zmq.LAST_ENDPOINT)
        """The address for other nodes."""

    def connect(self, node: int, address: str) -> None:
        """Connect to `node` at `address` immediately; a former connection to it is closed."""
        local = checked(address, self._keys is not None)
        self.forget(node)
        socket = self._socket(zmq.DEALER, address)
        socket.routing_id = str(self.node).encode()
        socket.reconnect_ivl, socket.reconnect_ivl_max = _RECONNECT_MS, _LONGEST_RECONNECT_MS
        if self._keys is not None:
            socket.curve_serverkey = self._keys.server_public
            socket.curve_publickey, socket.curve_secretkey = self._keys.client_public, self._keys.client_secret
        socket.connect(address)
        part_bytes = None if local else PART_BYTES
        self._peers[node] = _Peer(socket, self._references if local else None, part_bytes)

    def forget(self, node: int) -> None:
        """Close the line to `node`, with all that has not left."""
        peer = self._peers.pop(node, None)
        if peer is not None:
            peer.socket.close(0)

    def post(self, to: int, message: Message) -> bool:
        """Send without waiting. False: the line is full or unknown, and the message dropped; ask again later.

        Large tensors are lent, not copied: see `encode` for how long they must stay unchanged. Their memory is kept
        until ZeroMQ has released it.
        """
        peer = self._peers.get(to)
        if peer is None:
            self._counts.dropped += 1
            return False
        frames = encode(message, peer.references, peer.part_bytes)
        lent = any(len(frame) >= _LENT_BYTES for frame in frames)
        try:
            tracker = peer.socket.send_multipart(frames, zmq.NOBLOCK, copy=not lent, track=lent)
        except zmq.Again:
            self._counts.dropped += 1
            return False
        while peer.lent and peer.lent[0].done:
            peer.lent.popleft()
        if tracker is not None:
            peer.lent.append(tracker)
        self._counts.posted += 1
        return True

    def settle(self, wait_s: float) -> bool:
        """Wait until all large tensors that were posted have left; False if some have not after `wait_s`."""
        until_s = time.monotonic() + wait_s
        for peer in self._peers.values():
            for tracker in peer.lent:
                try:
                    tracker.wait(max(0.0, until_s - time.monotonic()))
                except zmq.NotDone:
                    return False
        return True

    def take(self, wait_s: float | None = None) -> tuple[int, Message] | None:
        """The next (source, message); None if none comes within `wait_s` (None: wait without end)."""
        until_s = math.inf if wait_s is None else time.monotonic() + wait_s
        while True:
            parts = received(self._router, self.limits.total_bytes, self.limits.num_frames)
            mail = None if parts is None else self._opened(parts)
            if mail is not None:
                self._counts.taken += 1
                return mail
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return None
            if parts is None:
                self._router.poll(None if left_s == math.inf else math.ceil(1e3 * left_s))

    @property
    def arrivals(self) -> zmq.Socket[bytes]:
        """The socket to wait on for mail, together with others; `take` alone reads it."""
        return self._router

    def _opened(self, parts: list[Frame]) -> tuple[int, Message] | None:
        sender = bytes(parts[0])
        if _NUMBER.fullmatch(sender) and (source := int(sender)) < self._num_nodes:
            with suppress(Malformed):
                return source, decode(parts[1:], self.limits, self._references if self._local else None)
        self._counts.malformed += 1
        return None

    @property
    def counts(self) -> MailCounts:
        """The counts so far."""
        self._counts.refused = self._guard.refused if self._guard else 0
        return self._counts

    def close(self, linger_s: float = 0.0) -> None:
        """Close all connections. Messages that have not left get `linger_s`, then they are dropped."""
        if self._context.closed:
            return
        self._router.disable_monitor()
        self._router.close(0)
        for peer in self._peers.values():
            peer.socket.close(round(1e3 * linger_s))
        self._peers.clear()
        end_context(self._context)
        if self._file is not None:  # ZeroMQ leaves it
            self._file.unlink(missing_ok=True)
        if self._guard is not None:
            self._guard.join()

    def _socket(self, kind: zmq.SocketType, address: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = self._high_water
        socket.maxmsgsize = self.limits.total_bytes
        socket.ipv6 = "[" in address
        if not address.startswith("ipc:"):
            socket.maxmsgsize = min(self.limits.total_bytes, MOST_FRAME_BYTES)
            socket.handshake_ivl = _HANDSHAKE_MS
            watch_by_tcp(socket, _UNCONFIRMED_S)
        return socket


class TwoEnds:
    """A node's mail by two ways, as one mailbox: `near`, at an `ipc://` address or None, and `far`. It closes both.

    processes of this host ── files, tensors in shared memory ──▶ near ┐
    processes of others    ── TCP, encrypted ──────────────────▶ far  ┴─▶ take
    """

    def __init__(self, near: Mailbox | None, far: Mailbox) -> None:
        self.near, self.far = near, far
        self._ends: list[Mailbox] = [far] if near is None else [near, far]
        self._poller = zmq.Poller()
        for end in self._ends:
            self._poller.register(end.arrivals, zmq.POLLIN)
        self._ways: dict[int, Mailbox] = {}
        """Node -> the end of mail for it."""

    def connect(self, node: int, address: str) -> None:
        """Write to `node` at `address` from now on; a former line to it is closed, whichever way it went."""
        is_file = address.startswith("ipc://")
        if is_file and self.near is None:
            raise ValueError(f"{address} is a file of another host; this node has no mail by files")
        self.forget(node)
        end = self.near if is_file and self.near is not None else self.far
        end.connect(node, address)
        self._ways[node] = end

    def forget(self, node: int) -> None:
        """Close the line to `node`, with all that has not left."""
        end = self._ways.pop(node, None)
        if end is not None:
            end.forget(node)

    def post(self, to: int, message: Message) -> bool:
        """See `Mailbox.post`."""
        return self._ways.get(to, self.far).post(to, message)

    def take(self, wait_s: float | None = None) -> tuple[int, Message] | None:
        """The next (source, message) of either end, or None if none comes within `wait_s`; the ends take turns."""
        until_s = math.inf if wait_s is None else time.monotonic() + wait_s
        while True:
            for end in tuple(self._ends):
                mail = end.take(0.0)
                if mail is not None:
                    self._ends.remove(end)
                    self._ends.append(end)
                    return mail
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return None
            self._poller.poll(None if left_s == math.inf else math.ceil(1e3 * left_s))

    def close(self, linger_s: float = 0.0) -> None:
        """Close both; messages that have not left get `linger_s` in all."""
        until_s = time.monotonic() + linger_s
        for end in self._ends:
            end.close(max(0.0, until_s - time.monotonic()))


_TCP = re.compile(r"tcp://(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[^\[\]:/]+)):(?P<port>\*|[0-9]{1,5})")
_PATH_BYTES = 107
"""The longest path of a socket: `sun_path` without the zero at its end."""


def checked(address: str, has_keys: bool) -> bool:
    """True if `address` is on this host by file (`ipc://`). Refuses addresses that other users can reach.

    Errors: ValueError for an `ipc://` path that is too long or in a folder that others may enter, for a `tcp://`
    address beyond loopback without keys, and for anything else.
    """
    if address.startswith("ipc://"):
        _check_folder(Path(address.removeprefix("ipc://")))
        return True
    match = _TCP.fullmatch(address)
    if match is None:
        raise ValueError(f"a mailbox is at ipc:///folder/name or tcp://host:port, not at {address!r}")
    if not has_keys and not _is_loopback(match["six"] or match["host"]):
        raise ValueError(f"{address} can be reached from other hosts, so it needs keys; without them use 127.0.0.1")
    return False


def _check_folder(path: Path) -> None:
    if not path.is_absolute() or len(os.fsencode(path)) > _PATH_BYTES:
        raise ValueError(f"{path} must be an absolute path of up to {_PATH_BYTES} bytes; use a shorter folder")
    status = os.stat(path.parent, follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ValueError(f"{path.parent} must be a folder of this user that others cannot enter (chmod 700)")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name or an interface: its address is not known here
        return False
