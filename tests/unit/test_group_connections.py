"""Another thread ends a group's connections; earlier ones and listeners stay."""

from __future__ import annotations

import socket
import threading

from polytempo.membership.message import GroupView
from polytempo.runs.elastic.generation_group import GroupConnections, sockets
from polytempo.runs.elastic.run_elastic import MembershipHistory

LONG_S = 60.0


def connected(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection over loopback."""
    mine = socket.create_connection(listener.getsockname(), LONG_S)
    theirs, _ = listener.accept()
    return mine, theirs


def test_a_wait_ends_where_the_group_is_broken_and_no_other_connection_does() -> None:
    broken = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as old:
        before_mine, before_theirs = connected(old)
        before = sockets()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            mine, theirs = connected(listener)
            connections = GroupConnections(before, broken.is_set)
            broken.set()
            assert mine.recv(1) == b""  # nothing has been sent, and the other end is open
            connections.close()
            again = connected(listener)
            before_theirs.sendall(b"x")
            assert before_mine.recv(1) == b"x"
            for each in (mine, theirs, before_mine, before_theirs, *again):
                each.close()


def test_connections_of_a_group_that_is_left_in_time_stay() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        before = sockets()
        mine, theirs = connected(listener)
        GroupConnections(before, lambda: False).close()
        theirs.sendall(b"x")
        assert mine.recv(1) == b"x"
        mine.close()
        theirs.close()


def test_the_history_says_who_was_lost_left_and_came() -> None:
    times = iter(range(100))
    history = MembershipHistory(lambda: float(next(times)))
    names = {life: f"member-{life}" for life in range(5)}
    history.announced(GroupView(1, (0, 1, 2), 0, 0), names)
    history.formed(1)
    history.loses("member-1", "was killed by SIGKILL")
    history.announced(GroupView(2, (2, 3), 1, 7), names)
    history.formed(2)
    assert [(event["who"], event["how"], event["then"]) for event in history.events] == [
        ("member-1", "was killed by SIGKILL", "2 workers go on after step 7"),
        ("member-3", "joined", "2 workers go on after step 7"),
        ("member-0", "left", "2 workers go on after step 7"),
    ]
    assert [(change["lost"], change["joined"]) for change in history.changes] == [
        ([], 0),
        (["member-1 was killed by SIGKILL"], 1),
    ]
    assert history.changes[0]["seconds"] is None
    assert history.changes[1]["seconds"] > 0
