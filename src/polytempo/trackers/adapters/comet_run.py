"""Comet: one experiment, online, or a file that `comet upload` takes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import comet_ml

from polytempo.report.status.records import LoggedImage, LoggedText, ProcessEvent, RunFinished, StreamRecord
from polytempo.trackers.tracker import TrackedRun
from polytempo.trackers.words import sentence

PART_S = 300.0
"""Seconds of a run in a file of their own: Comet writes an offline file when it ends."""


class CometRun:
    """Parameters, rows, pictures, texts; events as texts, faults counted."""

    def __init__(self, project: str, workspace: str | None, mode: str, dir: str | None) -> None:  # noqa: A002
        if mode not in ("online", "offline"):
            raise ValueError(f"comet: mode={mode!r}; give 'online' or 'offline'")
        self._project, self._workspace, self._online, self._dir = project, workspace, mode == "online", dir
        self._faults = 0

    def start(self, facts: TrackedRun) -> None:
        """Begin the experiment, or go on with it: its key is made of the identity."""
        self._folder, self._facts = Path(facts.folder), facts
        self._begin()
        self._run.log_parameters(facts.settings)
        self._part_s, self._given = time.monotonic(), False

    def _begin(self) -> None:
        facts = self._facts
        quiet: dict[str, Any] = dict.fromkeys(("log_code", "log_graph", "parse_args", "log_env_details"), False)
        quiet |= dict.fromkeys(("log_git_metadata", "log_git_patch", "auto_output_logging"), False)
        quiet |= dict.fromkeys(("auto_param_logging", "auto_metric_logging", "auto_log_co2"), False)
        beside = None if "://" in facts.folder else str(self._folder / "comet")
        self._run = comet_ml.start(
            project_name=self._project,
            workspace=self._workspace,
            online=self._online,
            experiment_key=sha256(facts.identity.encode()).hexdigest()[:40],
            experiment_config=comet_ml.ExperimentConfig(
                name=facts.name, offline_directory=self._dir or beside, display_summary_level=0, **quiet
            ),
        )

    def log(self, row: Mapping[str, float], step: int) -> None:
        """The numbers of a step."""
        self._given = True
        self._run.log_metrics(dict(row), step=step)

    def event(self, event: StreamRecord) -> None:
        """A picture, or a text."""
        self._given = True
        if isinstance(event, LoggedImage):
            self._run.log_image(str(self._folder / event.path), name=event.name, step=event.step)
        elif isinstance(event, LoggedText):
            self._run.log_text(event.text, step=event.step, metadata={"name": event.name})
        else:
            self._faults += isinstance(event, ProcessEvent)
            self._run.log_text(sentence(event), metadata={"name": str(event.__struct_config__.tag)})
            self._run.log_other("faults", self._faults)

    def kept_s(self) -> float:
        """Now online, which sends as it goes; offline the end of the last complete file."""
        now_s = time.monotonic()
        if not self._online and self._given and now_s - self._part_s >= PART_S:
            self._run.end()
            self._begin()
            self._part_s, self._given = now_s, False
        return self._part_s if self._given and not self._online else now_s

    def finish(self, status: RunFinished) -> None:
        """End the experiment, or this part of it."""
        self._run.log_others({"state": status.state, "why": status.why})
        self._run.end()
