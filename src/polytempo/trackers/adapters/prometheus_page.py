"""Prometheus: a page on loopback that a scraper reads while the run goes on."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from polytempo.report.status.records import ProcessEvent, RunFinished, StreamRecord
from polytempo.trackers.tracker import AXES, TrackedRun

_HOST = "127.0.0.1"
"""The page has no password; the library's own default is every address of the host."""
_WORKER = re.compile(r"(.*)/worker-(\d+)")
_UNFIT = re.compile(r"[^a-zA-Z0-9_]")


class PrometheusPage:
    """A gauge for each number of a row, such as polytempo_train_loss{worker="1"}; the page ends with the run.

    polytempo_step, polytempo_last_step_timestamp_seconds, polytempo_train_loss, polytempo_train_samples_per_s,
    polytempo_train_idle_share (waiting), polytempo_train_staleness, polytempo_test_accuracy, polytempo_faults_total,
    polytempo_run_info.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}

    def start(self, facts: TrackedRun) -> None:
        """Open the page. OSError if the port is taken."""
        labels = {"run": facts.name, "job": facts.job, "strategy": facts.strategy, "world": facts.world}
        info = Gauge("polytempo_run_info", "The run's facts.", list(labels), registry=self._registry)
        info.labels(**labels).set(1)
        Gauge("polytempo_workers", "Number of workers.", registry=self._registry).set(facts.workers)
        self._step = Gauge("polytempo_step", "Steps so far.", registry=self._registry)
        self._at_s = Gauge("polytempo_last_step_timestamp_seconds", "Time of the last row.", registry=self._registry)
        self._faults = Counter("polytempo_faults", "Processes that died or fell silent.", registry=self._registry)
        self._server, self._thread = start_http_server(self._port, _HOST, self._registry)
        print(f"prometheus: http://{_HOST}:{self._server.server_port}/metrics")

    def log(self, row: Mapping[str, float], step: int) -> None:
        """Set the gauges."""
        self._step.set(step)
        self._at_s.set(time.time())
        for entry, value in row.items():
            worker = _WORKER.fullmatch(entry)
            name = worker[1] if worker else entry
            self._gauge(f"run/{name}" if name in AXES else name).labels(worker[2] if worker else "").set(value)

    def event(self, event: StreamRecord) -> None:
        """Count a fault."""
        if isinstance(event, ProcessEvent):
            self._faults.inc()

    def finish(self, status: RunFinished) -> None:
        """Close the page."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _gauge(self, name: str) -> Gauge:
        if name not in self._gauges:
            metric = f"polytempo_{_UNFIT.sub('_', name)}"
            self._gauges[name] = Gauge(metric, f"{name} of the last row.", ["worker"], registry=self._registry)
        return self._gauges[name]
