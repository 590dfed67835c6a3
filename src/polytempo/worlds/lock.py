"""`HostLock`: a lock that the processes of one host share."""

from __future__ import annotations

import fcntl
import os
import time

from torch._C._distributed_c10d import Store

_YIELDS = 200
_SHORTEST_S, _LONGEST_S = 20e-6, 1e-3


class HostLock:
    """A record lock on a file without a name. The kernel lets go for a process that has died.

    The first process that comes makes the file and says in `store` where it is; the others open it through `/proc`,
    so it must live until they have. The file stays open until the process ends, for a later world of the same store
    finds it there. A process holds the lock as a whole: threads of one do not exclude each other.
    """

    def __init__(self, store: Store, host: int) -> None:
        key = f"polytempo/lock/{host}"
        if store.add(f"{key}/made", 1) == 1:
            self._descriptor = os.memfd_create("polytempo-lock", os.MFD_CLOEXEC)
            store.set(key, f"/proc/{os.getpid()}/fd/{self._descriptor}")
        else:
            self._descriptor = os.open(store.get(key).decode(), os.O_RDWR | os.O_CLOEXEC)

    def acquire(self, timeout_s: float) -> bool:
        """Wait for the lock, at most `timeout_s`; says whether it is ours. Yields the core at first, then sleeps."""
        deadline_s, pause_s, tries = time.monotonic() + timeout_s, _SHORTEST_S, 0
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except (BlockingIOError, PermissionError):  # which of the two is the system's choice
                pass
            tries += 1
            if tries <= _YIELDS:
                os.sched_yield()
                continue
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)

    def release(self) -> None:
        """Let the next one in."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
