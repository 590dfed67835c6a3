"""`SilentTracker`: a tracker that counts its calls, for runs that are watched in every way."""

from __future__ import annotations

from collections.abc import Mapping

from polytempo.report.status.records import RunFinished, StreamRecord
from polytempo.trackers import TrackedRun


class SilentTracker:
    """Counts."""

    def __init__(self) -> None:
        self.logs, self.ended = 0, ""

    def start(self, facts: TrackedRun) -> None:
        """Nothing."""

    def log(self, row: Mapping[str, float], step: int) -> None:
        """One more."""
        self.logs += 1

    def event(self, event: StreamRecord) -> None:
        """Nothing."""

    def finish(self, status: RunFinished) -> None:
        """The state."""
        self.ended = status.state
