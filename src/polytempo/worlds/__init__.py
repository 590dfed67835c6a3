"""Worlds that perform operations: a virtual clock, or real processes."""

from polytempo.worlds.process.process_world import ProcessWorld, beside, current, set_current
from polytempo.worlds.trace import (
    MOST_WRITTEN,
    Event,
    Joined,
    Trace,
    chrome_trace,
    combined_hash,
    joined,
    write_chrome_trace,
)
from polytempo.worlds.virtual.virtual_world import Outcome, VirtualWorld

__all__ = [
    "MOST_WRITTEN",
    "Event",
    "Joined",
    "Outcome",
    "ProcessWorld",
    "Trace",
    "VirtualWorld",
    "beside",
    "chrome_trace",
    "combined_hash",
    "current",
    "joined",
    "set_current",
    "write_chrome_trace",
]
