"""Weights & Biases: one run, online or offline; the step is the axis of its charts."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from polytempo.report.status.records import LoggedImage, LoggedText, ProcessEvent, RunFinished, StreamRecord
from polytempo.trackers.tracker import AXES, TrackedRun
from polytempo.trackers.words import sentence

_WRITTEN_S = 20.0
"""The library's process writes its file every 15 s, and when a buffer is full."""


class WandbRun:
    """Config, rows, pictures, texts; events as `events` in the summary, faults counted."""

    def __init__(
        self,
        project: str,
        entity: str | None,
        mode: Any,
        name: str | None,
        group: str | None,
        dir: str | None,  # noqa: A002 - the word of W&B
    ) -> None:
        self._given: dict[str, Any] = {"project": project, "entity": entity, "mode": mode, "group": group}
        self._name, self._dir = name, dir
        self._events: list[str] = []
        self._faults = 0

    def start(self, facts: TrackedRun) -> None:
        """Begin the run, or go on with it: W&B knows it by the identity."""
        self._folder = Path(facts.folder)
        beside = None if "://" in facts.folder else facts.folder
        self._run = wandb.init(
            **self._given,
            name=self._name or facts.name,
            dir=self._dir or beside,
            id=facts.identity,
            resume="allow",
            config=facts.settings,
            tags=[each for each in str(facts.settings.get("tags", "")).split(",") if each] or None,
            settings=wandb.Settings(console="off", silent=True),
        )
        for axis in ("step", *AXES):
            self._run.define_metric(axis, hidden=axis == "step")
        for group in ("train/*", "test/*"):
            self._run.define_metric(group, step_metric="step")

    def log(self, row: Mapping[str, float], step: int) -> None:
        """One line of history. `step` is an entry: W&B's own step counts lines."""
        self._run.log({**row, "step": step})

    def event(self, event: StreamRecord) -> None:
        """A picture, a text, or a line of `events`."""
        if isinstance(event, LoggedImage):
            self._run.log({event.name: wandb.Image(str(self._folder / event.path)), "step": event.step})
        elif isinstance(event, LoggedText):
            self._run.log({event.name: wandb.Html(f"<pre>{html.escape(event.text)}</pre>"), "step": event.step})
        else:
            self._events.append(sentence(event))
            self._faults += isinstance(event, ProcessEvent)
            self._run.summary.update({"events": "\n".join(self._events[-100:]), "faults": self._faults})

    def kept_s(self) -> float:
        """The time of rows that are in the file, or sent."""
        return time.monotonic() - _WRITTEN_S

    def finish(self, status: RunFinished) -> None:
        """End the run. A run that was preempted may go on."""
        self._run.summary.update({"state": status.state, "why": status.why})
        self._run.finish(exit_code=0 if status.state == "finished" else 1)
