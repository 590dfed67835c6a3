"""`HostLock`: a lock that the processes of one host share."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch._C._distributed_c10d import Store

from polytempo.core import TimedOut

_YIELDS = 200
_SHORTEST_S, _LONGEST_S = 20e-6, 1e-3


class WaitingWorld(Protocol):
    """The world of a process that waits for the lock."""

    rank: int
    step: int
    waited_s: float

    def now_s(self) -> float:
        """Seconds since the world's zero."""


class HostLock:
    """A record lock on a file without a name. The kernel lets go for a process that has died.

    Processes that share it stand in a line in `store`. Each writes there where it has the file: process, descriptor,
    device and inode. The next one opens the file of the last living process before it, through `/proc`, and makes one
    where there is none. So all living processes have one file, whichever process has died.

    The file stays open until the process ends, for a later world of the same store finds it there. A process holds
    the lock as a whole: threads of one do not exclude each other.
    Errors: PermissionError, RuntimeError where the processes of one host do not see each other in `/proc`.
    """

    def __init__(self, store: Store, host: int) -> None:
        key = f"polytempo/lock/{host}"
        place = store.add(key, 1)
        before, found = place - 1, None
        while found is None and before > 0:  # the last one has spoken only after all before it
            found = _opened(store.get(f"{key}/{before}").decode())
            before -= 1
        if found is None:
            found = os.memfd_create("polytempo-lock", os.MFD_CLOEXEC)
            os.fchmod(found, 0o600)
        self._descriptor = found
        store.set(f"{key}/{place}", _described(self._descriptor))

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

    @contextmanager
    def held(self, world: WaitingWorld, limit_s: float) -> Iterator[None]:
        """Hold the lock inside; the wait counts as the world's. Raises TimedOut where it is longer than `limit_s`."""
        since_s = world.now_s()
        entered = self.acquire(limit_s)
        world.waited_s += world.now_s() - since_s
        if not entered:
            raise TimedOut(world.rank, world.step, "alone", limit_s)
        try:
            yield
        finally:
            self.release()


def _described(descriptor: int) -> str:
    status = os.fstat(descriptor)
    return f"{_namespace()} {os.getpid()} {descriptor} {status.st_dev} {status.st_ino}"


def _opened(described: str) -> int | None:
    """The file that another process has; None where it has ended. Its number may be another's by now."""
    namespace, process, number, device, inode = described.split()
    if namespace != _namespace():
        raise RuntimeError(f"process {process} of this host is not in this one's /proc: give both one PID namespace")
    try:
        path = os.open(f"/proc/{process}/fd/{number}", os.O_PATH | os.O_CLOEXEC)  # opens nothing that is a stranger's
    except (FileNotFoundError, ProcessLookupError):
        return None
    try:
        status = os.fstat(path)
        if (status.st_dev, status.st_ino) != (int(device), int(inode)):
            return None
        return os.open(f"/proc/self/fd/{path}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(path)  # of an O_PATH descriptor: this process keeps the record locks that it has on the file


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid")
