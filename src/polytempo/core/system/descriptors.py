"""Descriptors of this process: as many as the system allows, less a reserve for saving the run."""

from __future__ import annotations

import errno
import os
import resource
from contextlib import suppress

_MOST = 65_536
"""A limit of millions is of no use, and costs programs that walk through all descriptors."""
RESERVE = 64


def raised() -> int:
    """Raise the soft limit to the hard one less `RESERVE`, or to 65,536 less that; the limit that holds now."""
    return _limited(RESERVE)


def open_descriptor(path: str | os.PathLike[str], flags: int, mode: int = 0o777) -> int:
    """`os.open`. Where this process has no descriptor left, it gets the reserve."""
    try:
        return os.open(path, flags, mode)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        _limited(0)
        return os.open(path, flags, mode)


def _limited(reserve: int) -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft <= most and most > 2 * RESERVE:
        with suppress(ValueError, OSError):  # macOS allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (most - reserve, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
