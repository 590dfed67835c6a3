"""`descriptor_copy`: a look at a connection that ZeroMQ owns, and may close at any time."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def descriptor_copy(descriptor: int) -> Iterator[socket.socket]:
    """The TCP socket behind `descriptor`. OSError where there is none."""
    copy = os.dup(descriptor)
    try:
        found = socket.socket(fileno=copy)
    except BaseException:
        os.close(copy)
        raise
    with found:
        if found.family not in (socket.AF_INET, socket.AF_INET6):
            raise OSError(errno.ENOTSOCK, "this is not a TCP connection")
        yield found
