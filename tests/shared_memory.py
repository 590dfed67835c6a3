"""The files in /dev/shm, where nothing of ours has a name."""

from __future__ import annotations

import os

OTHERS = ("torch_", "sem.", "__KMP")
"""Segments of torch's data loaders, of Python's multiprocessing and of OpenMP, which simultaneous tests may use."""


def segments() -> set[str]:
    """The names that a process of ours could have left."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(OTHERS)}
