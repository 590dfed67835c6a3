"""The channel between a run's head and its agents: both ways, with the run's keys and no others, bounded."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import zmq

from polytempo.engines.remote.messages import AgentBeat, Bye, Close, FromAgent, StopProcess, ToAgent
from polytempo.engines.remote.ticket import AgentTicket
from polytempo.wire.channel import ChannelClient, ChannelServer
from polytempo.wire.keys import Keys, make_keys
from process.test_wire_zeromq import Tap

LONG_S, SHORT_S = 30.0, 0.3
KEYS, OTHERS = make_keys(), make_keys()
Server, Client = ChannelServer[Any, Any], ChannelClient[Any, Any]


@pytest.fixture
def server() -> Iterator[Server]:
    made: Server = ChannelServer("tcp://127.0.0.1:*", KEYS, FromAgent)  # type: ignore[arg-type] # a union of types
    yield made
    made.close()


def connected(server: Server, keys: Keys = KEYS) -> Client:
    return ChannelClient(server.address, keys, ToAgent)  # type: ignore[arg-type] # a union of types


def test_messages_travel_both_ways(server: Server) -> None:
    client = connected(server)
    assert client.send(AgentBeat((3, 4)))
    heard = server.take(LONG_S)
    assert heard is not None
    peer, message = heard
    assert message == AgentBeat((3, 4))
    assert server.send(peer, StopProcess(7))
    assert client.take(LONG_S) == StopProcess(7)
    assert client.parted_s == 0.0
    client.close()


def test_a_client_comes_back_before_its_break_is_noticed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second connection of a name takes the place of the first, which still seems to be there."""
    monkeypatch.setattr("secrets.token_bytes", lambda number: b"x" * number)
    with closing(connected(server)) as first:
        first.send(AgentBeat((1,)))
        assert server.take(LONG_S) is not None
        second = connected(server)
        second.send(AgentBeat((2,)))
        heard = server.take(LONG_S)
        assert heard is not None
        assert heard[1] == AgentBeat((2,))
        assert server.send(heard[0], StopProcess(7))
        assert second.take(LONG_S) == StopProcess(7)
        second.close()


@pytest.mark.parametrize(
    "keys",
    [
        OTHERS,
        replace(KEYS, client_public=OTHERS.client_public, client_secret=OTHERS.client_secret),
        replace(KEYS, server_public=OTHERS.server_public, server_secret=OTHERS.server_secret),
    ],
    ids=["both", "client's", "server's"],
)
def test_wrong_keys_are_refused(server: Server, keys: Keys) -> None:
    client = connected(server, keys)
    client.send(Bye())
    assert server.take(SHORT_S) is None
    assert client.parted_s > 0
    client.close()


def test_no_keys_are_refused(server: Server) -> None:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.connect(server.address)
    dealer.send(msgspec.msgpack.encode(Bye()))
    assert server.take(SHORT_S) is None
    dealer.close()
    context.term()


def test_a_replayed_connection_and_a_spliced_message_are_refused(server: Server) -> None:
    with closing(Tap(int(server.address.rpartition(":")[2]))) as tap:
        client: Client = ChannelClient(tap.address, KEYS, ToAgent)  # type: ignore[arg-type] # a union of types
        client.send(AgentBeat((1,)))
        assert server.take(LONG_S) is not None
        before = len(tap.said[1])
        client.send(AgentBeat((2,)))
        assert server.take(LONG_S) is not None
        whole, last = bytes(tap.said[1]), bytes(tap.said[1][before:])
        with socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2]))) as replay:
            replay.settimeout(LONG_S)
            replay.sendall(whole)
            while replay.recv(1 << 16):  # until the server hangs up
                pass
        tap.upstream.sendall(last)
        for _ in range(1000):  # until the server has hung up on the client as well, which then connects again
            if len(tap.said) > 2:
                break
            assert server.take(0.03) is None
        client.send(Bye())
        while (heard := server.take(LONG_S)) is not None and heard[1] != Bye():
            pytest.fail(f"{heard[1]} came by replay")
        assert heard is not None
        assert server.malformed == 0
        client.close()


def test_a_server_is_watched_by_tcp_alone(server: Server) -> None:
    router = server._router  # with ZeroMQ's heartbeats a peer that ends with messages unread aborts this process
    assert (router.heartbeat_ivl, router.tcp_keepalive, router.tcp_maxrt) == (0, 1, 10_000)


def test_what_is_no_message_is_dropped_and_counted(server: Server) -> None:
    client: Client = connected(server)
    client.send({"type": "hello", "number": "not a number"})
    client.send(StopProcess(1))  # only a head says this
    client.send(Bye())
    heard = server.take(LONG_S)
    assert heard is not None
    assert heard[1] == Bye()
    assert server.malformed == 2
    client.close()


def test_a_client_is_parted_where_the_server_is_gone() -> None:
    server: Server = ChannelServer("tcp://127.0.0.1:*", KEYS, FromAgent)  # type: ignore[arg-type] # a union of types
    client = connected(server)
    client.send(Bye())
    assert server.take(LONG_S) is not None
    assert client.parted_s == 0.0
    server.close()
    for _ in range(1000):
        if client.parted_s > 0:
            break
        client.take(0.03)
    assert client.parted_s > 0
    client.close()


def test_failed_attempts_at_a_connection_do_not_count_as_one() -> None:
    """A head that is stopped still accepts: its kernel does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client: Client = ChannelClient(f"tcp://127.0.0.1:{listener.getsockname()[1]}", KEYS, ToAgent)  # type: ignore[arg-type]
        accepted_s = []
        for _ in range(3):
            listener.accept()[0].close()
            accepted_s.append(time.monotonic())
        assert client.parted_s >= accepted_s[-1] - accepted_s[0]
        client.close()


def test_a_peer_that_is_gone_gets_nothing(server: Server) -> None:
    assert not server.send(b"unknown", Close())


def test_it_listens_at_its_address_alone(server: Server) -> None:
    port = int(server.address.rpartition(":")[2])
    with socket.socket() as elsewhere, pytest.raises(OSError, match="refused"):
        elsewhere.connect(("127.0.0.2", port))  # all of 127.0.0.0/8 is this host


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot listen at tcp://192\.0\.2\.1:"):
        ChannelServer("tcp://192.0.2.1:*", KEYS, Bye)


def test_a_ticket_goes_to_json_and_back_and_shows_no_key() -> None:
    ticket = AgentTicket("tcp://127.0.0.1:1", KEYS, 3)
    assert AgentTicket.from_json(ticket.to_json()) == ticket
    assert KEYS.client_secret.decode() not in repr(ticket)


@pytest.mark.parametrize("text", ["", "{}", "no JSON", '{"format": "polytempo-ticket-1", "head": "x", "keys": {}}'])
def test_what_is_no_ticket_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expects a ticket of a run"):
        AgentTicket.from_json(text)


def test_a_ticket_that_all_can_read_is_refused(tmp_path: Any) -> None:
    path = tmp_path / "ticket"
    path.write_text(AgentTicket("tcp://127.0.0.1:1", KEYS).to_json())
    path.chmod(0o644)
    with pytest.raises(ValueError, match=r"all users can get at the ticket .*chmod o-rwx"):
        AgentTicket.read(path)
    path.chmod(0o600)
    assert AgentTicket.read(path).keys == KEYS


@pytest.mark.parametrize("end", ["server", "client"])
def test_signals_wait_while_a_monitor_begins(end: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyzmq does not repeat that call after a signal, and its exception would end a program with a SIGCHLD handler."""
    masks, begin = list[set[int]](), zmq.Socket.get_monitor_socket

    def seen(*given: Any) -> Any:
        masks.append(set(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        return begin(*given)

    monkeypatch.setattr(zmq.Socket, "get_monitor_socket", seen)
    (connected(server) if end == "client" else Server("tcp://127.0.0.1:*", KEYS, FromAgent)).close()  # type: ignore[arg-type]
    assert [{signal.SIGCHLD, signal.SIGALRM} <= mask for mask in masks] == [True]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
