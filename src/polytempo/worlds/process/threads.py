"""Threads that must be over before Python is.

A thread that asks for Python's lock after Python has ended is unwound in the middle of its work; if that is in torch's
C++, the process aborts ("terminate called without an active exception").
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import Protocol

_END_S = 2.0
"""Seconds that the end waits for a thread: a thread that waits for other ranks may have to be left behind."""


class Closable(Protocol):
    """Something with a thread."""

    def close(self) -> None:
        """Let the thread end, and wait for that."""


_open: weakref.WeakSet[Closable] = weakref.WeakSet()
_process = os.getpid()


def close_at_exit(owner: Closable) -> None:
    """Have `owner` closed before Python ends, if it is still there."""
    _open.add(owner)


def ended(thread: threading.Thread | None) -> None:
    """Wait until `thread` is over, as far as it is another one of this process."""
    if thread is not None and thread is not threading.current_thread():
        thread.join(_END_S)


@atexit.register
def _close_all() -> None:
    if os.getpid() == _process:
        for owner in list(_open):
            owner.close()
