"""Trackio: a run in its local dashboard, with the calls of W&B."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import trackio

from polytempo.report.status.records import LoggedImage, LoggedText, RunFinished, StreamRecord
from polytempo.trackers.tracker import TrackedRun
from polytempo.trackers.words import sentence

_WRITTEN_S = 1.0
"""Trackio's thread writes twice a second."""


class TrackioRun:
    """Config and rows; pictures; texts as Markdown; events as alerts."""

    def __init__(self, project: str, space: str | None) -> None:
        self._project, self._space = project, space

    def start(self, facts: TrackedRun) -> None:
        """Begin the run, or go on with the run of this name."""
        self._folder = Path(facts.folder)
        self._run = trackio.init(
            project=self._project,
            name=f"{facts.name}-{facts.identity}",
            space_id=self._space,
            config=facts.settings,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, row: Mapping[str, float], step: int) -> None:
        """The numbers of a step."""
        self._run.log(dict(row), step=step)

    def event(self, event: StreamRecord) -> None:
        """A picture, a text, or an alert."""
        if isinstance(event, LoggedImage):
            self._run.log({event.name: trackio.Image(str(self._folder / event.path))}, step=event.step)
        elif isinstance(event, LoggedText):
            self._run.log({event.name: trackio.Markdown(event.text)}, step=event.step)
        else:
            self._run.alert(title=str(event.__struct_config__.tag), text=sentence(event))

    def kept_s(self) -> float:
        """A second ago."""
        return time.monotonic() - _WRITTEN_S

    def finish(self, status: RunFinished) -> None:
        """End the run; how it ended is an alert, unless it is at its end."""
        if status.state != "finished":
            self._run.alert(title=status.state, text=status.why)
        self._run.finish()
