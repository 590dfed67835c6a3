"""Connections that send without an end are closed; others are not."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from polytempo.wire.unfinished import FIRST_BYTES, UnfinishedBytes

LONG_S = 30.0
Pair = tuple[socket.socket, socket.socket]


@contextmanager
def connected() -> Iterator[Pair]:
    """A client's end and the server's."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), LONG_S) as client,
        listener.accept()[0] as server,
    ):
        server.settimeout(LONG_S)
        yield client, server


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A connection."""
    with connected() as found:
        yield found


def sent(pair: Pair, num_bytes: int) -> None:
    """Bytes that have come."""
    pair[0].sendall(bytes(num_bytes))
    assert len(pair[1].recv(num_bytes, socket.MSG_WAITALL)) == num_bytes


def is_open(pair: Pair) -> bool:
    try:
        pair[1].sendall(b"x")
    except BrokenPipeError:
        return False
    return pair[0].recv(1) == b"x"


def test_more_bytes_than_the_bound_without_an_end(pair: Pair) -> None:
    counted = UnfinishedBytes(100_000)
    counted.come(pair[1].fileno())
    counted.taken(pair[1].fileno(), "a")
    sent(pair, 90_000)
    counted.look()
    assert is_open(pair)
    sent(pair, 20_000)
    counted.look()
    assert not is_open(pair)


def test_a_peer_has_one_bound_for_all_of_its_connections(pair: Pair) -> None:
    """The one with the most bytes is closed; another peer's is not."""
    counted = UnfinishedBytes(100_000)
    with connected() as second, connected() as other:
        for each, name in ((pair, "a"), (second, "a"), (other, "b")):
            counted.come(each[1].fileno())
            counted.taken(each[1].fileno(), name)
        for each, num_bytes in ((pair, 60_000), (second, 50_000), (other, 90_000)):
            sent(each, num_bytes)
        counted.look()
        assert [is_open(each) for each in (pair, second, other)] == [False, True, True]


def test_a_connection_without_a_name_has_a_small_bound(pair: Pair) -> None:
    counted = UnfinishedBytes(10 * FIRST_BYTES)
    counted.come(pair[1].fileno())
    sent(pair, FIRST_BYTES)
    counted.look()
    assert is_open(pair)
    sent(pair, 1000)
    counted.look()
    assert not is_open(pair)


def test_messages_that_are_read_count_no_more(pair: Pair) -> None:
    counted = UnfinishedBytes(100_000)
    counted.come(pair[1].fileno())
    counted.taken(pair[1].fileno(), "a")
    for _ in range(5):
        sent(pair, 90_000)
        counted.taken(pair[1].fileno(), "a")
        counted.look()
    assert is_open(pair)


def test_another_connection_with_the_descriptor_is_left_alone(pair: Pair) -> None:
    """The counted connection has gone, and the system gives its descriptor to the next."""
    counted, descriptor = UnfinishedBytes(1), pair[1].fileno()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname(), LONG_S) as other, listener.accept()[0] as gone:
            counted.come(gone.fileno())
            assert other.getsockname() == gone.getpeername()
            number = gone.fileno()
        with socket.socket(fileno=_moved(pair[1], number)) as moved:
            sent((pair[0], moved), 1000)
            counted.taken(number, "a")
            counted.look()
            assert is_open((pair[0], moved))
    assert descriptor != number


def _moved(line: socket.socket, number: int) -> int:
    """The line's descriptor under another number."""
    return os.dup2(line.fileno(), number)
