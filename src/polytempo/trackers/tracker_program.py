"""The program of a run's trackers: `python -m polytempo.trackers.tracker_program`, beside the run.

launcher ── order as a line of JSON ──▶ program: a feed for each tracker ──▶ libraries
         ── finish as a line of JSON ─▶ reads the rest, finishes, ends

Libraries of trackers have threads, signal handlers and imports of seconds. Here they take nothing from the launcher,
which may be a rank that trains, and a library that hangs ends with the process. Without a second line the launcher was
killed: then the trackers finish with "failed".
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import IO

import msgspec

from polytempo.report.status.records import RunFinished
from polytempo.spec.tracker_call import parse_tracker
from polytempo.trackers.feed import EVERY_S, TrackerFeed
from polytempo.trackers.table import made
from polytempo.trackers.tracker import TrackedRun

_NICE = 10
_LOOK_S = 0.1


class TrackersOrder(msgspec.Struct, frozen=True):
    """All that the program gets to know."""

    run: TrackedRun
    trackers: dict[str, str]
    """Text of each tracker by its name in notes."""
    log: str
    """The file for the output of libraries; "": none."""
    longest_call_s: float
    finish_s: float
    """Seconds for all trackers to finish."""


def main() -> None:
    """Feed the trackers until the run is over, then end; exit code 0 also if trackers were dropped."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a terminal's Ctrl-C is the run's, which says how it ended
    os.nice(_NICE)
    orders, notes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(2), "w", buffering=1)
    order = msgspec.json.decode(orders.readline(), type=TrackersOrder)
    _redirect(order.log)
    feeds = [_feed(name, text, order, notes) for name, text in order.trackers.items()]
    for feed in feeds:
        feed.begin()
    finish = _finish(orders, feeds, order.longest_call_s)
    for feed in feeds:
        feed.end(finish)
    until_s = time.monotonic() + order.finish_s
    for feed in feeds:
        if not feed.join(max(0.0, until_s - time.monotonic())):
            feed.drop(f"has not finished within {order.finish_s:g} s")
    notes.flush()
    os._exit(0)  # a library's thread that hangs does not keep the process


def _feed(name: str, text: str, order: TrackersOrder, notes: IO[str]) -> TrackerFeed:
    return TrackerFeed(name, lambda: made(parse_tracker(text)), order.run, lambda said: print(said, file=notes))


def _redirect(log: str) -> None:
    """Standard output and error go to the log, and there is no standard input."""
    null = os.open(os.devnull, os.O_RDWR)
    to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644) if log else null
    for given, descriptor in ((null, 0), (to, 1), (to, 2)):
        os.dup2(given, descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a text file


def _finish(orders: IO[bytes], feeds: list[TrackerFeed], longest_call_s: float) -> RunFinished:
    """The run's end, as the launcher tells it; hanging trackers are dropped meanwhile."""
    told: list[RunFinished] = []

    def read() -> None:
        try:
            told.append(msgspec.json.decode(orders.readline(), type=RunFinished))
        except (ValueError, OSError):
            told.append(RunFinished(state="failed", why="the launcher was killed"))

    reader = threading.Thread(target=read, name="polytempo-orders", daemon=True)
    reader.start()
    while not told:
        reader.join(EVERY_S)
        for feed in feeds:
            feed.check(longest_call_s)
    return told[0]


if __name__ == "__main__":
    main()
