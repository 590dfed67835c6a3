"""`TrackerFeed`: a thread that reads a run's stream from its folder, and hands it to one tracker.

    run ──▶ metrics.jsonl, events.jsonl ──▶ thread of tensorboard ──▶ start, log, event, …, finish
                                       └──▶ thread of wandb       ──▶ start, log, event, …, finish

The files are the queue: a tracker that is slow reads later, and neither the run nor another tracker waits for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from math import inf

import msgspec

from polytempo.core.system.url_path import place
from polytempo.report.status.client_rounds import ROUND
from polytempo.report.status.records import (
    ExchangeRow,
    Logged,
    LoggedText,
    RunFinished,
    RunStarted,
    StreamRecord,
    TestRow,
    TrainRow,
)
from polytempo.report.status.stream import RunStream
from polytempo.trackers.bookmark import Bookmark
from polytempo.trackers.tracker import BufferingTracker, TrackedRun, Tracker, scalars

EVERY_S = 1.0
"""Seconds between two looks at the run's folder."""
_MOST_SAID = 300
_MOST_PLACES = 4096


class TrackerFeed:
    """Feeds the tracker that `make` makes with the records of `run`, from `begin` to `end`.

    A tracker that raises is named once to `say`, and gets no further call. Memory: the records of one look.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        run: TrackedRun,
        say: Callable[[str], object],
        every_s: float = EVERY_S,
    ) -> None:
        self.name = name
        self._make, self._run, self._say, self._every_s = make, run, say, every_s
        self._thread = threading.Thread(target=self._serve, name=f"polytempo-{name}", daemon=True)
        self._over = threading.Event()
        self._finish = RunFinished(state="failed", why="the launcher was killed")
        self._called_s: float | None = None
        self._places: deque[tuple[float, bytes]] = deque()
        """Places in the stream with the time of the last record before them: the last that was kept, and later ones."""
        self._dropped = False

    def begin(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self, finish: RunFinished) -> None:
        """Let the thread read the rest, and finish. No record comes after this."""
        self._finish = finish
        self._over.set()

    def join(self, wait_s: float) -> bool:
        """True if the tracker has ended within `wait_s`."""
        self._thread.join(wait_s)
        return self._dropped or not self._thread.is_alive()

    def check(self, longest_s: float) -> None:
        """Drop the tracker if its present call takes longer than `longest_s`."""
        since_s = self._called_s
        if since_s is not None and time.monotonic() - since_s > longest_s:
            self.drop(f"has not answered for {longest_s:g} s")

    def drop(self, why: str) -> None:
        """Name the tracker once, and give it up."""
        if not self._dropped:
            self._dropped = True
            self._say(f"note: tracker {self.name} {why}; the run goes on without it")

    def _serve(self) -> None:
        try:
            with _Called(self):
                tracker = self._make()
            self._feed(tracker)
        except (Exception, SystemExit) as error:
            said = (str(error).strip() or "no text").partition("\n")[0]
            self.drop(f"ended with {type(error).__name__}: {said[:_MOST_SAID]}")

    def _feed(self, tracker: Tracker) -> None:
        folder = place(self._run.folder)
        bookmark = Bookmark.of(folder, self.name, fresh=not self._run.resumed)
        bookmark.write()  # the identity, before the library knows it
        self._places.append((time.monotonic(), bookmark.place))
        with _Called(self):
            tracker.start(msgspec.structs.replace(self._run, identity=bookmark.identity))
        stream: RunStream | None = None
        over = False
        while not (over or self._dropped):
            over = self._over.wait(self._every_s)  # first: no record comes after the end
            records = [] if stream is None else stream.look()
            if stream is None:
                stream, records = self._begun(over)
            for record in records:
                if self._dropped:
                    return
                if bookmark.is_new(record):
                    with _Called(self):
                        _hand(tracker, record)
                if time.monotonic() - self._places[-1][0] >= self._every_s:
                    self._keep(tracker, bookmark)
            self._keep(tracker, bookmark)
        with _Called(self):
            tracker.finish(self._finish)
        bookmark.write()

    def _keep(self, tracker: Tracker, bookmark: Bookmark) -> None:
        """Keep the newest place with records before it that would all survive a kill."""
        if len(self._places) == _MOST_PLACES:  # a `kept_s` that stands still
            self._places.pop()
        self._places.append((time.monotonic(), bookmark.place))
        with _Called(self):
            kept_s = tracker.kept_s() if isinstance(tracker, BufferingTracker) else inf
        while len(self._places) > 1 and self._places[1][0] <= kept_s:
            self._places.popleft()
        if self._places[0][0] <= kept_s:
            bookmark.write(self._places[0][1])

    def _begun(self, over: bool) -> tuple[RunStream | None, list[StreamRecord]]:
        """The stream with its first records, once its last start is of this run."""
        stream = RunStream(self._run.folder)
        try:
            records = stream.look()
        except ValueError:
            if over:
                return stream, []
            return None, []
        starts = [record.began_s or 0.0 for record in records if isinstance(record, RunStarted)]
        return (stream, records) if over or (starts and starts[-1] >= self._run.began_s) else (None, [])


class _Called:
    """The time of a call, for `check`."""

    def __init__(self, feed: TrackerFeed) -> None:
        self._feed = feed

    def __enter__(self) -> None:
        self._feed._called_s = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self._feed._called_s = None


def _hand(tracker: Tracker, record: StreamRecord) -> None:
    if isinstance(record, TrainRow | TestRow | ExchangeRow | Logged):
        if values := scalars(record):
            tracker.log(values, record.step)
    elif isinstance(record, LoggedText) and record.name == ROUND:
        return  # a file of each round's clients, in some trackers
    elif not isinstance(record, RunStarted | RunFinished):
        tracker.event(record)
