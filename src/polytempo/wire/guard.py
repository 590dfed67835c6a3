"""`ConnectionGuard`: admits connections with the run's keys, and counts those that it refuses.

ZeroMQ asks it about every new connection (ZAP, rfc.zeromq.org/spec/27), and reports accepted connections and finished
handshakes. It has a thread of its own, so that nodes connect while their programs compute.

It does not subscribe to failed handshakes: to report one, libzmq (4.3.5) overwrites its own note of the error, and then
sometimes leaves the connection open but dead instead of closing it.
"""

from __future__ import annotations

import threading

import zmq
from zmq.utils.monitor import parse_monitor_message

from polytempo.wire.keys import Keys

_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"polytempo"
_JOIN_S = 5.0


class ConnectionGuard:
    """Guards `socket`, which must not be bound yet. Ends when the context ends."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], keys: Keys | None) -> None:
        self._come = self._let_in = 0
        self._client = keys.client if keys is not None else None
        self._monitor: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.Event.ACCEPTED | zmq.Event.HANDSHAKE_SUCCEEDED)
        self._questions: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._questions.linger = self._monitor.linger = 0
        self._questions.bind(_ZAP)
        if keys is not None:
            socket.zap_domain = _DOMAIN
            socket.zap_enforce_domain = True
        self._thread = threading.Thread(target=self._stand, name="polytempo-guard", daemon=True)
        self._thread.start()

    @property
    def refused(self) -> int:
        """Connections that were not admitted, and those whose handshake is under way."""
        return max(0, self._come - self._let_in)

    def join(self) -> None:
        """Wait for the guard's end; call it after the context has ended."""
        self._thread.join(_JOIN_S)

    def _stand(self) -> None:
        poller = zmq.Poller()
        poller.register(self._questions, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._monitor in ready:
                    event = parse_monitor_message(self._monitor.recv_multipart())["event"]
                    self._come += event == zmq.Event.ACCEPTED
                    self._let_in += event == zmq.Event.HANDSHAKE_SUCCEEDED
                if self._questions in ready:
                    self._questions.send_multipart(self._answer(self._questions.recv_multipart()))
        except zmq.ContextTerminated:
            pass
        finally:
            self._questions.close()
            self._monitor.close()

    def _answer(self, question: list[bytes]) -> list[bytes]:
        """Yes to the run's client key, no to all else."""
        version, number, domain, _, _, mechanism, *credentials = question  # ZeroMQ itself asks, not the peer
        known = mechanism == b"CURVE" and domain == _DOMAIN and credentials == [self._client]
        status, text = (b"200", b"OK") if known else (b"400", b"unknown key")
        return [version, number, status, text, b"", b""]
