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

    Those that share it stand in a line in `store`. Each says there where it has the file: process, descriptor, device
    and inode. The next one opens the file of the last before it that still lives, through `/proc`, and makes one where
    none does. So all that live have one file, whichever process has died.

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
        self._descriptor = _made() if found is None else found
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


def _made() -> int:
    descriptor = os.memfd_create("polytempo-lock", os.MFD_CLOEXEC)
    os.fchmod(descriptor, 0o600)
    return descriptor


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
