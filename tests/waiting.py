"""Waiting for something that another process does: every wait has an end, and is over as soon as it may."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LONG_S = 60.0
LOOK_S = 0.005


def soon(holds: Callable[[], bool], within_s: float = LONG_S) -> bool:
    """Wait until `holds()` is true. False if it is not within these seconds."""
    until_s = time.monotonic() + within_s
    pause = threading.Event()
    while not (held := holds()) and (left_s := until_s - time.monotonic()) > 0:
        pause.wait(min(LOOK_S, left_s))
    return held
