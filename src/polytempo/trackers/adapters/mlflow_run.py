"""MLflow: one run of an experiment, with parameters, metrics and artifacts."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from polytempo.core.system.files import RESULT
from polytempo.report.status.records import CheckpointSaved, LoggedImage, LoggedText, RunFinished, StreamRecord
from polytempo.trackers.tracker import TrackedRun
from polytempo.trackers.words import sentence

_TAG = "polytempo.identity"
_STATES = {"finished": "FINISHED", "failed": "FAILED", "preempted": "KILLED"}
_MOST_VALUE = 5000
"""Characters of a parameter that MLflow takes."""
_KEPT = ("report.html", RESULT)


class MlflowRun:
    """Rows go to MLflow as they come; at the end report, result, model and last checkpoint are copied there."""

    def __init__(self, uri: str | None, experiment: str) -> None:
        self._uri, self._experiment = uri, experiment
        self._events: list[str] = []
        self._checkpoint: str | None = None

    def start(self, facts: TrackedRun) -> None:
        """Begin the run, or go on with the run that has the identity as a tag."""
        self._folder, self._is_local = Path(facts.folder), "://" not in facts.folder
        self._client = client = MlflowClient(self._uri)
        known = client.get_experiment_by_name(self._experiment)
        experiment = client.create_experiment(self._experiment) if known is None else known.experiment_id
        found = client.search_runs([experiment], f"tags.`{_TAG}` = '{facts.identity}'", max_results=1)
        if found:
            self._run = str(found[0].info.run_id)
            client.update_run(self._run, status="RUNNING")
            return
        tags = {_TAG: facts.identity, "polytempo.folder": facts.folder, "polytempo.world": facts.world}
        self._run = str(client.create_run(experiment, tags=tags, run_name=facts.name).info.run_id)
        client.log_batch(self._run, params=[Param(n, str(v)[:_MOST_VALUE]) for n, v in facts.settings.items()])

    def log(self, row: Mapping[str, float], step: int) -> None:
        """The metrics of a step."""
        now_ms = int(time.time() * 1000)
        self._client.log_batch(self._run, metrics=[Metric(name, value, now_ms, step) for name, value in row.items()])

    def event(self, event: StreamRecord) -> None:
        """A picture or a text as an artifact; other events are the tag `polytempo.events`."""
        if isinstance(event, LoggedImage):
            self._client.log_artifact(self._run, str(self._folder / event.path), "images")
        elif isinstance(event, LoggedText):
            self._client.log_text(self._run, event.text, f"texts/{event.name}-{event.step}.txt")
        else:
            if isinstance(event, CheckpointSaved):
                self._checkpoint = event.path
            self._events.append(sentence(event))
            told = "\n".join(self._events)[-_MOST_VALUE:]
            self._client.log_batch(self._run, tags=[RunTag("polytempo.events", told)])

    def finish(self, status: RunFinished) -> None:
        """End the run, then copy its artifacts, the largest last: a copy that is cut short leaves no run RUNNING."""
        if status.why:
            self._client.set_tag(self._run, "polytempo.why", status.why)
        self._client.set_terminated(self._run, _STATES.get(status.state, "FAILED"))
        if self._is_local:
            for name in _KEPT:
                if (self._folder / name).is_file():
                    self._client.log_artifact(self._run, str(self._folder / name))
            if status.state == "finished":
                self._log_model()

    def _log_model(self) -> None:
        """The model as safetensors, and the last checkpoint; nothing of a run that has saved none."""
        saved = None if self._checkpoint is None else self._folder / self._checkpoint
        if saved is not None and saved.is_dir():
            self._client.log_artifacts(self._run, str(saved), f"checkpoint/{saved.name}")
        write: Any = import_module("polytempo.training.observe.whole_checkpoint").export_checkpoint  # it loads torch
        file = self._folder / "trackers" / f"mlflow-{self._run}" / "model.safetensors"  # a kill leaves it in the run
        try:
            write(self._folder, file)
        except ValueError:
            return  # it has no whole model
        else:
            self._client.log_artifact(self._run, str(file), "model")
        finally:
            shutil.rmtree(file.parent, ignore_errors=True)
