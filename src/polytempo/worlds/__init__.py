"""Who performs the operations: a virtual clock, or real processes."""

from polytempo.worlds.beside import beside
from polytempo.worlds.current import current, set_current
from polytempo.worlds.process import ProcessWorld
from polytempo.worlds.trace import Event, Trace, chrome_trace, combined_hash, write_chrome_trace
from polytempo.worlds.virtual import Outcome, VirtualWorld

__all__ = [
    "Event",
    "Outcome",
    "ProcessWorld",
    "Trace",
    "VirtualWorld",
    "beside",
    "chrome_trace",
    "combined_hash",
    "current",
    "set_current",
    "write_chrome_trace",
]
