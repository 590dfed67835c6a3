"""`GroupConnections`: the TCP connections of one generation's group, which this process can break by itself.

launcher: a member is lost ──▶ board ──▶ a thread of each other member ── shutdown(2) ──▶ its main thread, inside gloo

gloo notices the end of a connection and its deadline, nothing else. A process that is killed ends its connections; a
host that is stopped, or whose cable is cut, does not.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable
from contextlib import suppress

_LOOK_S = 0.1
_GRACE_S = 0.3
"""How long a member may take to notice by itself that its group is broken."""


def sockets() -> dict[int, int]:
    """The sockets of this process: inode and descriptor."""
    found = {}
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


class GroupConnections:
    """Those sockets that are here and were not among `before`. `is_broken` is asked ten times a second, in a thread."""

    def __init__(self, before: dict[int, int], is_broken: Callable[[], bool]) -> None:
        self._inodes = sockets().keys() - before.keys()
        self._is_broken, self._left = is_broken, threading.Event()
        self._thread: threading.Thread | None = None
        if self._inodes:
            self._thread = threading.Thread(target=self._watch, name="polytempo-connections", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """The group has been left."""
        self._left.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._left.wait(_LOOK_S):
            if self._is_broken():
                if not self._left.wait(_GRACE_S):
                    self.shut_down()
                return

    def shut_down(self) -> None:
        """End the connections: whatever waits for them fails, as if the others had ended them."""
        for inode, descriptor in sockets().items():
            if inode in self._inodes:
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                    same = os.fstat(connection.fileno()).st_ino == inode
                    listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)  # gloo aborts without it
                    if same and not listens and connection.family in (socket.AF_INET, socket.AF_INET6):
                        connection.shutdown(socket.SHUT_RDWR)
