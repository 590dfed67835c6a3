"""Connections that send without an end are closed; others are not."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from polytempo.wire.unfinished import UnfinishedBytes

LONG_S = 30.0
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A client's end and the server's."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), LONG_S) as client,
        listener.accept()[0] as server,
    ):
        server.settimeout(LONG_S)
        yield client, server


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
    sent(pair, 90_000)
    counted.look()
    assert is_open(pair)
    sent(pair, 20_000)
    counted.look()
    assert not is_open(pair)


def test_messages_that_are_read_count_no_more(pair: Pair) -> None:
    counted = UnfinishedBytes(100_000)
    counted.come(pair[1].fileno())
    for _ in range(5):
        sent(pair, 90_000)
        counted.taken(pair[1].fileno())
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
            counted.taken(number)
            counted.look()
            assert is_open((pair[0], moved))
    assert descriptor != number


def _moved(line: socket.socket, number: int) -> int:
    """The line's descriptor under another number."""
    return os.dup2(line.fileno(), number)
