"""`RankLink`: messages between rank 0 and each other rank, in order: UNIX sockets on one host, TCP between hosts.

The UNIX socket is a file in a private folder, so other users cannot connect to it. Over TCP anyone can: a connection
counts once it has sent the token from the store, delays no other before, and is closed where there are many of them.

One thread at a time waits; any thread may send, and `interrupt` wakes the waiting thread. Nothing blocks but `wait`:
bytes that a socket does not take immediately are left to a thread, which also sends while the program is in a
collective that other ranks join only when they have the whole message.
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
from polytempo.core.system.scratch_folder import ScratchFolder
from polytempo.worlds.process.threads import ended

Look = Callable[[], None]
_Ends = list[tuple[int, socket.socket]]

MOST_BYTES = 256 << 20
"""The longest message."""
_LENGTH = struct.Struct("<I")
_TOKEN_BYTES = 32
_READ_BYTES = 1 << 18
_GREETING_BYTES = _TOKEN_BYTES + _LENGTH.size
_SPARE_GUESTS = 64
"""So many connections beside the ranks' own may be open without a greeting; then the oldest is closed."""
_CREDENTIALS = struct.Struct("iII")
"""Process, user and group at the other end of a UNIX socket, as Linux tells them."""
_SLICE_S = 0.1
_SPIN_S = 100e-6
"""`wait` looks again and again for so long before it lets the kernel wake it."""


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
        ends: _Ends = []
        if size > 1 and rank:
            ends = _connected(rank, store, timeout_s)
        elif size > 1:
            ends = _accepted(size, store, address, timeout_s, look or (lambda: None))
        self.rank, self.size = rank, size
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._rung = False
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        self._space = memoryview(bytearray(_READ_BYTES))
        """The bytes that have just been received; only the waiting thread uses them."""
        self._unsent = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._peers: dict[int, _Peer] = {}
        self._by_descriptor: dict[int, _Peer] = {}
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
        """Send the remaining bytes, at most for so long, and close."""
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
        """The thread: send the remaining bytes when sockets take them."""
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
                count = 0  # no rank sends that: the rest cannot be read
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


def _accepted(size: int, store: Store, address: str, timeout_s: float, look: Look) -> _Ends:
    """Rank 0's ends, once all others have come."""
    token, until_s = secrets.token_bytes(_TOKEN_BYTES), time.monotonic() + timeout_s
    ends: dict[int, socket.socket] = {}
    with ExitStack() as listening, ExitStack() as open_ends:
        listener, where = _listening(address, size, listening)
        guests = listening.enter_context(_Guests(listener, token, size))
        store.set("link", f"{where}|{token.hex()}")
        while len(ends) < size - 1:
            look()
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                late = sorted(set(range(1, size)) - set(ends))
                raise TimedOut(0, None, "init", timeout_s, f"ranks {late} have not come")
            for who, one in guests.greeted(min(left_s, _SLICE_S)):
                if who in ends:
                    one.close()
                else:
                    ends[who] = open_ends.enter_context(one)
        open_ends.pop_all()
    return list(ends.items())


def _listening(address: str, size: int, listening: ExitStack) -> tuple[socket.socket, str]:
    """Rank 0's socket, and where others find it: `host|port`, or a path that only this user can follow."""
    if address or sys.platform != "linux":
        host = address or "127.0.0.1"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = listening.enter_context(socket.create_server((host, 0), family=family, backlog=size))
        where = f"{host}|{listener.getsockname()[1]}"
    else:
        home = listening.enter_context(ScratchFolder())
        folder = os.open(home.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        listening.callback(os.close, folder)
        where = f"/proc/{os.getpid()}/fd/{folder}/link"  # short, with any TMPDIR, and the same in any container
        listener = listening.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(where)
        listener.listen(size)
    listener.setblocking(False)
    return listener, where


class _Guests:
    """Connections to rank 0 that have not greeted yet, the oldest first. None of them can let it wait."""

    def __init__(self, listener: socket.socket, token: bytes, size: int) -> None:
        self._listener, self._token, self._size = listener, token, size
        self._said: dict[socket.socket, bytes] = {}

    def __enter__(self) -> _Guests:
        return self

    def __exit__(self, *exception: object) -> None:
        for one in self._said:
            one.close()

    def greeted(self, timeout_s: float) -> _Ends:
        """(rank, connection) of each new greeting; waits for the first news, which may not be a greeting."""
        ready = select.poll()
        for one in (self._listener, *self._said):
            ready.register(one, select.POLLIN)
        if not ready.poll(1000 * timeout_s):
            return []
        with suppress(OSError):  # no other is there, or it has gone already
            one, _ = self._listener.accept()
            one.setblocking(False)
            self._said[one] = b""
        found = [(who, one) for one in list(self._said) if (who := self._heard(one)) is not None]
        if len(self._said) > self._size + _SPARE_GUESTS:
            self._dismiss(next(iter(self._said)))
        return found

    def _heard(self, one: socket.socket) -> int | None:
        """Read on; the rank at the other end, if its greeting is complete. A stranger is dismissed."""
        try:
            more = one.recv(_GREETING_BYTES - len(self._said[one]))
        except BlockingIOError:
            return None
        except OSError:
            more = b""
        said = self._said[one] = self._said[one] + more
        if more and len(said) < _GREETING_BYTES:
            return None
        if more and hmac.compare_digest(said[:_TOKEN_BYTES], self._token) and _is_own(one):
            (rank,) = _LENGTH.unpack(said[_TOKEN_BYTES:])
            if 0 < rank < self._size:
                del self._said[one]
                return int(rank)
        self._dismiss(one)
        return None

    def _dismiss(self, one: socket.socket) -> None:
        del self._said[one]
        one.close()


def _is_own(one: socket.socket) -> bool:
    """True if a process of this user is at the other end, as far as the kernel knows."""
    if sys.platform != "linux" or one.family != socket.AF_UNIX:
        return True
    _, user, _ = _CREDENTIALS.unpack(one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.geteuid())


def _connected(rank: int, store: Store, timeout_s: float) -> _Ends:
    until_s = time.monotonic() + timeout_s
    where, *port, token = store.get("link").decode().split("|")
    left_s = max(until_s - time.monotonic(), 0.001)
    if port:
        one = socket.create_connection((where, int(port[0])), timeout=left_s)
    else:
        one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        one.settimeout(left_s)
        one.connect(where)
    one.sendall(bytes.fromhex(token) + _LENGTH.pack(rank))
    return [(0, one)]
