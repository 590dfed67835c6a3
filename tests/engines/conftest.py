"""Ctrl-C is one of the things that these tests do, also where they were started in the background."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """A shell lets its `&` jobs ignore SIGINT, and their children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
