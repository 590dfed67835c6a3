"""Aim: a run in its repository."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from aim import Image, Repo, Run, Text
from aim.sdk.types import QueryReportMode

from polytempo.report.status.records import LoggedImage, LoggedText, RunFinished, StreamRecord
from polytempo.trackers.tracker import TrackedRun
from polytempo.trackers.words import sentence


class AimRun:
    """Hyper-parameters and rows; pictures; texts; events as texts."""

    def __init__(self, repo: str | None, experiment: str) -> None:
        self._repo, self._experiment, self._step = repo, experiment, 0

    def start(self, facts: TrackedRun) -> None:
        """Begin the run, or go on with the run of this identity; Aim names runs itself."""
        self._folder = Path(facts.folder)
        self._run = Run(
            run_hash=self._hash_of(facts.identity) if facts.resumed else None,
            repo=self._repo,
            experiment=self._experiment,
            force_resume=True,
            system_tracking_interval=None,
            capture_terminal_logs=False,
        )
        self._run.name = facts.name
        self._run["polytempo"] = facts.identity
        self._run["hparams"] = facts.settings

    def _hash_of(self, identity: str) -> str | None:
        repo = Repo.from_path(self._repo) if self._repo else Repo.default_repo()
        found = repo.query_runs(f"run.polytempo == {identity!r}", report_mode=QueryReportMode.DISABLED)
        return next((str(each.run.hash) for each in found.iter_runs()), None)

    def log(self, row: Mapping[str, float], step: int) -> None:
        """The numbers of a step."""
        self._step = step
        for name, value in row.items():
            self._run.track(value, name=name, step=step)

    def event(self, event: StreamRecord) -> None:
        """A picture or a text."""
        if isinstance(event, LoggedImage):
            self._run.track(Image(str(self._folder / event.path)), name=event.name, step=event.step)
        elif isinstance(event, LoggedText):
            self._run.track(Text(event.text), name=event.name, step=event.step)
        else:
            self._run.track(Text(sentence(event)), name="events", step=self._step)

    def finish(self, status: RunFinished) -> None:
        """End the run, with its state."""
        self._run["state"] = status.state
        self._run.close()
