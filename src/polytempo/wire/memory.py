"""`keep_memory`: memory of large tensors that have been freed is used again, not given back to the system.

Every page that the system gives is zeroed at its first touch. ZeroMQ asks `malloc` for room for each message, and above
32 MiB glibc always asks the system for it: half of the time that a large tensor takes over TCP. Stages of a pipeline
free activations in an order that often frees the end of the heap, and glibc gives that back: with small
convolutions a stage touched up to 5,000 new pages a step, and a rank that mixes its model with its neighbours' 1,300.
"""

from __future__ import annotations

import ctypes
from functools import cache

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # of mallopt(3)
_MOST_KEPT_BYTES = (1 << 31) - 1


@cache
def keep_memory() -> bool:
    """Serve large allocations of this process from one heap from now on, and keep up to 2 GiB of it at its end.

    False where the C library cannot (musl): then everything works, more slowly. Cost: the process stays as large as it
    was at its largest.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {_ARENA_MAX: 1, _MMAP_MAX: 0, _TRIM_THRESHOLD: _MOST_KEPT_BYTES}
    return all(bool(mallopt(option, value)) for option, value in settings.items())
