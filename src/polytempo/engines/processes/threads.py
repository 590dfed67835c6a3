"""How many threads a process may have that is forked from this one."""

from __future__ import annotations

import os
import threading
import time

_POLL_S = 0.02
_LOOKS = 3


def threads_per_worker(workers: int, asked: int | None = None) -> int:
    """How many threads each of `workers` processes forked from this one may have (see `launch`).

    To be asked after a first fork (the janitor's): it lets libraries that can fork, like OpenBLAS,
    put their threads away. Those of OpenMP stay, and a child waits for ever for them to work.
    """
    strangers = _native_threads()
    if asked is None:
        return 1 if strangers else max(1, _cores() // workers)
    if asked < 1:
        raise ValueError(f"threads={asked} must be at least 1")
    if asked > 1 and strangers:
        raise ValueError(
            f"threads={asked} is impossible: this process has computed with several threads already ({strangers} are "
            "not Python's), and a worker forked from it would wait for ever in its first parallel loop; "
            "use threads=1, or start the run before anything is computed"
        )
    return asked


def _native_threads() -> int:
    """Threads of this process that are not Python's; 0 where there is no /proc to count them (macOS)."""
    if not os.path.isdir("/proc/self/task"):
        return 0
    strangers = 0
    for _ in range(_LOOKS):  # a thread that has just ended is listed for a moment longer
        strangers = max(0, len(os.listdir("/proc/self/task")) - threading.active_count())
        if strangers == 0:
            break
        time.sleep(_POLL_S)
    return strangers


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
