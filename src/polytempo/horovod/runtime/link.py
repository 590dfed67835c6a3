"""`RankLink`: messages between rank 0 and each other rank, in order: UNIX sockets on one host, TCP between hosts.

One thread at a time waits; any thread may send, and `interrupt` lets the one that waits return. Nothing blocks but
`wait`: what a socket does not take at once is left to a thread, which also sends while the program is in a collective
that other ranks join only when they have the whole message.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from torch._C._distributed_c10d import Store

from polytempo.core import TimedOut
from polytempo.worlds.threads import ended

Look = Callable[[], None]

MOST_BYTES = 256 << 20
"""The longest message."""
_LENGTH = struct.Struct("<I")
_TOKEN_BYTES = 32
_READ_BYTES = 1 << 18
_SLICE_S = 0.1
_SPIN_S = 100e-6
"""How long `wait` looks again and again before it lets the kernel wake it."""


@dataclass(eq=False)
class _Peer:
    rank: int
    socket: socket.socket
    coming: bytearray = field(default_factory=bytearray)
    going: bytearray = field(default_factory=bytearray)
    lock: threading.Lock = field(default_factory=threading.Lock)


class RankLink:
    """Rank `rank`'s ends: rank 0 has one to each other rank, the others have one to rank 0.

    `address`: where rank 0 listens for ranks of other hosts; "" where all are on one. All ranks make it together and
    meet at `store`; a rank that does not know the store's secret is turned away. `look` is called while rank 0 waits
    for the others, and may raise. Errors: TimedOut.
    """

    def __init__(
        self, rank: int, size: int, store: Store, *, address: str, timeout_s: float, look: Look | None = None
    ) -> None:
        self.rank, self.size = rank, size
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._rung = False
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        self._space = memoryview(bytearray(_READ_BYTES))
        """What has just been received; only the thread that waits uses it."""
        self._unsent = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._peers: dict[int, _Peer] = {}
        self._by_descriptor: dict[int, _Peer] = {}
        if size > 1:
            until_s = time.monotonic() + timeout_s
            if rank == 0:
                ends = _accepted(rank, size, store, address, until_s, look or (lambda: None))
            else:
                ends = _connected(rank, store, until_s)
            for peer, each in ends:
                self._add(peer, each)

    def _add(self, rank: int, found: socket.socket) -> None:
        found.setblocking(False)
        if found.family != getattr(socket, "AF_UNIX", None):
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = _Peer(rank, found)
        self._peers[rank] = self._by_descriptor[found.fileno()] = peer
        self._poll.register(found, select.POLLIN)

    def send(self, to: int, message: bytes) -> None:
        """Hand a message over. To a rank that is gone it is dropped: `wait` tells of the loss."""
        peer = self._peers.get(to)
        if peer is None:
            return
        data = _LENGTH.pack(len(message)) + message
        with peer.lock:
            sent = 0 if peer.going else _sent(peer.socket, data)
            if sent == len(data):
                return
            peer.going += data[sent:]
            if self._thread is None:
                self._thread = threading.Thread(target=self._send_rest, name="polytempo-link", daemon=True)
                self._thread.start()
        self._unsent.set()

    def wait(self, timeout_s: float, *, spin: bool = False) -> list[tuple[int, bytes | None]]:
        """(rank, message) of all that have come, None for the message of a rank that is lost; waits for the first.

        Empty after the time, or after `interrupt`.
        """
        ready = self._poll.poll(0)
        if spin and not ready:
            until_s = time.perf_counter() + min(timeout_s, _SPIN_S)
            while not ready and time.perf_counter() < until_s:
                os.sched_yield()
                ready = self._poll.poll(0)
        ready = ready or self._poll.poll(1000 * timeout_s)
        found: list[tuple[int, bytes | None]] = []
        for descriptor, _ in ready:
            peer = self._by_descriptor.get(descriptor)
            if peer is None:
                self._bell.recv(4096)
                self._rung = False  # a ring between the two is heard, too: this call returns
            else:
                self._read(peer, found)
        return found

    def interrupt(self) -> None:
        """Let `wait` return."""
        if not self._rung:
            self._rung = True
            self._ring.send(b"x")

    def close(self, linger_s: float = 1.0) -> None:
        """Send what is kept, at most for so long, and close."""
        until_s = time.monotonic() + linger_s
        while any(peer.going for peer in self._peers.values()) and time.monotonic() < until_s:
            time.sleep(0.01)
        self._closed = True
        self._unsent.set()
        ended(self._thread)
        for peer in self._peers.values():
            peer.socket.close()
        self._peers.clear()
        self._bell.close()
        self._ring.close()

    def _send_rest(self) -> None:
        """The thread: send what is kept, as sockets take it."""
        while not self._closed:
            self._unsent.wait()
            self._unsent.clear()
            while not self._closed and (busy := [peer for peer in list(self._peers.values()) if peer.going]):
                writable = select.poll()
                with suppress(OSError, ValueError):  # one of them has just been closed
                    for peer in busy:
                        writable.register(peer.socket, select.POLLOUT)
                    writable.poll(1000 * _SLICE_S)
                for peer in busy:
                    with peer.lock:
                        del peer.going[: _sent(peer.socket, bytes(peer.going[:_READ_BYTES]))]

    def _read(self, peer: _Peer, found: list[tuple[int, bytes | None]]) -> None:
        try:
            count = peer.socket.recv_into(self._space)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        data = self._space[:count]
        if not peer.coming and count > _LENGTH.size and _LENGTH.unpack_from(data)[0] == count - _LENGTH.size:
            found.append((peer.rank, bytes(data[_LENGTH.size :])))  # one message, as nearly always
            return
        peer.coming += data
        while len(peer.coming) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(peer.coming)
            if length > MOST_BYTES:
                count = 0  # no rank sends that: what follows cannot be told apart
                break
            if len(peer.coming) < _LENGTH.size + length:
                break
            found.append((peer.rank, bytes(peer.coming[_LENGTH.size : _LENGTH.size + length])))
            del peer.coming[: _LENGTH.size + length]
        if not count:
            found.append((peer.rank, None))
            self._poll.unregister(peer.socket)
            self._by_descriptor.pop(peer.socket.fileno())
            self._peers.pop(peer.rank).socket.close()


def _sent(to: socket.socket, data: bytes) -> int:
    try:
        return to.send(data)
    except BlockingIOError:
        return 0
    except OSError:  # it is gone, as `wait` will find
        return len(data)


_Ends = list[tuple[int, socket.socket]]


def _accepted(rank: int, size: int, store: Store, address: str, deadline_s: float, look: Look) -> _Ends:
    """Rank 0's ends, once all others have come."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    if address or sys.platform != "linux":
        host = address or "127.0.0.1"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=size)
        where = f"{host}|{listener.getsockname()[1]}"
    else:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        where = f"polytempo-{secrets.token_hex(16)}"
        listener.bind(f"\0{where}")  # a name that is no file
        listener.listen(size)
    ends: dict[int, socket.socket] = {}
    with listener, ExitStack() as open_ends:
        store.set("link", f"{where}|{token.hex()}")
        while len(ends) < size - 1:
            look()
            left_s = deadline_s - time.monotonic()
            listener.settimeout(min(max(left_s, 0.001), _SLICE_S))
            try:
                one, _ = listener.accept()
            except TimeoutError:
                if left_s > 0:
                    continue
                late = sorted(set(range(1, size)) - set(ends))
                raise TimedOut(rank, None, "init", max(left_s, 0), f"ranks {late} have not come") from None
            who = _greeting(one, token, size)
            if who is None or who in ends:
                one.close()
            else:
                ends[who] = open_ends.enter_context(one)
        open_ends.pop_all()
    return list(ends.items())


def _greeting(one: socket.socket, token: bytes, size: int) -> int | None:
    """The rank that is at the other end; None for a stranger."""
    one.settimeout(5.0)
    data = b""
    try:
        while len(data) < _TOKEN_BYTES + _LENGTH.size:
            more = one.recv(_TOKEN_BYTES + _LENGTH.size - len(data))
            if not more:
                return None
            data += more
    except OSError:
        return None
    (rank,) = _LENGTH.unpack(data[_TOKEN_BYTES:])
    known = hmac.compare_digest(data[:_TOKEN_BYTES], token) and 0 < rank < size
    return rank if known else None


def _connected(rank: int, store: Store, deadline_s: float) -> _Ends:
    where, *port, token = store.get("link").decode().split("|")
    left_s = max(deadline_s - time.monotonic(), 0.001)
    if port:
        one = socket.create_connection((where, int(port[0])), timeout=left_s)
    else:
        one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        one.settimeout(left_s)
        one.connect(f"\0{where}")
    one.sendall(bytes.fromhex(token) + _LENGTH.pack(rank))
    return [(0, one)]
