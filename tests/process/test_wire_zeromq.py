"""Mailboxes over ZeroMQ: their writers, refused and counted messages, and that nothing is left behind."""

from __future__ import annotations

import gc
import os
import random
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
import torch
import zmq

from polytempo.runs.process.mailbox_directory import NodeMail
from polytempo.server.message import Beat, Message, Pulled
from polytempo.wire.frames import FrameLimits, encode
from polytempo.wire.guard import MOST_STRANGERS, Strangers
from polytempo.wire.keys import Keys, make_keys
from polytempo.wire.message_parts import PART_BYTES, Frame
from polytempo.wire.zeromq import Mailbox

pytestmark = pytest.mark.process

LOOPBACK = "tcp://127.0.0.1:*"
KEYS = make_keys()
WAIT_S = 20.0
"""Only ever waited for where something is broken."""

Open = Callable[..., Mailbox]


@pytest.fixture
def box() -> Iterator[Open]:
    """Opens mailboxes, and closes them after the test."""
    with ExitStack() as stack:

        def opened(node: int, address: str = LOOPBACK, keys: Keys | None = None, **more: object) -> Mailbox:
            return stack.enter_context(closing(Mailbox(node, address, keys, **more)))  # type: ignore[arg-type]

        yield opened


def connected(a: Mailbox, b: Mailbox) -> None:
    a.connect(b.node, b.address)
    b.connect(a.node, a.address)


def until(condition: Callable[[], bool], box: Mailbox) -> None:
    """Let `box` wait for mail, which does not come, until the condition holds."""
    for _ in range(2000):
        if condition():
            return
        assert box.take(0.01) is None
    pytest.fail("it never happened")


def comes_to_refuse(box: Mailbox, refused: int) -> None:
    """The guard, in a thread of its own, may hear of a handshake after the mail that came by it."""
    for _ in range(2000):
        if box.counts.refused == refused:
            return
        box.take(0.01)
    pytest.fail(f"{box.counts.refused} refused, not {refused}")


def retried(sender: Mailbox, to: int, message: Message, receiver: Mailbox) -> tuple[int, Message] | None:
    """The outcome of a message that is sent again as often as needed: a broken connection loses its messages."""
    for _ in range(200):
        sender.post(to, message)
        mail = receiver.take(0.1)
        if mail is not None:
            return mail
    return None


def beat(number: int) -> Beat:
    return Beat(1, 0, number)


def number(mail: tuple[int, Message] | None) -> int:
    assert mail is not None
    assert isinstance(mail[1], Beat)
    return mail[1].epoch


@pytest.mark.parametrize("way", ["tcp", "tcp with keys", "ipc", "ipc with keys"])
def test_mail_arrives_in_order_with_its_sender(box: Open, private: Path, way: str) -> None:
    keys = KEYS if "keys" in way else None
    a, b = (box(node, f"ipc://{private}/{node}" if "ipc" in way else LOOPBACK, keys) for node in (0, 1))
    connected(a, b)
    large = torch.arange(100_000.0)
    assert b.post(0, beat(1))
    assert b.post(0, Pulled(0, 1, 2, 3, 4, large))
    assert b.post(0, beat(2))
    assert a.take(WAIT_S) is not None
    mail = a.take(WAIT_S)
    assert mail is not None
    assert mail[0] == 1
    assert isinstance(mail[1], Pulled)
    assert torch.equal(mail[1].values, large)
    assert number(a.take(WAIT_S)) == 2
    assert a.post(1, beat(3))
    assert number(b.take(WAIT_S)) == 3
    assert (a.counts.taken, a.counts.posted, a.counts.malformed) == (3, 1, 0)
    comes_to_refuse(a, 0)


def test_a_line_over_tcp_is_watched_by_tcp_alone(box: Open) -> None:
    router = box(0).arrivals  # with ZeroMQ's heartbeats a peer that ends with mail unread aborts this process
    assert router.heartbeat_ivl == 0
    assert (router.tcp_keepalive, router.tcp_keepalive_idle, router.tcp_maxrt) == (1, 10, 30_000)


@pytest.fixture
def private(tmp_path: Path) -> Path:
    folder = tmp_path / "mail"
    folder.mkdir(mode=0o700)
    return folder


def test_a_node_that_is_started_anew_takes_the_place_of_its_former_life(box: Open) -> None:
    a, old, new = box(0), box(1), box(1)
    old.connect(0, a.address)
    old.post(0, beat(1))
    assert number(a.take(WAIT_S)) == 1
    new.connect(0, a.address)
    new.post(0, beat(2))
    assert number(a.take(WAIT_S)) == 2


# ------------------------------------------------------------------------------------------- bounds of messages


def test_posting_never_waits(box: Open, private: Path) -> None:
    a = box(0, f"ipc://{private}/0", high_water=4)
    a.connect(1, f"ipc://{private}/1")  # no receiver is there
    assert [a.post(1, beat(i)) for i in range(6)] == [True] * 4 + [False] * 2
    assert not a.post(2, beat(0))
    assert (a.counts.posted, a.counts.dropped) == (4, 3)
    a.forget(1)
    assert not a.post(1, beat(0))


def test_a_lent_tensor_stays_until_it_has_left(box: Open, private: Path) -> None:
    a = box(0, f"ipc://{private}/0")
    a.connect(1, f"ipc://{private}/1")
    a.post(1, Pulled(0, 0, 0, 1, 1, torch.full((1 << 18,), 3.0)))
    gc.collect()
    others = [torch.full((1 << 18,), 4.0) for _ in range(4)]
    assert not a.settle(0)
    b = box(1, f"ipc://{private}/1")
    mail = b.take(WAIT_S)
    assert mail is not None
    assert isinstance(mail[1], Pulled)
    assert bool((mail[1].values == 3).all())
    assert a.settle(WAIT_S)
    assert len(others) == 4


# ---------------------------------------------------------------------------------------------- addresses and files


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:*", "tcp://*:*", "tcp://[::]:5000", "tcp://localhost:*", "tcp://eth0:1"]
)
def test_a_wide_address_needs_keys(box: Open, address: str) -> None:
    with pytest.raises(ValueError, match="so it needs keys"):
        box(0, address)
    with pytest.raises(ValueError, match="so it needs keys"):
        box(0).connect(1, address)


def test_with_keys_any_address_will_do(box: Open) -> None:
    a, b = box(0, "tcp://0.0.0.0:*", KEYS), box(1, LOOPBACK, KEYS)
    b.connect(0, a.address.replace("0.0.0.0", "127.0.0.1"))
    b.post(0, beat(1))
    assert number(a.take(WAIT_S)) == 1


@pytest.mark.parametrize("address", ["", "tcp://", "tcp://127.0.0.1", "inproc://x", "udp://127.0.0.1:1", "pgm://x;y:1"])
def test_other_addresses_are_refused(box: Open, address: str) -> None:
    with pytest.raises(ValueError, match=r"a mailbox is at ipc:///folder/name or tcp://host:port"):
        box(0, address, KEYS)


def test_a_folder_must_be_private_and_its_name_short(box: Open, private: Path) -> None:
    with pytest.raises(ValueError, match="up to 107 bytes"):
        box(0, f"ipc://{private}/{'x' * 107}")
    with pytest.raises(ValueError, match="absolute path"):
        box(0, "ipc://relative")
    private.chmod(0o750)
    with pytest.raises(ValueError, match="cannot enter"):
        box(0, f"ipc://{private}/0")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_nothing_is_left_behind(private: Path) -> None:
    def once() -> None:
        with closing(Mailbox(0, f"ipc://{private}/0")) as a, closing(Mailbox(1, LOOPBACK, KEYS)) as b:
            a.connect(1, f"ipc://{private}/1")
            a.post(1, Pulled(0, 0, 0, 1, 1, torch.ones(1 << 18)))
            b.connect(0, "tcp://127.0.0.1:1")
            assert [path.name for path in private.iterdir()] == ["0"]

    once()
    threads, files = threading.active_count(), descriptors()
    for _ in range(3):
        once()
    assert (threading.active_count(), descriptors()) == (threads, files)
    assert list(private.iterdir()) == []


def test_lines_to_nodes_that_are_gone_for_good_are_closed(
    box: Open, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy of a shard that is started again is another node, in a run that goes on for weeks."""
    clock_s = 0.0
    monkeypatch.setattr("polytempo.runs.process.mailbox_directory.time.monotonic", lambda: clock_s)
    with closing(box(0, f"ipc://{private}/0")) as inner, closing(box(1, f"ipc://{private}/1")) as alive:
        mail = NodeMail(0, inner, lambda node: f"ipc://{private}/{node}", moves=False)
        files = []
        for copy in range(2, 34):
            clock_s += 30.0
            assert mail.post(copy, beat(copy))
            assert mail.post(1, beat(copy))
            assert number(alive.take(WAIT_S)) == copy
            files.append(descriptors())
        monkeypatch.undo()
        until(lambda: descriptors() < files[3] + 8, alive)  # of 30 lines: ZeroMQ closes them in threads of its own


# -------------------------------------------------------------------------------------- strangers before and after


@pytest.mark.parametrize("wrong", ["no keys", "another run's keys", "the server's right, the client's wrong"])
def test_who_lacks_the_keys_is_refused_and_counted(box: Open, wrong: str) -> None:
    a, friend, other = box(0, LOOPBACK, KEYS), box(1, LOOPBACK, KEYS), make_keys()
    forged = {
        "no keys": None,
        "another run's keys": other,
        "the server's right, the client's wrong": Keys(
            KEYS.server_public, KEYS.server_secret, other.client_public, other.client_secret
        ),
    }[wrong]
    stranger = box(2, LOOPBACK, forged)
    stranger.connect(0, a.address)
    stranger.post(0, beat(666))
    until(lambda: a.counts.refused > 0, a)
    friend.connect(0, a.address)
    friend.post(0, beat(1))
    assert number(a.take(WAIT_S)) == 1
    assert a.take(0.05) is None  # of the stranger, who knocked before the friend
    assert a.counts.refused > 0
    assert a.counts.malformed == 0


def left_open(connections: Sequence[socket.socket], most: int) -> list[socket.socket]:
    """Connections that the other end has not closed, once they are at most `most`."""
    here = list(connections)
    for _ in range(2000):
        over, _, _ = select.select(here, [], [], 0.01)
        here = [each for each in here if each not in over or each.recv(64, socket.MSG_DONTWAIT)]  # else it greets
        if len(here) <= most:
            return here
    pytest.fail(f"{len(here)} are open")


def test_of_many_connections_without_keys_the_newest_few_stay(box: Open) -> None:
    a, before, after = box(0, LOOPBACK, KEYS), box(1, LOOPBACK, KEYS), box(2, LOOPBACK, KEYS)
    before.connect(0, a.address)
    before.post(0, beat(1))
    assert number(a.take(WAIT_S)) == 1
    with ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port_of(a)))) for _ in range(3 * MOST_STRANGERS)
        ]
        open_ones = left_open(strangers, MOST_STRANGERS)
        assert open_ones[-1] is strangers[-1]
        before.post(0, beat(2))
        assert number(a.take(WAIT_S)) == 2  # on the same connection: messages under way on a closed one are lost
        after.connect(0, a.address)
        after.post(0, beat(3))
        assert number(a.take(WAIT_S)) == 3


def test_without_descriptors_no_stranger_stays() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        port = listener.getsockname()[1]
        near = [stack.enter_context(socket.create_connection(listener.getsockname())) for _ in range(3)]
        far = [stack.enter_context(listener.accept()[0]) for _ in near]
        strangers = Strangers(1 << 20)
        for each in far[:2]:
            strangers.come(each.fileno(), port)
        far[1].sendall(bytes(300))  # more than a peer without keys gets
        near[1].recv(300, socket.MSG_WAITALL)
        Strangers(64).come(listener.fileno(), port)  # no connection
        few = Strangers(64)
        few._here.extend(strangers._here)
        few.come(far[2].fileno(), port)
        assert [each.recv(1) for each in (near[0], near[2])] == [b"", b""]
        far[1].sendall(b"x")
        assert near[1].recv(1) == b"x"


@pytest.mark.parametrize("num_bytes", [PART_BYTES + 257, 1 << 30])
def test_no_stranger_makes_it_hold_more_than_a_part(box: Open, num_bytes: int) -> None:
    a = box(0, LOOPBACK, KEYS)
    with socket.create_connection(("127.0.0.1", port_of(a))) as raw:
        raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32))
        raw.settimeout(WAIT_S)
        greeting = bytearray()
        while len(greeting) < 64:  # MSG_WAITALL does not wait on a socket with a timeout
            greeting += raw.recv(64 - len(greeting)) or pytest.fail("it hung up")
        raw.sendall(b"\x06" + num_bytes.to_bytes(8, "big"))  # a command so long
        with suppress(ConnectionResetError):
            assert raw.recv(1) == b""


@pytest.mark.parametrize("keys", [None, KEYS], ids=["without keys", "with keys"])
def test_garbage_in_place_of_a_handshake(box: Open, keys: Keys | None) -> None:
    a, b = box(0, LOOPBACK, keys), box(1, LOOPBACK, keys)
    connected(a, b)
    b.post(0, beat(1))
    assert number(a.take(WAIT_S)) == 1
    seed = 11
    print(f"seed {seed}")
    chance = random.Random(seed)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + (b"CURVE" if keys else b"NULL").ljust(20, b"\0") + bytes(32)
    before = resident_bytes()
    for i in range(300):
        address = ("127.0.0.1", port_of(a))
        with socket.create_connection(address) as raw, suppress(ConnectionError):  # it may have hung up already
            raw.sendall((greeting if i % 2 else b"") + chance.randbytes(chance.choice([1, 10, 100, 3000])))
            raw.sendall(b"\x02" + (1 << 62).to_bytes(8, "big"))  # a frame of four exabytes
    until(lambda: a.counts.refused >= 50, a)
    b.post(0, beat(2))
    assert number(a.take(WAIT_S)) == 2
    assert resident_bytes() - before < 32 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def port_of(box: Mailbox) -> int:
    return int(box.address.rpartition(":")[2])


@pytest.mark.parametrize("keys", [None, KEYS], ids=["without keys", "with keys"])
def test_garbage_from_one_who_has_been_let_in(box: Open, keys: Keys | None) -> None:
    a, b = box(0, LOOPBACK, keys, num_nodes=8), box(1, LOOPBACK, keys)
    seed = 12
    print(f"seed {seed}")
    chance = random.Random(seed)
    good = [bytes(frame) for frame in encode(beat(3))]
    num_bad = 0
    with zmq.Context() as context:
        for name in (b"3", b"8", b"-1", b"01", b"x", b"", b"99999999999"):  # the first alone is a node's
            with context.socket(zmq.DEALER) as scheduler:
                if keys is not None:
                    scheduler.curve_serverkey = keys.server_public
                    scheduler.curve_publickey, scheduler.curve_secretkey = keys.client_public, keys.client_secret
                scheduler.linger = 5000
                if name:
                    scheduler.routing_id = name
                scheduler.connect(a.address)
                for _ in range(60):
                    scheduler.send_multipart(
                        [chance.randbytes(chance.randrange(50)) for _ in range(chance.randrange(1, 5))]
                    )
                scheduler.send_multipart([b"x"] * (a.limits.num_frames + 10))
                scheduler.send_multipart(good)
                num_bad += 61 + (name != b"3")
                if name == b"3":
                    assert number(a.take(WAIT_S)) == 3
                else:
                    until(lambda: a.counts.malformed == num_bad, a)  # noqa: B023
    b.connect(0, a.address)
    b.post(0, beat(1))
    assert number(a.take(WAIT_S)) == 1
    assert a.counts.malformed == num_bad


def test_what_is_too_large_is_not_let_in(box: Open) -> None:
    a, b = box(0, LOOPBACK, None, limits=FrameLimits(total_bytes=100_000)), box(1)
    b.connect(0, a.address)
    b.post(0, Pulled(0, 0, 0, 1, 1, torch.zeros(100_000)))
    assert number(retried(b, 0, beat(1), a)) == 1


def test_many_parts_that_are_too_large_together_are_refused_and_not_held(box: Open) -> None:
    a, b = box(0, LOOPBACK, None, limits=FrameLimits(total_bytes=100_000)), box(1)
    most: list[int] = []
    opened = a._opened

    def watched(parts: list[Frame]) -> tuple[int, Message] | None:
        most.append(sum(map(len, parts)))
        return opened(parts)

    a._opened = watched  # type: ignore[method-assign]
    with zmq.Context() as context, context.socket(zmq.DEALER) as scheduler:
        scheduler.routing_id = b"3"
        scheduler.connect(a.address)
        scheduler.send_multipart([bytes(50_000)] * 3)
        scheduler.send_multipart([bytes(50_000)] * 2 + [b"", b"x"])
        scheduler.send_multipart([bytes(frame) for frame in encode(beat(3))])
        assert number(a.take(WAIT_S)) == 3
    assert a.counts.malformed == 2
    assert most[:2] == [1, 1]  # the sender's number
    b.connect(0, a.address)
    b.post(0, beat(1))
    assert number(a.take(WAIT_S)) == 1


# ------------------------------------------------------------------------------------------------- replay and splice


class Tap:
    """Passes a TCP connection on to `port` and records both ends; it can repeat or change a client's bytes."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.said, self.answered = [bytearray()], [bytearray()]
        """Bytes by connection."""
        self.alter: Callable[[bytes], bytes] = bytes
        """A client's bytes -> the bytes that are passed on."""
        self._sockets: list[socket.socket] = []
        self.upstream: socket.socket
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            upstream = socket.create_connection(("127.0.0.1", self._port))
            self._sockets += [client, upstream]
            self.said.append(bytearray())
            self.answered.append(bytearray())
            self.upstream = upstream
            self._start(self._pass, client, upstream, self.said[-1], lambda data: self.alter(data))
            self._start(self._pass, upstream, client, self.answered[-1], bytes)

    def _pass(
        self, source: socket.socket, sink: socket.socket, said: bytearray, alter: Callable[[bytes], bytes]
    ) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                said += data
                sink.sendall(alter(data))
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for each in (self._listener, *self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(WAIT_S)


def test_a_replayed_connection_and_a_spliced_message_are_refused(box: Open) -> None:
    a, b = box(0, LOOPBACK, KEYS), box(1, LOOPBACK, KEYS)
    with closing(Tap(port_of(a))) as tap:
        b.connect(0, tap.address)
        b.post(0, beat(1))
        assert number(a.take(WAIT_S)) == 1
        before = len(tap.said[1])
        b.post(0, beat(2))
        assert number(a.take(WAIT_S)) == 2
        whole, last = bytes(tap.said[1]), bytes(tap.said[1][before:])
        assert last  # one encrypted frame

        with socket.create_connection(("127.0.0.1", port_of(a))) as replay:  # 1. all of it, on a new connection
            replay.settimeout(WAIT_S)
            replay.sendall(whole)
            while replay.recv(1 << 16):  # until `a` hangs up
                pass

        tap.upstream.sendall(last)  # 2. the last message once more, on the connection that it came by
        until(lambda: len(tap.said) > 2, a)  # `a` has hung up, and the sender connects again

        # 3. the sender goes on
        assert number(retried(b, 0, beat(3), a)) == 3
        assert (a.counts.taken, a.counts.malformed) == (3, 0)
        comes_to_refuse(a, 1)


def recorded(box: Open, a: Mailbox) -> tuple[bytes, bytes]:
    """The bytes of a node with the run's keys, and mailbox `a`'s answers, one message included."""
    with closing(Tap(port_of(a))) as tap:
        b = box(1, LOOPBACK, KEYS)
        b.connect(0, tap.address)
        b.post(0, beat(1))
        assert number(a.take(WAIT_S)) == 1
        return bytes(tap.said[1]), bytes(tap.answered[1])


@pytest.mark.parametrize("where", ["the same mailbox", "a new one with the same keys", "another run's"])
def test_a_recorded_connection_opens_no_mailbox_and_costs_nothing(box: Open, where: str) -> None:
    a, times, keys = box(0, LOOPBACK, KEYS), 100, KEYS
    said, _ = recorded(box, a)
    if where != "the same mailbox":
        a.close()
        keys = KEYS if "same keys" in where else make_keys()
        a = box(0, LOOPBACK, keys)
    friend, taken = box(2, LOOPBACK, keys), a.counts.taken
    friend.connect(0, a.address)
    friend.post(0, beat(2))
    assert number(a.take(WAIT_S)) == 2
    threads, files, before = threading.active_count(), descriptors(), resident_bytes()
    for _ in range(times):
        with socket.create_connection(("127.0.0.1", port_of(a))) as replay, suppress(ConnectionError):
            replay.settimeout(WAIT_S)
            replay.sendall(said)
            while replay.recv(1 << 16):  # until `a` hangs up
                pass
    comes_to_refuse(a, times)
    until(lambda: descriptors() <= files, a)
    friend.post(0, beat(3))
    assert number(a.take(WAIT_S)) == 3
    assert (a.counts.taken, a.counts.malformed) == (taken + 2, 0)
    assert threading.active_count() <= threads
    assert resident_bytes() - before < 16 << 20


def test_who_plays_a_mailbox_from_a_record_hears_no_message(box: Open) -> None:
    _, answered = recorded(box, box(0, LOOPBACK, KEYS))
    b, heard = box(2, LOOPBACK, KEYS), bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        b.connect(0, f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        b.post(0, Pulled(0, 1, 2, 3, 4, torch.zeros(1000)))
        client, _ = listener.accept()
        with client, suppress(ConnectionError):
            client.settimeout(WAIT_S)
            client.sendall(answered)
            while data := client.recv(1 << 16):  # until `b` hangs up
                heard += data
    assert len(heard) <= 64 + 202  # a greeting, and the first command of a handshake


def test_a_bit_that_is_changed_on_the_way_changes_no_message(box: Open) -> None:
    a, b = box(0, LOOPBACK, KEYS), box(1, LOOPBACK, KEYS)
    with closing(Tap(port_of(a))) as tap:
        b.connect(0, tap.address)
        b.post(0, beat(1))
        assert number(a.take(WAIT_S)) == 1
        tap.alter = lambda data: data[:-1] + bytes([data[-1] ^ 1])
        b.post(0, beat(2))
        until(lambda: len(tap.said) > 2, a)  # `a` has hung up
        tap.alter = bytes
        assert number(retried(b, 0, beat(3), a)) == 3
        assert a.counts.malformed == 0


def test_signals_meanwhile_leave_nothing_of_a_mailbox() -> None:
    """One with a handler interrupts the wait for ZeroMQ's threads, and pyzmq goes on as if they had ended."""
    Mailbox(0, LOOPBACK, KEYS).close()
    before, handler = descriptors(), signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
        for _ in range(50):
            Mailbox(0, LOOPBACK, KEYS).close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert descriptors() == before
