"""How long a thread that computes in Python keeps others waiting.

A thread that waits for the interpreter's lock asks for it only after the switch interval, 5 ms unless it is set; until
then the one that has the lock gives it up around each operation of torch and takes it back, often before the other has
woken up. Operations of a model are shorter than 5 ms, so branches would run one after the other.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL_S = 1e-3
"""About as long as operations for which branches are worth their threads. Each switch costs some microseconds."""

_lock = threading.Lock()
_before: list[float] = []
"""The interval as it was; one for each that has been shortened and not yet set back."""


@contextmanager
def short_intervals() -> Iterator[None]:
    """Inside, threads switch after at most `INTERVAL_S`. The interval belongs to the process; the last one out sets it
    back."""
    with _lock:
        _before.append(_before[0] if _before else sys.getswitchinterval())
        sys.setswitchinterval(min(INTERVAL_S, _before[0]))
    try:
        yield
    finally:
        with _lock:
            before = _before.pop()
            if not _before:
                sys.setswitchinterval(before)
