"""Kubeflow: the status of the TrainJob that this pod belongs to, by HTTP from its environment.

Source: Kubeflow Trainer, proposal KEP-2779, "Track TrainJob progress and expose training metrics".
"""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from polytempo.report.status.records import RunFinished, StreamRecord
from polytempo.trackers.tracker import TrackedRun

URL, CERTIFICATE, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
"""Names in the environment: the address, and the files of its certificate and of this pod's token."""
_EVERY_S, _TIMEOUT_S = 5.0, 10.0


class TrainJobStatus:
    """Progress, remaining seconds and the last numbers, at most every five seconds, and at the end."""

    def __init__(self) -> None:
        self._next_s = 0.0
        self._metrics: dict[str, float] = {}
        self._progress = 0.0

    def start(self, facts: TrackedRun) -> None:
        """Read the environment. ValueError outside of a TrainJob."""
        if URL not in os.environ:
            raise ValueError(f"{URL} is not set; Kubeflow's trainer sets it in the pods of a TrainJob")
        self._run, self._began_s = facts, time.monotonic()
        self._first: float | None = None
        self._send()

    def log(self, row: Mapping[str, float], step: int) -> None:
        """Send, if the interval is over."""
        self._metrics |= {**row, "step": step}
        done, whole = (step, self._run.steps) if self._run.steps else (row.get("epoch", 0.0), self._run.epochs)
        self._progress = max(self._progress, min(1.0, done / whole)) if whole else 0.0
        self._first = self._progress if self._first is None else self._first
        if time.monotonic() >= self._next_s:
            self._send()

    def event(self, event: StreamRecord) -> None:
        """A status has no place for events."""

    def finish(self, status: RunFinished) -> None:
        """The last numbers; only a run that has finished has 100 %."""
        self._progress = 1.0 if status.state == "finished" else self._progress
        self._send()

    def _send(self) -> None:
        self._next_s = time.monotonic() + _EVERY_S
        body = json.dumps({"trainerStatus": self._status()}).encode()
        headers = {"Content-Type": "application/json"}
        if TOKEN in os.environ:  # read each time: it is renewed
            headers["Authorization"] = f"Bearer {Path(os.environ[TOKEN]).read_text().strip()}"
        url = os.environ[URL]
        if not url.startswith(("https://", "http://")):
            raise ValueError(f"{URL}={url!r} is not an address")
        certificate = os.environ.get(CERTIFICATE)
        context = ssl.create_default_context(cafile=certificate) if url.startswith("https:") else None
        with urlopen(Request(url, body, headers), timeout=_TIMEOUT_S, context=context):  # noqa: S310 - checked above
            pass

    def _status(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "progressPercentage": int(100 * self._progress),
            "metrics": [{"name": name, "value": repr(value)} for name, value in sorted(self._metrics.items())],
            "lastUpdatedTime": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        }
        done = self._progress - (self._first or 0.0)
        if done > 0:
            left_s = (time.monotonic() - self._began_s) * (1 - self._progress) / done
            found["estimatedRemainingSeconds"] = int(left_s)
        return found
