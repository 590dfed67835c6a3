"""The ends of ZeroMQ contexts and the begins of monitors, also where signals arrive meanwhile."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zmq


def end_context(context: zmq.Context[Any]) -> None:
    """Wait until the threads of `context` have ended; its sockets are closed, or close once they hear of the end.

    A signal with a handler interrupts the wait, and pyzmq takes that for an end: a thread and its descriptors would
    stay for the life of the process. torch's `DataLoader` leaves such a handler, of SIGCHLD, in every process that
    has used its workers.
    """
    with _uninterrupted():
        context.term()


def monitor_of(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """`socket.get_monitor_socket(events)`, which pyzmq does not repeat after a signal."""
    with _uninterrupted():
        monitor: zmq.Socket[bytes] = socket.get_monitor_socket(events)
    return monitor


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Signals for this thread wait until the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
