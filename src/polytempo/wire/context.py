"""`end_context` waits for the end of a ZeroMQ context, also where signals arrive meanwhile."""

from __future__ import annotations

import signal
from typing import Any

import zmq


def end_context(context: zmq.Context[Any]) -> None:
    """Wait until the threads of `context` have ended; its sockets are closed, or close once they hear of the end.

    A signal with a handler interrupts the wait, and pyzmq takes that for an end: a thread and its descriptors would
    stay for the life of the process. torch's `DataLoader` leaves such a handler, of SIGCHLD, in every process that
    has used its workers. Signals for this thread wait until the context has ended.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        context.term()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
