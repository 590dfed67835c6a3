"""When a TCP connection whose other end is gone without a word is closed."""

from __future__ import annotations

import zmq

_IDLE_S, _PROBE_S, _MOST_PROBES = 10, 5, 4
"""On a connection without traffic TCP asks after so long whether the other end is there, so often, so many times."""


def watch_by_tcp(socket: zmq.Socket[bytes], unconfirmed_s: float) -> None:
    """Close a connection of `socket` on which nothing that was sent is confirmed for `unconfirmed_s`, or on idle 30 s.

    For sockets whose mail may wait to be read, instead of ZeroMQ's heartbeats: where such a connection breaks, libzmq
    4.3.5 aborts the whole process at its next heartbeat ("Assertion failed: !_io_error").
    """
    socket.tcp_keepalive, socket.tcp_keepalive_cnt = 1, _MOST_PROBES
    socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl = _IDLE_S, _PROBE_S
    socket.tcp_maxrt = round(1e3 * unconfirmed_s)
